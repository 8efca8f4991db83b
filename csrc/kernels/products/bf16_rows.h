/* Sums of products of bfloat16 (AVX512_BF16) in float32, for compact weights: 14 rows × 32 columns of accumulators. */

#define SA_BF16_ROWS 14
#define SA_BF16_AHEAD 4096 /* bytes: the panel comes from L2, or from farther */

SA_INLINE void sa_bf16_tile(const sa_compact_tile *t, const int rows) {
    const char *x = t->x, *panel = t->panel;
    vf32 sum[SA_BF16_ROWS][2];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = vf32_set1(0);
    }
    for (ptrdiff_t k = 0; k < t->steps; ++k, x += SA_WORD, panel += SA_PANEL_COLUMNS * SA_WORD) {
        const vf32 left = vf32_load((const float *)(const void *)panel),
                   right = vf32_load((const float *)(const void *)panel + 16);
        __builtin_prefetch(panel + SA_BF16_AHEAD);
        __builtin_prefetch(panel + SA_BF16_AHEAD + 64);
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            float pair;
            memcpy(&pair, x + r * t->stride, sizeof pair);
            sum[r][0] = vf32_add_products(sum[r][0], vf32_set1(pair), left);
            sum[r][1] = vf32_add_products(sum[r][1], vf32_set1(pair), right);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        float *to = (float *)t->sums + r * SA_PANEL_COLUMNS;
        vf32_store(to, sum[r][0]);
        vf32_store(to + 16, sum[r][1]);
    }
}

#define SA_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#define SA_BF16_LEAF(n)                                                                                                        \
    SA_LEAF void sa_bf16_rows##n(const sa_compact_tile *t) { sa_bf16_tile(t, n); }
SA_EACH_ROWS(SA_BF16_LEAF)
#undef SA_BF16_LEAF

static void sa_bf16(const sa_compact_tile *t) {
#define SA_BF16_ENTRY(n) [n] = sa_bf16_rows##n,
    static sa_compact_leaf *const leaf[SA_BF16_ROWS + 1] = {SA_EACH_ROWS(SA_BF16_ENTRY)};
#undef SA_BF16_ENTRY
    leaf[t->rows](t);
}
#undef SA_EACH_ROWS

const sa_compact_products sa_bf16_avx512bf16 = {.name = "avx512bf16", .most_rows = SA_BF16_ROWS, .leaf = sa_bf16};
