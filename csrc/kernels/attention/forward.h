/* The forward pass over a block: rows of one key head against its keys begin … end − 1, tile by tile (Milakov &
 * Gimelshein 2018; Dao et al. 2022, algorithm 1):
 *
 *     m' = max(m, max_j s_j)   α = 2^(m − m')   p_j = 2^(s_j − m')   l' = α·l + Σ_j p_j   O' = α·O + Σ_j p_j·v_j
 *
 * and in the end out = O/l, lse = ln 2·(m + log2 l). Scores are in log2 units. A lane belongs to one row throughout.
 * drivers/attention.c cuts the blocks; forward_block, at the end of this file, chooses how to compute a block;
 * decode/decode.h computes blocks of few rows.
 *
 * s->unit is NULL except on avx512bf16 and amx. If the unit does not take the block, s->wide.terms is 0, and
 * multiply-adds compute all products.
 * Comes after kernels/attention/scores.h and kernels/decode/rows.h. */
#include "kernels/kernels.h"

/* ---- one tile of keys -------------------------------------------------------------------------------------------- */

/* Returns the first key of the next tile from key `from` on; *n becomes the number of its keys. */
SA_INLINE ptrdiff_t FN(next_tile)(const sa_block *b, ptrdiff_t from, ptrdiff_t *n) {
    if (b->rows->gaps > 0) {
        return sa_next_open_tile(b, from, n);
    }
    *n = SA_SMALLER(b->end - from, SA_KEYS_PER_TILE);
    return from;
}

/* A loop over the tiles of block b, each of n keys from key `first` on. */
#define SA_EACH_KEY_TILE(b, first, n)                                                                                  \
    for (ptrdiff_t n, first = FN(next_tile)(b, (b)->begin, &n); first < (b)->end;                                      \
         first = FN(next_tile)(b, first + n, &n))

/* Writes products of keys and queries to s->P. Scores are these times s->factor, which is 1 for multiply-adds, where
 * queries are scaled. True if s->top has the maxima. */
SA_INLINE bool FN(products_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                                 int decoded) {
    const sa_attention *a = b->a;
    FN(copy_vectors)(s->top, s->maximum, nv); /* a row's maximum is that of all tiles so far */
    s->factor = 1;
    if (decoded) {
        FN(scores_of_decode)(b, s, first, n, SA_LANES, decoded);
        return false;
    }
    FN(spread_ahead)(s, n);
    if (s->wide.terms && s->unit->scores(b, s, first, n, nv)) {
        return s->unit->know_top;
    }
    if (!s->scaled) {
        FN(copy_queries)(b, s, nv);
    }
    s->k = FN(tile_rows)(b, &b->key, &s->key, first, n, a->E, &s->k_stride);
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(rows_times_lanes)(s->q, s->k, s->k_stride, end, a->E, s->P, nv * SA_LANES, s->top, &s->ahead, nv);
    return true;
}

SA_INLINE void FN(apply_factor)(FN(scratch) * s, ptrdiff_t n, int nv) {
    if (s->factor != 1) {
        FN(pass_scale)(s->P, n, nv, s->factor);
        s->factor = 1;
    }
}

/* Makes scores from products, still to be multiplied by s->factor, and writes their maxima to s->top. Without want_top
 * there are no maxima, and the factor becomes 1. Sets *masked if a pair is closed. */
SA_INLINE void FN(finish_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                                 int mask_state, bool top_is_right, bool want_top, bool *masked) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    if (a->softcap > 0 || a->alibi.m.data || mask_state >= SA_TILE_ADDS || !want_top) {
        FN(apply_factor)(s, n, nv);
    }
    if (a->softcap > 0) {
        FN(pass_softcap)(s->P, n, nv, FN(in_log2)(a->softcap), s->gain, s->holds_tanh);
        top_is_right = false;
    }
    if (a->alibi.m.data) {
        for (int r = 0; r < rows->count; ++r) {
            SA_KEEP_LOOP();
            s->position[r] = (real)(rows->position[r] - first);
        }
        FN(pass_alibi)(s->P, n, nv, s->slope, s->position);
        top_is_right = false;
    }
    bool closes = false;
    if (FN(apply_masks)(b, s, first, n, nv, mask_state, SA_MASK_SCORES, &closes)) {
        *masked |= closes;
        top_is_right = false;
    }
    if (want_top && !top_is_right) {
        FN(copy_vectors)(s->top, s->maximum, nv);
        FN(pass_max)(s->P, n, nv, s->factor, s->top);
    }
}

/* Writes a tile's scores to s->P. False if the whole tile is closed.
 * decoded: in decoding the number of rows, rounded up, else SA_NOT_DECODED. */
SA_INLINE bool FN(score_tile_here)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                                   int decoded, bool want_top, bool *masked) {
    const int state = FN(inspect_tile)(b, s, first, n);
    if (state == SA_TILE_CLOSED) {
        sa_fetch_rest(&s->ahead);
        *masked = true;
        return false;
    }
    if (b->mask_far && state != SA_TILE_OPEN && !decoded && b->rows->count > 1) {
        const sa_matrix *mask = &b->a->mask.m;
        sa_plan_mask_fetch(b->rows->mask, b->rows->count, &s->ahead, mask, first * mask->col_stride, n);
    }
    const bool top_is_right = FN(products_tile)(b, s, first, n, nv, decoded);
    sa_fetch_rest(&s->ahead);
    FN(finish_scores)(b, s, first, n, nv, state, top_is_right, want_top, masked);
    return true;
}

SA_ONCE bool FN(score_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, int decoded,
                            bool want_top, bool *masked) {
    return FN(score_tile_here)(b, s, first, n, nv, decoded, want_top, masked);
}

/* Replaces scores by 2^(s − m) up to open_ends; all of them if a multiply unit reads whole slices. */
SA_INLINE void FN(exp_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    for (int v = 0; s->unit && s->unit->replace_rows && v < nv; ++v) {
        end[v] = n;
    }
    FN(pass_exp)(s->P, end, s->maximum, s->tile_sum, nv);
}

/* Closes the pairs of a tile of weights that masks close: their weights become −inf. */
SA_INLINE void FN(close_weights)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    bool closes = false;
    FN(apply_masks)(b, s, first, n, nv, FN(inspect_tile)(b, s, first, n), SA_CLOSE_WEIGHTS, &closes);
}

/* Replaces scores by 2^(s − m), closed ones by −inf. The masks are applied again,
 * as an open pair's score may be −inf, too. */
SA_ONCE void FN(exp_careful)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    ptrdiff_t end[SA_BACKWARD_VECS];
    for (int v = 0; v < nv; ++v) {
        end[v] = n;
    }
    FN(pass_exp)(s->P, end, s->maximum, s->tile_sum, nv);
    FN(close_weights)(b, s, first, n, nv);
}

/* Drops weights: a dropped one counts in the denominator but not in the output. */
SA_ONCE void FN(drop)(const sa_attention *a, FN(scratch) * s, real *P, ptrdiff_t first, ptrdiff_t n, int nv) {
    const double least = rint(a->dropout_p * 4294967296.0);
    if (least < 4294967296.0) {
        FN(pass_dropout)(P, a->first_key + first, n, nv, a->seed, (uint32_t)least, s->index, s->head_lo, s->head_hi,
                         s->words);
    } else {
        for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
            V(store)(P + i, V(min)(V(set1)(0), V(load)(P + i)));
        }
    }
}

SA_INLINE void FN(add_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    ptrdiff_t v_stride, end[SA_BACKWARD_VECS];
    const real *v = FN(tile_rows)(b, &b->value, &s->value, first, n, b->a->Dv, &v_stride);
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(columns_times_lanes)(s->P, v, v_stride, end, b->a->Dv, s->O, nv * SA_LANES, s->alpha, &s->ahead, nv);
}

/* ---- the end of a block ------------------------------------------------------------------------------------------ */

SA_INLINE bool FN(writes_native)(const sa_block *b, const real *partial) {
    const sa_matrix *out = &b->a->out.m;
    return partial || (out->dtype == SA_REAL_DTYPE && out->col_stride == (ptrdiff_t)sizeof(real));
}

SA_INLINE void FN(write_vector)(const sa_block *b, FN(scratch) * s, int r, ptrdiff_t d, int columns, vec x,
                                real *partial) {
    const sa_matrix *out = &b->a->out.m;
    char *to = partial ? (char *)(partial + r * b->a->Dv + d) : b->rows->out[r] + d * out->col_stride;
    if (FN(writes_native)(b, partial) && (uintptr_t)to % sizeof(real) == 0) {
        FN(store_up_to)((void *)to, x, columns);
    } else if (!partial && (out->dtype == SA_F16 || out->dtype == SA_BF16) && out->col_stride == 2 &&
               columns == SA_LANES) {
        FN(store_16_bits)(to, out->dtype, x);
    } else {
        V(store)(s->row, x);
        FN(store_row)(to, out->col_stride, out->dtype, s->row, columns);
    }
}

/* The functions below write factor·O: out if factor is 1/sum, a partial result if it is 1. True if all is finite. */
SA_ONCE bool FN(write_wide)(const sa_block *b, FN(scratch) * s, const real *factor, real *partial, int nv) {
    const sa_rows *rows = b->rows;
    const ptrdiff_t Dv = b->a->Dv;
    const bool in_place = partial || FN(rows_in_place)((const char *const *)rows->out, rows->count, &b->a->out.m);
    vec check = V(set1)(0);
    for (int v = 0; v < nv; ++v) {
        const vec f = V(load)(factor + v * SA_LANES);
        for (ptrdiff_t d = 0; d < Dv; d += SA_LANES) {
            const int columns = Dv - d < SA_LANES ? (int)(Dv - d) : SA_LANES;
            vec x[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                x[i] = V(set1)(0);
                if (i < columns) {
                    x[i] = V(load)(s->O + ((d + i) * nv + v) * SA_LANES) * f;
                }
            }
            FN(transpose)(x);
            if (in_place && columns == SA_LANES && (v + 1) * SA_LANES <= rows->count) {
                SA_UNROLL
                for (int i = 0; i < SA_LANES; ++i) {
                    const int r = v * SA_LANES + i;
                    V(store)((partial ? partial + r * Dv : (real *)(void *)rows->out[r]) + d, x[i]);
                    check = V(fma)(x[i], V(set1)(0), check);
                }
                continue;
            }
            for (int i = 0; i < SA_LANES && v * SA_LANES + i < rows->count; ++i) {
                check = check + (x[i] - x[i]);
                FN(write_vector)(b, s, v * SA_LANES + i, d, columns, x[i], partial);
            }
        }
    }
    return FN(is_finite)(check);
}

/* The same after decoding, where O[r] is a row. */
SA_ONCE bool FN(write_decode)(const sa_block *b, FN(scratch) * s, const real *factor, real *partial) {
    const ptrdiff_t Dv = b->a->Dv;
    vec check = V(set1)(0);
    for (int r = 0; r < b->rows->count; ++r) {
        const vec f = V(set1)(factor[r]);
        for (ptrdiff_t d = 0; d < Dv; d += SA_LANES) { /* rows of O are padded with zeros */
            const vec x = V(load)(s->O + r * FN(decode_width)(Dv) + d) * f;
            check = check + (x - x);
            FN(write_vector)(b, s, r, d, Dv - d < SA_LANES ? (int)(Dv - d) : SA_LANES, x, partial);
        }
    }
    return FN(is_finite)(check);
}

/* The same for a small output, without a transpose. */
SA_ONCE bool FN(write_handful)(const sa_block *b, FN(scratch) * s, const real *factor, real *partial) {
    const ptrdiff_t Dv = b->a->Dv;
    real check = 0;
    for (int r = 0; r < b->rows->count; ++r) {
        real check_r = 0;
        const real *from = s->O + r, f = factor[r];
        char *to = partial ? (char *)(partial + r * Dv) : b->rows->out[r];
        for (ptrdiff_t i = 0; i < Dv; ++i) {
            const real y = from[i * SA_LANES] * f;
            memcpy(to + i * (ptrdiff_t)sizeof y, &y, sizeof y);
            check_r += y - y;
        }
        check += check_r;
    }
    return check == 0;
}

SA_INLINE bool FN(write_output)(const sa_block *b, FN(scratch) * s, const real *factor, real *partial, int nv,
                                int decoded) {
    if (decoded) {
        return FN(write_decode)(b, s, factor, partial);
    }
    if (nv == 1 && b->rows->count * b->a->Dv <= 16 && FN(writes_native)(b, partial)) {
        return FN(write_handful)(b, s, factor, partial);
    }
    return FN(write_wide)(b, s, factor, partial, nv);
}

/* Writes lse and statistics; s->alpha becomes keep/sum. Rows without an open key get −inf and 0. */
SA_INLINE void FN(end_rows)(const sa_block *b, FN(scratch) * s, int nv) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const real keep = (real)(a->dropout_p > 0 && a->dropout_p < 1 ? 1 / (1 - a->dropout_p) : 1);
    const vec zero = V(set1)(0);
    for (int v = 0; v < nv; ++v) {
        vec l = V(load)(s->sum + v * SA_LANES);
        V(store)(s->alpha + v * SA_LANES, V(select)(V(eq)(l, zero), zero, V(set1)(keep) / l));
    }
    if (a->stats.m.data) {
        for (int r = 0; r < rows->count; ++r) {
            real *stats = (void *)rows->stats[r];
            /* in a row with a NaN the maximum, and 2^(s − m), may be any number */
            stats[0] = s->sum[r] == s->sum[r] ? s->maximum[r] : s->sum[r];
            stats[1] = s->sum[r] == 0 ? 0 : 1 / s->sum[r];
        }
    }
    if (a->lse.m.data) {
        for (int r = 0; r < rows->count; ++r) {
            const double l = (double)s->sum[r];
            const double lse = l == 0 ? -INFINITY : (double)s->maximum[r] * 0.69314718055994530942 + log(l);
            if (a->lse.m.dtype == SA_F64) {
                memcpy(rows->lse[r], &lse, sizeof lse);
            } else {
                const float narrow = (float)lse;
                memcpy(rows->lse[r], &narrow, sizeof narrow);
            }
        }
    }
}

/* Writes the weights, in a second pass over the scores; s->alpha is keep/sum. The array comes zero-filled. */
SA_ONCE void FN(write_weights)(const sa_block *b, FN(scratch) * s, int nv, int decoded) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const sa_matrix *weights = &a->weights.m;
    const vec zero = V(set1)(0);
    SA_EACH_KEY_TILE(b, first, n) {
        bool masked = false;
        if (!FN(score_tile)(b, s, first, n, nv, decoded, SA_WITH_MAXIMA, &masked)) {
            continue;
        }
        for (int v = 0; v < nv; ++v) {
            const vec m = V(load)(s->maximum + v * SA_LANES), f = V(load)(s->alpha + v * SA_LANES);
            const vec factor = V(set1)(s->factor);
            for (ptrdiff_t j = 0; j < n; ++j) {
                real *p = s->P + (j * nv + v) * SA_LANES;
                V(store)(p, FN(exp2)(V(fma)(V(load)(p), factor, -m)) * f);
            }
        }
        if (masked) { /* a closed pair's weight is 0 even in a row of NaN */
            FN(close_weights)(b, s, first, n, nv);
            for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
                const vec x = V(load)(s->P + i);
                V(store)(s->P + i, V(select)(V(lt)(x, zero), zero, x));
            }
        }
        if (a->dropout_p > 0) {
            FN(drop)(a, s, s->P, first, n, nv);
        }
        for (int r = 0; r < rows->count; ++r) {
            for (ptrdiff_t j = 0; j < n; ++j) {
                s->row[j] = s->P[j * nv * SA_LANES + r];
            }
            FN(store_row)(rows->weights[r] + first * weights->col_stride, weights->col_stride, weights->dtype, s->row,
                          n);
        }
    }
}

SA_INLINE void FN(start_rows_here)(const sa_block *b, FN(scratch) * s, int nv) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    for (int r = 0; r < nv * SA_LANES; r += SA_LANES) {
        V(store)(s->maximum + r, V(set1)(-SA_REAL_MAX)); /* not −inf, as −inf − −inf is NaN */
        V(store)(s->sum + r, V(set1)(0));
        V(store)(s->slope + r, V(set1)(0));
        V(store)(s->position + r, V(set1)(0));
        V(store)(s->lo + r, V(set1)(0));
        V(store)(s->hi + r, V(set1)((real)SA_KEYS_PER_TILE));
        V(store)(s->ones + r, V(set1)(1));
    }
    if (rows->clipped) {
        FN(open_vectors)(rows, s, nv);
    }
    for (int r = 0; r < rows->count; ++r) {
        if (a->alibi.m.data) {
            s->slope[r] = FN(in_log2)(rows->slope[r]);
        }
        if (a->sinks.m.data && b->first_chunk && rows->sink[r] != -INFINITY) {
            s->maximum[r] = FN(in_log2)(rows->sink[r]);
            s->sum[r] = 1;
        }
    }
    if (a->dropout_p > 0) {
        const int words = SA_CEIL_DIV(nv * SA_LANES, SA_U32_LANES) * SA_U32_LANES;
        for (int r = 0; r < words; ++r) {
            const int from = r < rows->count ? r : 0;
            s->index[r] = (uint32_t)(a->first_query + rows->index[from]);
            s->head_lo[r] = (uint32_t)rows->head[from];
            s->head_hi[r] = (uint32_t)(rows->head[from] >> 32);
        }
    }
}

SA_ONCE void FN(start_rows)(const sa_block *b, FN(scratch) * s, int nv) { FN(start_rows_here)(b, s, nv); }

/* The maximum may stay if it would grow by less than this: O then needs no factor,
 * and weights stay below 2 to this power. */
#define SA_MAXIMUM_LAG 8

/* Raises the maximum where s->top is larger by `lag`; s->alpha becomes the factor for the sum and output so far. */
SA_INLINE void FN(raise_maximum)(FN(scratch) * s, int nv, real lag) {
    for (int v = 0; v < nv; ++v) {
        vec old = V(load)(s->maximum + v * SA_LANES), now = V(load)(s->top + v * SA_LANES);
        now = V(select)(V(lt)(now, old + V(set1)(lag)), old, now);
        V(store)(s->alpha + v * SA_LANES, FN(exp2)(old - now));
        V(store)(s->maximum + v * SA_LANES, now);
    }
}

SA_INLINE void FN(take_sum)(FN(scratch) * s, int nv) {
    for (int v = 0; v < nv; ++v) {
        vec alpha = V(load)(s->alpha + v * SA_LANES), l = V(load)(s->sum + v * SA_LANES);
        V(store)(s->sum + v * SA_LANES, V(fma)(alpha, l, V(load)(s->tile_sum + v * SA_LANES)));
    }
}

/* True if a mask or a bias may close pairs. */
SA_INLINE bool FN(may_close)(const sa_block *b) { return b->a->mask.m.data || b->key_bias || b->a->offset_bias.m.data; }

/* Writes a partial result, or output, lse and weights. True if the block must be computed again, because its output is
 * not finite and some pair may be closed. */
SA_INLINE bool FN(finish_block_here)(const sa_block *b, FN(scratch) * s, int nv, int decoded, bool masked) {
    real *partial = b->partial;
    if (partial) {
        memcpy(partial, s->maximum, (size_t)b->rows->count * sizeof(real));
        memcpy(partial + b->partial_rows, s->sum, (size_t)b->rows->count * sizeof(real));
        FN(write_output)(b, s, s->ones, partial + 2 * b->partial_rows, nv, decoded);
        return false;
    }
    FN(end_rows)(b, s, nv);
    if (!FN(write_output)(b, s, s->alpha, partial, nv, decoded) && (masked || FN(may_close)(b))) {
        return true;
    }
    if (b->a->weights.m.data) {
        FN(write_weights)(b, s, nv, decoded);
    }
    return false;
}

SA_ONCE bool FN(finish_block)(const sa_block *b, FN(scratch) * s, int nv, int decoded, bool masked) {
    return FN(finish_block_here)(b, s, nv, decoded, masked);
}

/* Rounds the weights of a multiply-add tile, if the unit rounds those of its own tiles. */
SA_INLINE void FN(round_weights)(FN(scratch) * s, ptrdiff_t count) {
    if (((s->wide.terms && s->wide.weight_terms) || s->decode.rounds) && s->unit->round_weights) {
        s->unit->round_weights(s, count);
    }
}

SA_INLINE void FN(start_wide)(const sa_block *b, FN(scratch) * s, int nv) {
    s->scaled = false;
    s->empty = true;
    if (s->wide.terms) {
        s->unit->copy_queries(b, s, nv);
    }
}

/* Computes the block again, slowly: closed pairs are skipped, so that NaN in their keys and values cannot spread. */
SA_ONCE void FN(run_careful)(const sa_block *b, FN(scratch) * s) {
    const int nv = SA_VECS;
    bool masked = false;
    FN(start_wide)(b, s, nv);
    FN(start_rows)(b, s, nv);
    FN(start_output)(b, s, nv);
    SA_EACH_KEY_TILE(b, first, n) {
        if (!FN(score_tile)(b, s, first, n, nv, SA_NOT_DECODED, SA_WITH_MAXIMA, &masked)) {
            continue;
        }
        FN(raise_maximum)(s, nv, 0);
        FN(apply_factor)(s, n, nv);
        FN(exp_careful)(b, s, first, n, nv);
        FN(take_sum)(s, nv);
        if (b->a->dropout_p > 0) {
            FN(drop)(b->a, s, s->P, first, n, nv);
        }
        FN(round_weights)(s, n * nv * SA_LANES);
        ptrdiff_t v_stride;
        const real *v = FN(tile_rows)(b, &b->value, &s->value, first, n, b->a->Dv, &v_stride);
        FN(values_careful)(s->P, s->P, v, v_stride, n, b->a->Dv, s->O, s->alpha, nv);
    }
    masked = false; /* closed pairs have added nothing: the cause of NaN is an open pair */
    if (FN(finish_block)(b, s, nv, SA_NOT_DECODED, masked) && b->a->weights.m.data) {
        FN(write_weights)(b, s, nv, SA_NOT_DECODED);
    }
}

SA_INLINE void FN(raise_wide_maximum)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, int nv) {
    const bool may_lag = s->wide.terms && s->unit->may_lag && s->unit->may_lag(b, s, first);
    FN(raise_maximum)(s, nv, may_lag ? SA_MAXIMUM_LAG : 0);
}

/* Adds the tile of scores in P to sum and output. */
SA_INLINE void FN(add_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const FN(unit) *unit = s->unit;
    const bool drops = b->a->dropout_p > 0;
    bool by_unit = s->wide.terms && !drops && unit->weights(b, s, first, n, nv, SA_HOLDS_SCORES);
    if (!by_unit) {
        FN(apply_factor)(s, n, nv);
        FN(exp_tile)(b, s, first, n, nv);
    }
    FN(take_sum)(s, nv);
    if (drops) {
        FN(drop)(b->a, s, s->P, first, n, nv);
        by_unit = s->wide.terms && unit->weights(b, s, first, n, nv, SA_HOLDS_WEIGHTS);
    }
    if (by_unit) {
        unit->values(b, s, first, n, nv);
    } else {
        FN(start_output)(b, s, nv);
        FN(round_weights)(s, n * nv * SA_LANES);
        FN(add_values)(b, s, first, n, nv);
    }
    sa_fetch_rest(&s->ahead);
}

SA_ONCE void FN(run_wide)(const sa_block *b, FN(scratch) * s, int nv) {
    bool masked = false;
    FN(start_wide)(b, s, nv);
    FN(start_rows)(b, s, nv);
    SA_EACH_KEY_TILE(b, first, n) {
        sa_plan_next_block(b, &s->ahead, first);
        sa_plan_tile(b, &s->ahead, &b->value, b->a->Dv, first);
        if (!FN(score_tile)(b, s, first, n, nv, SA_NOT_DECODED, SA_WITH_MAXIMA, &masked)) {
            continue;
        }
        FN(raise_wide_maximum)(b, s, first, nv);
        sa_plan_tile(b, &s->ahead, &b->key, b->a->E, first + n);
        FN(spread_ahead)(s, b->a->Dv);
        FN(add_tile)(b, s, first, n, nv);
    }
    FN(start_output)(b, s, nv);
    if (FN(finish_block)(b, s, nv, SA_NOT_DECODED, masked)) {
        FN(run_careful)(b, s);
    }
}

/* The same for one vector, with a literal nv and nothing fetched ahead: such blocks are so short that loops over
 * vectors would cost too much. */
SA_ONCE void FN(run_vector)(const sa_block *b, FN(scratch) * s) {
    enum { nv = 1 };
    bool masked = false;
    FN(start_wide)(b, s, nv);
    FN(start_rows_here)(b, s, nv);
    SA_EACH_KEY_TILE(b, first, n) {
        if (FN(score_tile_here)(b, s, first, n, nv, SA_NOT_DECODED, SA_WITH_MAXIMA, &masked)) {
            FN(raise_wide_maximum)(b, s, first, nv);
            FN(add_tile)(b, s, first, n, nv);
        }
    }
    FN(start_output)(b, s, nv);
    if (FN(finish_block_here)(b, s, nv, SA_NOT_DECODED, masked)) {
        FN(run_careful)(b, s);
    }
}

/* Returns the block if it begins at the first key of a cell, otherwise a longer one, in *aligned, that begins there;
 * the rows, which both share, then count as clipped. */
SA_INLINE const sa_block *FN(begin_at_cell)(const sa_block *b, const FN(wide_state) * wide, sa_block *aligned) {
    const ptrdiff_t before = wide->terms && b->begin < b->end ? (b->begin - b->copied_from) % SA_KEYS_PER_TILE : 0;
    if (before == 0) {
        return b;
    }
    *aligned = *b;
    aligned->begin -= before;
    aligned->rows->clipped = true;
    return aligned;
}

/* ---- functions that the table's entries call (SA_ATTENTION_KERNELS in unit.h) ------------------------------------ */

/* A partial result: maximum[rows], sum[rows], unnormalised output[rows][Dv]. */
SA_KERNEL size_t FN(attention_partial)(const sa_attention *a, ptrdiff_t rows) {
    return ((2 + (size_t)a->Dv) * (size_t)rows * sizeof(real) + 63) / 64 * 64;
}

SA_SHARED size_t FN(forward_bytes)(const sa_attention *a, const FN(unit) * unit) {
    FN(scratch) s;
    return FN(lay_out)(a, SA_NOWHERE, &s, FN(block_rows), unit);
}

SA_ONCE void FN(run_decode)(const sa_block *b, FN(scratch) * s);

/* How a block is computed depends on its numbers of rows and keys and on the call's options, never on elements. */
SA_SHARED void FN(forward_block)(const sa_block *given, void *scratch, const FN(unit) * unit) {
    FN(scratch) s;
    sa_block aligned;
    FN(lay_out)(given->a, scratch, &s, FN(block_rows), unit);
    FN(forget_copies)(given, &s);
    if (unit) {
        unit->start(given, &s.wide);
    }
    const sa_block *b = FN(begin_at_cell)(given, &s.wide, &aligned);
    const int count = b->rows->count, decode_rows = unit ? unit->decode_rows : SA_DECODE_ROWS;
    /* Decoding sums across lanes, which pays from 32 keys on. The last rows of a longer call are not decoded, nor are
     * calls with statistics, because the backward pass must sum scores in the same order, nor rows of which a longer
     * call may be cut into two. */
    if (count <= decode_rows && b->whole && b->a->S >= 32 && b->a->stats.m.data == NULL && !b->a->by_rows) {
        if (unit) {
            unit->start_decode(b, &s);
        }
        FN(run_decode)(b, &s);
    } else if (count <= SA_LANES) {
        FN(run_vector)(b, &s);
    } else {
        FN(run_wide)(b, &s, SA_CEIL_DIV(count, SA_LANES));
    }
    if (unit && (s.wide.terms || s.decode.holds_unit)) {
        unit->end();
    }
}

/* O[n] = alpha·x, plus O unless x is the first. */
SA_ONCE void FN(merge_row)(real *O, const real *x, real alpha, ptrdiff_t n, bool first) {
    const vec f = V(set1)(alpha), zero = V(set1)(0);
    for (ptrdiff_t d = 0; d < n; d += SA_LANES) {
        FN(store_up_to)(O + d, (first ? zero : FN(load_up_to)(O + d, n - d)) + f * FN(load_up_to)(x + d, n - d), n - d);
    }
}

/* With M = max_c m_c over the chunks c, l = Σ_c 2^(m_c − M)·l_c, and O likewise, in the order of the chunks. */
SA_SHARED void FN(merge_block)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch,
                               const FN(unit) * unit) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const ptrdiff_t Dv = a->Dv;
    const size_t bytes = FN(attention_partial)(a, b->partial_rows);
    const int nv = SA_CEIL_DIV(rows->count, SA_LANES);
    FN(scratch) layout, *s = &layout;
    FN(lay_out)(a, scratch, s, FN(block_rows), unit);
    FN(forget_copies)(b, s);
    FN(start_rows)(b, s, SA_VECS);
    for (ptrdiff_t c = 0; c < chunks; ++c) {
        const real *maximum_c = (const void *)(partial + (size_t)c * bytes);
        for (int r = 0; r < rows->count; ++r) {
            SA_KEEP_LOOP();
            s->maximum[r] =
                c == 0 || maximum_c[r] > s->maximum[r] || maximum_c[r] != maximum_c[r] ? maximum_c[r] : s->maximum[r];
            s->sum[r] = 0;
        }
    }
    for (ptrdiff_t c = 0; c < chunks; ++c) {
        const real *maximum_c = (const void *)(partial + (size_t)c * bytes);
        const real *sum_c = maximum_c + b->partial_rows, *O_c = sum_c + b->partial_rows;
        for (int r = 0; r < nv * SA_LANES; ++r) {
            s->tile_sum[r] = r < rows->count ? maximum_c[r] - s->maximum[r] : 0;
        }
        for (int v = 0; v < nv; ++v) {
            V(store)(s->alpha + v * SA_LANES, FN(exp2)(V(load)(s->tile_sum + v * SA_LANES)));
        }
        for (int r = 0; r < rows->count; ++r) {
            s->sum[r] += s->alpha[r] * sum_c[r];
            FN(merge_row)(s->O + r * Dv, O_c + r * Dv, s->alpha[r], Dv, c == 0);
        }
    }
    FN(end_rows)(b, s, nv);
    const vec zero = V(set1)(0);
    vec check = zero;
    for (int r = 0; r < rows->count; ++r) {
        const vec f = V(set1)(s->alpha[r]);
        for (ptrdiff_t d = 0; d < Dv; d += SA_LANES) {
            const vec x = FN(load_up_to)(s->O + r * Dv + d, Dv - d) * f;
            V(store)(s->row + d, x);
            check = check + (x - x);
        }
        FN(store_row)(rows->out[r], a->out.m.col_stride, a->out.m.dtype, s->row, Dv);
    }
    if (!FN(is_finite)(check) && (rows->clipped || FN(may_close)(b))) {
        FN(run_careful)(b, s);
    } else if (a->weights.m.data) {
        FN(write_weights)(b, s, SA_VECS, SA_NOT_DECODED);
    }
}
