/* The gradients of a float mask and of offset_bias from a tile's dS, for backward.h and hvp.h. Rows or keys may share
 * mask elements. */
#include "kernels/kernels.h"

/* Lane i becomes the sum over rows of dS of key j + i, and 0 from key n on.
 * dS may hold anything in lanes without a row. */
SA_INLINE vec FN(sum_rows)(const real *dS, ptrdiff_t j, ptrdiff_t n, ptrdiff_t count, int nv) {
    vec t[SA_LANES];
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        t[i] = V(set1)(0);
        for (int v = 0; v < nv && j + i < n; ++v) {
            const real *from = dS + ((j + i) * nv + v) * SA_LANES;
            const ptrdiff_t rows = count - v * SA_LANES;
            t[i] = t[i] + FN(load_up_to)(from, rows);
        }
    }
    FN(transpose)(t);
    SA_UNROLL
    for (int half = SA_LANES / 2; half > 0; half /= 2) {
        SA_UNROLL
        for (int i = 0; i < half; ++i) {
            t[i] = t[i] + t[i + half];
        }
    }
    return t[0];
}

/* Where rows or keys have the same mask elements, dS is summed before it is added to memory:
 * otherwise the error would grow with the length. */
SA_ONCE void FN(add_dmask_of_rows)(const sa_backward_block *b, const real *dS, ptrdiff_t first, ptrdiff_t n, int nv,
                                   ptrdiff_t bytes) {
    const ptrdiff_t stride = b->g->dmask.m.col_stride;
    char *to = b->grads->dmask[0] + (first - b->dmask_key) * stride + bytes;
    vec all = V(set1)(0);
    for (ptrdiff_t j = 0; j < n; j += SA_LANES) {
        const vec sum = FN(sum_rows)(dS, j, n, b->b.rows->count, nv);
        real *elements = (void *)(to + j * stride);
        if (stride != 0) {
            FN(store_up_to)(elements, FN(load_up_to)(elements, n - j) + sum, n - j);
        }
        all = all + sum;
    }
    if (stride == 0) {
        *(real *)(void *)to += FN(sum_lanes)(all);
    }
}

SA_ONCE void FN(add_dmask_of_keys)(const sa_backward_block *b, const real *dS, ptrdiff_t n, int nv, ptrdiff_t bytes) {
    for (int v = 0; v < nv; ++v) {
        vec sum[4];
        SA_UNROLL
        for (int c = 0; c < 4; ++c) {
            sum[c] = V(set1)(0);
        }
        for (ptrdiff_t j = 0; j < n; j += 4) {
            SA_UNROLL
            for (int c = 0; c < 4; ++c) {
                if (j + c < n) {
                    sum[c] = sum[c] + V(load)(dS + ((j + c) * nv + v) * SA_LANES);
                }
            }
        }
        real of_rows[SA_LANES];
        V(store)(of_rows, (sum[0] + sum[1]) + (sum[2] + sum[3]));
        for (int i = 0; i < SA_LANES && v * SA_LANES + i < b->b.rows->count; ++i) {
            *(real *)(void *)(b->grads->dmask[v * SA_LANES + i] + bytes) += of_rows[i];
        }
    }
}

SA_ONCE bool FN(rows_share_mask)(const sa_backward_block *b) {
    const int count = b->b.rows->count;
    bool same = count > 1;
    for (int r = 1; r < count && same; ++r) {
        same = b->grads->dmask[r] == b->grads->dmask[0];
    }
    return same;
}

/* row_i[j] += dS_ij. Rows may overlap, as those of offset_bias do. */
SA_ONCE void FN(add_to_rows)(const real *dS, char *const *row, int count, ptrdiff_t bytes, ptrdiff_t n, int nv) {
    for (int v = 0; v < nv; ++v) {
        for (ptrdiff_t j = 0; j < n; j += SA_LANES) {
            vec t[SA_LANES];
            FN(load_transposed)(dS + (j * nv + v) * SA_LANES, nv * SA_LANES, n - j, SA_LANES, t);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                if (v * SA_LANES + i < count) {
                    real *to = (real *)(void *)(row[v * SA_LANES + i] + bytes) + j;
                    FN(store_up_to)(to, FN(load_up_to)(to, n - j) + t[i], n - j);
                }
            }
        }
    }
}

/* Adds a tile to sums that begin `bytes` after the rows. */
SA_ONCE void FN(add_diagonals)(const sa_backward_block *b, const real *dS, ptrdiff_t first, ptrdiff_t n, int nv,
                               ptrdiff_t bytes) {
    FN(add_to_rows)(dS, b->grads->diagonals, b->b.rows->count,
                    (first - b->first_diagonal) * (ptrdiff_t)sizeof(real) + bytes, n, nv);
}

/* dmask_ij += dS_ij, in an array that begins `bytes` after the mask's gradient. A row is contiguous, or one element
 * (stride 0). */
SA_ONCE void FN(add_dmask)(const sa_backward_block *b, const real *dS, ptrdiff_t first, ptrdiff_t n, int nv,
                           ptrdiff_t bytes) {
    const ptrdiff_t stride = b->g->dmask.m.col_stride;
    if (FN(rows_share_mask)(b)) {
        FN(add_dmask_of_rows)(b, dS, first, n, nv, bytes);
        return;
    }
    if (stride == 0) {
        FN(add_dmask_of_keys)(b, dS, n, nv, bytes);
        return;
    }
    FN(add_to_rows)(dS, b->grads->dmask, b->b.rows->count, (first - b->dmask_key) * stride + bytes, n, nv);
}
