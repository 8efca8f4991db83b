/* Which rows a block fetches ahead, and when. prefetch.h does the fetching. */

/* The next product, of so many rows, fetches what is planned between its rounds; without rounds it is fetched now. */
SA_INLINE void FN(share_ahead)(FN(scratch) * s, ptrdiff_t rows) {
    if (s->wide.terms && s->unit->replace_rows) {
        sa_end_ahead(&s->ahead);
    }
    s->ahead.share = s->ahead.bytes / (rows / 8 + 1) + 1;
}

/* Keys and values of at least so many bytes are fetched a tile ahead; with b->fetches, always. */
#define SA_FAR_HEAD_BYTES ((ptrdiff_t)12 << 20)

SA_ONCE void FN(fetch_tile)(const sa_block *b, sa_ahead *ahead, const sa_matrix *m, ptrdiff_t width, ptrdiff_t first) {
    const ptrdiff_t bytes = sa_bytes_together(m, width),
                    to = b->end - first < SA_KEYS_PER_TILE ? b->end : first + SA_KEYS_PER_TILE;
    if (bytes == 0 || (!b->fetches && b->end - b->begin < SA_FAR_HEAD_BYTES / 2 / bytes)) {
        return;
    }
    sa_plan_ahead(ahead, (sa_rows_ahead){.offset = (uintptr_t)m->data + (uintptr_t)(first * m->row_stride),
                                         .stride = m->row_stride,
                                         .count = to - first,
                                         .bytes = bytes});
}

SA_ONCE void FN(fetch_mask)(const sa_block *b, sa_ahead *ahead, ptrdiff_t first, ptrdiff_t n) {
    const sa_matrix *mask = &b->a->mask.m;
    sa_plan_ahead(ahead, (sa_rows_ahead){.row = b->rows->mask,
                                         .offset = (uintptr_t)(first * mask->col_stride),
                                         .count = b->rows->count,
                                         .bytes = sa_bytes_together(mask, n)});
}

SA_ONCE void FN(fetch_dmask)(const sa_backward_block *b, sa_ahead *ahead, ptrdiff_t first, ptrdiff_t n) {
    const sa_matrix *dmask = &b->g->dmask.m;
    sa_plan_ahead(ahead, (sa_rows_ahead){.row = (const char *const *)b->rows->dmask,
                                         .offset = (uintptr_t)((first - b->dmask_key) * dmask->col_stride),
                                         .count = b->b.rows->count,
                                         .bytes = sa_bytes_together(dmask, n)});
}

/* This tile's share of the rows to write, the next block's queries and the next head's first keys. */
SA_ONCE void FN(look_ahead)(const sa_block *b, sa_ahead *ahead, ptrdiff_t first) {
    if (b->ahead == 0) {
        return;
    }
    const sa_rows *rows = b->rows;
    const ptrdiff_t tiles = (b->end - b->begin + SA_KEYS_PER_TILE - 1) / SA_KEYS_PER_TILE;
    const ptrdiff_t tile = (first - b->begin) / SA_KEYS_PER_TILE, share = (rows->count + tiles - 1) / tiles, at = tile * share;
    if (at < rows->count) {
        const ptrdiff_t count = rows->count - at < share ? rows->count - at : share;
        sa_plan_ahead(ahead, (sa_rows_ahead){.row = rows->query + at,
                                             .offset = (uintptr_t)b->ahead,
                                             .count = count,
                                             .bytes = sa_bytes_together(&b->a->query.m, b->a->E)});
        sa_plan_ahead(ahead, (sa_rows_ahead){.row = (const char *const *)rows->out + at,
                                             .count = count,
                                             .bytes = sa_bytes_together(&b->a->out.m, b->a->Dv)});
    }
    const ptrdiff_t keys = b->keys_ahead == 0 ? 0 : b->a->S < SA_KEYS_PER_TILE ? b->a->S : SA_KEYS_PER_TILE;
    const ptrdiff_t key_share = (keys + tiles - 1) / tiles, key = tile * key_share;
    sa_plan_ahead(ahead,
                  (sa_rows_ahead){.offset = (uintptr_t)b->key.data + (uintptr_t)(b->keys_ahead + key * b->key.row_stride),
                                  .stride = b->key.row_stride,
                                  .count = keys - key < key_share ? keys - key : key_share,
                                  .bytes = sa_bytes_together(&b->key, b->a->E)});
}
