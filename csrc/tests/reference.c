/* Attention and its gradients by definition (docs/theory/backward.md), in more precision than the kernels, and the error that a
 * right result may have. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

#if LDBL_MANT_DIG == 64
#define WIDE(function) function##l
#else
#define WIDE(function) function
#endif

/* Philox4x32 of seven rounds. */
static bool dropout_keeps(const sa_attention *a, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j) {
    uint32_t words[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)head, (uint32_t)((uint64_t)head >> 32)};
    uint32_t k0 = (uint32_t)a->seed, k1 = (uint32_t)(a->seed >> 32);
    for (int round = 0; round < 7; ++round) {
        const uint64_t first = (uint64_t)words[0] * 0xD2511F53u, second = (uint64_t)words[2] * 0xCD9E8D57u;
        const uint32_t next[4] = {(uint32_t)(second >> 32) ^ words[1] ^ k0, (uint32_t)second,
                                  (uint32_t)(first >> 32) ^ words[3] ^ k1, (uint32_t)first};
        memcpy(words, next, sizeof next);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)words[j % 4] >= rint(a->dropout_p * 4294967296.0);
}

/* A row. Errors are in u, the unit roundoff of the type that computes. Each line adds its roundings, to first order (Higham,
 * "Accuracy and Stability", section 3.1). */
typedef struct {
    bool *open;
    wide *s, *gain;
    double *s_error, *gain_error;  /* gain_error is absolute */
    wide *weight;                  /* weights before dropout */
    double *weight_error, *factor; /* relative errors */
    wide lse, sink;
    double lse_error, mean_error, sums;
    bool live; /* the row attends to a key or a sink */
} row_state;

static void score(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j, row_state *r) {
    const sa_attention *a = &c->call;
    wide dot = 0;
    double absolute = 0;
    for (ptrdiff_t e = 0; e < a->E; ++e) {
        const wide product = (wide)case_get(c, QUERY, head, i, e) * case_get(c, KEY, head, j, e);
        dot += product;
        absolute += fabs((double)product);
    }
    wide s = dot * a->scale;
    /* E products and sums, the factor scale·log2 e, its product with the query */
    double error = (double)(a->E + 4) * absolute * fabs(a->scale);
    r->gain[j] = 1;
    r->gain_error[j] = 0;
    if (a->softcap > 0) {
        const wide t = WIDE(tanh)(s / a->softcap);
        r->gain[j] = 1 - t * t;
        r->gain_error[j] = 12 + 2 * error / a->softcap;
        s = a->softcap * t;
        error += 8 * fabs((double)s); /* c·log2 e, a quotient, tanh in 2 ulp = 4 u, a product */
    }
    if (a->alibi.m.data) {
        const wide bias = case_get(c, ALIBI, head, 0, 0) * WIDE(fabs)((wide)(i + a->diagonal - j));
        s -= bias;
        error += 3 * fabs((double)bias) + fabs((double)s);
    }
    if (a->mask.m.data && a->mask.m.dtype != SA_BOOL) {
        const double most = (a->f64 ? DBL_MAX : FLT_MAX) * 0.69314718055994531; /* the most that stays finite in log2 units */
        double bias = case_get(c, MASK, head, i, j);
        if (isfinite(bias)) {
            bias = bias > most ? most : bias < -most ? -most : bias;
        }
        s += bias;
        error += 4 * fabs(bias) + fabs((double)s);
    }
    if (a->key_bias.m.data) {
        const double bias = case_get(c, KEY_BIAS, head, 0, j);
        s += bias;
        error += 4 * fabs(bias) + fabs((double)s);
    }
    r->s[j] = s;
    r->s_error[j] = error;
}

static void weigh(const live_case *c, ptrdiff_t head, ptrdiff_t i, row_state *r) {
    const sa_attention *a = &c->call;
    const wide sink = a->sinks.m.data ? (wide)case_get(c, SINKS, head, 0, 0) : -(wide)INFINITY;
    const double keep = a->dropout_p < 1 ? 1 / (1 - a->dropout_p) : 0;
    wide top = sink, sum = 0;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->open[j] = case_allows(c, head, i, j);
        if (r->open[j]) {
            score(c, head, i, j, r);
            top = r->s[j] > top || isnan(r->s[j]) ? r->s[j] : top;
        }
    }
    top = top == -(wide)INFINITY ? 0 : top;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->weight[j] = r->open[j] ? WIDE(exp)(r->s[j] - top) : 0;
        sum += r->weight[j];
    }
    r->sink = WIDE(exp)(sink - top);
    sum += r->sink;
    r->live = sum != 0;
    r->sink = r->live ? r->sink / sum : 0;

    /* Sums run within a tile, then over tiles and chunks, in numerator and denominator. A new maximum adds a multiplication by
     * a factor; differences to it are rounded. */
    const double tiles = (double)(a->S / SA_KEYS_PER_TILE + 1);
    const double tile = a->S < SA_KEYS_PER_TILE ? (double)a->S : SA_KEYS_PER_TILE;
    r->sums = 2 * (tile + 6 * tiles + 16);
    r->mean_error = sink > -(wide)INFINITY ? 4 * fabs((double)sink) : 0;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->weight[j] = r->live && r->open[j] ? r->weight[j] / sum : 0;
        r->s_error[j] += 2 * fabs((double)(r->s[j] - top)) + 4;
        if (r->weight[j] > 0) {
            r->mean_error += (double)r->weight[j] * r->s_error[j];
        }
    }
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->weight_error[j] = r->weight[j] > 0 ? r->s_error[j] + r->mean_error + r->sums : 0;
        r->factor[j] = a->dropout_p == 0 ? 1 : dropout_keeps(a, head, i, j) ? keep : 0;
    }
    r->lse = WIDE(log)(sum) + top;
    r->lse_error = r->mean_error + r->sums + 4 * fabs((double)r->lse) + 4;
}

/* The error is relative · |x| + more. */
static void expect_at(expected_array *to, size_t at, wide x, double relative, double more) {
    if (at < to->count) {
        to->value[at] += x;
        to->error[at] += relative * fabs((double)x) + more;
    }
}

static void expect(const live_case *c, expected_array *all, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col, wide x,
                   double error) {
    if (c->arrays[which].memory) {
        expect_at(&all[which], case_index(c, which, head, row, col), x, 0, error);
    }
}

/* Adds the rounding of the store; 16 bits underflow gradually. */
static double stored(const live_case *c, int which, wide x, double error) {
    const sa_dtype dtype = c->arrays[which].tensor.m.dtype;
    const double smallest = dtype == SA_F16 ? 0x1p-24 : 4 * (c->call.f64 ? DBL_MIN : (double)FLT_MIN);
    return error + 1.01 * unit_roundoff(dtype) * (fabs((double)x) + error) + smallest;
}

/* bfloat16 pairs round weights to bfloat16, for few rows or for more than a vector. AMX has two terms, 17 bits in all. */
static double rounding_of_weights(const live_case *c) {
    const sa_attention *a = &c->call;
    if (a->query.m.dtype != SA_BF16 || a->key.m.dtype != SA_BF16 || a->value.m.dtype != SA_BF16) {
        return 0;
    }
    const bool pairs = strcmp(sa_isa_name(), "avx512bf16") == 0 && a->S >= 32 && a->E >= 16;
    return strcmp(sa_isa_name(), "amx") == 0 ? 0x1p-17 : pairs && (a->L > 16 / a->gqa || a->L * a->gqa <= 8) ? 0x1p-8 : 0;
}

static void gradients_of_row(const live_case *c, ptrdiff_t head, ptrdiff_t i, const row_state *r, expected_array *all) {
    const sa_attention *a = &c->call;
    const double u = unit_roundoff(a->f64 ? SA_F64 : SA_F32), least = a->f64 ? DBL_MIN : (double)FLT_MIN;
    const double coarse = rounding_of_weights(c), rows = (double)(a->L * c->heads) + 16; /* the most rows that share a key */
    wide *dp = zero_memory((size_t)(a->S + 1) * sizeof *dp);
    double *dp_error = zero_memory((size_t)(a->S + 1) * sizeof *dp_error);
    const wide grad_lse = c->spec.grad_lse ? (wide)case_get(c, GRAD_LSE, head, i, 0) : 0;
    wide delta = -grad_lse;
    double delta_error = u * 2 * fabs((double)grad_lse);
    bool sees = false;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        const double error = u * (r->weight_error[j] + rows) + coarse;
        const size_t dvalue = c->arrays[D_VALUE].memory ? case_index(c, D_VALUE, head, j, 0) : 0;
        for (ptrdiff_t d = 0; d < a->Dv && r->open[j]; ++d) {
            const double go = case_get(c, GRAD_OUT, head, i, d);
            const wide product = r->factor[j] * (wide)go * case_get(c, VALUE, head, j, d);
            dp[j] += product;
            dp_error[j] += u * (double)(a->Dv + 4) * fabs((double)product);
            expect_at(&all[D_VALUE], dvalue + (size_t)d, r->weight[j] * r->factor[j] * go, error, least);
        }
        delta += r->open[j] ? r->weight[j] * dp[j] : 0;
        sees |= r->open[j];
    }
    for (ptrdiff_t d = 0; d < a->Dv && sees; ++d) { /* kernels read the stored output */
        const size_t at = case_index(c, OUT, head, i, d);
        const double go = fabs(case_get(c, GRAD_OUT, head, i, d));
        delta_error += go * (all[OUT].error[at] + u * (double)(a->Dv + 4) * fabs((double)all[OUT].value[at]));
    }
    double slope_error = 0;
    wide slope = 0;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        if (!r->open[j]) {
            continue;
        }
        const wide p = r->weight[j], ds = p * (dp[j] - delta);
        const double size = fabs((double)dp[j]) + fabs((double)delta);
        const double error = (double)p * (dp_error[j] + delta_error + u * (r->weight_error[j] + 4) * size) + least * size;
        const double distance = fabs((double)(i + a->diagonal - j));
        expect(c, all, D_MASK, head, i, j, ds, error + u * rows * fabs((double)ds));
        slope -= ds * distance;
        slope_error += distance * (error + u * (double)(a->S + 8) * (double)p * size);
        const wide of_dot = ds * a->scale * r->gain[j];
        const double dot_error = fabs(a->scale) * (error * (double)r->gain[j] + u * fabs((double)ds) * (r->gain_error[j] + 4)) +
                                 coarse * fabs((double)of_dot) + least;
        const double more = dot_error + u * fabs((double)of_dot) * ((double)a->S + rows);
        const size_t dquery = c->arrays[D_QUERY].memory ? case_index(c, D_QUERY, head, i, 0) : 0;
        const size_t dkey = c->arrays[D_KEY].memory ? case_index(c, D_KEY, head, j, 0) : 0;
        for (ptrdiff_t e = 0; e < a->E; ++e) {
            const double q = case_get(c, QUERY, head, i, e), k = case_get(c, KEY, head, j, e);
            expect_at(&all[D_QUERY], dquery + (size_t)e, of_dot * k, 0, more * fabs(k));
            expect_at(&all[D_KEY], dkey + (size_t)e, of_dot * q, 0, more * fabs(q));
        }
    }
    expect(c, all, D_SLOPES, head, i, 0, slope, slope_error + least);
    const double sink = (double)r->sink;
    expect(c, all, D_SINKS, head, i, 0, r->live ? -r->sink * delta : 0,
           sink * (delta_error + u * (r->mean_error + r->sums + 8) * fabs((double)delta)) + least);
}

void reference_row(const live_case *c, ptrdiff_t head, ptrdiff_t i, expected_array *all) {
    FREES_AT_END;
    const sa_attention *a = &c->call;
    const double u = unit_roundoff(a->f64 ? SA_F64 : SA_F32), least = a->f64 ? DBL_MIN : (double)FLT_MIN;
    const double coarse = rounding_of_weights(c);
    const size_t n = (size_t)a->S + 1;
    wide *wides = zero_memory(3 * n * sizeof *wides);
    double *doubles = zero_memory(4 * n * sizeof *doubles);
    row_state r = {.open = zero_memory(n), .s = wides, .gain = wides + n, .weight = wides + 2 * n};
    r.s_error = doubles;
    r.gain_error = doubles + n;
    r.weight_error = doubles + 2 * n;
    r.factor = doubles + 3 * n;
    weigh(c, head, i, &r);
    expect(c, all, LSE, head, i, 0, r.lse, u * r.lse_error + least);
    for (ptrdiff_t d = 0; d < a->Dv; ++d) {
        expect(c, all, OUT, head, i, d, 0, 0);
    }
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        const wide w = r.weight[j] * r.factor[j];
        const double error = w > 0 ? u * (double)w * r.weight_error[j] + 4 * r.factor[j] * least : 0;
        expect(c, all, WEIGHTS, head, i, j, w, w != 0 ? stored(c, WEIGHTS, w, error) : 0);
        for (ptrdiff_t d = 0; d < a->Dv && r.open[j]; ++d) {
            const wide v = case_get(c, VALUE, head, j, d);
            expect(c, all, OUT, head, i, d, w * v, fabs((double)v) * (error + coarse * (double)w));
        }
    }
    for (ptrdiff_t d = 0; d < a->Dv; ++d) {
        const size_t at = case_index(c, OUT, head, i, d);
        all[OUT].error[at] = stored(c, OUT, all[OUT].value[at], all[OUT].error[at]);
    }
    if (c->spec.backward && r.live) {
        gradients_of_row(c, head, i, &r, all);
    }
}
