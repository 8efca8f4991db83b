/* Weights in the quants of a GGUF file: their numbers, decoded one by one from the bits; products and rows of decoding, in any
 * cut, against double. Weights are allocated to the byte; quants may have any bits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/quants.h"
#include "tests/test.h"

#define U 0x1p-24 /* the relative error of a rounding to float32 */

static double half_at(const uint8_t *p) { return element_get((const char *)p, SA_F16, false); }

/* Number i of a quant; *size becomes the sum of the magnitudes of its terms. As llama.cpp's ggml-quants.c says. */
static double number_of_quant(sa_quant_type type, const uint8_t *p, int i, double *size) {
    static const int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const int half = i / 128, part = i % 128 / 32, l = i % 32, g = i / 32, h = i / 16;
    double d = half_at(p), q = 0, m = 0;
    switch (type) {
    case SA_QUANT_F32: return element_get((const char *)p, SA_F32, false);
    case SA_QUANT_F16: return d;
    case SA_QUANT_BF16: return element_get((const char *)p, SA_BF16, false);
    case SA_QUANT_Q4_0: q = (i < 16 ? p[2 + i] & 15 : p[2 + i - 16] >> 4) - 8; break;
    case SA_QUANT_Q4_1:
        q = i < 16 ? p[4 + i] & 15 : p[4 + i - 16] >> 4;
        m = half_at(p + 2);
        break;
    case SA_QUANT_Q5_0: q = (i < 16 ? p[6 + i] & 15 : p[6 + i - 16] >> 4) + 16 * (p[2 + i / 8] >> i % 8 & 1) - 16; break;
    case SA_QUANT_Q5_1:
        q = (i < 16 ? p[8 + i] & 15 : p[8 + i - 16] >> 4) + 16 * (p[4 + i / 8] >> i % 8 & 1);
        m = half_at(p + 2);
        break;
    case SA_QUANT_Q8_0: q = (int8_t)p[2 + i]; break;
    case SA_QUANT_IQ4_NL: q = values[i < 16 ? p[2 + i] & 15 : p[2 + i - 16] >> 4]; break;
    case SA_QUANT_Q2_K:
        d = half_at(p + 80);
        q = (p[16 + 32 * half + l] >> 2 * part & 3) * (p[h] & 15);
        m = -half_at(p + 82) * (p[h] >> 4);
        break;
    case SA_QUANT_Q3_K: {
        const int low = h < 8 ? p[96 + h] & 15 : p[96 + h - 8] >> 4, high = p[104 + h % 4] >> 2 * (h / 4) & 3;
        d = half_at(p + 108);
        q = ((p[32 + 32 * half + l] >> 2 * part & 3) - (p[l] >> g & 1 ? 0 : 4)) * (low + 16 * high - 32);
        break;
    }
    case SA_QUANT_Q4_K:
    case SA_QUANT_Q5_K: {
        const int byte = p[(type == SA_QUANT_Q4_K ? 16 : 48) + g / 2 * 32 + l],
                  five = type == SA_QUANT_Q5_K ? p[16 + l] >> g & 1 : 0;
        const int scale = g < 4 ? p[4 + g] & 63 : (p[8 + g] & 15) + 16 * (p[g] >> 6);
        const int least = g < 4 ? p[8 + g] & 63 : (p[8 + g] >> 4) + 16 * (p[4 + g] >> 6);
        q = scale * ((g % 2 == 0 ? byte & 15 : byte >> 4) + 16 * five);
        m = -half_at(p + 2) * least;
        break;
    }
    case SA_QUANT_IQ4_XS: {
        const int byte = p[8 + 16 * g + i % 16], low = p[4 + g / 2] >> g % 2 * 4 & 15, high = p[2 + g / 4] >> g % 4 * 2 & 3;
        q = values[l < 16 ? byte & 15 : byte >> 4] * (low + 16 * high - 32);
        break;
    }
    default: {
        const int at = i % 128, low = p[64 * half + at % 64], high = p[128 + 32 * half + at % 32];
        d = half_at(p + 208);
        q = ((at < 64 ? low & 15 : low >> 4) + 16 * (high >> 2 * (at / 32) & 3) - 32) * (int8_t)p[192 + i / 16];
        break;
    }
    }
    *size = fabs(d * q) + fabs(m);
    return d * q + m;
}

typedef struct {
    sa_compact w;
    uint8_t *bytes;
    double *number, *size; /* (out, in) */
} weights;

/* hostile: scales may be any float16. */
static void weights_make(weights *w, sa_quant_type type, ptrdiff_t out, ptrdiff_t quants, bool hostile, random_source *random) {
    const sa_quant_kind *s = &sa_quant_kinds[type];
    const ptrdiff_t in = quants * s->numbers;
    w->bytes = zero_memory((size_t)(out * quants * s->bytes) + 1);
    w->number = zero_memory((size_t)(out * in) * sizeof *w->number);
    w->size = zero_memory((size_t)(out * in) * sizeof *w->size);
    w->w = sa_quants_at(type, out, in, w->bytes + 1); /* unaligned */
    for (ptrdiff_t b = 0; b < out * quants; ++b) {
        uint8_t *p = w->bytes + 1 + b * s->bytes;
        for (ptrdiff_t i = 0; i < s->bytes; ++i) {
            p[i] = (uint8_t)random_bits(random);
        }
        if (!hostile && s->numbers == 1) {
            element_set((char *)p,
                        type == SA_QUANT_F32   ? SA_F32
                        : type == SA_QUANT_F16 ? SA_F16
                                               : SA_BF16,
                        false, random_between(random, -1, 1));
        } else if (!hostile) {
            static const int d_at[SA_QUANT_TYPES] = {[SA_QUANT_Q2_K] = 80, [SA_QUANT_Q3_K] = 108, [SA_QUANT_Q6_K] = 208};
            element_set((char *)p + d_at[type], SA_F16, false, random_between(random, -0.01, 0.01));
            if (type == SA_QUANT_Q4_1 || type == SA_QUANT_Q5_1 || type == SA_QUANT_Q2_K || type == SA_QUANT_Q4_K ||
                type == SA_QUANT_Q5_K) {
                element_set((char *)p + d_at[type] + 2, SA_F16, false, random_between(random, -0.01, 0.01));
            }
        }
        for (int i = 0; i < s->numbers; ++i) {
            double size = 0;
            w->number[b * s->numbers + i] = number_of_quant(type, p, i, &size);
            w->size[b * s->numbers + i] = size > 0 ? size : fabs(w->number[b * s->numbers + i]);
        }
    }
}

static bool same(double got, double want) { return got == want || (isnan(got) && isnan(want)); }

static void try_numbers(sa_quant_type type, bool hostile) {
    FREES_AT_END;
    random_source random = {(uint64_t)type + 1};
    const ptrdiff_t out = 5;
    weights w;
    weights_make(&w, type, out, sa_quant_kinds[type].numbers == 1 ? 96 : 3, hostile, &random);
    const ptrdiff_t in = w.w.in;
    float *row = dirty_memory((size_t)in * sizeof *row), *rows = dirty_memory((size_t)(2 * in) * sizeof *rows);
    ptrdiff_t wrong = 0;
    for (ptrdiff_t c = 0; c < out; ++c) {
        sa_quants_row(&w.w, c, row);
        for (ptrdiff_t i = 0; i < in; ++i) {
            wrong += !same((double)row[i], (double)(float)w.number[c * in + i]);
        }
    }
    CHECK(wrong == 0, "%s, hostile %d: %td wrong numbers", sa_quant_kinds[type].name, hostile, wrong);
    const int64_t ids[2] = {out - 1, 0};
    sa_quants_look_up(&w.w, row, NULL, ids, 2, rows); /* `row` is the last one */
    for (ptrdiff_t i = 0; i < in; ++i) {
        wrong += !same((double)rows[i], (double)(row[i] + row[i]));
    }
    CHECK(wrong == 0, "%s: %td wrong numbers looked up", sa_quant_kinds[type].name, wrong);
}

static float *multiply(const sa_linear *l, int threads) {
    sa_linear own = *l;
    float *y = dirty_memory((size_t)(l->rows * l->out[0] + 1) * sizeof *y);
    own.y[0] = (char *)y;
    char *scratch = dirty_memory((size_t)threads * sa_linear_scratch(&own, threads, false, false) + 1);
    sa_linear_forward(&own, threads, scratch);
    return y;
}

/* As digits, numbers have an error of up to half a unit of the last digit (kernels/transformer/quants.h), where the largest of 32
 * is 127 or 32639 units; with three, rounding to float32 makes it up to 2·2^−22 of the largest. */
static void try_product(sa_quant_type type, ptrdiff_t rows, ptrdiff_t out, ptrdiff_t quants, int digits, bool hostile) {
    FREES_AT_END;
    random_source random = {(uint64_t)(rows * 1000 + out + type)};
    weights w;
    weights_make(&w, type, out, quants, hostile, &random);
    const ptrdiff_t in = w.w.in;
    float *x = draw_reals(rows * in, false, &random);
    x[0] = hostile ? NAN : 100;
    const float *bias = draw_reals(out, false, &random), *residual = draw_reals(rows * out, false, &random);
    const sa_linear l = {.weights = SA_WEIGHTS_QUANTS,
                         .decoding = digits == 3,
                         .digits = digits == 3 ? 0 : digits,
                         .rows = rows,
                         .in = in,
                         .count = 1,
                         .out = {out},
                         .weight = {(const char *)&w.w},
                         .bias = {(const char *)bias},
                         .residual = (const char *)residual,
                         .x = (const char *)x};
    const double unit = digits == 1 ? 0.501 / 127 : digits == 2 ? 0.501 / 32639 : 0x1p-21;
    sa_compact filled = w.w; /* for the shared product */
    if (sa_quant_kinds[type].numbers > 1) {
        sa_quants_fill(&(sa_copied_quants){&filled, dirty_memory((size_t)(out * filled.row_bytes))}, 1, 2);
    }
    sa_linear by_strips = l;
    by_strips.weight[0] = (const char *)&filled;
    float *y = multiply(&l, 1), *shared = multiply(&by_strips, 3);
    ptrdiff_t bad = 0;
    double worst = 0;
    for (ptrdiff_t r = 0; r < rows; ++r) {
        sa_linear alone = l;
        alone.rows = 1;
        alone.x = (const char *)(x + r * in);
        alone.residual = (const char *)(residual + r * out);
        float *own = multiply(&alone, 1);
        double *off = zero_memory((size_t)in * sizeof *off); /* the error of each number's factor */
        for (ptrdiff_t i = 0; i < in; ++i) {
            double largest = 0; /* the largest of 32 */
            for (ptrdiff_t k = i / 32 * 32; digits > 0 && k < in && k < i / 32 * 32 + 32; ++k) {
                largest = fmax(largest, fabs((double)x[r * in + k]));
            }
            off[i] = (double)(in + 8) * U * fabs((double)x[r * in + i]) + unit * largest;
        }
        for (ptrdiff_t c = 0; c < out; ++c) {
            const double start[2] = {(double)bias[c], (double)residual[r * out + c]};
            double sum = start[0] + start[1], error = (double)(in + 2) * U * (fabs(start[0]) + fabs(start[1]));
            for (ptrdiff_t i = 0; i < in; ++i) {
                sum += (double)x[r * in + i] * w.number[c * in + i];
                error += w.size[c * in + i] * off[i];
            }
            const double got = (double)y[r * out + c];
            note_result(got);
            bad += !same(got, (double)own[c]) || !same(got, (double)shared[r * out + c]) || (!isfinite(sum) && isfinite(got));
            if (!hostile) {
                worst = fmax(worst, fabs(got - sum) / (error + 1e-30));
            }
        }
    }
    CHECK(bad == 0 && worst <= 1, "%s, %td x %td x %td, %d digits, hostile %d: %td wrong bits, off by %g bounds",
          sa_quant_kinds[type].name, rows, out, in, digits, hostile, bad, worst);
}

void test_quants(void) {
    static const ptrdiff_t shapes[5][3] = {{1, 1, 1}, {1, 37, 3}, {2, 16, 2}, {7, 33, 5}, {60, 70, 6}};
    for (sa_quant_type type = 0; type < SA_QUANT_TYPES; ++type) {
        const ptrdiff_t times = sa_quant_kinds[type].numbers == 1 ? 32 : 1;
        for (int hostile = 0; hostile < 2; ++hostile) {
            try_numbers(type, hostile);
            for (int i = 0; i < 5; ++i) {
                for (int digits = 0; digits <= SA_DIGITS && (i < 4 || (!quick && !hostile)); ++digits) {
                    try_product(type, shapes[i][0], shapes[i][1], shapes[i][2] * times, digits, hostile);
                }
            }
        }
    }
}
