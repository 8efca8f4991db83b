/* The rows of a tile, in place or copied; what bounds of rows (causal, windows, lengths) leave open of it. For both passes. */

/* Not memcpy: with nv unknown that calls the C library. */
SA_INLINE void FN(copy_vectors)(real *to, const real *from, int nv) {
    for (int v = 0; v < nv; ++v) {
        V(store)(to + v * SA_LANES, V(load)(from + v * SA_LANES));
        SA_KEEP_LOOP();
    }
}
SA_INLINE void FN(clear_rows)(real *to) {
    SA_UNROLL
    for (int v = 0; v < SA_BACKWARD_VECS; ++v) {
        V(store)(to + v * SA_LANES, V(set1)(0));
    }
}

/* The next product, of `rows` rows, fetches the planned rows between its rounds; the matrix unit has none, so they are
 * fetched now. */
SA_INLINE void FN(share_ahead)(FN(scratch) * s, ptrdiff_t rows) {
    if (s->wide.terms && s->unit->replace_rows) {
        sa_fetch_rest(&s->ahead);
    }
    s->ahead.share = s->ahead.bytes / (rows / 8 + 1) + 1;
}

/* True if the rows are native, aligned and without gaps. */
SA_INLINE bool FN(rows_in_place)(const char *const *rows, int count, const sa_matrix *m) {
    bool direct = m->dtype == SA_REAL_DTYPE && !m->swapped && m->col_stride == (ptrdiff_t)sizeof(real);
    for (int r = 0; r < count && direct; ++r) {
        direct = (uintptr_t)rows[r] % sizeof(real) == 0;
    }
    return direct;
}

/* The queries of vector v, in place (`direct`) or in s->row. Returns their number. */
int FN(queries_of_vector)(const sa_block *b, FN(scratch) * s, bool direct, int v, const real **q);

/* The tile's rows as real[n][width], copied if they are not yet. */
const real *FN(copied_rows)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n,
                            ptrdiff_t width);

/* The same as real[n][*stride], in place where that is possible and fast. */
SA_INLINE const real *FN(tile_rows)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n,
                                    ptrdiff_t width, ptrdiff_t *stride) {
    if (FN(is_direct)(m) && m->row_stride <= SA_DIRECT_STRIDE && m->row_stride >= -SA_DIRECT_STRIDE) {
        *stride = m->row_stride / (ptrdiff_t)sizeof(real);
        return (const real *)(const void *)(m->data + first * m->row_stride);
    }
    *stride = width;
    return FN(copied_rows)(b, m, cache, first, n, width);
}

/* Zeroes O unless something has been stored there: the matrix unit stores its first product without adding to O. */
SA_INLINE void FN(start_output)(const sa_block *b, FN(scratch) * s, int nv) {
    if (s->empty) {
        memset(s->O, 0, (size_t)b->a->Dv * (size_t)nv * SA_LANES * sizeof(real));
        s->empty = false;
    }
}

/* ---- bounds of rows ------------------------------------------------------------------------------------------------ */

/* The key relative to the tile, clamped to 0 … n. */
SA_INLINE ptrdiff_t FN(in_tile)(ptrdiff_t key, ptrdiff_t first, ptrdiff_t n) {
    return key < first ? 0 : key - first > n ? n : key - first;
}

/* Passes take vector v's first end[v] keys of the tile, a multiple of 4 or n: later keys are closed to it by causal. Rows are
 * sorted by position, so the ends grow. */
SA_INLINE void FN(open_ends)(const sa_rows *rows, const FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, ptrdiff_t *end) {
    if (nv == 1 || !rows->clipped || first + n <= rows->open_to) {
        end[0] = n;
        for (int v = 1; v < nv; ++v) {
            end[v] = n;
        }
        return;
    }
    ptrdiff_t most = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t open = s->open[v].any_to - first;
        most = open > most ? open : most;
        end[v] = most > n ? n : (most + 3) / 4 * 4 < n ? (most + 3) / 4 * 4 : n;
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

/* To s->open. Whole vectors have a call of their own: their loops become vector code. */
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

#if !defined(SA_PRODUCTS_ALONE)
/* ---- copies -------------------------------------------------------------------------------------------------------- */

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
SA_INLINE void FN(forget_tiles)(FN(cache) * cache) {
    if (cache->room > 0) {
        memset(cache->filled, 0, (size_t)cache->room / SA_KEYS_PER_TILE);
    }
}

/* Forgets tiles copied for other keys. */
SA_INLINE void FN(forget_copies)(const sa_block *b, FN(scratch) * s) {
    if (!b->cache_holds) {
        FN(forget_tiles)(&s->key);
        FN(forget_tiles)(&s->value);
    }
}
#endif
