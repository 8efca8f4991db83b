/* The products of a wide block by products of pairs of bfloat16, where the CPU has them and the arrays are of bfloat16. Two terms of a
 * sum cost what one multiply-add costs. Products are exact in float32, sums are float32's, and factors (scale·log2 e, 1/l) are
 * float32's: nothing is lost of scores. Weights are rounded to bfloat16 before they meet the values, where those are of
 * that type, too, after their sum was taken (../../docs/decisions/0007-pairs.md).
 *
 * A tile of keys is a cell: [keys][steps · 32] bfloat16, copied when it is first asked for, padded with zeros, and kept for the next
 * blocks of the same head, up to SA_CACHE_BYTES. Rows of queries become lanes of pairs, [E / 2][nv·lanes]. A tile of values is one of
 * pairs of rows, [keys / 2][steps · 32][2], and its weights become pairs of keys, [keys / 2][nv·lanes]. */

#if defined(SA_HAS_BF16_PRODUCTS)

enum { SA_PAIR_STEP = 32 };

/* Magnitudes below 2^50 go by pairs: products stay within float32. Of scores it does not matter what a subnormal number would have
 * added to them; values and dO are 0 or at least 2^−60, and no product of theirs is subnormal. As exponents of 2: */
enum { SA_LEAST_OF_SCORES = -127, SA_LEAST_OF_GRADIENTS = -60, SA_MOST_OF_PAIRS = 50 };

/* Not for a handful of numbers, nor with a factor beside which the products' range would matter. */
SA_INLINE bool FN(pairs_take)(const sa_attention *a) {
    const real factor = FN(factor_of)(a);
    return a->query.m.dtype == SA_BF16 && a->key.m.dtype == SA_BF16 && a->S >= 32 && a->E >= 16 && factor >= 0x1p-40f &&
           factor <= 0x1p40f;
}

/* Nor in wide blocks that are all of one vector. */
SA_INLINE bool FN(uses_parts)(const sa_attention *a) { return FN(pairs_take)(a) && a->L > SA_LANES / a->gqa; }

SA_INLINE size_t FN(pair_row_bytes)(ptrdiff_t width) {
    return (size_t)((width + SA_PAIR_STEP - 1) / SA_PAIR_STEP) * SA_PAIR_STEP * 2;
}

SA_INLINE ptrdiff_t FN(pair_cells)(const sa_attention *a) { return (a->S + SA_KEYS_PER_TILE - 1) / SA_KEYS_PER_TILE; }

/* Values by pairs of keys: those that are of bfloat16. */
SA_INLINE bool FN(pairs_take_values)(const sa_attention *a) { return a->value.m.dtype == SA_BF16 && a->Dv > 0; }

SA_INLINE size_t FN(lay_out_parts)(const sa_attention *a, char *base, size_t used, FN(parts) * s) {
    FN(lay_out_cells)(&s->keys, FN(pair_row_bytes)(a->E), SA_KEYS_PER_TILE, FN(pair_cells)(a)); /* a row is a part */
    SA_TAKE(keys.tiles, char, (size_t)(s->keys.room + 1) * s->keys.bytes);
    SA_TAKE(keys.state, unsigned char, (size_t)s->keys.room);
    SA_TAKE(queries, char, FN(pair_row_bytes)(a->E) * SA_MAX_BLOCK_ROWS);
    SA_TAKE(rows, char, FN(pair_row_bytes)(a->E > a->Dv ? a->E : a->Dv) * SA_LANES);
    s->of_weights = FN(pairs_take_values)(a);
    if (s->of_weights) {
        FN(lay_out_cells)(&s->values, 2 * FN(pair_row_bytes)(a->Dv), SA_KEYS_PER_TILE / 2, FN(pair_cells)(a));
        SA_TAKE(values.tiles, char, (size_t)(s->values.room + 1) * s->values.bytes);
        SA_TAKE(values.state, unsigned char, (size_t)s->values.room);
    }
    return used;
}

SA_INLINE void FN(parts_open)(const sa_block *b, FN(parts) * s) {
    if (!FN(uses_parts)(b->a)) {
        return;
    }
    if (!b->cache_holds) {
        memset(s->keys.state, SA_CELL_UNKNOWN, (size_t)s->keys.room);
        if (s->of_weights) {
            memset(s->values.state, SA_CELL_UNKNOWN, (size_t)s->values.room);
        }
    }
    s->count = b->rows->count > SA_LANES && b->rows->gaps == 0; /* tiles of block masks with gaps begin anywhere */
}

SA_INLINE void FN(parts_close)(const FN(parts) * s) { (void)s; }

/* n elements of a row as pairs, padded with zeros to whole steps. Tells whether one of them is beyond pairs. */
SA_INLINE int FN(copy_pairs)(const char *row, const sa_matrix *m, ptrdiff_t n, int least, char *to) {
    if (m->swapped || m->col_stride != 2) {
        for (ptrdiff_t e = 0; e < n; ++e) {
            const char *from = row + e * m->col_stride;
            to[2 * e] = from[m->swapped];
            to[2 * e + 1] = from[!m->swapped];
        }
        row = to;
    }
    int beyond = 0;
    for (ptrdiff_t e = 0; e < n; e += SA_PAIR_STEP) {
        const vec pairs = V(load_pairs)(row + 2 * e, n - e);
        beyond |= V(bf16_beyond)(pairs, least, SA_MOST_OF_PAIRS);
        V(store)((real *)(void *)(to + 2 * e), pairs);
    }
    return beyond;
}

/* Two rows as one, a number of the first beside that of the second, or beside 0 where there is none: pairs for sums over rows. */
SA_INLINE int FN(join_rows)(const char *row, const char *second, const sa_matrix *m, ptrdiff_t width, int least, char *to,
                            char *two) {
    const size_t bytes = FN(pair_row_bytes)(width);
    int beyond = FN(copy_pairs)(row, m, width, least, two);
    if (second) {
        beyond |= FN(copy_pairs)(second, m, width, least, two + bytes);
    }
    for (size_t at = 0; at < bytes; at += 2 * SA_LANES) {
        V(store)((real *)(void *)(to + 2 * at), V(zip_pairs)(two + at, SA_LANES, two + bytes + at, second ? SA_LANES : 0));
    }
    return beyond;
}

/* The cell of the keys or values from `first` on, or NULL where pairs do not hold it: of rows joined in twos when there is a place for
 * two of them. */
SA_INLINE const real *FN(pairs_of_tile)(const sa_block *b, const FN(cells) * cells, const sa_matrix *m, ptrdiff_t width,
                                        ptrdiff_t first, int least, char *two) {
    const ptrdiff_t at = (first - b->cache_from) / SA_KEYS_PER_TILE, cell = at < cells->room ? at : cells->room;
    char *const tile = cells->tiles + (size_t)cell * cells->bytes, *to = tile;
    unsigned char none = SA_CELL_UNKNOWN, *state = at < cells->room ? &cells->state[cell] : &none;
    if (*state == SA_CELL_UNKNOWN) {
        const ptrdiff_t n = b->keys - first < SA_KEYS_PER_TILE ? b->keys - first : SA_KEYS_PER_TILE;
        const char *row = m->data + first * m->row_stride;
        int beyond = 0;
        for (ptrdiff_t j = 0; j < n; j += two ? 2 : 1, row += (two ? 2 : 1) * m->row_stride, to += cells->part_bytes) {
            beyond |= two ? FN(join_rows)(row, j + 1 < n ? row + m->row_stride : NULL, m, width, least, to, two)
                          : FN(copy_pairs)(row, m, width, least, to);
        }
        *state = beyond ? SA_CELL_BEYOND : SA_CELL_HOLDS;
    }
    return *state == SA_CELL_HOLDS ? (const real *)(const void *)tile : NULL;
}

/* The first `count` rows as lanes of pairs: to[width / 2 rounded up to steps][nv·lanes], other lanes 0. False where pairs do not
 * hold them. */
SA_INLINE bool FN(pairs_of_lanes)(const FN(parts) * s, const char *const *rows, const sa_matrix *m, int count, ptrdiff_t width,
                                  int least, char *to, const int nv) {
    const size_t bytes = FN(pair_row_bytes)(width);
    int beyond = 0;
    for (int v = 0; v < nv; ++v) {
        const int left = count - v * SA_LANES, n = left < SA_LANES ? left : SA_LANES;
        for (int i = 0; i < n; ++i) {
            beyond |= FN(copy_pairs)(rows[v * SA_LANES + i], m, width, least, s->rows + (size_t)i * bytes);
        }
        for (size_t at = 0; at < bytes; at += 64) {
            vec x[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                x[i] = V(set1)(0);
                if (i < n) {
                    x[i] = V(load)((const real *)(const void *)(s->rows + (size_t)i * bytes + at));
                }
            }
            FN(transpose)(x);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                V(store)((real *)(void *)to + ((ptrdiff_t)(at / 4) + i) * nv * SA_LANES + v * SA_LANES, x[i]);
            }
        }
    }
    return !beyond;
}

SA_INLINE void FN(split_queries)(const sa_block *b, FN(scratch) * s, const int nv) {
    if (s->parts.count) {
        s->parts.queries_fit = FN(pairs_of_lanes)(&s->parts, b->rows->query, &b->a->query.m, b->rows->count, b->a->E,
                                                  SA_LEAST_OF_SCORES, s->parts.queries, nv);
    }
}

/* to[n][nv·lanes] = factor · the rows of a cell times lanes of pairs; but for vectors that causal closes. top takes the maximum. */
SA_INLINE void FN(rows_by_pairs)(const sa_block *b, FN(scratch) * s, const FN(cells) * cells, const real *cell,
                                 const char *lanes_of_pairs, ptrdiff_t width, const real *factor, ptrdiff_t first, ptrdiff_t n,
                                 real *to, real *top, const int nv) {
    ptrdiff_t end[SA_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(pairs_wide)((const real *)(const void *)lanes_of_pairs, cell, (ptrdiff_t)(cells->part_bytes / sizeof(real)), end,
                   (width + 1) / 2, to, nv * SA_LANES, factor, top, &s->ahead, nv);
}

/* Leaves the scores of the tile's keys in s->P, and their maxima in s->top. False: nothing was done. */
SA_INLINE bool FN(scores_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    const FN(parts) *parts = &s->parts;
    const ptrdiff_t E = b->a->E;
    const real *keys = parts->count && parts->queries_fit
                           ? FN(pairs_of_tile)(b, &parts->keys, &b->key, E, first, SA_LEAST_OF_SCORES, NULL)
                           : NULL;
    if (keys) {
        real factor[SA_MAX_BLOCK_ROWS];
        for (int v = 0; v < nv; ++v) {
            V(store)(factor + v * SA_LANES, V(set1)(FN(factor_of)(b->a)));
        }
        FN(rows_by_pairs)(b, s, &parts->keys, keys, parts->queries, E, factor, first, n, s->P, s->top, nv);
    }
    return keys != NULL;
}

/* P, scores or already the weights, as pairs of weights in its place. False: nothing was done. */
SA_INLINE bool FN(weights_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv,
                                    bool scores) {
    FN(parts) *parts = &s->parts;
    const real *values = parts->count && parts->of_weights ? FN(pairs_of_tile)(b, &parts->values, &b->value, b->a->Dv, first,
                                                                               SA_LEAST_OF_GRADIENTS, parts->rows)
                                                           : NULL;
    parts->values_now = (const char *)values;
    if (values) {
        ptrdiff_t end[SA_VECS];
        FN(open_ends)(b->rows, s, first, n, nv, end);
        FN(pass_pair_weights)(s->P, end, s->maximum, s->tile_sum, nv, scores);
    }
    return values != NULL;
}

/* O = alpha·O + Vᵀ·P with the weights of weights_by_parts. */
SA_INLINE void FN(values_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    ptrdiff_t end[SA_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(open_output)(b, s, nv);
    FN(value_pairs_wide)(s->P, (const real *)(const void *)s->parts.values_now,
                         (ptrdiff_t)(s->parts.values.part_bytes / sizeof(real)), end, b->a->Dv, s->O, s->alpha, &s->ahead, nv);
}

/* The weights P[count] of a tile that pairs do not hold, in a block that is of pairs: as exact as its neighbours', whatever a key
 * holds that is closed. */
SA_INLINE void FN(round_weights)(FN(scratch) * s, ptrdiff_t count) {
    if (!(s->parts.count && s->parts.of_weights) && !s->few.rounds) {
        return;
    }
    for (real *p = s->P; p < s->P + count; p += SA_LANES) {
        V(store)(p, V(round_pairs)(V(set1)(0), V(load)(p)));
    }
}

SA_INLINE bool FN(may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first) { return (void)b, (void)s, (void)first, false; }

#elif !defined(SA_HAS_TILES) /* everything by multiply-adds */

SA_INLINE bool FN(uses_parts)(const sa_attention *a) { return (void)a, false; }
SA_INLINE size_t FN(lay_out_parts)(const sa_attention *a, char *base, size_t used, FN(parts) * s) {
    return (void)a, (void)base, (void)s, used;
}
SA_INLINE void FN(parts_open)(const sa_block *b, FN(parts) * s) { (void)b, (void)s; }
SA_INLINE void FN(parts_close)(const FN(parts) * s) { (void)s; }
SA_INLINE void FN(split_queries)(const sa_block *b, FN(scratch) * s, int nv) { (void)b, (void)s, (void)nv; }
SA_INLINE bool FN(scores_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    return (void)b, (void)s, (void)first, (void)n, (void)nv, false;
}
SA_INLINE bool FN(weights_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool scores) {
    return (void)b, (void)s, (void)first, (void)n, (void)nv, (void)scores, false;
}
SA_INLINE void FN(values_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    (void)b, (void)s, (void)first, (void)n, (void)nv;
}
SA_INLINE void FN(round_weights)(FN(scratch) * s, ptrdiff_t count) { (void)s, (void)count; }
SA_INLINE bool FN(may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first) { return (void)b, (void)s, (void)first, false; }

#endif
