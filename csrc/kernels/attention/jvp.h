/* Forward mode of attention over a block (docs/theory/second_derivatives.md). A dot means a tangent. With natural scores
 * s and weights P = exp(s)/l, where l has the sink's term too, in one pass over the keys:
 *
 *     ṡ_ij = gain_ij·scale·(Q̇_i·K_j + Q_i·K̇_j) + tangents of slopes, masks and biases      (7)
 *     r_i  = Σ_j P_ij·ṡ_ij                                          the tangent of lse    (8)
 *     Ȯ_i  = Σ_j P_ij·(ṡ_ij·V_j + V̇_j) − r_i·O_i                                          (9)
 *
 * gain is the derivative of softcap. A row of the call's arrays is a pair, the numbers and then their tangents, so a->E
 * and a->Dv are twice the width of one of them, and one product computes V and V̇ times P. The products are multiply-adds
 * on each instruction set.
 *
 * Closed pairs have P = 0 and P·ṡ = 0. Where that 0 would meet NaN or infinity, the block is computed again, and closed
 * pairs are skipped.
 * Comes after kernels/attention/forward.h. */

/* A thread's scratch for pairs. */
typedef struct {
    FN(scratch) s;       /* its q holds Q, Q̇ and Q again [3/2·E][nv·lanes], its O holds O and Ȯ [Dv][nv·lanes] */
    real *T;             /* [keys][nv·lanes]: ṡ, then P·ṡ */
    real *rows;          /* [SA_LANES][keys]: tangents of a mask */
    FN(per_row) r, z;    /* Σ_j of P·ṡ, and with ALiBi of P·|i + o − j|, without the factor 1/l */
    FN(per_row) slope_tangent;
} FN(jvp_scratch);

SA_ONCE size_t FN(lay_out_jvp)(const sa_attention *a, char *base, FN(jvp_scratch) * s) {
    const size_t W = FN(backward_rows), E = FN(round_up)(a->E);
    size_t used = FN(lay_out)(a, base, &s->s, W, NULL);
    SA_TAKE(s.q, real, (E + E / 2 + SA_LANES) * W);
    SA_TAKE(T, real, SA_KEYS_PER_TILE * W);
    SA_TAKE(rows, real, SA_KEYS_PER_TILE * SA_LANES);
    if (a->softcap > 0) {
        SA_TAKE(s.gain, real, SA_KEYS_PER_TILE * W);
    }
    s->s.holds_tanh = true;
    return used;
}

/* Writes queries as factors: Q times scale·log2 e for scores in log2 units, then Q̇ and Q times scale for (7). */
SA_ONCE void FN(copy_pairs_of_queries)(const sa_block *b, FN(scratch) * s, int nv) {
    const ptrdiff_t count = b->a->E / 2 * nv * SA_LANES;
    const vec natural = V(set1)((real)0.69314718055994530942);
    FN(copy_queries)(b, s, nv);
    for (ptrdiff_t i = 0; i < count; i += SA_LANES) {
        V(store)(s->q + count + i, V(load)(s->q + count + i) * natural);
        V(store)(s->q + 2 * count + i, V(load)(s->q + i) * natural);
    }
}

/* Writes a tile's scores to s->P as score_tile does, and the products of (7) to T. False if the whole tile is closed. */
SA_ONCE bool FN(score_pairs)(const sa_block *b, FN(scratch) * s, real *T, ptrdiff_t first, ptrdiff_t n, int nv,
                             bool want_top, bool *masked) {
    const ptrdiff_t E = b->a->E / 2, lanes = nv * SA_LANES;
    const int state = FN(inspect_tile)(b, s, first, n);
    ptrdiff_t end[SA_BACKWARD_VECS];
    if (state == SA_TILE_CLOSED) {
        sa_fetch_rest(&s->ahead);
        *masked = true;
        return false;
    }
    FN(copy_vectors)(s->top, s->maximum, nv);
    s->factor = 1;
    FN(spread_ahead)(s, n);
    s->k = FN(tile_rows)(b, &b->key, &s->key, first, n, b->a->E, &s->k_stride);
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(rows_times_lanes)(s->q, s->k, s->k_stride, end, E, s->P, lanes, s->top, &s->ahead, nv);
    FN(rows_times_lanes)(s->q + E * lanes, s->k, s->k_stride, end, 2 * E, T, lanes, s->tile_sum, &s->ahead, nv);
    sa_fetch_rest(&s->ahead);
    FN(finish_scores)(b, s, first, n, nv, state, true, want_top, masked);
    return true;
}

/* ---- the other terms of (7) -------------------------------------------------------------------------------------- */

/* T += the tangents of a mask or bias, whose rows are row[…]. */
SA_ONCE void FN(add_mask_tangent)(const char *const *row, int count, const sa_matrix *m, real *rows, real *T,
                                  ptrdiff_t first, ptrdiff_t n, int nv) {
    for (int v = 0; v < nv; ++v) {
        const int here = SA_SMALLER(count - v * SA_LANES, SA_LANES);
        for (int i = 0; i < here; ++i) {
            FN(load_row)(rows + i * SA_KEYS_PER_TILE, row[v * SA_LANES + i] + first * m->col_stride, m->col_stride, n,
                         m->dtype, m->swapped);
        }
        for (ptrdiff_t j = 0; j < n; j += SA_LANES) {
            vec t[SA_LANES];
            FN(load_transposed)(rows + j, SA_KEYS_PER_TILE, here, SA_SMALLER(n - j, SA_LANES), t);
            for (int i = 0; i < SA_LANES && j + i < n; ++i) {
                real *to = T + ((j + i) * nv + v) * SA_LANES;
                V(store)(to, V(load)(to) + t[i]);
            }
        }
    }
}

/* Makes ṡ of the products in T. The array gain becomes the derivative 1 − t², from t = tanh. */
SA_ONCE void FN(finish_tangents)(const sa_block *b, FN(jvp_scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const vec one = V(set1)(1);
    for (ptrdiff_t i = 0; s->s.gain && i < n * nv * SA_LANES; i += SA_LANES) {
        const vec t = V(load)(s->s.gain + i);
        V(store)(s->T + i, V(load)(s->T + i) * ((one - t) * (one + t)));
    }
    if (a->alibi_tangent.m.data) {
        FN(pass_alibi)(s->T, n, nv, s->slope_tangent, s->s.position);
    }
    if (a->mask_tangent.m.data) {
        FN(add_mask_tangent)(rows->mask_tangent, rows->count, &a->mask_tangent.m, s->rows, s->T, first, n, nv);
    }
    if (a->offset_bias_tangent.m.data) {
        FN(add_mask_tangent)(rows->offset_bias_tangent, rows->count, &a->offset_bias_tangent.m, s->rows, s->T, first, n,
                             nv);
    }
}

SA_ONCE void FN(start_slope_tangents)(const sa_block *b, FN(jvp_scratch) * s, int nv) {
    for (int r = 0; r < nv * SA_LANES; ++r) {
        s->slope_tangent[r] = b->a->alibi_tangent.m.data && r < b->rows->count ? (real)b->rows->slope_tangent[r] : 0;
    }
}

/* ---- the tiles of a block ---------------------------------------------------------------------------------------- */

/* T = P·ṡ, and 0 for closed pairs. r = α·r + Σ_j T. */
SA_ONCE void FN(weigh_tangents)(FN(jvp_scratch) * s, ptrdiff_t n, int nv) {
    const vec zero = V(set1)(0), least = V(set1)(SA_REAL_LEAST);
    for (int v = 0; v < nv; ++v) {
        vec sum[2] = {zero, zero};
        for (ptrdiff_t j = 0; j < n; ++j) {
            const ptrdiff_t at = (j * nv + v) * SA_LANES;
            const vec p = V(load)(s->s.P + at);
            const vec t = V(select)(V(lt)(p, least), zero, p * V(load)(s->T + at)); /* NaN is not closed */
            V(store)(s->T + at, t);
            sum[j % 2] = sum[j % 2] + t;
        }
        real *r = s->r + v * SA_LANES;
        V(store)(r, V(fma)(V(load)(s->s.alpha + v * SA_LANES), V(load)(r), sum[0] + sum[1]));
    }
}

/* z = α·z + Σ_j P·|i + o − j|. */
SA_ONCE void FN(weigh_distances)(FN(jvp_scratch) * s, ptrdiff_t n, int nv) {
    const vec zero = V(set1)(0);
    for (int v = 0; v < nv; ++v) {
        const vec position = V(load)(s->s.position + v * SA_LANES);
        vec sum = zero;
        for (ptrdiff_t j = 0; j < n; ++j) {
            const vec p = V(max)(V(load)(s->s.P + (j * nv + v) * SA_LANES), zero);
            sum = V(fma)(p, V(abs)(position - V(set1)((real)j)), sum);
        }
        real *z = s->z + v * SA_LANES;
        V(store)(z, V(fma)(V(load)(s->s.alpha + v * SA_LANES), V(load)(z), sum));
    }
}

/* Drops the weights in P, and the same elements of T. */
SA_ONCE void FN(drop_pairs)(const sa_attention *a, FN(jvp_scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const vec zero = V(set1)(0);
    FN(drop)(a, &s->s, s->s.P, first, n, nv);
    for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
        V(store)(s->T + i, V(select)(V(eq)(V(load)(s->s.P + i), zero), zero, V(load)(s->T + i)));
    }
}

/* O = α·O + P·[V, V̇], and (P·ṡ)·V is added to its second half. */
SA_ONCE void FN(add_pairs_of_values)(const sa_block *b, FN(jvp_scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                                     bool careful) {
    const ptrdiff_t Dv = b->a->Dv, lanes = nv * SA_LANES;
    ptrdiff_t v_stride, end[SA_BACKWARD_VECS];
    const real *v = FN(tile_rows)(b, &b->value, &s->s.value, first, n, Dv, &v_stride);
    real *tangents = s->s.O + Dv / 2 * lanes;
    if (careful) {
        FN(values_careful)(s->s.P, s->s.P, v, v_stride, n, Dv, s->s.O, s->s.alpha, nv);
        FN(values_careful)(s->s.P, s->T, v, v_stride, n, Dv / 2, tangents, s->s.ones, nv);
        return;
    }
    FN(open_ends)(b->rows, &s->s, first, n, nv, end);
    FN(columns_times_lanes)(s->s.P, v, v_stride, end, Dv, s->s.O, lanes, s->s.alpha, &s->s.ahead, nv);
    FN(columns_times_lanes)(s->T, v, v_stride, end, Dv / 2, tangents, lanes, s->s.ones, &s->s.ahead, nv);
}

/* Subtracts r·O of (9), and writes r and z as statistics and r as the tangent of lse. */
SA_ONCE void FN(end_tangents)(const sa_block *b, FN(jvp_scratch) * s, int nv) {
    const sa_attention *a = b->a;
    const ptrdiff_t Dv = a->Dv / 2, lanes = nv * SA_LANES;
    for (int r = 0; r < b->rows->count; ++r) {
        const real l = s->s.sum[r], mean = l == 0 ? 0 : s->r[r] / l;
        s->r[r] = mean;
        if (a->stats.m.data) {
            real *stats = (void *)b->rows->stats[r];
            stats[2] = mean;
            stats[3] = l == 0 ? 0 : s->z[r] / l;
        }
        if (a->lse.m.data) {
            memcpy(b->rows->lse[r] + sizeof mean, &mean, sizeof mean);
        }
    }
    for (int v = 0; v < nv; ++v) {
        const vec r = V(load)(s->r + v * SA_LANES);
        for (ptrdiff_t d = 0; d < Dv; ++d) {
            real *o = s->s.O + d * lanes + v * SA_LANES, *tangent = o + Dv * lanes;
            V(store)(tangent, V(load)(tangent) - r * V(load)(o));
        }
    }
}

/* True if the block must be computed again, carefully. */
SA_ONCE bool FN(run_jvp)(const sa_block *b, FN(jvp_scratch) * s, int nv, bool careful) {
    const sa_attention *a = b->a;
    bool masked = false;
    FN(start_rows)(b, &s->s, nv);
    FN(copy_pairs_of_queries)(b, &s->s, nv);
    FN(start_slope_tangents)(b, s, nv);
    memset(s->s.O, 0, (size_t)(a->Dv * nv * SA_LANES) * sizeof(real));
    for (int r = 0; r < nv * SA_LANES; ++r) { /* the sink's weight is 1 so far */
        const bool sinks = a->sink_tangent.m.data && r < b->rows->count && s->s.sum[r] == 1;
        s->r[r] = sinks ? (real)b->rows->sink_tangent[r] : 0;
        s->s.tile_sum[r] = s->z[r] = 0;
    }
    SA_EACH_KEY_TILE(b, first, n) {
        sa_plan_tile(b, &s->s.ahead, &b->value, a->Dv, first);
        if (!FN(score_pairs)(b, &s->s, s->T, first, n, nv, SA_WITH_MAXIMA, &masked)) {
            continue;
        }
        FN(finish_tangents)(b, s, first, n, nv);
        FN(raise_maximum)(&s->s, nv, 0);
        if (careful) {
            FN(exp_careful)(b, &s->s, first, n, nv);
        } else {
            FN(exp_tile)(b, &s->s, first, n, nv);
        }
        FN(take_sum)(&s->s, nv);
        FN(weigh_tangents)(s, n, nv);
        if (a->alibi.m.data) {
            FN(weigh_distances)(s, n, nv);
        }
        if (a->dropout_p > 0) {
            FN(drop_pairs)(a, s, first, n, nv);
        }
        sa_plan_tile(b, &s->s.ahead, &b->key, a->E, first + n);
        FN(spread_ahead)(&s->s, a->Dv);
        FN(add_pairs_of_values)(b, s, first, n, nv, careful);
        sa_fetch_rest(&s->s.ahead);
    }
    FN(end_rows)(b, &s->s, nv);
    FN(end_tangents)(b, s, nv);
    return !FN(write_wide)(b, &s->s, s->s.alpha, NULL, nv) && (masked || FN(may_close)(b));
}

/* ---- the table's entries ----------------------------------------------------------------------------------------- */

SA_KERNEL size_t FN(jvp_scratch_bytes)(const sa_attention *a) {
    FN(jvp_scratch) s;
    return FN(lay_out_jvp)(a, SA_NOWHERE, &s);
}

SA_KERNEL void FN(attention_jvp)(const sa_block *b, void *scratch) {
    FN(jvp_scratch) s;
    FN(lay_out_jvp)(b->a, scratch, &s);
    FN(forget_copies)(b, &s.s);
    const int nv = SA_CEIL_DIV(b->rows->count, SA_LANES);
    if (FN(run_jvp)(b, &s, nv, false)) {
        FN(run_jvp)(b, &s, nv, true);
    }
}
