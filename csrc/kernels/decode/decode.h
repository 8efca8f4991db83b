/* The forward pass over a block of few queries (decoding): as in forward.h, with features as lanes.
 * rows.h has the products.
 * Comes after kernels/attention/forward.h. */
#include "kernels/kernels.h"

/* Copies q[R][width] times the factor, in the order in which keys are read. A unit takes queries without the factor. */
SA_ONCE void FN(copy_decode_queries)(const sa_block *b, FN(scratch) * s, int R) {
    const sa_matrix *m = &b->a->query.m;
    const vec factor = V(set1)(FN(factor_of)(b->a));
    const ptrdiff_t E = b->a->E, width = FN(decode_width)(E);
    const bool in_pairs = SA_DECODE_VECS(FN(decode_reads)(&b->key)) == 2;
    memset(s->q, 0, (size_t)(R * width) * sizeof(real));
    if (s->unit && s->unit->decode_queries && s->unit->decode_queries(b, s)) {
        return;
    }
    for (int r = 0; r < R && r < b->rows->count; ++r) {
        real *q_r = s->q + r * width;
        FN(load_row)(q_r, b->rows->query[r], m->col_stride, E, m->dtype, m->swapped);
        for (ptrdiff_t e = 0; e < width; e += 2 * SA_LANES) {
            const vec x = V(load)(q_r + e) * factor, y = V(load)(q_r + e + SA_LANES) * factor;
            V(store)(q_r + e, in_pairs ? V(even)(x, y) : x);
            V(store)(q_r + e + SA_LANES, in_pairs ? V(odd)(x, y) : y);
        }
    }
}

/* Restores the order of columns: with bfloat16 values, the even ones come before the odd ones. */
SA_ONCE void FN(restore_order)(const sa_block *b, FN(scratch) * s, int R) {
    const ptrdiff_t count = R * FN(decode_width)(b->a->Dv);
    if (SA_DECODE_VECS(FN(decode_reads)(&b->value)) != 2) {
        return;
    }
    if (FN(decode_by_unit)(s)) {
        s->unit->decode_order(s->O, count);
        return;
    }
    for (real *O = s->O; O < s->O + count; O += 2 * SA_LANES) {
        const vec even = V(load)(O), odd = V(load)(O + SA_LANES);
        V(store)(O, V(zip_lo)(even, odd));
        V(store)(O + SA_LANES, V(zip_hi)(even, odd));
    }
}

/* True if the tile needs no pass of scores.h. Its scores are then [n][R], in full vectors. */
SA_ONCE bool FN(decode_plain)(const sa_block *b, ptrdiff_t first, ptrdiff_t n) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    bool plain = a->softcap == 0 && a->alibi.m.data == NULL && a->mask.m.data == NULL && b->key_bias == NULL &&
                 a->offset_bias.m.data == NULL && a->dropout_p == 0 && rows->gaps == 0;
    for (int r = 0; r < rows->count && plain; ++r) {
        plain = rows->lo[r] <= first && rows->hi[r] >= first + n;
    }
    return plain;
}

/* Sums have the bits of decode_plain_exp: a mask that closes nothing must not change lse (unless decode_sums_hold
 * rejects the output). */
SA_ONCE void FN(decode_pass_exp)(real *P, ptrdiff_t n, const real *maximum, real *tile_sum, int R) {
    const int keys = SA_LANES / R;
    const vec m = V(load)(maximum);
    vec sum[SA_LANES];
    for (int i = 0; i < SA_LANES; ++i) {
        sum[i] = V(set1)(0);
    }
    for (ptrdiff_t j = 0; j < n; j += keys) {
        for (int i = 0; i < keys && j + i < n; ++i) {
            real *p = P + (j + i) * SA_LANES;
            const vec e = FN(exp2)(V(load)(p) - m);
            sum[i] = sum[i] + e;
            V(store)(p, e);
        }
    }
    for (int i = 1; i < keys; ++i) {
        sum[0] = sum[0] + sum[i];
    }
    V(store)(tile_sum, sum[0]);
}

/* Updates maximum and sum with scores P[n][R], which become weights. */
SA_ONCE void FN(decode_plain_exp)(FN(scratch) * s, ptrdiff_t n, int R) {
    const ptrdiff_t count = n * R, padded = (ptrdiff_t)FN(round_up)(count);
    for (ptrdiff_t i = count; i < padded; ++i) {
        s->P[i] = -(real)INFINITY;
    }
    vec top = V(load)(s->P), sum = V(set1)(0);
    for (ptrdiff_t i = SA_LANES; i < padded; i += SA_LANES) {
        top = V(max)(top, V(load)(s->P + i));
    }
    const vec m = FN(decode_raise_maximum)(s, top, R);
    for (ptrdiff_t i = 0; i < padded; i += SA_LANES) {
        const vec e = FN(exp2)(V(load)(s->P + i) - m);
        sum = sum + e;
        V(store)(s->P + i, e);
    }
    FN(decode_take_sum)(s, sum, R);
}

/* In the sums of smaller outputs, the unit may have lost subnormals. */
#define SA_DECODE_LEAST_OUTPUT ((real)0x1p-100)

/* True if the unit's sums are finite and far from subnormal, as those of multiply-adds would be. */
SA_ONCE bool FN(decode_sums_hold)(const sa_block *b, const FN(scratch) * s) {
    const sa_rows *rows = b->rows;
    const vec least = V(set1)(SA_DECODE_LEAST_OUTPUT), beyond = V(set1)((real)INFINITY);
    int lost = s->decode.use && s->decode.lost;
    for (int r = 0; r < rows->count && s->decode.use; ++r) {
        const real *O_r = s->O + r * FN(decode_width)(b->a->Dv);
        const ptrdiff_t Dv = rows->lo[r] < rows->hi[r] ? b->a->Dv : 0;
        ptrdiff_t d = 0;
        for (; d + SA_LANES <= Dv; d += SA_LANES) {
            const vec x = V(abs)(V(load)(O_r + d));
            lost |= V(any)(V(lt)(x, least)) | V(any)(V(not_lt)(x, beyond));
        }
        for (; d < Dv; ++d) {
            const real x = O_r[d] < 0 ? -O_r[d] : O_r[d];
            lost |= !(x >= SA_DECODE_LEAST_OUTPUT && x <= SA_REAL_MAX);
        }
    }
    return !lost;
}

/* Computes a tile of n keys, or a longer one if the unit takes that. Returns the number of its keys. */
SA_ONCE ptrdiff_t FN(decode_plain_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int R) {
    const FN(unit) *unit = s->unit;
    const ptrdiff_t longer = unit && unit->decode_keys ? unit->decode_keys(b, s, first) : 0;
    if (longer > 0 && FN(decode_plain)(b, first, longer)) {
        unit->decode_tile(b, s, first, longer, R);
        return longer;
    }
    FN(scores_of_decode)(b, s, first, n, R, R);
    FN(decode_plain_exp)(s, n, R);
    FN(values_of_decode)(b, s, first, n, R, R);
    return n;
}

/* Computes a tile that needs passes of scores.h. A vector holds the scores of one key. */
SA_ONCE void FN(decode_masked_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int R,
                                    bool *masked) {
    enum { nv = 1 };
    if (!FN(score_tile)(b, s, first, n, nv, R, SA_WITH_MAXIMA, masked)) {
        return;
    }
    FN(raise_maximum)(s, nv, 0);
    FN(decode_pass_exp)(s->P, n, s->maximum, s->tile_sum, R);
    FN(take_sum)(s, nv);
    if (b->a->dropout_p > 0) {
        FN(drop)(b->a, s, s->P, first, n, nv);
    }
    FN(values_of_decode)(b, s, first, n, SA_LANES, R);
}

/* Computes up to SA_DECODE_ROWS rows, and again by multiply-adds if the unit's sums do not hold. */
SA_ONCE void FN(run_decode)(const sa_block *b, FN(scratch) * s) {
    enum { nv = 1 };
    const int count = b->rows->count, R = count <= 2 ? count : count <= 4 ? 4 : 8;
    bool masked = false;
    FN(copy_decode_queries)(b, s, R);
    memset(s->O, 0, (size_t)(R * FN(decode_width)(b->a->Dv)) * sizeof(real));
    memset(s->P, 0, FN(round_up)(SA_SMALLER(b->a->S, SA_KEYS_PER_TILE)) * SA_LANES * sizeof(real));
    FN(start_rows)(b, s, nv);
    SA_EACH_KEY_TILE(b, first, n) {
        if (FN(decode_plain)(b, first, n)) {
            n = FN(decode_plain_tile)(b, s, first, n, R);
        } else {
            FN(decode_masked_tile)(b, s, first, n, R, &masked);
        }
    }
    FN(restore_order)(b, s, R);
    if (!FN(decode_sums_hold)(b, s)) {
        s->decode.use = false;
        FN(run_decode)(b, s);
    } else if (FN(finish_block)(b, s, nv, R, masked)) {
        FN(run_careful)(b, s);
    }
}
