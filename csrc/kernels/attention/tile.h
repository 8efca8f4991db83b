/* What both passes share: the rows of a tile, and what causal leaves open of it. copies.h has what is compiled once. */

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

/* Whether they are native, aligned and without gaps. */
SA_INLINE bool FN(rows_in_place)(const char *const *rows, int count, const sa_matrix *m) {
    bool direct = m->dtype == SA_REAL_DTYPE && !m->swapped && m->col_stride == (ptrdiff_t)sizeof(real);
    for (int r = 0; r < count && direct; ++r) {
        direct = (uintptr_t)rows[r] % sizeof(real) == 0;
    }
    return direct;
}

/* The queries of vector v, in place or in s->row. Returns their number. */
int FN(queries_of_vector)(const sa_block *b, FN(scratch) * s, bool direct, int v, const real **q);

/* The tile's rows as real[n][width], copied if they are not yet. */
const real *FN(copied_rows)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n,
                            ptrdiff_t width);

/* As real[n][*stride], in place where that is possible and fast. */
SA_INLINE const real *FN(tile_rows)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n,
                                    ptrdiff_t width, ptrdiff_t *stride) {
    if (FN(is_direct)(m) && m->row_stride <= SA_DIRECT_STRIDE && m->row_stride >= -SA_DIRECT_STRIDE) {
        *stride = m->row_stride / (ptrdiff_t)sizeof(real);
        return (const real *)(const void *)(m->data + first * m->row_stride);
    }
    *stride = width;
    return FN(copied_rows)(b, m, cache, first, n, width);
}

/* The key relative to the tile, clamped to 0 … n. */
SA_INLINE ptrdiff_t FN(in_tile)(ptrdiff_t key, ptrdiff_t first, ptrdiff_t n) {
    return key < first ? 0 : key - first > n ? n : key - first;
}

/* Vector v is worked on for the tile's first end[v] keys, a multiple of 4 or n; what causal closes is skipped. Rows are
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

/* O is zeroed late: the matrix unit stores its first product in its place. */
SA_INLINE void FN(open_output)(const sa_block *b, FN(scratch) * s, int nv) {
    if (s->empty) {
        memset(s->O, 0, (size_t)b->a->Dv * (size_t)nv * SA_LANES * sizeof(real));
        s->empty = false;
    }
}
