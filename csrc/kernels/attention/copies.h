/* Copies queries into lanes and tiles into rows, and finds what the bounds of rows leave open to each vector. */

SA_SHARED int FN(queries_of_vector)(const sa_block *b, FN(scratch) * s, bool direct, int v, const real **q) {
    const sa_matrix *m = &b->a->query.m;
    const int left = b->rows->count - v * SA_LANES, n = left < SA_LANES ? left : SA_LANES;
    const size_t stride = FN(round_up)(b->a->E);
    for (int i = 0; i < n; ++i) {
        const char *row = b->rows->query[v * SA_LANES + i];
        q[i] = direct ? (const real *)(const void *)row : s->row + (size_t)i * stride;
        if (!direct) {
            FN(load_row)(s->row + (size_t)i * stride, row, m->col_stride, b->a->E, m->dtype, m->swapped);
        }
    }
    return n;
}

/* Queries times scale·log2 e to s->q, rows as lanes. */
SA_ONCE void FN(copy_queries)(const sa_block *b, FN(scratch) * s, int nv) {
    const sa_rows *rows = b->rows;
    const ptrdiff_t E = b->a->E;
    const sa_matrix *q = &b->a->query.m;
    const real factor = FN(factor_of)(b->a);
    const bool direct = FN(rows_in_place)(rows->query, rows->count, q);
    s->scaled = true;
    if (E < SA_LANES) {
        memset(s->q, 0, (size_t)E * (size_t)nv * SA_LANES * sizeof(real));
        for (int r = 0; r < rows->count; ++r) {
            const real *q_r = (const real *)(const void *)rows->query[r];
            if (!direct) {
                FN(load_row)(s->row, rows->query[r], q->col_stride, E, q->dtype, q->swapped);
                q_r = s->row;
            }
            for (ptrdiff_t e = 0; e < E; ++e) {
                s->q[e * nv * SA_LANES + r] = q_r[e] * factor;
            }
        }
        return;
    }
    for (int v = 0; v < nv; ++v) {
        const real *q_i[SA_LANES];
        const int here = FN(queries_of_vector)(b, s, direct, v, q_i);
        for (ptrdiff_t e = 0; e < E; e += SA_LANES) {
            vec x[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                x[i] = V(set1)(0);
                if (i < here) {
                    x[i] = FN(load_up_to)(q_i[i] + e, E - e) * V(set1)(factor);
                }
            }
            FN(transpose)(x);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                if (e + i < E) {
                    V(store)(s->q + ((e + i) * nv + v) * SA_LANES, x[i]);
                }
            }
        }
    }
}

SA_ONCE void FN(copy_tile)(real *copied, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    if (!FN(is_direct)(m)) {
        FN(load_rows)(copied, m, first, n, width);
        return;
    }
    for (ptrdiff_t r = 0; r < n; ++r) {
        const real *from = (const real *)(const void *)(m->data + (first + r) * m->row_stride);
        real *to = copied + r * width;
        for (ptrdiff_t i = 0; i < width; i += SA_LANES) {
            FN(store_up_to)(to + i, FN(load_up_to)(from + i, width - i), width - i);
        }
    }
}

SA_SHARED const real *FN(copied_rows)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n,
                                      ptrdiff_t width) {
    const ptrdiff_t at = first - b->cache_from, S = b->a->S;
    if (at + n > cache->room) {
        real *copied = cache->rows + cache->room * width;
        FN(copy_tile)(copied, m, first, n, width);
        return copied;
    }
    for (ptrdiff_t cell = at / SA_KEYS_PER_TILE; cell * SA_KEYS_PER_TILE < at + n; ++cell) {
        if (!cache->filled[cell]) {
            const ptrdiff_t row = cell * SA_KEYS_PER_TILE, from = b->cache_from + row;
            FN(copy_tile)(cache->rows + row * width, m, from, S - from < SA_KEYS_PER_TILE ? S - from : SA_KEYS_PER_TILE, width);
            cache->filled[cell] = 1;
        }
    }
    return cache->rows + at * width;
}

/* Tiny calls would notice a memset of nothing. */
SA_INLINE void FN(open_cache)(FN(cache) * cache) {
    if (cache->room > 0) {
        memset(cache->filled, 0, (size_t)cache->room / SA_KEYS_PER_TILE);
    }
}

/* Forgets tiles copied for other keys. */
SA_INLINE void FN(open_caches)(const sa_block *b, FN(scratch) * s) {
    if (!b->cache_holds) {
        FN(open_cache)(&s->key);
        FN(open_cache)(&s->value);
    }
}

/* A row without keys (0 … −1) leaves nothing open to all. */
SA_INLINE FN(open_bounds) FN(open_rows)(const ptrdiff_t *lo, const ptrdiff_t *hi, int n) {
    FN(open_bounds) open = {.any_from = lo[0], .any_to = hi[0], .all_from = lo[0], .all_to = hi[0]};
    for (int r = 1; r < n; ++r) {
        open.any_from = lo[r] < open.any_from ? lo[r] : open.any_from;
        open.any_to = hi[r] > open.any_to ? hi[r] : open.any_to;
        open.all_from = lo[r] > open.all_from ? lo[r] : open.all_from;
        open.all_to = hi[r] < open.all_to ? hi[r] : open.all_to;
    }
    return open;
}

/* Whole vectors go apart: their loops become vector code. */
SA_ONCE void FN(open_vectors)(const sa_rows *rows, FN(scratch) * s, int nv) {
    for (int v = 0; v < nv; ++v) {
        const int at = v * SA_LANES, left = rows->count - at;
        if (left >= SA_LANES) {
            s->open[v] = FN(open_rows)(rows->lo + at, rows->hi + at, SA_LANES);
        } else if (left > 0) {
            s->open[v] = FN(open_rows)(rows->lo + at, rows->hi + at, left);
        } else {
            s->open[v] = (FN(open_bounds)){.any_from = 0, .any_to = 0, .all_from = 0, .all_to = 0};
        }
    }
}
