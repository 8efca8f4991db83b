/* Decoding of one to four queries on the matrix unit; bfloat16 is read in place. 16 keys are a left operand. 16 rows of
 * values are a right operand, whose pairs are neighbouring columns: a weight p has the left rows (p, 0) for even
 * columns and (0, p) for odd ones, for each of its terms.
 *
 * Tile registers: 0 scores and 1 queries, 16 rows of R words; 2 weights and 4 to 7 outputs, 4·R rows of 64 bytes; 3
 * keys or values, 16 rows of 64 bytes.
 * Comes after kernels/products/amx_attention.h. */
#include "kernels/kernels.h"

enum { SA_AMX_DECODE_ROWS = 4 };

/* The most keys of a tile. The phases of a tile wait for one another, so longer tiles wait less often. */
#define SA_DECODE_KEYS 256

/* Weights are multiplied by this, so that neither their terms nor their products with ordinary values are subnormal. */
#define SA_DECODE_WEIGHT_SCALE 0x1p60f

enum { FN(decode_weight_rows) = 4 /* left rows of a query: two terms, for even and odd columns */ };

SA_ONCE bool FN(amx_takes_decode)(const sa_attention *a) {
    return a->query.m.dtype == SA_BF16 && a->key.m.dtype == SA_BF16 && a->value.m.dtype == SA_BF16 &&
           a->S >= SA_DECODE_KEYS && a->E > 0 && a->Dv > 0 && a->E % SA_TILE_SLICE == 0 && a->Dv % SA_TILE_SLICE == 0 &&
           FN(factor_is_ordinary)(a);
}

SA_ONCE size_t FN(amx_lay_out_decode)(const sa_attention *a, char *base, size_t used, FN(decode_state) * s) {
    if (FN(amx_takes_decode)(a)) {
        const size_t widest = (size_t)SA_LARGER(a->E, a->Dv);
        SA_TAKE(queries, char, (size_t)a->E * 2 * SA_AMX_DECODE_ROWS);
        SA_TAKE(weights, char, SA_DECODE_KEYS / SA_TILE_ROWS * FN(decode_weight_rows) * SA_AMX_DECODE_ROWS * 64);
        SA_TAKE(product, real, 4 * FN(decode_weight_rows) * SA_AMX_DECODE_ROWS * SA_LANES);
        SA_TAKE(rows, char, SA_DECODE_KEYS *widest * 2);
    }
    return used;
}

/* Copies queries as [E / 2][R] pairs. False if products with keys might exceed float32 without being noticed. */
SA_ONCE bool FN(decode_take_queries)(const sa_block *b, FN(scratch) * s, const int R) {
    const sa_matrix *m = &b->a->query.m;
    const ptrdiff_t E = b->a->E;
    memset(s->decode.queries, 0, (size_t)(E * 2 * R));
    lanemask beyond = V(lt)(V(set1)(0), V(set1)(0));
    for (int r = 0; r < b->rows->count; ++r) {
        FN(load_row)(s->row, b->rows->query[r], m->col_stride, E, m->dtype, m->swapped);
        for (ptrdiff_t e = 0; e < E; e += SA_LANES) {
            beyond = V(either)(beyond, V(beyond)(V(load)(s->row + e), SA_LEAST(1), SA_MOST(1)));
        }
        for (ptrdiff_t e = 0; e < E; e += 2) {
            uint32_t first, second;
            memcpy(&first, s->row + e, 4);
            memcpy(&second, s->row + e + 1, 4);
            const uint32_t pair = first >> 16 | second;
            memcpy(s->decode.queries + (e / 2 * R + r) * 4, &pair, 4);
        }
    }
    return !V(any)(beyond);
}

SA_INLINE void FN(decode_fetch)(const char *rows, ptrdiff_t stride) {
    SA_UNROLL
    for (int i = 0; i < SA_TILE_ROWS; ++i) {
        __builtin_prefetch(rows + i * stride, 0, 3);
    }
}

SA_ONCE void FN(amx_start_decode)(const sa_block *b, FN(scratch) * s) {
    const int count = b->rows->count, R = count > 2 ? 4 : count;
    s->decode.use = s->decode.holds_unit = FN(amx_takes_decode)(b->a) && FN(decode_take_queries)(b, s, R);
    if (s->decode.holds_unit) {
        sa_start_decode_tiles(R);
    }
}

/* Makes scores from products of 16 keys; *top takes their maxima. */
SA_INLINE void FN(decode_scale)(real *P, vec factor, vec *top, const int R) {
    SA_UNROLL
    for (int i = 0; i < R; ++i) {
        const vec x = V(load)(P + i * SA_LANES) * factor;
        V(store)(P + i * SA_LANES, x);
        *top = V(max)(*top, x);
    }
}

/* P[n][R] = factor·k[j]·q[r], n a multiple of 16. Vector code processes a slice while the unit multiplies the next.
 * Returns the maxima of lanes. A score of +inf or NaN makes the output NaN or infinite. */
SA_INLINE vec FN(amx_decode_scores)(const char *queries, const FN(decode_rows) * rows, ptrdiff_t n, ptrdiff_t E,
                                    real factor, real *P, const int R) {
    const ptrdiff_t stride = rows->stride, ahead = rows->ahead.soon;
    const char *k = rows->at;
    const vec scale = V(set1)(factor);
    vec top = V(set1)(-(real)INFINITY);
    SA_TILE_FENCE();
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_ROWS, k += SA_TILE_ROWS * stride) {
        SA_TILE_ZERO(0);
        for (ptrdiff_t e = 0; e < E; e += SA_TILE_SLICE) {
            SA_TILE_LOAD(1, queries + e * 2 * R, 4 * R);
            SA_TILE_LOAD(3, k + 2 * e, stride);
            FN(decode_fetch)(k + 2 * e + ahead, stride);
            SA_TILE_DOT(0, 3, 1);
        }
        SA_TILE_STORE(0, P + j * R, 4 * R);
        SA_TILE_FENCE();
        if (j > 0) {
            FN(decode_scale)(P + (j - SA_TILE_ROWS) * R, scale, &top, R);
        }
    }
    FN(decode_scale)(P + (n - SA_TILE_ROWS) * R, scale, &top, R);
    return top;
}

/* Makes a left operand of the weights of scores P[16][R]; adds the weights to *sum. */
SA_INLINE void FN(decode_weights)(const real *P, vec maximum, vec *sum, char *to, const int R) {
    const vec scale = V(set1)(SA_DECODE_WEIGHT_SCALE), zero = V(set1)(0);
    vec p[4];
    SA_UNROLL
    for (int i = 0; i < R; ++i) {
        p[i] = FN(exp2)(V(load)(P + i * SA_LANES) - maximum);
        *sum = *sum + p[i];
    }
    if (R == 2) {
        const vec low = p[0], high = p[1];
        p[0] = V(even)(low, high);
        p[1] = V(odd)(low, high);
    } else if (R == 4) {
        const vec even_low = V(even)(p[0], p[1]), odd_low = V(odd)(p[0], p[1]);
        const vec even_high = V(even)(p[2], p[3]), odd_high = V(odd)(p[2], p[3]);
        p[0] = V(even)(even_low, even_high);
        p[1] = V(even)(odd_low, odd_high);
        p[2] = V(odd)(even_low, even_high);
        p[3] = V(odd)(odd_low, odd_high);
    }
    SA_UNROLL
    for (int r = 0; r < R; ++r, to += FN(decode_weight_rows) * 64) {
        const vec whole = p[r] * scale, high = V(bf16_nearest)(whole), low = V(bf16_nearest)(whole - high);
        V(store_bf16_pairs)(to, high, zero);
        V(store_bf16_pairs)(to + 64, zero, high);
        V(store_bf16_pairs)(to + 128, low, zero);
        V(store_bf16_pairs)(to + 192, zero, low);
    }
}

#define SA_DECODE_VALUES(to, at)                                                                                       \
    SA_TILE_LOAD(3, v + (at), stride);                                                                                 \
    FN(decode_fetch)(v + (at) + ahead, stride);                                                                        \
    SA_TILE_DOT(to, 2, 3);

/* s->product[4][4·R][16] = weights of n keys times 32·`tiles` columns from v on. With P it first makes the weights.
 * With one or two tiles every second slice of 16 keys goes to the third and fourth, so that products do not wait. */
SA_INLINE void FN(decode_products)(const FN(decode_state) * s, const real *P, vec maximum, vec *sum, const char *v,
                                   ptrdiff_t stride, ptrdiff_t ahead, ptrdiff_t n, const ptrdiff_t tiles, const int R) {
    const ptrdiff_t bytes = FN(decode_weight_rows) * R * 64;
    char *weights = s->weights;
    SA_TILE_ZERO(4);
    SA_TILE_ZERO(5);
    SA_TILE_ZERO(6);
    SA_TILE_ZERO(7);
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_ROWS, v += SA_TILE_ROWS * stride, weights += bytes) {
        if (P) {
            FN(decode_weights)(P + j * R, maximum, sum, weights, R);
        }
        SA_TILE_FENCE();
        SA_TILE_LOAD(2, weights, 64);
        if (tiles > 2) {
            SA_DECODE_VALUES(4, 0)
            SA_DECODE_VALUES(5, 64)
            SA_DECODE_VALUES(6, 128)
            if (tiles > 3) {
                SA_DECODE_VALUES(7, 192)
            }
        } else if (j / SA_TILE_ROWS % 2 == 0) {
            SA_DECODE_VALUES(4, 0)
            if (tiles > 1) {
                SA_DECODE_VALUES(5, 64)
            }
        } else {
            SA_DECODE_VALUES(6, 0)
            if (tiles > 1) {
                SA_DECODE_VALUES(7, 64)
            }
        }
    }
    char *to = (char *)s->product;
    SA_TILE_STORE(4, to, 64);
    SA_TILE_STORE(5, to + bytes, 64);
    SA_TILE_STORE(6, to + 2 * bytes, 64);
    SA_TILE_STORE(7, to + 3 * bytes, 64);
    SA_TILE_FENCE();
}
#undef SA_DECODE_VALUES

/* O[R][Dv] = alpha·O + Σ_j 2^(P[j][r] − maximum)·v[j] over n keys, a multiple of 16.
 * In 32 columns the even ones come first. */
SA_INLINE void FN(amx_decode_values)(const FN(decode_state) * s, const real *P, vec maximum, vec *sum,
                                     const FN(decode_rows) * rows, ptrdiff_t n, ptrdiff_t Dv, real *O,
                                     const real *alpha, const int R) {
    const ptrdiff_t own = FN(decode_weight_rows);
    for (ptrdiff_t d = 0; d < Dv; d += 4 * SA_TILE_SLICE) {
        const ptrdiff_t left = (Dv - d) / SA_TILE_SLICE, tiles = SA_SMALLER(left, 4);
        FN(decode_products)(s, d == 0 ? P : NULL, maximum, sum, rows->at + 2 * d, rows->stride, rows->ahead.soon, n,
                            tiles, R);
        for (ptrdiff_t u = 0; u < tiles; ++u) {
            const real *x = s->product + u * R * own * SA_LANES, *y = x + 2 * R * own * SA_LANES;
            real *o = O + d + u * SA_TILE_SLICE;
            SA_UNROLL
            for (int r = 0; r < R; ++r) {
                SA_UNROLL
                for (int odd = 0; odd < 2; ++odd) {
                    const ptrdiff_t high = (r * own + odd) * SA_LANES, low = high + 2 * SA_LANES,
                                    at = r * Dv + odd * SA_LANES;
                    vec add = V(load)(x + high) + V(load)(x + low);
                    if (tiles <= 2) {
                        add = add + (V(load)(y + high) + V(load)(y + low));
                    }
                    V(store)(o + at,
                             V(fma)(add, V(set1)(1 / SA_DECODE_WEIGHT_SCALE), V(set1)(alpha[r]) * V(load)(o + at)));
                }
            }
        }
    }
}

SA_ONCE FN(decode_rows) FN(decode_bf16_rows)(const sa_block *b, FN(scratch) * s, const sa_matrix *m,
                                             FN(copies) * copies, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    if (FN(decode_reads)(m) == SA_READS_BF16) {
        return FN(decode_rows_of)(b, m, copies, first, n, width);
    }
    for (ptrdiff_t j = 0; j < n; j += SA_KEYS_PER_TILE) {
        const ptrdiff_t here = SA_SMALLER(n - j, SA_KEYS_PER_TILE);
        ptrdiff_t stride;
        const real *x = FN(tile_rows)(b, m, copies, first + j, here, width, &stride);
        for (ptrdiff_t i = 0; i < here; ++i, x += stride) {
            for (ptrdiff_t e = 0; e < width; e += 2 * SA_LANES) {
                const vec low = V(load)(x + e), high = V(load)(x + e + SA_LANES);
                V(store_bf16_pairs)(s->decode.rows + ((j + i) * width + e) * 2, V(even)(low, high), V(odd)(low, high));
            }
        }
    }
    return (FN(decode_rows)){.at = s->decode.rows, .stride = width * 2, .reads = SA_READS_BF16};
}

SA_ONCE ptrdiff_t FN(amx_decode_keys)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first) {
    const ptrdiff_t left = b->end - first,
                    n = left < SA_DECODE_KEYS ? left / SA_TILE_ROWS * SA_TILE_ROWS : SA_DECODE_KEYS;
    return s->decode.use && n >= SA_KEYS_PER_TILE ? n : 0;
}

SA_INLINE void FN(amx_decode_tile_any)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int R) {
    const ptrdiff_t E = b->a->E, Dv = b->a->Dv;
    const FN(decode_rows) k = FN(decode_bf16_rows)(b, s, &b->key, &s->key, first, n, E);
    const vec top = FN(amx_decode_scores)(s->decode.queries, &k, n, E, FN(factor_of)(b->a), s->P, R);
    const vec maximum = FN(decode_raise_maximum)(s, top, R);
    const FN(decode_rows) v = FN(decode_bf16_rows)(b, s, &b->value, &s->value, first, n, Dv);
    vec sum = V(set1)(0);
    FN(amx_decode_values)(&s->decode, s->P, maximum, &sum, &v, n, Dv, s->O, s->alpha, R);
    FN(decode_take_sum)(s, sum, R);
}

#define SA_AMX_DECODE_TILE(R)                                                                                          \
    SA_LEAF void FN(amx_decode_tile##R)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n) {            \
        FN(amx_decode_tile_any)(b, s, first, n, R);                                                                    \
    }
SA_AMX_DECODE_TILE(1)
SA_AMX_DECODE_TILE(2)
SA_AMX_DECODE_TILE(4)
#undef SA_AMX_DECODE_TILE

SA_ONCE void FN(amx_decode_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int R) {
    switch (R) {
    case 1: FN(amx_decode_tile1)(b, s, first, n); break;
    case 2: FN(amx_decode_tile2)(b, s, first, n); break;
    default: FN(amx_decode_tile4)(b, s, first, n); break;
    }
}
