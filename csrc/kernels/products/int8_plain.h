/* Sums of uint8 times int8 without instructions of their own, widened to 16 bits: the dot products of a row and a column. */

#define SA_PLAIN_DEPTH 512 /* numbers of a row at a time */

#if defined(SA_VEC128_SSE2)
#define SA_INT16_LANES 8
/* Σ over eight products, in four lanes. */
SA_VERB vu32 sa_add_products(vu32 sum, const int16_t *x, const int16_t *w) {
    const __m128i a = _mm_loadu_si128((const __m128i *)(const void *)x), b = _mm_loadu_si128((const __m128i *)(const void *)w);
    return (vu32)_mm_add_epi32((__m128i)sum, _mm_madd_epi16(a, b));
}
#else
#define SA_INT16_LANES 4
typedef int16_t sa_int16s __attribute__((vector_size(8)));
SA_VERB vu32 sa_add_products(vu32 sum, const int16_t *x, const int16_t *w) {
    sa_int16s a, b;
    memcpy(&a, x, sizeof a);
    memcpy(&b, w, sizeof b);
    return sum + (vu32)(__builtin_convertvector(a, mf32) * __builtin_convertvector(b, mf32));
}
#endif

/* rows × 32 columns, of the numbers from step `first` on: the first numbers set the sums, the others add to them. */
SA_ONCE void sa_plain_numbers(const sa_compact_tile *t, ptrdiff_t first, ptrdiff_t steps) {
    int16_t x[4][SA_PLAIN_DEPTH], w[SA_PLAIN_DEPTH];
    const ptrdiff_t n = steps * SA_WORD, whole = (n + SA_INT16_LANES - 1) / SA_INT16_LANES * SA_INT16_LANES;
    const char *panel = t->panel + first * SA_PANEL_COLUMNS * SA_WORD;
    memset(w, 0, sizeof w);
    memset(x, 0, sizeof x);
    for (ptrdiff_t r = 0; r < t->rows; ++r) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            x[r][i] = (uint8_t)t->x[r * t->stride + first * SA_WORD + i];
        }
    }
    for (ptrdiff_t c = 0; c < SA_PANEL_COLUMNS; ++c) {
        for (ptrdiff_t k = 0; k < steps; ++k) {
            const signed char *word = (const signed char *)panel + (k * SA_PANEL_COLUMNS + c) * SA_WORD;
            for (int i = 0; i < SA_WORD; ++i) {
                w[k * SA_WORD + i] = word[i];
            }
        }
        for (ptrdiff_t r = 0; r < t->rows; ++r) {
            vu32 sum = vu32_set1(0);
            for (ptrdiff_t i = 0; i < whole; i += SA_INT16_LANES) {
                sum = sa_add_products(sum, x[r] + i, w + i);
            }
            int32_t *to = (int32_t *)t->sums + r * SA_PANEL_COLUMNS + c;
            *to = (int32_t)((first == 0 ? 0 : (uint32_t)*to) + sum[0] + sum[1] + sum[2] + sum[3]);
        }
    }
}

static void sa_int8_widened(const sa_compact_tile *t) {
    for (ptrdiff_t k = 0; k < t->steps; k += SA_PLAIN_DEPTH / SA_WORD) {
        sa_plain_numbers(t, k, t->steps - k < SA_PLAIN_DEPTH / SA_WORD ? t->steps - k : SA_PLAIN_DEPTH / SA_WORD);
    }
}

const sa_compact_products SA_PASTE(sa_int8_, SA_ISA) = {.name = SA_STRING(SA_ISA), .most_rows = 4, .leaf = sa_int8_widened};
