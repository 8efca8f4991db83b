/* δ of every row, (4) of docs/theory/backward.md, and its part in the gradients of sinks and slopes. */

/* Σ x[i]·y[i]. Terms with x[i] = 0 are skipped: 0·inf and 0·NaN add nothing. Eight short sums keep the error small. */
SA_ONCE real FN(dot)(const real *x, const real *y, ptrdiff_t n) {
    const vec zero = V(set1)(0);
    vec sum[8];
    SA_UNROLL
    for (int c = 0; c < 8; ++c) {
        sum[c] = zero;
    }
    for (ptrdiff_t i = 0; i < n; i += 8 * SA_LANES) {
        SA_UNROLL
        for (int c = 0; c < 8; ++c) {
            const ptrdiff_t at = i + c * SA_LANES, left = n - at;
            if (left > 0) {
                const vec a = FN(load_up_to)(x + at, left);
                const vec b = FN(load_up_to)(y + at, left);
                sum[c] = V(fma)(a, V(select)(V(eq)(a, zero), zero, b), sum[c]);
            }
        }
    }
    SA_UNROLL
    for (int half = 4; half > 0; half /= 2) {
        SA_UNROLL
        for (int c = 0; c < half; ++c) {
            sum[c] = sum[c] + sum[c + half];
        }
    }
    real lanes[SA_LANES];
    V(store)(lanes, sum[0]);
    for (int half = SA_LANES / 2; half > 0; half /= 2) {
        for (int i2 = 0; i2 < half; ++i2) {
            lanes[i2] += lanes[i2 + half];
        }
    }
    return lanes[0];
}

/* A 16-bit output gives all keys of a row the same error in δ, which dQ and dK add up: there δ is Σ_j P_ij·dP_ij. Not
 * where other products round the weights as well. */
SA_INLINE bool FN(delta_is_summed)(const sa_attention *a, const FN(unit) * unit) {
    return !SA_REAL_IS_F64 && (a->out.m.dtype == SA_F16 || a->out.m.dtype == SA_BF16) && !(unit && unit->take(a));
}

/* Σ_j P_ij·dP_ij of each row's open pairs to s->x. */
SA_ONCE void FN(sum_delta)(const sa_backward_block *b, FN(gradient_scratch) * s, int nv) {
    const sa_attention *a = b->g->a;
    const vec zero = V(set1)(0);
    for (int r = 0; r < b->b.rows->count; ++r) {
        *(real *)(void *)b->rows->delta[r] = 0;
    }
    FN(open_block)(b, s, nv);
    ptrdiff_t look_at = b->b.begin + SA_ELEMENTS_AT_ONCE / (a->E + a->Dv + 1);
    for (ptrdiff_t n, first = FN(next_tile)(&b->b, b->b.begin, &n); first < b->b.end;
         first = FN(next_tile)(&b->b, first + n, &n)) {
        if (first >= look_at) {
            if (sa_cancelled(a)) {
                return;
            }
            look_at = first + SA_ELEMENTS_AT_ONCE / (a->E + a->Dv + 1);
        }
        bool masked = false;
        ptrdiff_t v_stride, end[SA_BACKWARD_VECS];
        if (!FN(score_tile)(&b->b, &s->s, first, n, nv, 0, false, &masked)) {
            continue;
        }
        FN(weights_tile)(&b->b, &s->s, first, n, nv, masked, false);
        if (a->dropout_p > 0) {
            FN(drop)(a, &s->s, s->s.P, first, n, nv);
        }
        const real *value = FN(tile_rows)(&b->b, &b->b.value, &s->s.value, first, n, a->Dv, &v_stride);
        FN(open_ends)(b->b.rows, &s->s, first, n, nv, end);
        FN(scores_wide)(s->s.O, value, v_stride, end, a->Dv, s->dS, nv * SA_LANES, s->s.tile_sum, &s->s.ahead, nv);
        for (int v = 0; v < nv; ++v) {
            vec sum = zero;
            for (ptrdiff_t j = 0; j < n; ++j) {
                const ptrdiff_t at = (j * nv + v) * SA_LANES;
                const vec p = V(load)(s->s.P + at);
                const lanemask closed = V(lt)(p, zero); /* −inf marks it: a weight of 0 may be an open pair's and meet a NaN */
                sum = V(fma)(V(select)(closed, zero, p), V(select)(closed, zero, V(load)(s->dS + at)), sum);
            }
            real *to = s->x + v * SA_LANES;
            V(store)(to, V(load)(to) + sum);
        }
    }
}

/* δ, the sink's gradient −2^(sink − m)/l·δ, and what Σ_j dS_ij should be. */
SA_SHARED void FN(delta_block)(const sa_backward_block *b, void *scratch, const FN(unit) * unit) {
    const sa_attention_gradients *g = b->g;
    const sa_attention *a = g->a;
    const sa_rows *rows = b->b.rows;
    FN(gradient_scratch) layout, *s = &layout;
    FN(lay_out_backward)(g, scratch, s, unit);
    const bool summed = FN(delta_is_summed)(a, unit);
    if (summed) {
        FN(open_caches)(&b->b, &s->s);
        FN(sum_delta)(b, s, (rows->count + SA_LANES - 1) / SA_LANES);
    }
    const bool in_place = FN(rows_in_place)((const char *const *)rows->out, rows->count, &a->out.m) &&
                          FN(rows_in_place)(b->rows->grad_out, rows->count, &g->grad_out.m);
    for (int r = 0; r < rows->count; ++r) {
        const real *stats = (const real *)(const void *)rows->stats[r];
        real delta = 0;
        if (stats[1] != 0) { /* a dead row has no gradient, whatever dO holds */
            const real *out = (const real *)(const void *)rows->out[r];
            const real *grad_out = (const real *)(const void *)b->rows->grad_out[r];
            if (!in_place && !summed) {
                real *more = s->do_rows + FN(round_up)(a->Dv);
                FN(load_row)(s->do_rows, rows->out[r], a->out.m.col_stride, a->Dv, a->out.m.dtype, a->out.m.swapped);
                FN(load_row)(more, b->rows->grad_out[r], g->grad_out.m.col_stride, a->Dv, g->grad_out.m.dtype,
                             g->grad_out.m.swapped);
                out = s->do_rows;
                grad_out = more;
            }
            /* a row with a sink but no keys gives 0 */
            delta = summed ? s->x[r] : FN(dot)(out, grad_out, a->Dv);
            real grad_lse = 0, sink_weight = 0;
            if (g->grad_lse.m.data) {
                FN(load_row)(&grad_lse, b->rows->grad_lse[r], 0, 1, g->grad_lse.m.dtype, g->grad_lse.m.swapped);
                delta -= grad_lse;
            }
            if (a->sinks.m.data && rows->sink[r] != -INFINITY) {
                real share[SA_LANES];
                V(store)(share, FN(exp2)(V(set1)(FN(in_log2)(rows->sink[r]) - stats[0])));
                sink_weight = share[0] * stats[1];
            }
            if (g->dsink_rows.m.data) {
                *(real *)(void *)b->rows->dsink[r] = rows->sink[r] == -INFINITY ? 0 : -sink_weight * delta;
            }
            if (g->dslope_rows.m.data) {
                ((real *)(void *)b->rows->dslope[r])[1] = grad_lse + sink_weight * delta;
            }
        }
        *(real *)(void *)b->rows->delta[r] = delta;
    }
}
