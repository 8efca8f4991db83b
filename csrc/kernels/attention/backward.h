/* The backward pass over a block: rows of one key head against its keys begin … end − 1 (docs/theory/backward.md). With
 * P = 2^(s − m)/l, from the saved m and 1/l:
 *
 *     dV_j += P_ij·dO_i                      (1)      δ_i = O_i·dO_i − dlse_i        (4)
 *     dP_ij = V_j·dO_i                       (2)      dS_ij = P_ij·(dP_ij − δ_i)     (5)
 *     dQ_i += scale·dS_ij·K_j                (3)      dK_j += scale·dS_ij·Q_i        (6)
 *
 * In the code P does not have the factor 1/l: the copies of dO and δ have it, so dS is as written. P and dS are
 * [keys][queries]. The array dS holds dP first. forward.h explains s->s.unit.
 *
 * Closed pairs add to no product: their P and dS are set to 0. Where that 0 would meet NaN or infinity, the tile's
 * products are computed pair by pair.
 * Comes after kernels/attention/forward.h. */
#include "kernels/kernels.h"

typedef struct {
    FN(scratch) s;     /* its O holds dOᵀ[Dv][nv·lanes] */
    real *q_rows;      /* Q [W][E rounded up], times scale */
    real *do_rows;     /* dO [W][Dv rounded up], times 1/l and 1/(1 − p) */
    real *dqT;         /* [E rounded up + lanes][nv·lanes] */
    real *dS;          /* [keys][nv·lanes] */
    real *kept;        /* [keys][nv·lanes]: P after dropout, or NULL */
    FN(per_row) delta; /* δ/l */
    FN(per_row) x, y, z;
    bool finite;           /* Q and dO are finite */
    bool copied;           /* q_rows, do_rows and dOᵀ hold this block's rows */
    bool delta_fits;       /* |δ| ≤ SA_REAL_MAX/2, so dP − δ overflows only if dP is as large */
    FN(factored) factored; /* the rows of Q and dO with their factors */
    FN(gradient_state) gradients;
} FN(gradient_scratch);

SA_ONCE size_t FN(lay_out_backward)(const sa_attention_gradients *g, char *base, FN(gradient_scratch) * s,
                                    const FN(unit) * unit) {
    const sa_attention *a = g->a;
    const size_t W = FN(backward_rows), E = FN(round_up)(a->E), Dv = FN(round_up)(a->Dv);
    const bool in_cells = unit && unit->take(a);
    const size_t tile = FN(round_up)(a->S < SA_KEYS_PER_TILE && !in_cells ? a->S : SA_KEYS_PER_TILE) * W;
    size_t used = FN(lay_out)(a, base, &s->s, FN(backward_rows), unit);
    SA_TAKE(q_rows, real, W * E);
    SA_TAKE(do_rows, real, W * Dv);
    SA_TAKE(dqT, real, (E + SA_LANES) * W);
    SA_TAKE(dS, real, tile);
    s->kept = NULL;
    if (a->dropout_p > 0) {
        SA_TAKE(kept, real, tile);
    }
    if (a->softcap > 0) {
        SA_TAKE(s.gain, real, tile);
    }
    s->gradients.fit = false;
    return unit ? unit->lay_out_gradients(g, base, used, &s->gradients) : used;
}

#include "kernels/attention/mask_gradient.h"

/* ---- the rows of a block ----------------------------------------------------------------------------------------- */

/* dst[r][n rounded up] = factor[r]·src[r], padded with zeros. A factor of 0 makes zeros even of NaN.
 * True if all is finite. */
SA_ONCE bool FN(copy_rows)(const char *const *src, const sa_matrix *m, int count, ptrdiff_t n, const real *factor,
                           real *dst) {
    const size_t stride = FN(round_up)(n);
    const bool direct = FN(is_native)(m);
    vec check = V(set1)(0);
    for (int r = 0; r < count; ++r) {
        real *to = dst + (size_t)r * stride;
        if (factor[r] == 0) {
            memset(to, 0, stride * sizeof(real));
            continue;
        }
        const real *from = (const void *)src[r];
        if (!direct || (uintptr_t)from % sizeof(real) != 0) {
            FN(load_row)(to, src[r], m->col_stride, n, m->dtype, m->swapped);
            from = to;
        }
        const vec f = V(set1)(factor[r]);
        for (ptrdiff_t i = 0; i < n; i += SA_LANES) {
            const vec x = f * FN(load_up_to)(from + i, n - i);
            V(store)(to + i, x);
            check = check + (x - x);
        }
    }
    return FN(is_finite)(check);
}

/* Transposes x[count][width rounded up] to xT[width][nv·lanes]; other lanes are 0. */
SA_ONCE void FN(transpose_rows)(const real *x, int count, ptrdiff_t width, real *xT, int nv) {
    const ptrdiff_t stride = (ptrdiff_t)FN(round_up)(width);
    for (int v = 0; v < nv; ++v) {
        for (ptrdiff_t d = 0; d < width; d += SA_LANES) {
            vec t[SA_LANES];
            FN(load_transposed)(x + v * SA_LANES * stride + d, stride, count - v * SA_LANES, SA_LANES, t);
            for (int i = 0; i < SA_LANES && d + i < width; ++i) {
                V(store)(xT + ((d + i) * nv + v) * SA_LANES, t[i]);
            }
        }
    }
}

/* Copies Q and dO for multiply-adds. True if both are finite. */
SA_ONCE bool FN(copy_block)(const sa_backward_block *b, FN(gradient_scratch) * s, int nv) {
    const sa_attention *a = b->g->a;
    const sa_rows *rows = b->b.rows;
    s->copied = true;
    bool finite = FN(copy_rows)(rows->query, &a->query.m, rows->count, a->E, s->factored.query_factor, s->q_rows);
    finite &=
        FN(copy_rows)(b->grads->grad_out, &b->g->grad_out.m, rows->count, a->Dv, s->factored.grad_factor, s->do_rows);
    FN(transpose_rows)(s->do_rows, rows->count, a->Dv, s->s.O, nv);
    return finite;
}

SA_ONCE void FN(start_block)(const sa_backward_block *b, FN(gradient_scratch) * s, int nv) {
    const sa_attention *a = b->g->a;
    const sa_rows *rows = b->b.rows;
    const real keep = (real)(a->dropout_p > 0 && a->dropout_p < 1 ? 1 / (1 - a->dropout_p) : 1);
    s->s.scaled = s->copied = false;
    s->delta_fits = true;
    if (s->s.wide.terms) {
        s->s.unit->copy_queries(&b->b, &s->s, nv);
    }
    FN(start_rows)(&b->b, &s->s, nv);
    for (int r = 0; r < nv * SA_LANES; ++r) {
        s->s.maximum[r] = s->s.tile_sum[r] = s->delta[r] = 0;
        s->x[r] = s->y[r] = s->z[r] = 0;
        if (r < rows->count) {
            const real *stats = (const void *)rows->stats[r];
            s->s.maximum[r] = stats[0];
            s->delta[r] = *(const real *)(const void *)b->grads->delta[r] * stats[1];
            s->delta_fits &= s->delta[r] >= -SA_REAL_MAX / 2 && s->delta[r] <= SA_REAL_MAX / 2;
            s->factored.grad_factor[r] = stats[1] * keep;
            s->factored.query_factor[r] = (real)a->scale;
        }
    }
    memset(s->dqT, 0, (FN(round_up)(a->E) + SA_LANES) * (size_t)nv * SA_LANES * sizeof(real));
    if (s->s.wide.terms) {
        s->s.unit->copy_gradients(b, &s->s, &s->gradients, &s->factored, s->q_rows, s->do_rows, nv);
    }
    s->finite = s->gradients.fit || FN(copy_block)(b, s, nv);
}

/* ---- passes over a tile ------------------------------------------------------------------------------------------ */

/* The weights P after dropout. */
SA_INLINE real *FN(weights_of_values)(const FN(gradient_scratch) * s) { return s->kept ? s->kept : s->s.P; }

/* True if the gradient of slopes or of offset_bias is wanted. */
SA_INLINE bool FN(sums_dscores)(const sa_backward_block *b) {
    return b->g->dslope_rows.m.data || b->g->doffset_bias.m.data;
}

/* True if a gradient other than dV is wanted. */
SA_INLINE bool FN(wants_dscores)(const sa_backward_block *b) {
    return b->g->dquery.m.data || b->dkey || b->with_mask || FN(sums_dscores)(b);
}

/* Replaces scores by 2^(s − m), closed ones by −inf. If all is finite,
 * a score of −inf may count as closed: it adds 0. */
SA_ONCE void FN(weights_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool masked,
                              bool finite) {
    if (!masked) {
        FN(exp_tile)(b, s, first, n, nv);
    } else if (finite) {
        FN(pass_exp_marking)(s->P, n, nv, s->maximum);
    } else {
        FN(exp_careful)(b, s, first, n, nv);
    }
}

/* Replaces scores in P by weights, and dP, which the array dS holds, by dS of (5), in nv vectors of rows of `lanes`. */
SA_INLINE void FN(weigh_any)(real *P, real *dS, ptrdiff_t n, ptrdiff_t lanes, const real *maximum, const real *delta,
                             const int nv) {
    vec m[SA_VECS], d[SA_VECS];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(maximum + v * SA_LANES);
        d[v] = V(load)(delta + v * SA_LANES);
    }
    for (ptrdiff_t j = 0; j < n; ++j) {
        real *p = P + j * lanes, *ds = dS + j * lanes;
        vec e[SA_VECS];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            e[v] = V(load)(p + v * SA_LANES) - m[v];
        }
        FN(exp2_each)(e, nv);
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            V(store)(p + v * SA_LANES, e[v]);
            V(store)(ds + v * SA_LANES, e[v] * (V(load)(ds + v * SA_LANES) - d[v]));
        }
    }
}

#define SA_WEIGH_LEAF(nv)                                                                                              \
    SA_LEAF void FN(weigh_wide##nv)(real * P, real * dS, ptrdiff_t n, ptrdiff_t lanes, const real *maximum,            \
                                    const real *delta) {                                                               \
        FN(weigh_any)(P, dS, n, lanes, maximum, delta, nv);                                                            \
    }
SA_LEAVES(SA_WEIGH_LEAF)
#undef SA_WEIGH_LEAF

SA_ONCE void FN(pass_weigh)(FN(gradient_scratch) * s, ptrdiff_t n, int nv) {
    for (int v = 0, now = SA_AT_ONCE(nv); v < nv; v += now, now = SA_SMALLER(nv - v, now)) {
        const ptrdiff_t at = v * SA_LANES;
        SA_CALL_LEAF(weigh_wide, now, s->s.P + at, s->dS + at, n, nv * SA_LANES, s->s.maximum + at, s->delta + at)
    }
}

/* Replaces dP, which the array dS holds, by dS of (5). dP counts as 0 where dropout has zeroed the weight. Closed pairs
 * become 0; with `marks` they stay −inf in P and `kept`. */
SA_ONCE void FN(pass_dscores)(FN(gradient_scratch) * s, ptrdiff_t n, int nv, bool masked, bool marks) {
    const vec zero = V(set1)(0);
    for (int v = 0; v < nv; ++v) {
        const vec delta = V(load)(s->delta + v * SA_LANES);
        for (ptrdiff_t j = 0; j < n; ++j) {
            const ptrdiff_t at = (j * nv + v) * SA_LANES;
            const vec p = V(load)(s->s.P + at);
            vec dp = V(load)(s->dS + at);
            if (s->kept) {
                dp = V(select)(V(eq)(V(load)(s->kept + at), zero), zero, dp);
            }
            vec ds = p * (dp - delta);
            if (masked) {
                const lanemask closed = V(lt)(p, zero);
                ds = V(select)(closed, zero, ds);
                if (!marks) {
                    V(store)(s->s.P + at, V(select)(closed, zero, p));
                    if (s->kept) {
                        V(store)(s->kept + at, V(select)(closed, zero, V(load)(s->kept + at)));
                    }
                }
            }
            V(store)(s->dS + at, ds);
        }
    }
}

/* Adds the tile's terms of dslope to x, y and z. Positions are relative to the tile. */
SA_ONCE void FN(pass_dslope)(FN(gradient_scratch) * s, ptrdiff_t n, int nv) {
    const vec zero = V(set1)(0);
    for (int v = 0; v < nv; ++v) {
        const vec position = V(load)(s->s.position + v * SA_LANES);
        vec x = zero, y = zero, z = zero;
        for (ptrdiff_t j = 0; j < n; ++j) {
            const ptrdiff_t at = (j * nv + v) * SA_LANES;
            const vec ds = V(load)(s->dS + at), distance = V(abs)(position - V(set1)((real)j));
            x = V(fma)(ds, distance, x);
            y = y + ds;
            z = V(fma)(V(max)(V(load)(s->s.P + at), zero), distance, z); /* P may be −inf, the mark of a closed pair */
        }
        const ptrdiff_t at = v * SA_LANES;
        V(store)(s->x + at, V(load)(s->x + at) - x);
        V(store)(s->y + at, V(load)(s->y + at) - y);
        V(store)(s->z + at, V(load)(s->z + at) + z);
    }
}

SA_ONCE bool FN(rows_finite)(const real *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width) {
    const vec zero = V(set1)(0);
    vec check = zero;
    for (ptrdiff_t r = 0; r < n; ++r) {
        vec row = zero;
        for (ptrdiff_t i = 0; i < width; i += SA_LANES) {
            const real *from = x + r * stride + i;
            row = V(fma)(FN(load_up_to)(from, width - i), zero, row);
        }
        check = check + row;
    }
    return FN(is_finite)(check);
}

/* (1), (3) and (6) over open pairs, from the tile's key `done` on. Closed pairs are marked by −inf. */
SA_ONCE void FN(products_careful)(const sa_backward_block *b, FN(gradient_scratch) * s, ptrdiff_t first, ptrdiff_t done,
                                  ptrdiff_t n, ptrdiff_t lanes) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t E = a->E, Dv = a->Dv;
    const real *P = FN(weights_of_values)(s);
    const ptrdiff_t at_key = first - b->first_key;
    real *dkey = (void *)b->dkey, *dvalue = (void *)b->dvalue;
    for (ptrdiff_t j = done; j < n; ++j) {
        for (int r = 0; r < b->b.rows->count; ++r) {
            const real p = P[j * lanes + r], ds = s->dS[j * lanes + r];
            if (p < 0) {
                continue;
            }
            const real *q_r = s->q_rows + (size_t)r * FN(round_up)(E),
                       *do_r = s->do_rows + (size_t)r * FN(round_up)(Dv);
            for (ptrdiff_t e = 0; e < E; ++e) {
                s->dqT[e * lanes + r] += ds * s->s.k[j * s->s.k_stride + e];
                if (dkey) {
                    dkey[(at_key + j) * b->dkey_stride + e] += ds * q_r[e];
                }
            }
            for (ptrdiff_t d = 0; dvalue && d < Dv; ++d) {
                dvalue[(at_key + j) * b->dvalue_stride + d] += p * do_r[d];
            }
        }
    }
}

/* (1), (3) and (6) without marks. Keys from end[u − 1] to end[u] are closed to the vectors before u (open_ends), so
 * only rows from vector u on use them. */
SA_ONCE void FN(products_plain)(const sa_backward_block *b, FN(gradient_scratch) * s, ptrdiff_t first, ptrdiff_t done,
                                ptrdiff_t n, int nv) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t E = a->E, Dv = a->Dv, lanes = nv * SA_LANES;
    const ptrdiff_t q_stride = (ptrdiff_t)FN(round_up)(E), do_stride = (ptrdiff_t)FN(round_up)(Dv);
    const real *P = FN(weights_of_values)(s);
    const ptrdiff_t at_key = first - b->first_key;
    real *dkey = (void *)b->dkey, *dvalue = (void *)b->dvalue;
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->b.rows, &s->s, first + done, n - done, nv, end);
    for (ptrdiff_t u = 0, from = 0; u < nv; ++u) {
        const ptrdiff_t keys = end[u] - from, j = done + from;
        const ptrdiff_t row = u * SA_LANES, rows = b->b.rows->count - row, at = j * lanes + row;
        if (keys <= 0) {
            continue;
        }
        if (dvalue) {
            real *to = dvalue + (at_key + j) * b->dvalue_stride;
            FN(outer)(P + at, lanes, s->do_rows + row * do_stride, do_stride, rows, keys, to, b->dvalue_stride, to,
                      b->dvalue_stride, Dv);
        }
        if (dkey) {
            real *to = dkey + (at_key + j) * b->dkey_stride;
            FN(outer)(s->dS + at, lanes, s->q_rows + row * q_stride, q_stride, rows, keys, to, b->dkey_stride, to,
                      b->dkey_stride, E);
        }
        from = end[u];
    }
    if (b->g->dquery.m.data) {
        FN(columns_times_lanes)(s->dS + done * lanes, s->s.k + done * s->s.k_stride, s->s.k_stride, end, E, s->dqT,
                                lanes, s->s.ones, &s->s.ahead, nv);
    }
}

/* ---- the phases of a tile ---------------------------------------------------------------------------------------- */

/* Lets the unit compute weights, dS and gradients together, if only these and the mask's gradient need dS. Returns how
 * many keys are done; the others still have scores in P and dP in dS. */
SA_ONCE ptrdiff_t FN(gradients_at_once)(const sa_backward_block *b, FN(gradient_scratch) * s, ptrdiff_t first,
                                        ptrdiff_t n, int nv, bool masked) {
    const FN(unit) *unit = s->s.unit;
    const bool keeps = b->with_mask;
    if ((keeps && !unit->replace_rows) || (masked && !s->delta_fits) || s->kept || b->mask_only ||
        FN(sums_dscores)(b) || s->s.gain) {
        return 0;
    }
    const ptrdiff_t done = unit->gradients(b, &s->s, &s->gradients, s->s.P, s->dS, s->delta, s->dqT, first, 0, n, nv,
                                           SA_HOLDS_SCORES, keeps ? SA_KEEPS_DS : SA_MAY_LOSE_DS);
    if (done == n) {
        sa_fetch_rest(&s->s.ahead);
    }
    if (keeps && done == n) {
        FN(add_dmask)(b, s->dS, first, n, nv, 0);
    } else if (keeps) { /* dS does not hold dP any more */
        unit->dweights(&b->b, &s->s, &s->gradients, first, n, s->dS, nv);
    }
    return done;
}

/* Replaces scores in P by weights, and dP in dS by dS; `kept` gets the weights after dropout. True if products must go
 * pair by pair, as a closed pair's 0 could meet NaN or infinity. */
SA_ONCE bool FN(dscores_tile)(const sa_backward_block *b, FN(gradient_scratch) * s, ptrdiff_t first, ptrdiff_t n,
                              int nv, bool masked, bool wants_dp) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t lanes = nv * SA_LANES;
    const FN(unit) *unit = s->s.wide.terms ? s->s.unit : NULL;
    const bool keys_elsewhere = unit && unit->tile_keys && unit->tile_keys(&b->b, &s->s, &s->gradients, first);
    if (!keys_elsewhere) {
        s->s.k = FN(tile_rows)(&b->b, &b->b.key, &s->s.key, first, n, a->E, &s->s.k_stride);
    }
    const real *value = NULL;
    ptrdiff_t v_stride = 0;
    if (wants_dp) { /* otherwise the unit has read the values, so they are finite */
        value = FN(tile_rows)(&b->b, &b->b.value, &s->s.value, first, n, a->Dv, &v_stride);
    }
    const bool careful = masked && !(s->finite && (keys_elsewhere || FN(rows_finite)(s->s.k, s->s.k_stride, n, a->E)));
    const bool plain = FN(wants_dscores)(b) && !masked && !s->kept;
    if (!plain) {
        FN(weights_tile)(&b->b, &s->s, first, n, nv, masked,
                         masked && !careful && s->delta_fits &&
                             (value == NULL || FN(rows_finite)(value, v_stride, n, a->Dv)));
    }
    if (s->kept) {
        memcpy(s->kept, s->s.P, (size_t)(n * lanes) * sizeof(real));
        FN(drop)(a, &s->s, s->kept, first, n, nv);
    }
    if (!s->copied && (wants_dp || careful)) {
        FN(copy_block)(b, s, nv);
    }
    if (wants_dp) {
        ptrdiff_t end[SA_BACKWARD_VECS];
        FN(open_ends)(b->b.rows, &s->s, first, n, nv, end);
        FN(rows_times_lanes)(s->s.O, value, v_stride, end, a->Dv, s->dS, lanes, s->s.tile_sum, &s->s.ahead, nv);
    }
    sa_fetch_rest(&s->s.ahead);
    if (plain) {
        FN(pass_weigh)(s, n, nv);
    } else {
        FN(pass_dscores)(s, n, nv, masked, careful);
    }
    return careful;
}

/* Multiplies dS by softcap's derivative, which may be NaN for closed pairs. */
SA_ONCE void FN(pass_gain)(FN(gradient_scratch) * s, ptrdiff_t n, int nv) {
    const vec zero = V(set1)(0);
    for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
        const vec ds = V(load)(s->dS + i);
        V(store)(s->dS + i, V(select)(V(eq)(ds, zero), ds, ds * V(load)(s->s.gain + i)));
    }
}

/* (1), (3) and (6): pair by pair if careful, otherwise by the unit as long as it can represent the numbers. */
SA_ONCE void FN(backward_products)(const sa_backward_block *b, FN(gradient_scratch) * s, ptrdiff_t first,
                                   ptrdiff_t done, ptrdiff_t n, int nv, bool careful) {
    if (careful) {
        FN(products_careful)(b, s, first, done, n, nv * SA_LANES);
        return;
    }
    real *P = FN(weights_of_values)(s);
    if (s->s.wide.terms) {
        done = s->s.unit->gradients(b, &s->s, &s->gradients, P, s->dS, s->delta, s->dqT, first, done, n, nv,
                                    SA_HOLDS_WEIGHTS, SA_MAY_LOSE_DS);
    }
    if (done < n) {
        if (!s->copied) {
            FN(copy_block)(b, s, nv);
        }
        FN(products_plain)(b, s, first, done, n, nv);
    }
}

SA_ONCE void FN(backward_tile)(const sa_backward_block *b, FN(gradient_scratch) * s, ptrdiff_t first, ptrdiff_t n,
                               int nv) {
    const sa_attention *a = b->g->a;
    bool masked = false;
    sa_plan_tile(&b->b, &s->s.ahead, &b->b.value, a->Dv, first);
    sa_plan_tile(&b->b, &s->s.ahead, &b->b.key, a->E, first + n);
    if (!FN(score_tile)(&b->b, &s->s, first, n, nv, SA_NOT_DECODED, SA_SCORES_ALONE, &masked)) {
        return;
    }
    if (b->with_mask && b->grads->dmask[0]) {
        const sa_matrix *dmask = &b->g->dmask.m;
        sa_plan_mask_fetch((const char *const *)b->grads->dmask, b->b.rows->count, &s->s.ahead, dmask,
                           (first - b->dmask_key) * dmask->col_stride, n);
        FN(spread_ahead)(&s->s, n);
    }
    const bool dscores = FN(wants_dscores)(b);
    if (!dscores) { /* dV needs no dP, but the unit splits dS, so it must be finite */
        memset(s->dS, 0, (size_t)(n * nv * SA_LANES) * sizeof(real));
    }
    const bool has_dp =
        dscores && s->s.wide.terms && s->s.unit->dweights(&b->b, &s->s, &s->gradients, first, n, s->dS, nv);
    const ptrdiff_t done = has_dp ? FN(gradients_at_once)(b, s, first, n, nv, masked) : 0;
    if (done == n) {
        return;
    }
    const bool careful = FN(dscores_tile)(b, s, first, n, nv, masked, dscores && !has_dp);
    if (b->with_mask) {
        FN(add_dmask)(b, s->dS, first, n, nv, 0);
    }
    if (b->mask_only) {
        return;
    }
    if (b->g->dslope_rows.m.data) {
        FN(pass_dslope)(s, n, nv);
    }
    if (b->g->doffset_bias.m.data) {
        FN(add_diagonals)(b, s->dS, first, n, nv, 0);
    }
    if (s->s.gain) {
        FN(pass_gain)(s, n, nv);
    }
    FN(backward_products)(b, s, first, done, n, nv, careful);
}

/* dQ += scale·dqT, in an array that begins `bytes` after dQ. */
SA_ONCE void FN(add_dquery)(const sa_backward_block *b, const real *dqT, ptrdiff_t bytes, int nv) {
    const ptrdiff_t E = b->g->a->E;
    const vec scale = V(set1)((real)b->g->a->scale);
    for (int v = 0; v < nv; ++v) {
        for (ptrdiff_t e = 0; e < E; e += SA_LANES) {
            vec t[SA_LANES];
            FN(load_transposed)(dqT + (e * nv + v) * SA_LANES, nv * SA_LANES, E - e, SA_LANES, t);
            for (int i = 0; i < SA_LANES && v * SA_LANES + i < b->b.rows->count; ++i) {
                real *to = (real *)(void *)(b->grads->dquery[v * SA_LANES + i] + bytes) + e;
                FN(store_up_to)(to, V(fma)(scale, t[i], FN(load_up_to)(to, E - e)), E - e);
            }
        }
    }
}

SA_ONCE void FN(backward_block)(const sa_backward_block *b, FN(gradient_scratch) * s, int nv) {
    FN(start_block)(b, s, nv);
    SA_EACH_KEY_TILE(&b->b, first, n) {
        FN(backward_tile)(b, s, first, n, nv);
    }
    if (b->mask_only) {
        return;
    }
    if (b->g->dquery.m.data) {
        FN(add_dquery)(b, s->dqT, 0, nv);
    }
    for (int r = 0; b->g->dslope_rows.m.data && r < b->b.rows->count; ++r) {
        real *to = (void *)b->grads->dslope[r];
        to[0] += s->x[r];
        to[1] += s->y[r];
        to[2] += s->z[r] * ((const real *)(const void *)b->b.rows->stats[r])[1];
    }
}

SA_SHARED size_t FN(gradient_bytes)(const sa_attention_gradients *g, const FN(unit) * unit) {
    FN(gradient_scratch) s;
    return FN(lay_out_backward)(g, SA_NOWHERE, &s, unit);
}

SA_SHARED void FN(gradient_block)(const sa_backward_block *given, void *scratch, const FN(unit) * unit) {
    FN(gradient_scratch) s;
    FN(lay_out_backward)(given->g, scratch, &s, unit);
    FN(forget_copies)(&given->b, &s.s);
    if (unit) {
        unit->start(&given->b, &s.s.wide);
        unit->start_gradients(&given->b, &s.gradients);
    }
    sa_backward_block own = *given, *b = &own;
    sa_block aligned;
    b->b = *FN(begin_at_cell)(&given->b, &s.s.wide, &aligned);
    FN(backward_block)(b, &s, SA_CEIL_DIV(b->b.rows->count, SA_LANES));
    if (s.s.wide.terms) {
        unit->end();
    }
}

/* ---- δ of every row, (4), and the row's share of the gradients of sinks and slopes ------------------------------- */

/* Σ x[i]·y[i]. Terms with x[i] = 0 are skipped: 0·inf and 0·NaN add nothing.
 * Eight sums of fewer terms have a smaller error. */
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

/* With a 16-bit output all keys of a row would have the same error in δ, and dQ and dK would add it up. So δ is then
 * Σ_j P_ij·dP_ij, unless the unit rounds weights too. */
SA_INLINE bool FN(delta_is_summed)(const sa_attention *a, const FN(unit) * unit) {
    return !SA_REAL_IS_F64 && (a->out.m.dtype == SA_F16 || a->out.m.dtype == SA_BF16) && !(unit && unit->take(a));
}

/* Writes Σ_j P_ij·dP_ij over each row's open pairs to s->x. */
SA_ONCE void FN(sum_delta)(const sa_backward_block *b, FN(gradient_scratch) * s, int nv) {
    const sa_attention *a = b->g->a;
    const vec zero = V(set1)(0);
    for (int r = 0; r < b->b.rows->count; ++r) {
        *(real *)(void *)b->grads->delta[r] = 0;
    }
    FN(start_block)(b, s, nv);
    const bool known_finite = false;
    ptrdiff_t look_at = b->b.begin + SA_ELEMENTS_AT_ONCE / (a->E + a->Dv + 1);
    SA_EACH_KEY_TILE(&b->b, first, n) {
        if (first >= look_at) {
            if (b->cancelled(a)) {
                return;
            }
            look_at = first + SA_ELEMENTS_AT_ONCE / (a->E + a->Dv + 1);
        }
        bool masked = false;
        ptrdiff_t v_stride, end[SA_BACKWARD_VECS];
        if (!FN(score_tile)(&b->b, &s->s, first, n, nv, SA_NOT_DECODED, SA_SCORES_ALONE, &masked)) {
            continue;
        }
        FN(weights_tile)(&b->b, &s->s, first, n, nv, masked, known_finite);
        if (a->dropout_p > 0) {
            FN(drop)(a, &s->s, s->s.P, first, n, nv);
        }
        const real *value = FN(tile_rows)(&b->b, &b->b.value, &s->s.value, first, n, a->Dv, &v_stride);
        FN(open_ends)(b->b.rows, &s->s, first, n, nv, end);
        FN(rows_times_lanes)(s->s.O, value, v_stride, end, a->Dv, s->dS, nv * SA_LANES, s->s.tile_sum, &s->s.ahead, nv);
        for (int v = 0; v < nv; ++v) {
            vec sum = zero;
            for (ptrdiff_t j = 0; j < n; ++j) {
                const ptrdiff_t at = (j * nv + v) * SA_LANES;
                const vec p = V(load)(s->s.P + at);
                const lanemask closed = V(lt)(p, zero); /* below 0: an open pair's weight may be 0 */
                sum = V(fma)(V(select)(closed, zero, p), V(select)(closed, zero, V(load)(s->dS + at)), sum);
            }
            real *to = s->x + v * SA_LANES;
            V(store)(to, V(load)(to) + sum);
        }
    }
}

/* Writes δ, the sink's gradient −2^(sink − m)/l·δ, and the value that Σ_j dS_ij should have. */
SA_SHARED void FN(delta_block)(const sa_backward_block *b, void *scratch, const FN(unit) * unit) {
    const sa_attention_gradients *g = b->g;
    const sa_attention *a = g->a;
    const sa_rows *rows = b->b.rows;
    FN(gradient_scratch) layout, *s = &layout;
    FN(lay_out_backward)(g, scratch, s, unit);
    const bool summed = FN(delta_is_summed)(a, unit);
    if (summed) {
        FN(forget_copies)(&b->b, &s->s);
        FN(sum_delta)(b, s, SA_CEIL_DIV(rows->count, SA_LANES));
    }
    const bool in_place = FN(rows_in_place)((const char *const *)rows->out, rows->count, &a->out.m) &&
                          FN(rows_in_place)(b->grads->grad_out, rows->count, &g->grad_out.m);
    for (int r = 0; r < rows->count; ++r) {
        const real *stats = (const void *)rows->stats[r];
        real delta = 0;
        if (stats[1] != 0) { /* a row without open keys has no gradient, whatever dO holds */
            const real *out = (const void *)rows->out[r];
            const real *grad_out = (const void *)b->grads->grad_out[r];
            if (!in_place && !summed) {
                real *more = s->do_rows + FN(round_up)(a->Dv);
                FN(load_row)(s->do_rows, rows->out[r], a->out.m.col_stride, a->Dv, a->out.m.dtype, a->out.m.swapped);
                FN(load_row)(more, b->grads->grad_out[r], g->grad_out.m.col_stride, a->Dv, g->grad_out.m.dtype,
                             g->grad_out.m.swapped);
                out = s->do_rows;
                grad_out = more;
            }
            /* 0 for a row with a sink but no keys */
            delta = summed ? s->x[r] : FN(dot)(out, grad_out, a->Dv);
            real grad_lse = 0, sink_weight = 0;
            if (g->grad_lse.m.data) {
                FN(load_row)(&grad_lse, b->grads->grad_lse[r], 0, 1, g->grad_lse.m.dtype, g->grad_lse.m.swapped);
                delta -= grad_lse;
            }
            if (a->sinks.m.data && rows->sink[r] != -INFINITY) {
                real weight[SA_LANES];
                V(store)(weight, FN(exp2)(V(set1)(FN(in_log2)(rows->sink[r]) - stats[0])));
                sink_weight = weight[0] * stats[1];
            }
            if (g->dsink_rows.m.data) {
                *(real *)(void *)b->grads->dsink[r] = rows->sink[r] == -INFINITY ? 0 : -sink_weight * delta;
            }
            if (g->dslope_rows.m.data) {
                ((real *)(void *)b->grads->dslope[r])[1] = grad_lse + sink_weight * delta;
            }
        }
        *(real *)(void *)b->grads->delta[r] = delta;
    }
}
