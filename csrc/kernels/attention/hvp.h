/* Second derivatives of attention over a block: the gradients of backward.h and their tangents
 * (docs/theory/second_derivatives.md). O, Ȯ, r, m and 1/l are those that jvp.h wrote. With P = 2^(s − m)/l and
 * Ṗ_ij = P_ij·(ṡ_ij − r_i):
 *
 *     dV_j += P_ij·dO_i                      dV̇_j += Ṗ_ij·dO_i + P_ij·dȮ_i                          (10)
 *     dP_ij = V_j·dO_i                       dṖ_ij = V_j·dȮ_i + V̇_j·dO_i                            (11)
 *     δ_i = O_i·dO_i − dlse_i                δ̇_i = O_i·dȮ_i + Ȯ_i·dO_i − dlṡe_i                     (12)
 *     dS_ij = P_ij·(dP_ij − δ_i)             dṠ_ij = Ṗ_ij·(dP_ij − δ_i) + P_ij·(dṖ_ij − δ̇_i)        (13)
 *     dX_ij = gain_ij·dS_ij                  dẊ_ij = gain_ij·dṠ_ij − 2/c·t_ij·gain_ij·dS_ij·ẋ_ij    (14)
 *     dQ_i += scale·dX_ij·K_j                dQ̇_i += scale·(dẊ_ij·K_j + dX_ij·K̇_j)                  (15)
 *     dK_j += scale·dX_ij·Q_i                dK̇_j += scale·(dẊ_ij·Q_i + dX_ij·Q̇_i)                  (16)
 *
 * (14) is softcap's, of x_ij = c·atanh(t_ij). In the code the copies of dO and dȮ have dropout's factor 1/(1 − p).
 *
 * Closed pairs add to no product, as in backward.h.
 * Comes after kernels/attention/jvp.h and kernels/attention/backward.h. */

/* A thread's scratch. Arrays of a tile are [keys][nv·lanes]. */
typedef struct {
    FN(jvp_scratch) j;               /* its T becomes Ṗ */
    real *do_rows, *do_tangent_rows; /* [W][Dv rounded up] */
    real *dO;                        /* dO, dȮ and dO again [3·Dv][nv·lanes] */
    real *dqT;                       /* dQ and dQ̇, without scale [2·E, and a vector][nv·lanes] */
    real *dS, *dS_tangent;           /* dP and dṖ at first */
    real *kept;                      /* P after dropout, or NULL */
    real *x_tangent;                 /* ẋ, or NULL without softcap */
    real *marks;                     /* below 0 for closed pairs */
    FN(per_row) inverse, delta, delta_tangent, slope, slope_tangent;
    bool finite; /* Q, dO and their tangents are finite */
} FN(hvp_scratch);

SA_ONCE size_t FN(lay_out_hvp)(const sa_attention *a, char *base, FN(hvp_scratch) * s) {
    const size_t W = FN(backward_rows), E = FN(round_up)(a->E), Dv = FN(round_up)(a->Dv), tile = SA_KEYS_PER_TILE * W;
    size_t used = FN(lay_out_jvp)(a, base, &s->j);
    SA_TAKE(do_rows, real, W * Dv);
    SA_TAKE(do_tangent_rows, real, W * Dv);
    SA_TAKE(dO, real, 3 * Dv * W);
    SA_TAKE(dqT, real, (2 * E + SA_LANES) * W);
    SA_TAKE(dS, real, tile);
    SA_TAKE(dS_tangent, real, tile);
    SA_TAKE(marks, real, tile);
    s->kept = s->x_tangent = NULL;
    if (a->dropout_p > 0) {
        SA_TAKE(kept, real, tile);
    }
    if (a->softcap > 0) {
        SA_TAKE(x_tangent, real, tile);
    }
    return used;
}

/* ---- the rows of a block ----------------------------------------------------------------------------------------- */

SA_ONCE void FN(start_hvp)(const sa_backward_block *b, FN(hvp_scratch) * s, int nv) {
    const sa_attention *a = b->g->a;
    const sa_rows *rows = b->b.rows;
    const ptrdiff_t lanes = nv * SA_LANES;
    const real keep = (real)(a->dropout_p > 0 && a->dropout_p < 1 ? 1 / (1 - a->dropout_p) : 1);
    real factor[FN(backward_rows)];
    s->finite = FN(start_pairs)(&b->b, &s->j, nv);
    for (int r = 0; r < lanes; ++r) {
        s->j.s.maximum[r] = s->inverse[r] = s->j.r[r] = s->j.z[r] = 0;
        s->delta[r] = s->delta_tangent[r] = s->slope[r] = s->slope_tangent[r] = 0;
        if (r < rows->count) {
            const real *stats = (const void *)rows->stats[r], *delta = (const void *)b->grads->delta[r];
            s->j.s.maximum[r] = stats[0];
            s->inverse[r] = stats[1];
            s->j.r[r] = stats[2];
            s->j.z[r] = stats[3];
            s->delta[r] = delta[0];
            s->delta_tangent[r] = delta[1];
            factor[r] = stats[1] != 0 ? keep : 0; /* a row without open keys has no gradient, whatever dO holds */
        }
    }
    s->finite &=
        FN(copy_both)(b->grads->grad_out, &b->g->grad_out.m, b->grads->grad_out_tangent, &b->g->grad_out_tangent.m,
                      rows->count, a->Dv, factor, s->do_rows, s->do_tangent_rows, s->dO + a->Dv * lanes, nv);
    memcpy(s->dO, s->dO + 2 * a->Dv * lanes, (size_t)(a->Dv * lanes) * sizeof(real));
    memset(s->dqT, 0, (2 * FN(round_up)(a->E) + SA_LANES) * (size_t)lanes * sizeof(real));
}

/* ---- passes over a tile ------------------------------------------------------------------------------------------ */

/* (13), from weights in P with their marks, ṡ in T, dP and dṖ. P and T become P and Ṗ after dropout, without its
 * factor. */
SA_ONCE void FN(pass_second)(FN(hvp_scratch) * s, ptrdiff_t n, int nv) {
    const vec zero = V(set1)(0);
    real *P = s->j.s.P, *T = s->j.T;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t row = v * SA_LANES;
        const vec inverse = V(load)(s->inverse + row), r = V(load)(s->j.r + row), delta = V(load)(s->delta + row),
                  delta_tangent = V(load)(s->delta_tangent + row);
        for (ptrdiff_t j = 0; j < n; ++j) {
            const ptrdiff_t at = j * nv * SA_LANES + row;
            const vec p = V(load)(P + at);
            const lanemask closed = V(lt)(p, zero);
            vec weight = V(select)(closed, zero, p * inverse);
            vec tangent = V(select)(closed, zero, weight * (V(load)(T + at) - r));
            vec dp = V(load)(s->dS + at), dp_tangent = V(load)(s->dS_tangent + at);
            if (s->kept) {
                const lanemask dropped = V(eq)(V(load)(s->kept + at), zero);
                dp = V(select)(dropped, zero, dp);
                dp_tangent = V(select)(dropped, zero, dp_tangent);
                V(store)(P + at, V(select)(dropped, zero, weight));
                V(store)(T + at, V(select)(dropped, zero, tangent));
            } else {
                V(store)(P + at, weight);
                V(store)(T + at, tangent);
            }
            dp = dp - delta;
            const vec ds_tangent = V(fma)(tangent, dp, weight * (dp_tangent - delta_tangent));
            V(store)(s->dS + at, V(select)(closed, zero, weight * dp));
            V(store)(s->dS_tangent + at, V(select)(closed, zero, ds_tangent));
        }
    }
}

/* Adds the tile's terms of the slopes' gradient, −Σ_j dS_ij·(|i + o − j| − z_i). With z near the mean distance rounding
 * errors of dS, whose sum over j is known, count less; hvp_delta adds the rest, −z_i·Σ_j dS_ij. */
SA_ONCE void FN(pass_second_dslope)(FN(hvp_scratch) * s, ptrdiff_t n, int nv) {
    for (int v = 0; v < nv; ++v) {
        const vec position = V(load)(s->j.s.position + v * SA_LANES), z = V(load)(s->j.z + v * SA_LANES);
        vec x = V(set1)(0), tangent = x;
        for (ptrdiff_t j = 0; j < n; ++j) {
            const ptrdiff_t at = (j * nv + v) * SA_LANES;
            const vec distance = V(abs)(position - V(set1)((real)j)) - z;
            x = V(fma)(V(load)(s->dS + at), distance, x);
            tangent = V(fma)(V(load)(s->dS_tangent + at), distance, tangent);
        }
        const ptrdiff_t at = v * SA_LANES;
        V(store)(s->slope + at, V(load)(s->slope + at) - x);
        V(store)(s->slope_tangent + at, V(load)(s->slope_tangent + at) - tangent);
    }
}

/* (14); t may be NaN for closed pairs. */
SA_ONCE void FN(pass_second_gain)(FN(hvp_scratch) * s, ptrdiff_t n, int nv, real cap) {
    const vec zero = V(set1)(0), one = V(set1)(1), bend = V(set1)(-2 / cap);
    for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
        const lanemask closed = V(lt)(V(load)(s->marks + i), zero);
        const vec t = V(load)(s->j.s.gain + i), gain = (one - t) * (one + t), dx = V(load)(s->dS + i) * gain;
        const vec tangent = V(load)(s->dS_tangent + i) * gain + bend * t * dx * V(load)(s->x_tangent + i);
        V(store)(s->dS + i, V(select)(closed, zero, dx));
        V(store)(s->dS_tangent + i, V(select)(closed, zero, tangent));
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* to[keys][width] += W[keys][rows]·x[rows][width]. Keys from end[u − 1] to end[u] are closed to vectors before u. */
SA_ONCE void FN(outer_open)(const real *W, const real *x, ptrdiff_t x_stride, const ptrdiff_t *end, int count, real *to,
                            ptrdiff_t to_stride, ptrdiff_t width, int nv) {
    ptrdiff_t from = 0;
    for (int u = 0; u < nv; ++u) {
        const ptrdiff_t row = u * SA_LANES;
        if (end[u] > from) {
            real *here = to + from * to_stride;
            FN(outer)(W + from * nv * SA_LANES + row, nv * SA_LANES, x + row * x_stride, x_stride, count - row,
                      end[u] - from, here, to_stride, here, to_stride, width);
            from = end[u];
        }
    }
}

/* The gradient's rows of the tile's keys, dX_jᵀ·x and in its tangent dX_jᵀ·ẋ + dẊ_jᵀ·x: (10) and (16). */
SA_ONCE void FN(second_outer)(const real *W, const real *W_tangent, const real *x, const real *x_tangent,
                              const ptrdiff_t *end, int count, char *to, ptrdiff_t tangent, ptrdiff_t to_stride,
                              ptrdiff_t width, int nv) {
    const ptrdiff_t stride = (ptrdiff_t)FN(round_up)(width);
    real *here = (void *)to, *there = (void *)(to + tangent);
    FN(outer_open)(W, x, stride, end, count, here, to_stride, width, nv);
    FN(outer_open)(W, x_tangent, stride, end, count, there, to_stride, width, nv);
    FN(outer_open)(W_tangent, x, stride, end, count, there, to_stride, width, nv);
}

/* (10), (15) and (16). */
SA_ONCE void FN(second_products)(const sa_backward_block *b, FN(hvp_scratch) * s, ptrdiff_t first, ptrdiff_t n,
                                 int nv) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t E = a->E, lanes = nv * SA_LANES, at_key = (first - b->first_key) * (ptrdiff_t)sizeof(real);
    const int count = b->b.rows->count;
    FN(scratch) *own = &s->j.s;
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->b.rows, own, first, n, nv, end);
    if (b->dvalue) {
        FN(second_outer)(own->P, s->j.T, s->do_rows, s->do_tangent_rows, end, count,
                         b->dvalue + at_key * b->dvalue_stride, b->g->dvalue_tangent, b->dvalue_stride, a->Dv, nv);
    }
    if (b->dkey) {
        FN(second_outer)(s->dS, s->dS_tangent, s->j.q_rows, s->j.q_tangent_rows, end, count,
                         b->dkey + at_key * b->dkey_stride, b->g->dkey_tangent, b->dkey_stride, E, nv);
    }
    if (b->g->dquery.m.data) {
        real *tangents = s->dqT + E * lanes;
        FN(columns_times_lanes)(s->dS, own->k, own->k_stride, end, E, s->dqT, lanes, own->ones, &own->ahead, nv);
        FN(columns_times_lanes)(s->dS, own->k + E, own->k_stride, end, E, tangents, lanes, own->ones, &own->ahead, nv);
        FN(columns_times_lanes)(s->dS_tangent, own->k, own->k_stride, end, E, tangents, lanes, own->ones, &own->ahead,
                                nv);
    }
}

/* to[i·stride] += w·x[i] + w_tangent·y[i] */
SA_INLINE void FN(add_two)(real *to, ptrdiff_t stride, const real *x, real w, const real *y, real w_tangent,
                           ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; ++i) {
        to[i * stride] += w * x[i] + w_tangent * y[i];
    }
}

/* The same pair by pair, without the closed pairs. */
SA_ONCE void FN(second_products_careful)(const sa_backward_block *b, FN(hvp_scratch) * s, ptrdiff_t first, ptrdiff_t n,
                                         ptrdiff_t lanes) {
    const sa_attention_gradients *g = b->g;
    const ptrdiff_t E = g->a->E, Dv = g->a->Dv, at_key = first - b->first_key, size = (ptrdiff_t)sizeof(real);
    for (ptrdiff_t j = 0; j < n; ++j) {
        for (int r = 0; r < b->b.rows->count; ++r) {
            const ptrdiff_t at = j * lanes + r;
            if (s->marks[at] < 0) {
                continue;
            }
            const real *q = s->j.q_rows + (size_t)r * FN(round_up)(E), *k = s->j.s.k + j * s->j.s.k_stride;
            const real *q_tangent = s->j.q_tangent_rows + (size_t)r * FN(round_up)(E);
            const real *dout = s->do_rows + (size_t)r * FN(round_up)(Dv);
            const real *dout_tangent = s->do_tangent_rows + (size_t)r * FN(round_up)(Dv);
            const real p = s->j.s.P[at], p_tangent = s->j.T[at], ds = s->dS[at], ds_tangent = s->dS_tangent[at];
            if (b->dvalue) {
                char *to = b->dvalue + (at_key + j) * b->dvalue_stride * size;
                FN(add_two)((void *)to, 1, dout, p, dout, 0, Dv);
                FN(add_two)((void *)(to + g->dvalue_tangent), 1, dout_tangent, p, dout, p_tangent, Dv);
            }
            if (b->dkey) {
                char *to = b->dkey + (at_key + j) * b->dkey_stride * size;
                FN(add_two)((void *)to, 1, q, ds, q, 0, E);
                FN(add_two)((void *)(to + g->dkey_tangent), 1, q_tangent, ds, q, ds_tangent, E);
            }
            FN(add_two)(s->dqT + r, lanes, k, ds, k, 0, E);
            FN(add_two)(s->dqT + E * lanes + r, lanes, k + E, ds, k, ds_tangent, E);
        }
    }
}

/* ---- tiles and blocks -------------------------------------------------------------------------------------------- */

/* Writes dP and dṖ of (11). */
SA_ONCE void FN(second_dweights)(const sa_backward_block *b, FN(hvp_scratch) * s, const real *value, ptrdiff_t first,
                                 ptrdiff_t n, int nv) {
    const ptrdiff_t Dv = b->g->a->Dv, lanes = nv * SA_LANES, stride = FN(pair_stride)(Dv);
    FN(scratch) *own = &s->j.s;
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->b.rows, own, first, n, nv, end);
    FN(rows_times_lanes)(s->dO, value, stride, end, Dv, s->dS, lanes, own->tile_sum, &own->ahead, nv);
    FN(rows_times_lanes)(s->dO + Dv * lanes, value, stride, end, 2 * Dv, s->dS_tangent, lanes, own->tile_sum,
                         &own->ahead, nv);
    sa_fetch_rest(&own->ahead);
}

SA_ONCE void FN(second_tile)(const sa_backward_block *b, FN(hvp_scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const sa_attention *a = b->g->a;
    FN(scratch) *own = &s->j.s;
    const size_t bytes = (size_t)(n * nv * SA_LANES) * sizeof(real);
    bool masked = false;
    sa_plan_tile(&b->b, &own->ahead, &b->b.value, a->Dv, first);
    sa_plan_tile(&b->b, &own->ahead, &b->b.key, a->E, first + n);
    if (!FN(score_pairs)(&b->b, &s->j, first, n, nv, SA_SCORES_ALONE, &masked)) {
        return;
    }
    if (s->x_tangent) {
        memcpy(s->x_tangent, s->j.T, bytes);
    }
    FN(finish_tangents)(&b->b, &s->j, first, n, nv);
    const real *value = FN(pair_rows)(&b->b, &b->b.value, &b->b.value_tangent, &s->j.values, first, n, a->Dv);
    const bool careful = masked && !(s->finite && FN(rows_finite)(own->k, own->k_stride, n, 2 * a->E) &&
                                     FN(rows_finite)(value, FN(pair_stride)(a->Dv), n, 2 * a->Dv));
    FN(weights_tile)(&b->b, own, first, n, nv, masked, !careful);
    memcpy(s->marks, own->P, bytes);
    if (s->kept) {
        memcpy(s->kept, own->P, bytes);
        FN(drop)(a, own, s->kept, first, n, nv);
    }
    FN(second_dweights)(b, s, value, first, n, nv);
    FN(pass_second)(s, n, nv);
    if (b->with_mask) {
        FN(add_dmask)(b, s->dS, first, n, nv, 0);
        FN(add_dmask)(b, s->dS_tangent, first, n, nv, b->dmask_tangent);
    }
    if (b->mask_only) {
        return;
    }
    if (b->g->dslope_rows.m.data) {
        FN(pass_second_dslope)(s, n, nv);
    }
    if (b->g->doffset_bias.m.data) {
        FN(add_diagonals)(b, s->dS, first, n, nv, 0);
        FN(add_diagonals)(b, s->dS_tangent, first, n, nv, b->diagonal_tangent);
    }
    if (s->x_tangent) {
        FN(pass_second_gain)(s, n, nv, (real)a->softcap);
    }
    if (careful) {
        FN(second_products_careful)(b, s, first, n, nv * SA_LANES);
    } else {
        FN(second_products)(b, s, first, n, nv);
    }
}

/* ---- the table's entries ----------------------------------------------------------------------------------------- */

SA_KERNEL size_t FN(hvp_scratch_bytes)(const sa_attention_gradients *g) {
    FN(hvp_scratch) s;
    return FN(lay_out_hvp)(g->a, SA_NOWHERE, &s);
}

/* Writes (12), the sink's gradient −w·δ with w = 2^(sink − m)/l, whose tangent is −w·((sink's tangent − r)·δ + δ̇), and
 * the part −z·Σ_j dS_ij = −z·(dlse + w·δ) of the slope's. */
SA_KERNEL void FN(attention_hvp_delta)(const sa_backward_block *b, void *scratch) {
    const sa_attention_gradients *g = b->g;
    const sa_attention *a = g->a;
    const sa_rows *rows = b->b.rows;
    const ptrdiff_t Dv = a->Dv;
    const sa_matrix *const from[4] = {&a->out.m, &a->out.m, &g->grad_out.m, &g->grad_out_tangent.m};
    FN(hvp_scratch) layout, *s = &layout;
    FN(lay_out_hvp)(a, scratch, s);
    for (int r = 0; r < rows->count; ++r) {
        const real *stats = (const void *)rows->stats[r];
        const char *const row[4] = {rows->out[r], rows->out[r] + a->out_tangent, b->grads->grad_out[r],
                                    b->grads->grad_out_tangent[r]};
        real *delta = (void *)b->grads->delta[r], dlse[2] = {0, 0}, *x[4]; /* O, Ȯ, dO, dȮ */
        delta[0] = delta[1] = 0;
        if (stats[1] == 0) {
            continue;
        }
        for (int i = 0; i < 4; ++i) {
            x[i] = s->dO + (size_t)i * FN(round_up)(Dv);
            memset(x[i], 0, (size_t)Dv * sizeof(real));
            if (row[i]) {
                FN(load_row)(x[i], row[i], from[i]->col_stride, Dv, from[i]->dtype, from[i]->swapped);
            }
        }
        if (b->grads->grad_lse[r]) {
            FN(load_row)(dlse, b->grads->grad_lse[r], 0, 1, g->grad_lse.m.dtype, g->grad_lse.m.swapped);
        }
        if (b->grads->grad_lse_tangent[r]) {
            const sa_matrix *m = &g->grad_lse_tangent.m;
            FN(load_row)(dlse + 1, b->grads->grad_lse_tangent[r], 0, 1, m->dtype, m->swapped);
        }
        delta[0] = FN(dot)(x[0], x[2], Dv) - dlse[0];
        delta[1] = FN(dot)(x[0], x[3], Dv) + FN(dot)(x[1], x[2], Dv) - dlse[1];
        real of_sink[2] = {0, 0}; /* w·δ and its tangent */
        if (a->sinks.m.data && rows->sink[r] != -INFINITY) {
            real weight[SA_LANES];
            const real tangent = a->sink_tangent.m.data ? (real)rows->sink_tangent[r] : 0;
            V(store)(weight, FN(exp2)(V(set1)(FN(in_log2)(rows->sink[r]) - stats[0])) * V(set1)(stats[1]));
            of_sink[0] = weight[0] * delta[0];
            of_sink[1] = weight[0] * ((tangent - stats[2]) * delta[0] + delta[1]);
        }
        for (int which = 0; which < 2; ++which) {
            if (g->dsink_rows.m.data) {
                ((real *)(void *)b->grads->dsink[r])[which] = -of_sink[which];
            }
            if (g->dslope_rows.m.data) {
                ((real *)(void *)b->grads->dslope[r])[which] = -stats[3] * (dlse[which] + of_sink[which]);
            }
        }
    }
}

SA_KERNEL void FN(attention_hvp)(const sa_backward_block *b, void *scratch) {
    FN(hvp_scratch) layout, *s = &layout;
    const int nv = SA_CEIL_DIV(b->b.rows->count, SA_LANES);
    FN(lay_out_hvp)(b->g->a, scratch, s);
    FN(forget_pairs)(&b->b, &s->j);
    FN(start_hvp)(b, s, nv);
    SA_EACH_KEY_TILE(&b->b, first, n) {
        FN(second_tile)(b, s, first, n, nv);
    }
    if (b->mask_only) {
        return;
    }
    if (b->g->dquery.m.data) {
        FN(add_dquery)(b, s->dqT, 0, nv);
        FN(add_dquery)(b, s->dqT + b->g->a->E * nv * SA_LANES, b->g->dquery_tangent, nv);
    }
    for (int r = 0; b->g->dslope_rows.m.data && r < b->b.rows->count; ++r) {
        real *to = (void *)b->grads->dslope[r];
        to[0] += s->slope[r];
        to[1] += s->slope_tangent[r];
    }
}
