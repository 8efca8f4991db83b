/* Decoding by dot products of bfloat16 pairs. Keys are read in place; two rows of values are zipped into pairs of keys;
 * weights are rounded to bfloat16 after they are summed. Queries must be below 2^50 and not subnormal. Instead of keys,
 * scores and output are checked (decode_sums_hold). If they fail, multiply-adds compute the block, and round weights,
 * too.
 * Comes after kernels/products/bf16dot.h. */
#include "kernels/kernels.h"

enum { SA_LEAST_OF_DECODE = -126 };

SA_INLINE bool FN(decode_by_pairs)(const sa_attention *a) { return FN(pairs_take)(a) && FN(pairs_take_values)(a); }

SA_ONCE size_t FN(bf16dot_lay_out_decode)(const sa_attention *a, char *base, size_t used, FN(decode_state) * s) {
    if (FN(decode_by_pairs)(a) &&
        (FN(decode_reads)(&a->key.m) != SA_READS_BF16 || FN(decode_reads)(&a->value.m) != SA_READS_BF16)) {
        SA_TAKE(rows, char, SA_KEYS_PER_TILE *FN(pair_row_bytes)(SA_LARGER(a->E, a->Dv)));
    }
    return used;
}

SA_ONCE void FN(bf16dot_start_decode)(const sa_block *b, FN(scratch) * s) {
    s->decode.use = s->decode.rounds = FN(decode_by_pairs)(b->a);
}

SA_ONCE void FN(bf16dot_decode_order)(real *O, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i += 2 * SA_LANES) {
        const vec low = V(load)(O + i), high = V(load)(O + i + SA_LANES);
        V(store)(O + i, V(first_quarters)(low, high));
        V(store)(O + i + SA_LANES, V(last_quarters)(low, high));
    }
}

SA_ONCE bool FN(bf16dot_decode_queries)(const sa_block *b, FN(scratch) * s) {
    const sa_matrix *m = &b->a->query.m;
    int beyond = 0;
    for (int r = 0; r < b->rows->count && s->decode.use; ++r) {
        real *to = s->q + r * FN(decode_width)(b->a->E);
        beyond |= FN(copy_pairs)(b->rows->query[r], m, b->a->E, SA_LEAST_OF_DECODE, (char *)to);
    }
    s->decode.use &= !beyond;
    return s->decode.use;
}

SA_ONCE FN(decode_rows) FN(decode_raw_rows)(const sa_block *b, FN(scratch) * s, const sa_matrix *m, FN(copies) * copies,
                                            ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    if (FN(decode_reads)(m) == SA_READS_BF16) {
        return FN(decode_rows_of)(b, m, copies, first, n, width);
    }
    const ptrdiff_t bytes = (ptrdiff_t)FN(pair_row_bytes)(width);
    for (ptrdiff_t j = 0; j < n; ++j) {
        FN(copy_pairs)(m->data + (first + j) * m->row_stride, m, width, SA_LEAST_OF_SCORES, s->decode.rows + j * bytes);
    }
    return (FN(decode_rows)){.at = s->decode.rows, .stride = bytes, .reads = SA_READS_RAW};
}

#define SA_DECODE_PAIR_LEAVES(R, kind)                                                                                 \
    SA_DECODE_SCORES_LEAF(R, kind)                                                                                     \
    SA_LEAF void FN(decode_pair_values##R##_##kind)(const real *pairs, ptrdiff_t apart, const FN(decode_rows) * v,     \
                                                    ptrdiff_t n, ptrdiff_t Dv, real *O, const real *alpha) {           \
        FN(decode_pair_values)(pairs, apart, v, n, Dv, O, alpha, R);                                                   \
    }

/* sum[r][c] += p[r] times C vectors of columns of two rows. Fetches ahead of `next`, or of the rows if next is 0. */
SA_INLINE void FN(decode_pair_slice)(const real *p, const char *row, const char *second, uintptr_t next,
                                     FN(decode_ahead) ahead, ptrdiff_t left, vec sum[SA_DECODE_ROWS][8], const int R,
                                     const int C, const bool far) {
    vec p_r[SA_DECODE_ROWS];
    SA_UNROLL
    for (int r = 0; r < R; ++r) {
        p_r[r] = V(set1)(p[r]);
    }
    SA_UNROLL
    for (int c = 0; c < C; c += 2) {
        const ptrdiff_t at = c * 2 * SA_LANES, n = left - c * SA_LANES;
        const vec one = V(load_pairs)(row + at, n), other = V(load_pairs)(second + at, n);
        FN(fetch_lines)(next != 0 ? next + (uintptr_t)(2 * at) : (uintptr_t)(row + at), ahead, far);
        FN(fetch_lines)(next != 0 ? next + (uintptr_t)(2 * at + 4 * SA_LANES) : (uintptr_t)(second + at), ahead, far);
        const vec low = V(zip_low_pairs)(one, other), high = V(zip_high_pairs)(one, other);
        SA_UNROLL
        for (int r = 0; r < R; ++r) {
            sum[r][c] = V(add_products)(sum[r][c], p_r[r], low);
            sum[r][c + 1] = V(add_products)(sum[r][c + 1], p_r[r], high);
        }
    }
}

/* O[R][o_stride] = alpha[r]·O + Σ_j p_j[r]·v[j] in C vectors of columns from d on. A vector of pairs[] has the weights
 * of 2·apart keys: lane i·R + r has those of keys i and i + apart for row r. */
SA_INLINE void FN(decode_pair_columns)(const real *restrict pairs, ptrdiff_t apart, const FN(decode_rows) * rows,
                                       ptrdiff_t n, ptrdiff_t d, ptrdiff_t left, real *restrict O, ptrdiff_t o_stride,
                                       const real *restrict alpha, const int R, const int C, const bool far) {
    const ptrdiff_t stride = rows->stride, across = apart * stride;
    const char *v = rows->at + 2 * d;
    vec sum[SA_DECODE_ROWS][8];
    FN(decode_zero_sums)(sum, R, C);
    uintptr_t next = far && rows->together ? (uintptr_t)rows->at + (uintptr_t)(2 * d * n) : 0;
    for (ptrdiff_t j = 0; j < n; j += 2 * apart, pairs += SA_LANES) {
        const ptrdiff_t here = SA_SMALLER(n - j, apart), both = n - j - apart;
        const char *v_j = v + j * stride;
        for (ptrdiff_t i = 0; i < here; ++i, v_j += stride) { /* an odd last key is paired with itself, at weight 0 */
            FN(decode_pair_slice)(pairs + i * R, v_j, i < both ? v_j + across : v_j, next, rows->ahead, left, sum, R, C,
                                  far);
            next += far && rows->together ? (uintptr_t)(4 * C * SA_LANES) : 0;
        }
    }
    FN(decode_add_sums)(sum, O + d, o_stride, alpha, R, C);
}

SA_INLINE void FN(decode_pair_far)(const real *restrict pairs, ptrdiff_t apart, const FN(decode_rows) * v, ptrdiff_t n,
                                   ptrdiff_t d, real *restrict O, ptrdiff_t o_stride, const real *restrict alpha,
                                   const int R, const int C) {
    if (SA_ARE_FAR(v)) {
        FN(decode_pair_columns)(pairs, apart, v, n, d, C * SA_LANES, O, o_stride, alpha, R, C, SA_FAR);
    } else {
        FN(decode_pair_columns)(pairs, apart, v, n, d, C * SA_LANES, O, o_stride, alpha, R, C, SA_NEAR);
    }
}

SA_INLINE void FN(decode_pair_values)(const real *restrict pairs, ptrdiff_t apart, const FN(decode_rows) * v,
                                      ptrdiff_t n, ptrdiff_t Dv, real *restrict O, const real *restrict alpha,
                                      const int R) {
    const int C = R == 8 ? 2 : R == 4 ? 4 : 8;
    const ptrdiff_t o_stride = FN(decode_width)(Dv);
    ptrdiff_t d = 0;
    for (; d + C * SA_LANES <= Dv; d += C * SA_LANES) {
        FN(decode_pair_far)(pairs, apart, v, n, d, O, o_stride, alpha, R, C);
    }
    if (C == 8 && d + 4 * SA_LANES <= Dv) {
        FN(decode_pair_far)(pairs, apart, v, n, d, O, o_stride, alpha, R, 4);
        d += 4 * SA_LANES;
    }
    for (; d < Dv; d += 2 * SA_LANES) { /* the last columns are read like near ones */
        FN(decode_pair_columns)(pairs, apart, v, n, d, Dv - d, O, o_stride, alpha, R, 2, SA_NEAR);
    }
}
SA_DECODE_EACH(SA_DECODE_PAIR_LEAVES, RAW)
#undef SA_DECODE_PAIR_LEAVES

/* True if a score is not finite: −inf would look like a closed pair, and softcap hides infinities. */
SA_ONCE bool FN(decode_score_lost)(const real *P, ptrdiff_t n, ptrdiff_t p_stride, const int R) {
    int lost = 0;
    if (p_stride == R) {
        vec check = V(set1)(0);
        for (ptrdiff_t i = 0; i < n * R; i += SA_LANES) {
            check = V(fma)(V(load)(P + i), V(set1)(0), check);
        }
        return !FN(is_finite)(check);
    }
    for (ptrdiff_t j = 0; j < n; ++j) { /* lanes from R on may hold anything */
        for (int r = 0; r < R; ++r) {
            const real x = P[j * p_stride + r];
            lost |= x - x != 0;
        }
    }
    return lost;
}

SA_ONCE void FN(bf16dot_decode_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n,
                                       ptrdiff_t p_stride, const int R) {
    const ptrdiff_t E = b->a->E;
    const FN(decode_rows) k = FN(decode_raw_rows)(b, s, &b->key, &s->key, first, n, E);
    const real factor = FN(factor_of)(b->a);
    SA_DECODE_CALL(R, decode_scores, RAW, s->q, &k, n, E, s->P, p_stride, factor)
    s->decode.lost |= FN(decode_score_lost)(s->P, n, p_stride, R);
}

/* Makes pairs, of two vectors each, of the weights P[n][p_stride]. */
SA_ONCE void FN(bf16dot_decode_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n,
                                       ptrdiff_t p_stride, const int R) {
    const ptrdiff_t Dv = b->a->Dv, apart = SA_LANES / p_stride, count = (ptrdiff_t)FN(round_up)(n * p_stride);
    real *P = s->P, *pairs = s->P;
    for (ptrdiff_t i = 0; i < count; i += 2 * SA_LANES, pairs += SA_LANES) {
        const vec other = i + SA_LANES < count ? V(load)(P + i + SA_LANES) : V(set1)(0);
        V(store)(pairs, V(round_pairs)(V(load)(P + i), other));
    }
    const FN(decode_rows) v = FN(decode_raw_rows)(b, s, &b->value, &s->value, first, n, Dv);
    SA_DECODE_CALL(R, decode_pair_values, RAW, P, apart, &v, n, Dv, s->O, s->alpha)
}
