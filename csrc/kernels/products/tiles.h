/* Attention's products as register tiles, for leaves of multiply-adds (at the end) and of bfloat16 pairs (bf16dot.h).
 * Lanes are queries, so K and V are read in place and nothing is summed across lanes. decode/ is for few queries.
 *
 *     rows_times_lanes      P[n][lanes] = k[n][E]·qT[E][lanes]             scores from K and Q; dP from V and dO
 *     columns_times_lanes   O[Dv][lanes] = alpha·O + v[n][Dv]ᵀ·P[n][lanes]   O from V and weights; dQ from K and dS
 *     outer                 C[m][width] += p[m][n]·x[n][width]             dK from dS and Q; dV from weights and dO
 *                           or C = from[m][width] + that
 * Comes after kernels/attention/load.h and kernels/attention/prefetch.h. */
#include "kernels/kernels.h"

/* Swaps lane j of a[i] and lane i of a[j]. */
SA_INLINE void FN(transpose)(vec *a) {
#if defined(SA_HAS_TRANSPOSE) && !SA_REAL_IS_F64
    V(transpose)(a);
#else
    vec b[SA_LANES];
    SA_UNROLL
    for (int span = 1; span < SA_LANES; span *= 2) {
        SA_UNROLL
        for (int i = 0; i < SA_LANES / 2; ++i) {
            b[2 * i] = V(zip_lo)(a[i], a[i + SA_LANES / 2]);
            b[2 * i + 1] = V(zip_hi)(a[i], a[i + SA_LANES / 2]);
        }
        SA_UNROLL
        for (int i = 0; i < SA_LANES; ++i) {
            a[i] = b[i];
        }
    }
#endif
}

/* Lane i of to[j] becomes x[i·stride + j] for i < n and j < columns, else 0. */
SA_INLINE void FN(load_transposed)(const real *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t columns, vec *to) {
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        to[i] = V(set1)(0);
        if (i < n) {
            to[i] = FN(load_up_to)(x + i * stride, columns);
        }
    }
    FN(transpose)(to);
}

/* Returns the sum of a[i]'s lanes in lane i; overwrites a. */
SA_INLINE vec FN(sum_each)(vec *a) {
#if defined(SA_HAS_SUM_EACH)
    return V(sum_each)(a);
#else
    SA_UNROLL
    for (int n = SA_LANES; n > 1; n /= 2) {
        SA_UNROLL
        for (int i = 0; i < n / 2; ++i) {
            a[i] = V(even)(a[2 * i], a[2 * i + 1]) + V(odd)(a[2 * i], a[2 * i + 1]);
        }
    }
    return a[0];
#endif
}

/* ---- lanes are queries: nv vectors of rows of `lanes`; end: see open_ends ---------------------------------------- */

/* For eight rows, four and four are faster than six and two. */
#define SA_ENDS_IN_FOURS(left, nv) (SA_ROWS(nv) == 6 && (left) == 8)

/* Calls tile(i, rows) for all n rows from i = 0 on, where `rows` is a literal. `after` follows each tile that uses all
 * accumulators. */
#define SA_EACH_TILE(n, nv, tile, after)                                                                               \
    ptrdiff_t i = 0;                                                                                                   \
    for (; i + SA_ROWS(nv) <= (n) && !SA_ENDS_IN_FOURS((n) - i, nv); i += SA_ROWS(nv)) {                               \
        tile(i, SA_ROWS(nv));                                                                                          \
        after;                                                                                                         \
    }                                                                                                                  \
    for (; SA_ROWS(nv) > 4 && i + 4 <= (n); i += 4) {                                                                  \
        tile(i, 4);                                                                                                    \
    }                                                                                                                  \
    if (i + 2 <= (n)) {                                                                                                \
        tile(i, 2);                                                                                                    \
        i += 2;                                                                                                        \
    }                                                                                                                  \
    if (i < (n)) {                                                                                                     \
        tile(i, 1);                                                                                                    \
    }

/* Returns sum + a·b; with `pairs`, sum plus both products of a bfloat16 pair. */
SA_INLINE vec FN(add_product)(vec sum, vec a, vec b, const bool pairs) {
#if defined(SA_HAS_BF16_PRODUCTS)
    if (pairs) {
        return V(add_products)(sum, b, a);
    }
#endif
    return (void)pairs, V(fma)(a, b, sum);
}

SA_INLINE void FN(set_to_zero)(vec sum[8][4], const int rows, const int nv) {
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            sum[r][v] = V(set1)(0);
        }
    }
}

/* sum[r][v] += a[r·stride]·b[v], v ≥ from. */
SA_INLINE void FN(add_outer)(vec sum[8][4], const real *a, ptrdiff_t stride, const real *b, const int rows,
                             const int from, const int nv, const bool pairs) {
    vec row[4];
    SA_UNROLL
    for (int v = from; v < nv; ++v) {
        row[v] = V(load)(b + v * SA_LANES);
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        const vec a_r = V(set1)(a[r * stride]);
        SA_UNROLL
        for (int v = from; v < nv; ++v) {
            sum[r][v] = FN(add_product)(sum[r][v], a_r, row[v], pairs);
        }
    }
}

/* P[rows][nv·lanes] = k[rows][E] · qT[E][nv·lanes]; top takes each lane's maximum.
 * With `pairs`, P is also multiplied by a factor for each lane. */
SA_INLINE void FN(rows_tile)(const real *restrict qT, const real *restrict k, ptrdiff_t k_stride, ptrdiff_t E,
                             real *restrict P, ptrdiff_t lanes, const real *factor, vec *top, const int rows,
                             const int nv, const bool pairs) {
    vec sum[8][4];
    FN(set_to_zero)(sum, rows, nv);
    for (ptrdiff_t e = 0; e < E; ++e) {
        FN(add_outer)(sum, k + e, k_stride, qT + e * lanes, rows, 0, nv, pairs);
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            vec s = sum[r][v];
            if (pairs) {
                s = s * V(load)(factor + v * SA_LANES);
            }
            V(store)(P + r * lanes + v * SA_LANES, s);
            top[v] = V(max)(top[v], s);
        }
    }
}

SA_INLINE void FN(rows_times_lanes_any)(const real *restrict qT, const real *restrict k, ptrdiff_t k_stride,
                                        ptrdiff_t n, ptrdiff_t E, real *restrict P, ptrdiff_t lanes, const real *factor,
                                        real *restrict top, sa_ahead *ahead, const int nv, const bool pairs) {
    vec m[4];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(top + v * SA_LANES);
    }
#define SA_TILE(j, rows)                                                                                               \
    FN(rows_tile)(qT, k + (j) * k_stride, k_stride, E, P + (j) * lanes, lanes, factor, m, rows, nv, pairs)
    SA_EACH_TILE(n, nv, SA_TILE, sa_fetch_next(ahead))
#undef SA_TILE
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        V(store)(top + v * SA_LANES, m[v]);
    }
}

/* O[rows][nv·lanes] = alpha·O + Σ_j v[j][rows]·P[j][nv·lanes], j < end[v]. The sum starts at zero and is added to O in
 * one fused step, which halves the RMS error. With `pairs`, j counts pairs of keys. */
SA_INLINE void FN(columns_tile)(const real *restrict P, const real *restrict v_j, ptrdiff_t v_stride,
                                const ptrdiff_t *end, real *restrict O, ptrdiff_t lanes, const vec *alpha,
                                const int rows, const int nv, const bool pairs) {
    vec sum[8][4];
    FN(set_to_zero)(sum, rows, nv);
    ptrdiff_t j = 0;
    SA_UNROLL
    for (int from = 0; from < nv; ++from) {
        for (; j < end[from]; ++j) {
            FN(add_outer)(sum, v_j + j * v_stride, 1, P + j * lanes, rows, from, nv, pairs);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            real *o = O + r * lanes + v * SA_LANES;
            V(store)(o, V(fma)(alpha[v], V(load)(o), sum[r][v]));
        }
    }
}

SA_INLINE void FN(columns_times_lanes_any)(const real *restrict P, const real *restrict v_j, ptrdiff_t v_stride,
                                           const ptrdiff_t *end, ptrdiff_t Dv, real *restrict O, ptrdiff_t lanes,
                                           const real *restrict alpha, sa_ahead *ahead, const int nv,
                                           const bool pairs) {
    vec a[4];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        a[v] = V(load)(alpha + v * SA_LANES);
    }
#define SA_TILE(d, rows) FN(columns_tile)(P, v_j + (d), v_stride, end, O + (d) * lanes, lanes, a, rows, nv, pairs)
    SA_EACH_TILE(Dv, nv, SA_TILE, sa_fetch_next(ahead))
#undef SA_TILE
}

/* ---- lanes are columns: the gradients of keys and values --------------------------------------------------------- */

/* C[rows][nv·lanes] = from + sum; `from` may be C. C's last vector has `tail` columns. */
SA_INLINE void FN(store_outer)(vec sum[8][4], const real *from, ptrdiff_t from_stride, real *C, ptrdiff_t c_stride,
                               int tail, const int rows, const int nv) {
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            const real *first = from + r * from_stride + v * SA_LANES;
            real *c = C + r * c_stride + v * SA_LANES;
            if (v < nv - 1 || tail == SA_LANES) {
                V(store)(c, V(load)(first) + sum[r][v]);
            } else {
                V(store_n)(c, V(load_n)(first, tail) + sum[r][v], tail);
            }
        }
    }
}

/* C[rows][nv·lanes] = from + Σ_i p[r][i]·x[i][nv·lanes], summed from zero; x is padded.
 * With `pairs`, i counts pairs of rows of x. */
SA_INLINE void FN(outer_tile)(const real *restrict p, ptrdiff_t p_stride, const real *restrict x, ptrdiff_t x_stride,
                              ptrdiff_t n, const real *from, ptrdiff_t from_stride, real *C, ptrdiff_t c_stride,
                              int tail, const int rows, const int nv, const bool pairs) {
    vec sum[8][4];
    FN(set_to_zero)(sum, rows, nv);
    for (ptrdiff_t i = 0; i < n; ++i) {
        FN(add_outer)(sum, p + i, p_stride, x + i * x_stride, rows, 0, nv, pairs);
    }
    FN(store_outer)(sum, from, from_stride, C, c_stride, tail, rows, nv);
}

SA_INLINE void FN(outer_any)(const real *restrict p, ptrdiff_t p_stride, const real *restrict x, ptrdiff_t x_stride,
                             ptrdiff_t n, ptrdiff_t m, const real *from, ptrdiff_t from_stride, real *C,
                             ptrdiff_t c_stride, int tail, const int nv, const bool pairs){
#define SA_TILE(r, rows)                                                                                               \
    FN(outer_tile)(p + (r) * p_stride, p_stride, x, x_stride, n, from + (r) * from_stride, from_stride,                \
                   C + (r) * c_stride, c_stride, tail, rows, nv, pairs)
    SA_EACH_TILE(m, nv, SA_TILE, )
#undef SA_TILE
}

/* Returns how many vectors a leaf computes (five as three and two);
 * *tail becomes the last vector's number of columns. */
SA_INLINE int FN(vectors_at_once)(ptrdiff_t width, int *tail) {
    const ptrdiff_t left = SA_CEIL_DIV(width, SA_LANES);
    const int nv = left == SA_LEAF_VECS + 1 && SA_LEAF_VECS == 4 ? 3 : left < SA_LEAF_VECS ? (int)left : SA_LEAF_VECS;
    *tail = width < nv * SA_LANES ? (int)width - (nv - 1) * SA_LANES : SA_LANES;
    return nv;
}

#if !defined(SA_PRODUCTS_ALONE)
/* ---- leaves of multiply-adds, and the loops over a tile that call them ------------------------------------------- */

#define SA_FMA_LEAVES(nv)                                                                                              \
    SA_LEAF void FN(rows_times_lanes##nv)(const real *qT, const real *k, ptrdiff_t k_stride, ptrdiff_t n, ptrdiff_t E, \
                                          real *P, ptrdiff_t lanes, real *top, sa_ahead *ahead) {                      \
        FN(rows_times_lanes_any)(qT, k, k_stride, n, E, P, lanes, SA_NO_FACTORS, top, ahead, nv, SA_OF_NUMBERS);       \
    }                                                                                                                  \
    SA_LEAF void FN(columns_times_lanes##nv)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end,   \
                                             ptrdiff_t Dv, real *O, ptrdiff_t lanes, const real *alpha,                \
                                             sa_ahead *ahead) {                                                        \
        FN(columns_times_lanes_any)(P, v, v_stride, end, Dv, O, lanes, alpha, ahead, nv, SA_OF_NUMBERS);               \
    }                                                                                                                  \
    SA_LEAF void FN(outer##nv)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n,      \
                               ptrdiff_t m, const real *from, ptrdiff_t from_stride, real *C, ptrdiff_t c_stride,      \
                               int tail) {                                                                             \
        FN(outer_any)(p, p_stride, x, x_stride, n, m, from, from_stride, C, c_stride, tail, nv, SA_OF_NUMBERS);        \
    }
SA_LEAVES(SA_FMA_LEAVES)
#undef SA_FMA_LEAVES

/* P[n][lanes] = k[n][E] · qT[E][lanes]; top takes the maxima. From key end[v] on (open_ends) P keeps old numbers, which
 * close_vector sets to −inf before they are read. */
SA_INLINE void FN(rows_times_lanes)(const real *qT, const real *k, ptrdiff_t k_stride, const ptrdiff_t *end,
                                    ptrdiff_t E, real *P, ptrdiff_t lanes, real *top, sa_ahead *ahead, int nv) {
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t n = end[v] - j;
        for (int at = v, now = SA_AT_ONCE(nv - v); n > 0 && at < nv; at += now, now = SA_SMALLER(nv - at, now)) {
            SA_CALL_LEAF(rows_times_lanes, now, qT + at * SA_LANES, k + j * k_stride, k_stride, n, E,
                         P + j * lanes + at * SA_LANES, lanes, top + at * SA_LANES, ahead)
        }
        j = n > 0 ? end[v] : j;
    }
}

/* O[Dv][lanes] = alpha·O + vᵀ·P, over the keys before end[v]. */
SA_INLINE void FN(columns_times_lanes)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end,
                                       ptrdiff_t Dv, real *O, ptrdiff_t lanes, const real *alpha, sa_ahead *ahead,
                                       int nv) {
    for (int at = 0, now = SA_AT_ONCE(nv); at < nv; at += now, now = SA_SMALLER(nv - at, now)) {
        SA_CALL_LEAF(columns_times_lanes, now, P + at * SA_LANES, v, v_stride, end + at, Dv, O + at * SA_LANES, lanes,
                     alpha + at * SA_LANES, ahead)
    }
}

/* C[m][width] = from + p[m][n]·x[n][width]; x is padded to whole vectors.
 * `from` is C, or a row for all rows, with stride 0. */
SA_SHARED void FN(outer)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n, ptrdiff_t m,
                         const real *from, ptrdiff_t from_stride, real *C, ptrdiff_t c_stride, ptrdiff_t width) {
    for (ptrdiff_t d = 0; d < width;) {
        int tail;
        const int nv = FN(vectors_at_once)(width - d, &tail);
        SA_CALL_LEAF(outer, nv, p, p_stride, x + d, x_stride, n, m, from + d, from_stride, C + d, c_stride, tail)
        d += nv * SA_LANES;
    }
}
#endif
