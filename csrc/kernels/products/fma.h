/* The leaves of multiply-adds, and their walk over a tile. tiles.h has the register tiles. */

#define SA_FMA_LEAVES(nv)                                                                                                      \
    SA_LEAF void FN(scores_wide##nv)(const real *qT, const real *k, ptrdiff_t k_stride, ptrdiff_t n, ptrdiff_t E, real *P,     \
                                     ptrdiff_t lanes, real *top, sa_ahead *ahead) {                                            \
        FN(scores_any)(qT, k, k_stride, n, E, P, lanes, NULL, top, ahead, nv, false);                                          \
    }                                                                                                                          \
    SA_LEAF void FN(values_wide##nv)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end, ptrdiff_t Dv,     \
                                     real *O, ptrdiff_t lanes, const real *alpha, sa_ahead *ahead) {                           \
        FN(values_any)(P, v, v_stride, end, Dv, O, lanes, alpha, ahead, nv, false);                                            \
    }                                                                                                                          \
    SA_LEAF void FN(outer##nv)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n, ptrdiff_t m, \
                               real *C, ptrdiff_t c_stride, int tail) {                                                        \
        FN(outer_any)(p, p_stride, x, x_stride, n, m, C, c_stride, tail, nv, false);                                           \
    }
SA_LEAVES(SA_FMA_LEAVES)
#undef SA_FMA_LEAVES

/* P[n][lanes] = k[n][E] · qT[E][lanes]; top takes the maxima. From key end[v] on (open_ends) P keeps old numbers, which
 * close_vector sets to −inf before anyone reads them. */
SA_INLINE void FN(scores_wide)(const real *qT, const real *k, ptrdiff_t k_stride, const ptrdiff_t *end, ptrdiff_t E, real *P,
                               ptrdiff_t lanes, real *top, sa_ahead *ahead, int nv) {
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t n = end[v] - j;
        for (int at = v, now = SA_AT_ONCE(nv - v); n > 0 && at < nv; at += now, now = nv - at < now ? nv - at : now) {
            SA_CALL_LEAF(scores_wide, now, qT + at * SA_LANES, k + j * k_stride, k_stride, n, E, P + j * lanes + at * SA_LANES,
                         lanes, top + at * SA_LANES, ahead)
        }
        j = n > 0 ? end[v] : j;
    }
}

/* O[Dv][lanes] = alpha·O + vᵀ·P, likewise. */
SA_INLINE void FN(values_wide)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end, ptrdiff_t Dv, real *O,
                               ptrdiff_t lanes, const real *alpha, sa_ahead *ahead, int nv) {
    for (int at = 0, now = SA_AT_ONCE(nv); at < nv; at += now, now = nv - at < now ? nv - at : now) {
        SA_CALL_LEAF(values_wide, now, P + at * SA_LANES, v, v_stride, end + at, Dv, O + at * SA_LANES, lanes,
                     alpha + at * SA_LANES, ahead)
    }
}

/* C[m][width] += p[m][n]·x[n][width]; x is padded to whole vectors. */
SA_SHARED void FN(outer)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n, ptrdiff_t m,
                         real *C, ptrdiff_t c_stride, ptrdiff_t width) {
    for (ptrdiff_t d = 0; d < width;) {
        int tail;
        const int nv = FN(vectors_at_once)(width - d, &tail);
        SA_CALL_LEAF(outer, nv, p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail)
        d += nv * SA_LANES;
    }
}
