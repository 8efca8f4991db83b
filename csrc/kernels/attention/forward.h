/* The forward pass over one block: rows that share a key head, against the keys begin … end − 1 of it, in tiles of
 * SA_KEYS_PER_TILE keys with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1):
 *
 *     m' = max(m, max_j s_j)   α = 2^(m − m')   p_j = 2^(s_j − m')   l' = α·l + Σ_j p_j   O' = α·O + Σ_j p_j·v_j
 *
 * and at the end out = O/l, lse = ln 2·(m + log2 l). Scores are in log2 units: queries are packed times scale·log2 e.
 * Rows never mix: a lane (or, for few rows, an accumulator) belongs to one row from beginning to end.
 *
 * No allocation, no threads: attention.c cuts the work into blocks and brings the scratch. */

/* ---- one tile of keys ---------------------------------------------------------------------------------------------- */

/* The next tile of the block from key `from` on: its first key, at least b->end after the last tile, and its keys. */
SA_INLINE ptrdiff_t FN(next_tile)(const sa_block *b, ptrdiff_t from, ptrdiff_t *n) {
    if (b->rows->gaps > 0) {
        return sa_next_open_tile(b, from, n);
    }
    *n = b->end - from < SA_KEYS_PER_TILE ? b->end - from : SA_KEYS_PER_TILE;
    return from;
}

/* Leaves the products of keys first … first + n − 1 with the queries in s->P, but for vectors that causal closes, and in s->factor
 * what makes scores of them. Returns whether s->top has their maxima. */
SA_INLINE bool FN(products_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv,
                                 const int few) {
    const sa_attention *a = b->a;
    memcpy(s->top, s->maximum, (size_t)nv * SA_LANES * sizeof(real));
    s->factor = 1;
    if (few) {
        FN(scores_of_few)(b, s, first, n, SA_LANES, few);
        return false;
    }
    FN(share_ahead)(s, n);
    if (FN(scores_by_parts)(b, s, first, n, nv)) {
        return FN(parts_know_top);
    }
    if (!s->scaled) {
        FN(pack_queries)(b, s, nv);
    }
    s->k = FN(tile_rows)(b, &b->key, &s->key, first, n, a->E, &s->k_stride);
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(scores_wide)(s->q, s->k, s->k_stride, end, a->E, s->P, nv * SA_LANES, s->top, &s->ahead, nv);
    return true;
}

SA_INLINE void FN(apply_factor)(FN(scratch) * s, ptrdiff_t n, const int nv) {
    if (s->factor != 1) {
        FN(pass_scale)(s->P, n, nv, s->factor);
        s->factor = 1;
    }
}

/* From the products in s->P to finished scores but for s->factor, with the scores' maxima in s->top. *masked is set when any pair
 * is closed. Without want_top the maxima are left out, and the factor is 1. */
SA_INLINE void FN(finish_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv, int mask_state,
                                 bool top_is_right, const bool want_top, bool *masked) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    if (a->softcap > 0 || a->alibi.m.data || mask_state == SA_TILE_BIASED || !want_top) {
        FN(apply_factor)(s, n, nv);
    }
    if (a->softcap > 0) {
        FN(pass_softcap)(s->P, n, nv, FN(in_log2)(a->softcap), s->gain);
        top_is_right = false;
    }
    if (a->alibi.m.data) {
        for (int r = 0; r < rows->count; ++r) {
            s->position[r] = (real)(rows->position[r] - first);
        }
        FN(pass_alibi)(s->P, n, nv, s->slope, s->position);
        top_is_right = false;
    }
    bool closes = false;
    if (FN(apply_masks)(b, s, first, n, nv, mask_state, false, &closes)) {
        *masked |= closes;
        top_is_right = false;
    }
    if (want_top && !top_is_right) {
        memcpy(s->top, s->maximum, (size_t)nv * SA_LANES * sizeof(real));
        FN(pass_max)(s->P, n, nv, s->factor, s->top);
    }
}

/* All of it: false when the tile is closed altogether. */
SA_INLINE bool FN(score_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv, const int few,
                              const bool want_top, bool *masked) {
    const int state = FN(open_tile)(b, s, first, n);
    if (state == SA_TILE_CLOSED) {
        sa_end_ahead(&s->ahead);
        *masked = true;
        return false;
    }
    if (b->mask_far && state != SA_TILE_OPEN && !few && b->rows->count > 1) { /* its rows lie pages apart */
        const sa_matrix *mask = &b->a->mask.m;
        sa_plan_ahead(&s->ahead, (sa_rows_ahead){.row = b->rows->mask,
                                                 .offset = (uintptr_t)(first * mask->col_stride),
                                                 .count = b->rows->count,
                                                 .bytes = sa_bytes_together(mask, n)});
    }
    const bool top_is_right = FN(products_tile)(b, s, first, n, nv, few);
    sa_end_ahead(&s->ahead);
    FN(finish_scores)(b, s, first, n, nv, state, top_is_right, want_top, masked);
    return true;
}

/* Scores in P become 2^(s − m), but for vectors that causal closes for some keys: those stay −inf, and values leave them out as well. On
 * the matrix unit all of them: after dropout weights_by_parts reads whole steps of keys and vectors in twos. */
SA_INLINE void FN(exp_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    for (int v = 0; v < nv && FN(parts_replace_rows); ++v) {
        end[v] = n;
    }
    FN(pass_exp)(s->P, end, s->maximum, s->tile_sum, nv);
}

/* Scores in P become 2^(s − m), those of closed pairs −inf. By their scores those are −inf too, but so may pairs be that are
 * open: what closes is asked once more. */
SA_NOINLINE void FN(exp_careful)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    ptrdiff_t end[SA_BACKWARD_VECS];
    for (int v = 0; v < nv; ++v) {
        end[v] = n;
    }
    FN(pass_exp)(s->P, end, s->maximum, s->tile_sum, nv);
    bool closes = false;
    FN(apply_masks)(b, s, first, n, nv, FN(open_tile)(b, s, first, n), true, &closes);
}

/* A dropped weight counts in the denominator and not in the output. */
SA_INLINE void FN(drop)(const sa_attention *a, FN(scratch) * s, real *P, ptrdiff_t first, ptrdiff_t n, const int nv) {
    const double least = rint(a->dropout_p * 4294967296.0);
    if (least < 4294967296.0) {
        FN(pass_dropout)(P, first, n, nv, a->seed, (uint32_t)least, s->index, s->head_lo, s->head_hi, s->words);
    } else {
        for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
            V(store)(P + i, V(min)(V(set1)(0), V(load)(P + i)));
        }
    }
}

SA_INLINE void FN(add_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv, const int few,
                              bool careful) {
    if (few && !careful) {
        FN(values_of_few)(b, s, first, n, SA_LANES, few);
        return;
    }
    const ptrdiff_t Dv = b->a->Dv;
    ptrdiff_t v_stride;
    const real *v = FN(tile_rows)(b, &b->value, &s->value, first, n, Dv, &v_stride);
    if (careful) {
        FN(values_careful)(s->P, v, v_stride, n, Dv, s->O, s->alpha, nv);
    } else {
        ptrdiff_t end[SA_BACKWARD_VECS];
        FN(open_ends)(b->rows, s, first, n, nv, end);
        FN(values_wide)(s->P, v, v_stride, end, Dv, s->O, nv * SA_LANES, s->alpha, &s->ahead, nv);
    }
}

/* ---- the end of a block -------------------------------------------------------------------------------------------- */

/* x[i] = columns d … d + lanes − 1 of the output row v·lanes + i, times the row's factor. */
SA_INLINE void FN(unpack_output)(const FN(scratch) * s, ptrdiff_t d, int columns, const real *factor, vec *x, const int nv,
                                 const int few, ptrdiff_t o_stride, int v) {
    if (few) {
        SA_UNROLL
        for (int i = 0; i < SA_LANES; ++i) {
            x[i] = V(set1)(0);
            if (i < few) {
                x[i] = V(load)(s->O + i * o_stride + d) * V(set1)(factor[i]);
            }
        }
        return;
    }
    const vec f = V(load)(factor + v * SA_LANES);
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        x[i] = V(set1)(0);
        if (i < columns) {
            x[i] = V(load)(s->O + ((d + i) * nv + v) * SA_LANES) * f;
        }
    }
    FN(transpose)(x);
}

/* Writes every row of out (factor = 1/sum) or of a partial result (factor = 1), and tells whether all were finite. */
SA_INLINE bool FN(write_output)(const sa_block *b, FN(scratch) * s, const real *factor, real *partial, const int nv,
                                const int few) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const ptrdiff_t Dv = a->Dv, o_stride = FN(few_width)(Dv);
    const sa_matrix *out = &a->out.m;
    const bool native = partial || (out->dtype == SA_REAL_DTYPE && out->col_stride == (ptrdiff_t)sizeof(real));
    const bool in_place = partial || FN(rows_in_place)((const char *const *)rows->out, rows->count, out);
    const bool sixteen_bits = (out->dtype == SA_F16 || out->dtype == SA_BF16) && out->col_stride == 2 && !partial;
    vec check = V(set1)(0); /* x − x and 0·x are 0 for a finite x and NaN for any other */
    for (int v = 0; v < nv; ++v) {
        for (ptrdiff_t d = 0; d < Dv; d += SA_LANES) {
            const int columns = Dv - d < SA_LANES ? (int)(Dv - d) : SA_LANES;
            vec x[SA_LANES];
            if (nv == 1 && !few && native && rows->count * columns <= 16) { /* a handful of numbers: no transpose */
                for (int r = 0; r < rows->count; ++r) {
                    real check_r = 0; /* of its own: sums of several rows go side by side */
                    const real *from = s->O + d * SA_LANES + r, f = factor[r];
                    char *to = (partial ? (char *)(partial + r * Dv) : rows->out[r]) + d * (ptrdiff_t)sizeof(real);
                    for (int i = 0; i < columns; ++i) {
                        const real y = from[i * SA_LANES] * f;
                        memcpy(to + i * (ptrdiff_t)sizeof y, &y, sizeof y);
                        check_r += y - y;
                    }
                    check = check + V(set1)(check_r);
                }
                continue;
            }
            FN(unpack_output)(s, d, columns, factor, x, nv, few, o_stride, v);
            if (in_place && columns == SA_LANES && (v + 1) * SA_LANES <= rows->count) {
                SA_UNROLL
                for (int i = 0; i < SA_LANES; ++i) { /* unrolled, else all vectors would pass through memory: 3 % at 128×64 */
                    const int r = v * SA_LANES + i;
                    V(store)((partial ? partial + r * Dv : (real *)(void *)rows->out[r]) + d, x[i]);
                    check = V(fma)(x[i], V(set1)(0), check);
                }
                continue;
            }
            for (int i = 0; i < SA_LANES && v * SA_LANES + i < rows->count; ++i) {
                const int r = v * SA_LANES + i;
                check = check + (x[i] - x[i]);
                char *to = partial ? (char *)(partial + r * Dv + d) : rows->out[r] + d * out->col_stride;
                if (native && (uintptr_t)to % sizeof(real) == 0) {
                    if (columns == SA_LANES) {
                        V(store)((real *)(void *)to, x[i]);
                    } else {
                        V(store_n)((real *)(void *)to, x[i], columns);
                    }
                } else if (sixteen_bits && columns == SA_LANES) {
                    FN(store_16_bits)(to, out->dtype, x[i]);
                } else {
                    V(store)(s->row, x[i]);
                    FN(store_row)(to, out->col_stride, out->dtype, s->row, columns);
                }
            }
        }
    }
    return !V(any)(V(not_lt)(check, V(set1)(1)));
}

/* lse and 1/sum of every row from s->maximum and s->sum; dead rows get −inf and 0. */
SA_INLINE void FN(close_rows)(const sa_block *b, FN(scratch) * s, const int nv) {
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
            real *stats = (real *)(void *)rows->stats[r];
            /* the maximum of a row with a NaN may be any number: 2^(s − m) would be one too, and not of a sign to be trusted */
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

/* The weights of every row, by a second walk over the scores now that maximum and sum are known: O(n) scratch, twice the
 * products. The array comes zero-filled; closed pairs stay 0. s->alpha is keep/sum. */
SA_INLINE void FN(write_weights)(const sa_block *b, FN(scratch) * s, const int nv, const int few) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const sa_matrix *weights = &a->weights.m;
    const vec zero = V(set1)(0);
    for (ptrdiff_t n, first = FN(next_tile)(b, b->begin, &n); first < b->end; first = FN(next_tile)(b, first + n, &n)) {
        bool masked = false;
        if (!FN(score_tile)(b, s, first, n, nv, few, true, &masked)) {
            continue;
        }
        for (int v = 0; v < nv; ++v) {
            const vec m = V(load)(s->maximum + v * SA_LANES), f = V(load)(s->alpha + v * SA_LANES);
            const vec unit = V(set1)(s->factor);
            for (ptrdiff_t j = 0; j < n; ++j) {
                real *p = s->P + (j * nv + v) * SA_LANES;
                V(store)(p, FN(exp2)(V(fma)(V(load)(p), unit, -m)) * f);
            }
        }
        if (masked) { /* in a row of NaN a closed pair's weight is 0 still */
            FN(apply_masks)(b, s, first, n, nv, FN(open_tile)(b, s, first, n), true, &masked);
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
            FN(store_row)(rows->weights[r] + first * weights->col_stride, weights->col_stride, weights->dtype, s->row, n);
        }
    }
}

SA_INLINE void FN(start_rows)(const sa_block *b, FN(scratch) * s, const int nv) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    for (int r = 0; r < nv * SA_LANES; r += SA_LANES) {  /* whole vectors: they are read as such at once */
        V(store)(s->maximum + r, V(set1)(-SA_REAL_MAX)); /* not −inf: −inf − −inf would be NaN */
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
        const int words = (nv * SA_LANES + SA_U32_LANES - 1) / SA_U32_LANES * SA_U32_LANES;
        for (int r = 0; r < words; ++r) {
            const int from = r < rows->count ? r : 0;
            s->index[r] = (uint32_t)rows->index[from];
            s->head_lo[r] = (uint32_t)rows->head[from];
            s->head_hi[r] = (uint32_t)(rows->head[from] >> 32);
        }
    }
}

/* In a large call: plans, for the tile from key `first` on, its share of the rows that this block will write, of the queries that the
 * next one will read, and of the first keys of the next head. */
SA_INLINE void FN(look_ahead)(const sa_block *b, sa_ahead *ahead, ptrdiff_t first) {
    if (b->ahead == 0) {
        return;
    }
    const sa_rows *rows = b->rows;
    const ptrdiff_t tiles = (b->end - b->begin + SA_KEYS_PER_TILE - 1) / SA_KEYS_PER_TILE;
    const ptrdiff_t tile = (first - b->begin) / SA_KEYS_PER_TILE, share = (rows->count + tiles - 1) / tiles, at = tile * share;
    if (at < rows->count) {
        const ptrdiff_t count = rows->count - at < share ? rows->count - at : share;
        sa_plan_ahead(ahead, (sa_rows_ahead){.row = rows->query + at,
                                             .offset = (uintptr_t)b->ahead,
                                             .count = count,
                                             .bytes = sa_bytes_together(&b->a->query.m, b->a->E)});
        sa_plan_ahead(ahead, (sa_rows_ahead){.row = (const char *const *)rows->out + at,
                                             .count = count,
                                             .bytes = sa_bytes_together(&b->a->out.m, b->a->Dv)});
    }
    const ptrdiff_t keys = b->keys_ahead == 0 ? 0 : b->a->S < SA_KEYS_PER_TILE ? b->a->S : SA_KEYS_PER_TILE;
    const ptrdiff_t key_share = (keys + tiles - 1) / tiles, key = tile * key_share;
    sa_plan_ahead(ahead,
                  (sa_rows_ahead){.offset = (uintptr_t)b->key.data + (uintptr_t)(b->keys_ahead + key * b->key.row_stride),
                                  .stride = b->key.row_stride,
                                  .count = keys - key < key_share ? keys - key : key_share,
                                  .bytes = sa_bytes_together(&b->key, b->a->E)});
}

SA_NOINLINE void FN(run_careful)(const sa_block *b, FN(scratch) * s);
static void FN(run_few)(const sa_block *b, FN(scratch) * s);

/* Weights may exceed 1 by this power of 2 where that does no harm: a maximum that grows by less stays, and the output so far needs
 * no factor. */
#define SA_MAXIMUM_LAG 8

/* nv vectors of lanes hold the rows; few is 0, or 1, 2, 4, 8: the number of rows, rounded up, of the feature-lane kernels. */
SA_INLINE void FN(run_block)(const sa_block *b, FN(scratch) * s, const int nv, const int few, bool careful) {
    const sa_attention *a = b->a;
    const bool drops = a->dropout_p > 0, may_split = !few && !careful;
    bool masked = false;
    s->scaled = false;
    s->empty = !few;
    if (few) {
        FN(pack_few_queries)(b, s, few);
        memset(s->O, 0, (size_t)(few * FN(few_width)(a->Dv)) * sizeof(real));
        memset(s->P, 0, FN(round_up)(a->S < SA_KEYS_PER_TILE ? a->S : SA_KEYS_PER_TILE) * SA_LANES * sizeof(real));
    }
    FN(split_queries)(b, s, nv);
    FN(start_rows)(b, s, nv);
    for (ptrdiff_t n, first = FN(next_tile)(b, b->begin, &n); first < b->end; first = FN(next_tile)(b, first + n, &n)) {
        if (few && FN(few_plain)(b, first, n)) {
            n = FN(few_plain_tile)(b, s, first, n, few);
            continue;
        }
        if (nv > 1) {
            FN(look_ahead)(b, &s->ahead, first);
            FN(fetch_tile)(b, &s->ahead, &b->value, a->Dv, first);
        }
        if (!FN(score_tile)(b, s, first, n, nv, few, true, &masked)) {
            continue;
        }
        const vec lag = V(set1)(may_split && FN(may_lag)(b, s, first) ? SA_MAXIMUM_LAG : 0);
        for (int v = 0; v < nv; ++v) {
            vec old = V(load)(s->maximum + v * SA_LANES), now = V(load)(s->top + v * SA_LANES);
            now = V(select)(V(lt)(now, old + lag), old, now);
            V(store)(s->alpha + v * SA_LANES, FN(exp2)(old - now));
            V(store)(s->maximum + v * SA_LANES, now);
        }
        if (nv > 1) {
            FN(fetch_tile)(b, &s->ahead, &b->key, a->E, first + n);
            FN(share_ahead)(s, a->Dv);
        }
        bool split = may_split && !drops && FN(weights_by_parts)(b, s, first, n, nv, true);
        if (!split) {
            FN(apply_factor)(s, n, nv);
        }
        if (careful) {
            FN(exp_careful)(b, s, first, n, nv);
        } else if (few) {
            FN(few_pass_exp)(s->P, n, s->maximum, s->tile_sum, few);
        } else if (!split) {
            FN(exp_tile)(b, s, first, n, nv);
        }
        for (int v = 0; v < nv; ++v) {
            vec alpha = V(load)(s->alpha + v * SA_LANES), l = V(load)(s->sum + v * SA_LANES);
            V(store)(s->sum + v * SA_LANES, V(fma)(alpha, l, V(load)(s->tile_sum + v * SA_LANES)));
        }
        if (drops) {
            FN(drop)(a, s, s->P, first, n, nv);
            split = may_split && FN(weights_by_parts)(b, s, first, n, nv, false);
        }
        if (split) {
            FN(values_by_parts)(b, s, first, n, nv);
        } else {
            FN(open_output)(b, s, nv);
            FN(round_weights)(s, n * nv * SA_LANES);
            FN(add_values)(b, s, first, n, nv, few, careful);
        }
        sa_end_ahead(&s->ahead);
    }
    FN(open_output)(b, s, nv);
    if (few) {
        FN(restore_order)(b, s, few);
        if (!FN(few_sums_hold)(b, s)) {
            s->few.use = false;
            FN(run_few)(b, s);
            return;
        }
    }
    if (b->partial) {
        real *partial = b->partial;
        memcpy(partial, s->maximum, (size_t)b->rows->count * sizeof(real));
        memcpy(partial + b->partial_rows, s->sum, (size_t)b->rows->count * sizeof(real));
        FN(write_output)(b, s, s->ones, partial + 2 * b->partial_rows, nv, few);
        return;
    }
    FN(close_rows)(b, s, nv);
    const bool finite = FN(write_output)(b, s, s->alpha, NULL, nv, few);
    if (!finite && (masked || a->mask.m.data) && !careful) {
        FN(run_careful)(b, s);
        return;
    }
    if (a->weights.m.data) {
        FN(write_weights)(b, s, nv, few);
    }
}

/* A block whose output was not finite although some pairs of it are closed: again, skipping every closed pair. */
SA_NOINLINE void FN(run_careful)(const sa_block *b, FN(scratch) * s) { FN(run_block)(b, s, SA_VECS, 0, true); }

#define SA_RUN(name, nv, few)                                                                                                  \
    SA_NOINLINE void FN(run_##name)(const sa_block *b, FN(scratch) * s) { FN(run_block)(b, s, nv, few, false); }
SA_RUN(wide1, 1, 0)
SA_RUN(wide2, 2, 0)
SA_RUN(wide3, 3, 0)
#if SA_VECS == 4
SA_RUN(wide4, 4, 0)
#endif
SA_RUN(few1, 1, 1)
SA_RUN(few2, 1, 2)
#if SA_FEW_ROWS >= 4
SA_RUN(few4, 1, 4)
#endif
#if SA_FEW_ROWS == 8
SA_RUN(few8, 1, 8)
#endif
#undef SA_RUN

static void FN(run_few)(const sa_block *b, FN(scratch) * s) {
    if (b->rows->count == 1) {
        FN(run_few1)(b, s);
    } else if (b->rows->count == 2) {
        FN(run_few2)(b, s);
#if SA_FEW_ROWS >= 4
    } else if (b->rows->count <= 4) {
        FN(run_few4)(b, s);
#endif
#if SA_FEW_ROWS == 8
    } else {
        FN(run_few8)(b, s);
#endif
    }
}

/* The block for the matrix unit, in `aligned` if it is another one: its tiles are the cells of the keys. */
SA_INLINE const sa_block *FN(on_cells)(const sa_block *b, const FN(parts) * s, sa_block *aligned) {
    const ptrdiff_t before = s->count && b->begin < b->end ? (b->begin - b->cache_from) % SA_KEYS_PER_TILE : 0;
    if (before == 0) {
        return b;
    }
    *aligned = *b;
    aligned->begin -= before;
    aligned->rows->clipped = true;
    return aligned;
}

/* Which kernel runs follows from the number of rows and keys alone. */
static void FN(attention_forward)(const sa_block *given, void *scratch) {
    FN(scratch) s;
    sa_block aligned;
    FN(lay_out)(given->a, scratch, &s, FN(block_rows), FN(uses_parts)(given->a));
    FN(open_caches)(given, &s);
    FN(parts_open)(given, &s.parts);
    const sa_block *b = FN(on_cells)(given, &s.parts, &aligned);
    const int count = b->rows->count;
    /* The feature-lane kernels are for decoding. Below 32 keys they lose to a single vector of queries: their sums across lanes are too
     * short. The last rows of a call of many go the way of the others, and so do few rows whose statistics are kept: the backward
     * pass sums scores as wide blocks do, and one of 10^5 that was summed in another order is 10^−2 off, and so would be its weight.
     * (The last 5 rows of 197 would be 2 % of a call faster.) */
    if (count <= SA_FEW_ROWS && b->whole && b->a->S >= 32 && b->a->stats.m.data == NULL) {
        FN(few_parts_open)(b, &s);
        FN(run_few)(b, &s);
        FN(few_parts_close)(&s.few);
    } else if (count <= SA_LANES) {
        FN(run_wide1)(b, &s);
    } else if (count <= 2 * SA_LANES) {
        FN(run_wide2)(b, &s);
    } else if (count <= 3 * SA_LANES) {
        FN(run_wide3)(b, &s);
#if SA_VECS == 4
    } else {
        FN(run_wide4)(b, &s);
#endif
    }
    FN(parts_close)(&s.parts);
}

/* O[n] = O + alpha·x, or alpha·x when it is the first. */
SA_INLINE void FN(merge_row)(real *O, const real *x, real alpha, ptrdiff_t n, bool first) {
    const vec f = V(set1)(alpha), zero = V(set1)(0);
    ptrdiff_t d = 0;
    for (; d + SA_LANES <= n; d += SA_LANES) {
        V(store)(O + d, (first ? zero : V(load)(O + d)) + f * V(load)(x + d));
    }
    if (d < n) {
        const int left = (int)(n - d);
        V(store_n)(O + d, (first ? zero : V(load_n)(O + d, left)) + f * V(load_n)(x + d, left), left);
    }
}

/* With M = max_c m_c over the chunks c: l = Σ_c 2^(m_c − M)·l_c and O likewise, in the order of the chunks. */
static void FN(attention_merge)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const ptrdiff_t Dv = a->Dv;
    const size_t bytes = FN(attention_partial)(a, b->partial_rows);
    const int nv = (rows->count + SA_LANES - 1) / SA_LANES;
    FN(scratch) layout, *s = &layout;
    FN(lay_out)(a, scratch, s, FN(block_rows), FN(uses_parts)(a));
    FN(open_caches)(b, s);
    FN(start_rows)(b, s, SA_VECS);
    for (ptrdiff_t c = 0; c < chunks; ++c) {
        const real *maximum_c = (const real *)(const void *)(partial + (size_t)c * bytes);
        for (int r = 0; r < rows->count; ++r) {
            s->maximum[r] =
                c == 0 || maximum_c[r] > s->maximum[r] || maximum_c[r] != maximum_c[r] ? maximum_c[r] : s->maximum[r];
            s->sum[r] = 0;
        }
    }
    for (ptrdiff_t c = 0; c < chunks; ++c) {
        const real *maximum_c = (const real *)(const void *)(partial + (size_t)c * bytes);
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
    FN(close_rows)(b, s, nv);
    const vec zero = V(set1)(0);
    vec check = zero; /* x − x is 0 for a finite x and NaN for any other */
    for (int r = 0; r < rows->count; ++r) {
        const vec f = V(set1)(s->alpha[r]);
        for (ptrdiff_t d = 0; d < Dv; d += SA_LANES) {
            const real *O_r = s->O + r * Dv + d;
            const vec x = (Dv - d < SA_LANES ? V(load_n)(O_r, (int)(Dv - d)) : V(load)(O_r)) * f;
            V(store)(s->row + d, x);
            check = check + (x - x);
        }
        FN(store_row)(rows->out[r], a->out.m.col_stride, a->out.m.dtype, s->row, Dv);
    }
    if (V(any)(V(not_lt)(check, V(set1)(1))) && (rows->clipped || a->mask.m.data)) {
        FN(run_careful)(b, s);
    } else if (a->weights.m.data) {
        FN(write_weights)(b, s, SA_VECS, 0);
    }
}
