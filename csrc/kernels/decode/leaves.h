/* The leaves of decoding by multiply-adds, and their callers. */

#define SA_DECODE_LEAVES(R, kind)                                                                                              \
    SA_DECODE_SCORES_LEAF(R, kind)                                                                                             \
    SA_LEAF void FN(decode_values##R##_##kind)(const real *P, ptrdiff_t p_stride, const FN(decode_rows) * v, ptrdiff_t n,      \
                                               ptrdiff_t Dv, real *O, const real *alpha) {                                     \
        FN(decode_values)(P, p_stride, v, n, Dv, O, alpha, R, SA_READS_##kind);                                                \
    }
#if SA_DECODE_ROWS == 8
#define SA_DECODE_ALL(kind)                                                                                                    \
    SA_DECODE_LEAVES(1, kind) SA_DECODE_LEAVES(2, kind) SA_DECODE_LEAVES(4, kind) SA_DECODE_LEAVES(8, kind)
#elif SA_DECODE_ROWS == 4
#define SA_DECODE_ALL(kind) SA_DECODE_LEAVES(1, kind) SA_DECODE_LEAVES(2, kind) SA_DECODE_LEAVES(4, kind)
#else
#define SA_DECODE_ALL(kind) SA_DECODE_LEAVES(1, kind) SA_DECODE_LEAVES(2, kind)
#endif
SA_DECODE_ALL(REAL)
#if SA_SOME_BF16
SA_DECODE_ALL(BF16)
SA_DECODE_ALL(PAIRS)
#define SA_DECODE_BF16(name, ...)                                                                                              \
    case SA_READS_BF16: SA_DECODE_CALL(name, BF16, __VA_ARGS__) break;                                                         \
    case SA_READS_PAIRS: SA_DECODE_CALL(name, PAIRS, __VA_ARGS__) break;
#else
#define SA_DECODE_BF16(name, ...)
#endif
#if SA_SOME_F16
SA_DECODE_ALL(F16)
#define SA_DECODE_F16(name, ...)                                                                                               \
    case SA_READS_F16: SA_DECODE_CALL(name, F16, __VA_ARGS__) break;
#else
#define SA_DECODE_F16(name, ...)
#endif
#define SA_DECODE_BY_KIND(reads, name, ...)                                                                                    \
    switch (reads) {                                                                                                           \
        SA_DECODE_BF16(name, __VA_ARGS__)                                                                                      \
        SA_DECODE_F16(name, __VA_ARGS__)                                                                                       \
    default: SA_DECODE_CALL(name, REAL, __VA_ARGS__) break;                                                                    \
    }

SA_SHARED FN(decode_rows) FN(decode_rows_of)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first,
                                             ptrdiff_t n, ptrdiff_t width) {
    const int reads = FN(decode_reads)(m);
    if (reads == SA_READS_BF16 || reads == SA_READS_F16 || FN(is_direct)(m)) {
        const ptrdiff_t bytes = width * (ptrdiff_t)sa_itemsize(m->dtype), last = first + n;
        const FN(decode_ahead) ahead = {FN(rows_ahead)(b, m, last, bytes, SA_BYTES_AHEAD(b->far)),
                                        FN(rows_ahead)(b, m, last, bytes, SA_BYTES_LATER(b->far))};
        return (FN(decode_rows)){m->data + first * m->row_stride, m->row_stride, ahead, reads, m->row_stride == bytes};
    }
    ptrdiff_t stride;
    const real *rows = FN(tile_rows)(b, m, cache, first, n, width, &stride);
    return (FN(decode_rows)){(const char *)rows, stride * (ptrdiff_t)sizeof(real), {0, 0}, reads, false};
}

SA_INLINE bool FN(decode_by_unit)(const FN(scratch) * s) { return s->decode.use && s->unit->decode_scores; }

/* s->P[n][p_stride] = the tile's scores; p_stride is R or SA_LANES. */
SA_ONCE void FN(scores_of_decode)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R) {
    if (FN(decode_by_unit)(s)) {
        s->unit->decode_scores(b, s, first, n, p_stride, R);
        return;
    }
    const ptrdiff_t E = b->a->E;
    const FN(decode_rows) k = FN(decode_rows_of)(b, &b->key, &s->key, first, n, E);
    SA_DECODE_BY_KIND(k.reads, decode_scores, s->q, &k, n, E, s->P, p_stride, 1) /* queries hold the factor */
}

/* O = alpha·O + s->P[n][p_stride] times the tile's values. */
SA_ONCE void FN(values_of_decode)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R) {
    if (FN(decode_by_unit)(s)) {
        s->unit->decode_values(b, s, first, n, p_stride, R);
        return;
    }
    if (s->decode.rounds) { /* as the products would have done */
        s->unit->round_weights(s, n * p_stride);
    }
    const ptrdiff_t Dv = b->a->Dv;
    const FN(decode_rows) v = FN(decode_rows_of)(b, &b->value, &s->value, first, n, Dv);
    SA_DECODE_BY_KIND(v.reads, decode_values, s->P, p_stride, &v, n, Dv, s->O, s->alpha)
}
#undef SA_DECODE_LEAVES
#undef SA_DECODE_ALL
#undef SA_DECODE_CALL
#undef SA_DECODE_BF16
#undef SA_DECODE_F16
#undef SA_DECODE_BY_KIND
