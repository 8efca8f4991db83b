/* Attention as its definition says, one query at a time, in more precision than the kernels have; and how far a right result
 * may be from it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

#if LDBL_MANT_DIG == 64
#define WIDE(function) function##l
#else
#define WIDE(function) function
#endif

void reference_philox(int rounds, const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
    uint32_t k0 = key[0], k1 = key[1];
    memcpy(words, counter, 4 * sizeof *words);
    for (int round = 0; round < rounds; ++round) {
        const uint64_t first = (uint64_t)words[0] * 0xD2511F53u, second = (uint64_t)words[2] * 0xCD9E8D57u;
        const uint32_t next[4] = {(uint32_t)(second >> 32) ^ words[1] ^ k0, (uint32_t)second,
                                  (uint32_t)(first >> 32) ^ words[3] ^ k1, (uint32_t)first};
        memcpy(words, next, sizeof next);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

static bool dropout_keeps(const sa_attention *a, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j) {
    const uint32_t counter[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)head, (uint32_t)((uint64_t)head >> 32)};
    const uint32_t key[2] = {(uint32_t)a->seed, (uint32_t)(a->seed >> 32)};
    uint32_t words[4];
    reference_philox(7, counter, key, words);
    return (double)words[j % 4] >= rint(a->dropout_p * 4294967296.0);
}

/* The score of one pair, and a bound of its error, in units of the last place u of what the kernels compute in: each line
 * adds what its own roundings can do to first order (Higham, "Accuracy and Stability", section 3.1). */
static wide score(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j, double *error) {
    const sa_attention *a = &c->call;
    wide dot = 0;
    double absolute = 0;
    for (ptrdiff_t e = 0; e < a->E; ++e) {
        const wide product = (wide)array_get(&c->query, head, 1, i, e) * array_get(&c->key, head, a->gqa, j, e);
        dot += product;
        absolute += fabs((double)product);
    }
    wide s = dot * a->scale;
    /* E products and sums, the packed factor scale·log2 e and its product with the query */
    *error = (double)(a->E + 4) * absolute * fabs(a->scale);
    if (a->softcap > 0) {
        s = a->softcap * WIDE(tanh)(s / a->softcap);
        *error += 8 * fabs((double)s); /* c·log2 e, a quotient, tanh in 2 ulp = 4 u, a product */
    }
    if (a->alibi.m.data) {
        const wide bias = array_get(&c->alibi, head, 1, 0, 0) * WIDE(fabs)((wide)(i + a->diagonal - j));
        s -= bias;
        *error += 3 * fabs((double)bias) + fabs((double)s);
    }
    if (a->mask.m.data && a->mask.m.dtype != SA_BOOL) {
        const double most = (a->f64 ? DBL_MAX : FLT_MAX) * 0.69314718055994531; /* what is finite stays finite in log2 units */
        double bias = array_get(&c->mask, head, 1, i, j);
        if (isfinite(bias)) {
            bias = bias > most ? most : bias < -most ? -most : bias;
        }
        s += bias;
        *error += 4 * fabs(bias) + fabs((double)s);
    }
    return s;
}

void reference_attention_row(const live_case *c, ptrdiff_t head, ptrdiff_t i, reference_row *r) {
    const sa_attention *a = &c->call;
    const double u = unit_roundoff(a->f64 ? SA_F64 : SA_F32), least = a->f64 ? DBL_MIN : (double)FLT_MIN;
    wide *s = calloc((size_t)a->S + 1, sizeof *s);
    double *s_error = calloc((size_t)a->S + 1, sizeof *s_error);
    bool *open = calloc((size_t)a->S + 1, sizeof *open);
    const wide sink = a->sinks.m.data ? (wide)array_get(&c->sinks, head, 1, 0, 0) : -(wide)INFINITY;
    wide top = sink, sum = 0;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        open[j] = case_allows(c, head, i, j);
        if (open[j]) {
            s[j] = score(c, head, i, j, &s_error[j]);
            top = s[j] > top || isnan(s[j]) ? s[j] : top;
        }
    }
    top = top == -(wide)INFINITY ? 0 : top;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->weights[j] = open[j] ? WIDE(exp)(s[j] - top) : 0;
        sum += r->weights[j];
    }
    sum += WIDE(exp)(sink - top);

    /* Sums run within a tile of keys first, then over tiles and chunks; both are in the numerator and in the denominator. A
     * change of the maximum costs a factor, and differences to it are rounded. */
    const double tiles = (double)(a->S / SA_KEYS_PER_TILE + 1);
    const double tile = a->S < SA_KEYS_PER_TILE ? (double)a->S : SA_KEYS_PER_TILE;
    const double sums = 2 * (tile + 6 * tiles + 16);
    double mean_error = sink > -(wide)INFINITY ? 4 * fabs((double)sink) : 0;
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->weights[j] = sum == 0 || !open[j] ? 0 : r->weights[j] / sum;
        s_error[j] += 2 * fabs((double)(s[j] - top)) + 4;
        if (r->weights[j] > 0) {
            mean_error += (double)r->weights[j] * s_error[j];
        }
    }
    r->lse = WIDE(log)(sum) + top;
    r->lse_error = u * (mean_error + sums + 4 * fabs((double)r->lse) + 4) + least;

    const double keep = a->dropout_p < 1 ? 1 / (1 - a->dropout_p) : 0;
    for (ptrdiff_t d = 0; d < a->Dv; ++d) {
        r->out[d] = r->out_error[d] = 0;
    }
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        if (!open[j]) {
            r->weights_error[j] = 0;
            continue;
        }
        if (a->dropout_p > 0) {
            r->weights[j] *= dropout_keeps(a, head, i, j) ? keep : 0;
        }
        const double w = (double)r->weights[j];
        r->weights_error[j] = w > 0 ? u * w * (s_error[j] + mean_error + sums) + 4 * keep * least : 0;
        for (ptrdiff_t d = 0; d < a->Dv; ++d) {
            const wide v = array_get(&c->value, head, a->gqa, j, d);
            r->out[d] += r->weights[j] * v;
            r->out_error[d] += fabs((double)v) * r->weights_error[j];
        }
    }
    /* Products of pairs of bfloat16 take weights rounded to it, in blocks of few rows or of more than a vector of them. */
    const bool rounds = strcmp(sa_isa_name(), "avx512bf16") == 0 && a->query.m.dtype == SA_BF16 && a->key.m.dtype == SA_BF16 &&
                        a->value.m.dtype == SA_BF16 && a->S >= 32 && a->E >= 16 && (a->L > 16 / a->gqa || a->L * a->gqa <= 8);
    for (ptrdiff_t d = 0; d < a->Dv && rounds; ++d) {
        for (ptrdiff_t j = 0; j < a->S; ++j) {
            const double v = open[j] ? array_get(&c->value, head, a->gqa, j, d) : 0;
            r->out_error[d] += 0x1p-8 * fabs(v) * (double)r->weights[j];
        }
    }
    const double store = a->out.m.data ? unit_roundoff(a->out.m.dtype) : 0;
    const double smallest = a->out.m.dtype == SA_F16 ? 0x1p-24 : 4 * least; /* gradual underflow */
    for (ptrdiff_t d = 0; d < a->Dv; ++d) {
        r->out_error[d] += 1.01 * store * (fabs((double)r->out[d]) + r->out_error[d]) + smallest;
    }
    for (ptrdiff_t j = 0; j < a->S; ++j) {
        r->weights_error[j] += r->weights[j] != 0 ? 1.01 * store * ((double)r->weights[j] + r->weights_error[j]) + smallest : 0;
    }
    free(s);
    free(s_error);
    free(open);
}
