/* The two matrix products of attention as register tiles, and the packing of queries.
 *
 * Lanes are queries. Everything is transposed, so K and V are read where they lie, nothing is summed across lanes,
 * and the width of a head is only an index of broadcasts. Needs many queries to fill the lanes. For few queries: attention_few.h. */

/* a[i] lane j ↔ a[j] lane i, by log2(lanes) perfect shuffles where there is nothing faster. */
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

/* Lane i of the result is the sum over the lanes of a[i]; a is used up. */
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

/* ---- wide ----------------------------------------------------------------------------------------------------------
 * nv vectors of lanes are worked on, of rows that are `lanes` long: a causal tile leaves out vectors that it closes for some of
 * its keys, and works on vector v for the first end[v] of them; the ends grow. */

/* Of eight rows after tiles of six, four and four are faster than six and two: a Zen 5 runs 2×4 at 198 GFLOP/s and 4×4 at 248, as
 * 6×4. */
#define SA_ENDS_IN_FOURS(left, nv) (SA_ROWS(nv) == 6 && (left) == 8)

#if defined(SA_HAS_BF16_PRODUCTS)
#define SA_ADD_PRODUCTS(sum, a, b) V(add_products)(sum, a, b)
#else
#define SA_ADD_PRODUCTS(sum, a, b) (sum)
#endif

/* P[rows][nv·lanes] = k[rows][E] · qT[E][nv·lanes]; top takes the maximum of each lane. Of `pairs` of bfloat16, P is
 * times a factor for each lane. */
SA_INLINE void FN(scores_tile)(const real *restrict qT, const real *restrict k, ptrdiff_t k_stride, ptrdiff_t E,
                               real *restrict P, ptrdiff_t lanes, const real *factor, vec *top, const int rows, const int nv,
                               const bool pairs) {
    vec sum[8][4];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            sum[r][v] = V(set1)(0);
        }
    }
    for (ptrdiff_t e = 0; e < E; ++e) {
        vec q[4];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            q[v] = V(load)(qT + e * lanes + v * SA_LANES);
        }
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            vec k_re = V(set1)(k[r * k_stride + e]);
            SA_UNROLL
            for (int v = 0; v < nv; ++v) {
                if (pairs) {
                    sum[r][v] = SA_ADD_PRODUCTS(sum[r][v], q[v], k_re);
                } else {
                    sum[r][v] = V(fma)(k_re, q[v], sum[r][v]);
                }
            }
        }
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

SA_INLINE void FN(scores_any)(const real *restrict qT, const real *restrict k, ptrdiff_t k_stride, ptrdiff_t n, ptrdiff_t E,
                              real *restrict P, ptrdiff_t lanes, const real *factor, real *restrict top, sa_ahead *ahead,
                              const int nv, const bool pairs) {
    vec m[4];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(top + v * SA_LANES);
    }
    ptrdiff_t j = 0;
    for (; j + SA_ROWS(nv) <= n && !SA_ENDS_IN_FOURS(n - j, nv); j += SA_ROWS(nv)) {
        FN(scores_tile)(qT, k + j * k_stride, k_stride, E, P + j * lanes, lanes, factor, m, SA_ROWS(nv), nv, pairs);
        sa_look_ahead(ahead);
    }
    for (; SA_ROWS(nv) > 4 && j + 4 <= n; j += 4) {
        FN(scores_tile)(qT, k + j * k_stride, k_stride, E, P + j * lanes, lanes, factor, m, 4, nv, pairs);
    }
    if (j + 2 <= n) {
        FN(scores_tile)(qT, k + j * k_stride, k_stride, E, P + j * lanes, lanes, factor, m, 2, nv, pairs);
        j += 2;
    }
    if (j < n) {
        FN(scores_tile)(qT, k + j * k_stride, k_stride, E, P + j * lanes, lanes, factor, m, 1, nv, pairs);
    }
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        V(store)(top + v * SA_LANES, m[v]);
    }
}

/* O[rows][nv·lanes] = alpha·O + Σ_j v[j][rows]·P[j][nv·lanes], j < end[v] for vector v. The sum starts at zero and meets the old
 * output in one fused step: half the RMS error of adding term by term to O, at no cost. Of `pairs`, j counts two keys. */
SA_INLINE void FN(values_tile)(const real *restrict P, const real *restrict v_j, ptrdiff_t v_stride, const ptrdiff_t *end,
                               real *restrict O, ptrdiff_t lanes, const vec *alpha, const int rows, const int nv,
                               const bool pairs) {
    vec sum[8][4];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            sum[r][v] = V(set1)(0);
        }
    }
    ptrdiff_t j = 0;
    SA_UNROLL
    for (int from = 0; from < nv; ++from) {
        for (; j < end[from]; ++j) {
            vec p[4];
            SA_UNROLL
            for (int v = from; v < nv; ++v) {
                p[v] = V(load)(P + j * lanes + v * SA_LANES);
            }
            SA_UNROLL
            for (int r = 0; r < rows; ++r) {
                vec v_jr = V(set1)(v_j[j * v_stride + r]);
                SA_UNROLL
                for (int v = from; v < nv; ++v) {
                    if (pairs) {
                        sum[r][v] = SA_ADD_PRODUCTS(sum[r][v], p[v], v_jr);
                    } else {
                        sum[r][v] = V(fma)(v_jr, p[v], sum[r][v]);
                    }
                }
            }
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

SA_INLINE void FN(values_any)(const real *restrict P, const real *restrict v_j, ptrdiff_t v_stride, const ptrdiff_t *end,
                              ptrdiff_t Dv, real *restrict O, ptrdiff_t lanes, const real *restrict alpha, sa_ahead *ahead,
                              const int nv, const bool pairs) {
    vec a[4];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        a[v] = V(load)(alpha + v * SA_LANES);
    }
    ptrdiff_t d = 0;
    for (; d + SA_ROWS(nv) <= Dv && !SA_ENDS_IN_FOURS(Dv - d, nv); d += SA_ROWS(nv)) {
        FN(values_tile)(P, v_j + d, v_stride, end, O + d * lanes, lanes, a, SA_ROWS(nv), nv, pairs);
        sa_look_ahead(ahead);
    }
    for (; SA_ROWS(nv) > 4 && d + 4 <= Dv; d += 4) {
        FN(values_tile)(P, v_j + d, v_stride, end, O + d * lanes, lanes, a, 4, nv, pairs);
    }
    if (d + 2 <= Dv) {
        FN(values_tile)(P, v_j + d, v_stride, end, O + d * lanes, lanes, a, 2, nv, pairs);
        d += 2;
    }
    if (d < Dv) {
        FN(values_tile)(P, v_j + d, v_stride, end, O + d * lanes, lanes, a, 1, nv, pairs);
    }
}

/* One function for each number of vectors, so that the register tiles are compiled once and alone. */
#define SA_WIDE(nv)                                                                                                            \
    SA_NOINLINE void FN(scores_wide##nv)(const real *qT, const real *k, ptrdiff_t k_stride, ptrdiff_t n, ptrdiff_t E, real *P, \
                                         ptrdiff_t lanes, real *top, sa_ahead *ahead) {                                        \
        FN(scores_any)(qT, k, k_stride, n, E, P, lanes, NULL, top, ahead, nv, false);                                          \
    }                                                                                                                          \
    SA_NOINLINE void FN(values_wide##nv)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end, ptrdiff_t Dv, \
                                         real *O, ptrdiff_t lanes, const real *alpha, sa_ahead *ahead) {                       \
        FN(values_any)(P, v, v_stride, end, Dv, O, lanes, alpha, ahead, nv, false);                                            \
    }
SA_WIDE(1)
SA_WIDE(2)
SA_WIDE(3)
#if SA_VECS == 4
SA_WIDE(4)
#endif
#undef SA_WIDE

/* Vector v is worked on for the first end[v] keys; what lies behind them in P is left as it is. */
SA_INLINE void FN(scores_wide)(const real *qT, const real *k, ptrdiff_t k_stride, const ptrdiff_t *end, ptrdiff_t E, real *P,
                               ptrdiff_t lanes, real *top, sa_ahead *ahead, const int nv) {
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t n = end[v] - j;
        for (int at = v, now = SA_AT_ONCE(nv - v); n > 0 && at < nv; at += now, now = nv - at < now ? nv - at : now) {
            const real *q = qT + at * SA_LANES, *rows = k + j * k_stride;
            real *to = P + j * lanes + at * SA_LANES;
            switch (now) {
            case 1: FN(scores_wide1)(q, rows, k_stride, n, E, to, lanes, top + at * SA_LANES, ahead); break;
            case 2: FN(scores_wide2)(q, rows, k_stride, n, E, to, lanes, top + at * SA_LANES, ahead); break;
            case 3: FN(scores_wide3)(q, rows, k_stride, n, E, to, lanes, top + at * SA_LANES, ahead); break;
#if SA_VECS == 4
            case 4: FN(scores_wide4)(q, rows, k_stride, n, E, to, lanes, top + at * SA_LANES, ahead); break;
#endif
            default: break;
            }
        }
        j = n > 0 ? end[v] : j;
    }
}

SA_INLINE void FN(values_wide)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end, ptrdiff_t Dv, real *O,
                               ptrdiff_t lanes, const real *alpha, sa_ahead *ahead, const int nv) {
    for (int at = 0, now = SA_AT_ONCE(nv); at < nv; at += now, now = nv - at < now ? nv - at : now) {
        const real *p = P + at * SA_LANES, *factor = alpha + at * SA_LANES;
        real *o = O + at * SA_LANES;
        switch (now) {
        case 1: FN(values_wide1)(p, v, v_stride, end + at, Dv, o, lanes, factor, ahead); break;
        case 2: FN(values_wide2)(p, v, v_stride, end + at, Dv, o, lanes, factor, ahead); break;
        case 3: FN(values_wide3)(p, v, v_stride, end + at, Dv, o, lanes, factor, ahead); break;
#if SA_VECS == 4
        case 4: FN(values_wide4)(p, v, v_stride, end + at, Dv, o, lanes, factor, ahead); break;
#endif
        default: break;
        }
    }
}

#if defined(SA_HAS_BF16_PRODUCTS)
#define SA_PAIRS_WIDE(nv)                                                                                                      \
    SA_NOINLINE void FN(pairs_wide##nv)(const real *qT, const real *k, ptrdiff_t k_stride, ptrdiff_t n, ptrdiff_t E, real *P,  \
                                        ptrdiff_t lanes, const real *factor, real *top, sa_ahead *ahead) {                     \
        FN(scores_any)(qT, k, k_stride, n, E, P, lanes, factor, top, ahead, nv, true);                                         \
    }                                                                                                                          \
    SA_NOINLINE void FN(value_pairs_wide##nv)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end,          \
                                              ptrdiff_t Dv, real *O, ptrdiff_t lanes, const real *alpha, sa_ahead *ahead) {    \
        FN(values_any)(P, v, v_stride, end, Dv, O, lanes, alpha, ahead, nv, true);                                             \
    }
SA_PAIRS_WIDE(1)
SA_PAIRS_WIDE(2)
SA_PAIRS_WIDE(3)
SA_PAIRS_WIDE(4)
#undef SA_PAIRS_WIDE

/* As scores_wide, of pairs of bfloat16, times a factor for each lane. */
SA_INLINE void FN(pairs_wide)(const real *qT, const real *k, ptrdiff_t k_stride, const ptrdiff_t *end, ptrdiff_t E, real *P,
                              ptrdiff_t lanes, const real *factor, real *top, sa_ahead *ahead, const int nv) {
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t n = end[v] - j, at = v * SA_LANES;
        if (n <= 0) {
            continue;
        }
        const real *q = qT + at, *rows = k + j * k_stride;
        real *to = P + j * lanes + at;
        switch (nv - v) {
        case 1: FN(pairs_wide1)(q, rows, k_stride, n, E, to, lanes, factor + at, top + at, ahead); break;
        case 2: FN(pairs_wide2)(q, rows, k_stride, n, E, to, lanes, factor + at, top + at, ahead); break;
        case 3: FN(pairs_wide3)(q, rows, k_stride, n, E, to, lanes, factor + at, top + at, ahead); break;
        default: FN(pairs_wide4)(q, rows, k_stride, n, E, to, lanes, factor + at, top + at, ahead); break;
        }
        j = end[v];
    }
}

/* As values_wide, of pairs: of weights, P[pairs of keys][nv·lanes], and of rows of values. */
SA_INLINE void FN(value_pairs_wide)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end, ptrdiff_t Dv,
                                    real *O, const real *alpha, sa_ahead *ahead, const int nv) {
    ptrdiff_t pairs[SA_VECS];
    for (int i = 0; i < nv; ++i) {
        pairs[i] = (end[i] + 1) / 2;
    }
    switch (nv) {
    case 1: FN(value_pairs_wide1)(P, v, v_stride, pairs, Dv, O, SA_LANES, alpha, ahead); break;
    case 2: FN(value_pairs_wide2)(P, v, v_stride, pairs, Dv, O, 2 * SA_LANES, alpha, ahead); break;
    case 3: FN(value_pairs_wide3)(P, v, v_stride, pairs, Dv, O, 3 * SA_LANES, alpha, ahead); break;
    default: FN(value_pairs_wide4)(P, v, v_stride, pairs, Dv, O, 4 * SA_LANES, alpha, ahead); break;
    }
}
#endif

/* ---- lanes are columns: the gradients of keys and values --------------------------------------------------------------- */

/* C[rows][nv·lanes] += Σ_i p[r][i]·x[i][nv·lanes]. The sum starts at zero, as in values_tile. The last vector of C has `tail`
 * columns; x is padded to whole vectors. Of `pairs`, i counts two rows of x. */
SA_INLINE void FN(outer_tile)(const real *restrict p, ptrdiff_t p_stride, const real *restrict x, ptrdiff_t x_stride,
                              ptrdiff_t n, real *restrict C, ptrdiff_t c_stride, int tail, const int rows, const int nv,
                              const bool pairs) {
    vec sum[8][4];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            sum[r][v] = V(set1)(0);
        }
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        vec x_i[4];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            x_i[v] = V(load)(x + i * x_stride + v * SA_LANES);
        }
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            vec p_ri = V(set1)(p[r * p_stride + i]);
            SA_UNROLL
            for (int v = 0; v < nv; ++v) {
                if (pairs) {
                    sum[r][v] = SA_ADD_PRODUCTS(sum[r][v], x_i[v], p_ri);
                } else {
                    sum[r][v] = V(fma)(p_ri, x_i[v], sum[r][v]);
                }
            }
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            real *c = C + r * c_stride + v * SA_LANES;
            if (v < nv - 1 || tail == SA_LANES) {
                V(store)(c, V(load)(c) + sum[r][v]);
            } else {
                V(store_n)(c, V(load_n)(c, tail) + sum[r][v], tail);
            }
        }
    }
}

SA_INLINE void FN(outer_any)(const real *restrict p, ptrdiff_t p_stride, const real *restrict x, ptrdiff_t x_stride,
                             ptrdiff_t n, ptrdiff_t m, real *restrict C, ptrdiff_t c_stride, int tail, const int nv,
                             const bool pairs) {
    ptrdiff_t r = 0;
    for (; r + SA_ROWS(nv) <= m && !SA_ENDS_IN_FOURS(m - r, nv); r += SA_ROWS(nv)) {
        FN(outer_tile)(p + r * p_stride, p_stride, x, x_stride, n, C + r * c_stride, c_stride, tail, SA_ROWS(nv), nv, pairs);
    }
    for (; SA_ROWS(nv) > 4 && r + 4 <= m; r += 4) {
        FN(outer_tile)(p + r * p_stride, p_stride, x, x_stride, n, C + r * c_stride, c_stride, tail, 4, nv, pairs);
    }
    if (r + 2 <= m) {
        FN(outer_tile)(p + r * p_stride, p_stride, x, x_stride, n, C + r * c_stride, c_stride, tail, 2, nv, pairs);
        r += 2;
    }
    if (r < m) {
        FN(outer_tile)(p + r * p_stride, p_stride, x, x_stride, n, C + r * c_stride, c_stride, tail, 1, nv, pairs);
    }
}

#define SA_OUTER(nv)                                                                                                           \
    SA_NOINLINE void FN(outer##nv)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n,          \
                                   ptrdiff_t m, real *C, ptrdiff_t c_stride, int tail) {                                       \
        FN(outer_any)(p, p_stride, x, x_stride, n, m, C, c_stride, tail, nv, false);                                           \
    }
SA_OUTER(1)
SA_OUTER(2)
SA_OUTER(3)
#if SA_VECS == 4
SA_OUTER(4)
#endif
#undef SA_OUTER

/* C[m][width] += p[m][n]·x[n][width], p and C strided, x padded to whole vectors. */
SA_INLINE void FN(outer)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n, ptrdiff_t m,
                         real *C, ptrdiff_t c_stride, ptrdiff_t width) {
    for (ptrdiff_t d = 0; d < width;) {
        const ptrdiff_t left = (width - d + SA_LANES - 1) / SA_LANES;
        const int nv = left == SA_VECS + 1 && SA_VECS == 4 ? 3 : left < SA_VECS ? (int)left : SA_VECS; /* 5 is 3 + 2 */
        const int tail = width - d < nv * SA_LANES ? (int)(width - d) - (nv - 1) * SA_LANES : SA_LANES;
        switch (nv) {
        case 1: FN(outer1)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
        case 2: FN(outer2)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
        case 3: FN(outer3)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
#if SA_VECS == 4
        case 4: FN(outer4)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
#endif
        default: break;
        }
        d += nv * SA_LANES;
    }
}

#if defined(SA_HAS_BF16_PRODUCTS)
#define SA_OUTER_PAIRS(nv)                                                                                                     \
    SA_NOINLINE void FN(outer_pairs##nv)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n,    \
                                         ptrdiff_t m, real *C, ptrdiff_t c_stride, int tail) {                                 \
        FN(outer_any)(p, p_stride, x, x_stride, n, m, C, c_stride, tail, nv, true);                                            \
    }
SA_OUTER_PAIRS(1)
SA_OUTER_PAIRS(2)
SA_OUTER_PAIRS(3)
SA_OUTER_PAIRS(4)
#undef SA_OUTER_PAIRS

/* The same of pairs: n counts two columns of p and two rows of x. */
SA_INLINE void FN(outer_pairs)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n, ptrdiff_t m,
                               real *C, ptrdiff_t c_stride, ptrdiff_t width) {
    for (ptrdiff_t d = 0; d < width;) {
        const ptrdiff_t left = (width - d + SA_LANES - 1) / SA_LANES;
        const int nv = left == SA_VECS + 1 && SA_VECS == 4 ? 3 : left < SA_VECS ? (int)left : SA_VECS; /* 5 is 3 + 2 */
        const int tail = width - d < nv * SA_LANES ? (int)(width - d) - (nv - 1) * SA_LANES : SA_LANES;
        switch (nv) {
        case 1: FN(outer_pairs1)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
        case 2: FN(outer_pairs2)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
        case 3: FN(outer_pairs3)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
        case 4: FN(outer_pairs4)(p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail); break;
        default: break;
        }
        d += nv * SA_LANES;
    }
}
#endif

#undef SA_ADD_PRODUCTS
