/* Forward mode of attention over a block (docs/theory/second_derivatives.md). A dot means a tangent. With scores s that
 * are not in log2 units, and weights P = exp(s)/l, where l has the sink's term too, in one pass over the keys:
 *
 *     ṡ_ij = gain_ij·scale·(Q̇_i·K_j + Q_i·K̇_j) + tangents of slopes, masks and biases      (7)
 *     r_i  = Σ_j P_ij·ṡ_ij                                          the tangent of lse    (8)
 *     Ȯ_i  = Σ_j P_ij·(ṡ_ij·V_j + V̇_j) − r_i·O_i                                          (9)
 *
 * gain is the derivative of softcap. A tile's keys and values are copied with their tangents after them, so that one
 * product computes V and V̇ times P. The products are multiply-adds on each instruction set.
 *
 * Closed pairs have P = 0 and P·ṡ = 0. Where that 0 would meet NaN or infinity, the block is computed again, and closed
 * pairs are skipped.
 * Comes after kernels/attention/backward.h. */

/* A thread's scratch. W is the most rows of a block. */
typedef struct {
    FN(scratch) s;           /* its q holds Q, Q̇ and Q again [3·E][nv·lanes], its O holds O and Ȯ [2·Dv][nv·lanes] */
    FN(copies) keys, values; /* rows of pair_stride numbers */
    real *q_rows, *q_tangent_rows; /* Q and Q̇ times scale [W][E rounded up] */
    real *T;                       /* [keys][nv·lanes]: ṡ, then P·ṡ */
    real *rows;                    /* [SA_LANES][keys]: tangents of a mask */
    FN(per_row) r, z;              /* Σ_j of P·ṡ, and with ALiBi of P·|i + o − j|, without the factor 1/l */
    FN(per_row) slope_tangent;
} FN(jvp_scratch);

/* Numbers and tangents of a row, and a vector more, as rows of a power of two use too few sets of the caches. */
SA_INLINE ptrdiff_t FN(pair_stride)(ptrdiff_t width) { return (ptrdiff_t)FN(round_up)(2 * width) + SA_LANES; }

/* Lays out copies of keys or values: as many tiles as may be kept, and one more. */
SA_ONCE size_t FN(lay_out_pairs)(FN(copies) * s, ptrdiff_t S, ptrdiff_t width, char *base, size_t used) {
    const size_t tile = (size_t)FN(pair_stride)(width) * SA_KEYS_PER_TILE,
                 tiles = SA_CEIL_DIV((size_t)S, SA_KEYS_PER_TILE);
    const size_t most = SA_COPIED_BYTES / 2 / (tile * sizeof(real)), kept = SA_SMALLER(tiles, most);
    s->room = (ptrdiff_t)(kept * SA_KEYS_PER_TILE);
    SA_TAKE(rows, real, (kept + 1) * tile);
    SA_TAKE(filled, unsigned char, kept);
    return used;
}

SA_ONCE size_t FN(lay_out_jvp)(const sa_attention *a, char *base, FN(jvp_scratch) * s) {
    const size_t W = FN(backward_rows), E = FN(round_up)(a->E), tile = SA_KEYS_PER_TILE * W;
    size_t used = FN(lay_out)(a, base, &s->s, W, NULL);
    used = FN(lay_out_pairs)(&s->keys, a->S, a->E, base, used);
    used = FN(lay_out_pairs)(&s->values, a->S, a->Dv, base, used);
    SA_TAKE(s.q, real, 3 * E * W);
    SA_TAKE(s.O, real, 2 * FN(round_up)(a->Dv) * W);
    SA_TAKE(q_rows, real, E * W);
    SA_TAKE(q_tangent_rows, real, E * W);
    SA_TAKE(T, real, tile);
    SA_TAKE(rows, real, SA_KEYS_PER_TILE * SA_LANES);
    if (a->softcap > 0) {
        SA_TAKE(s.gain, real, tile);
    }
    s->s.holds_tanh = true;
    return used;
}

SA_ONCE void FN(forget_pairs)(const sa_block *b, FN(jvp_scratch) * s) {
    if (!b->holds_copies) {
        FN(forget_tiles)(&s->keys);
        FN(forget_tiles)(&s->values);
    }
}

/* ---- rows with their tangents ------------------------------------------------------------------------------------ */

SA_ONCE void FN(copy_pairs)(real *to, const sa_matrix *m, const sa_matrix *tangent, ptrdiff_t first, ptrdiff_t n,
                            ptrdiff_t width) {
    for (ptrdiff_t key = first; key < first + n; ++key, to += FN(pair_stride)(width)) {
        FN(load_row)(to, m->data + key * m->row_stride, m->col_stride, width, m->dtype, m->swapped);
        if (tangent->data) {
            FN(load_row)(to + width, tangent->data + key * tangent->row_stride, tangent->col_stride, width,
                         tangent->dtype, tangent->swapped);
        } else {
            memset(to + width, 0, (size_t)width * sizeof(real));
        }
    }
}

/* The tile's rows as real[n][pair_stride]; copies them unless they are copied already. */
SA_ONCE const real *FN(pair_rows)(const sa_block *b, const sa_matrix *m, const sa_matrix *tangent, FN(copies) * copies,
                                  ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    const ptrdiff_t at = first - b->copied_from, stride = FN(pair_stride)(width);
    if (at + n > copies->room) {
        real *copied = copies->rows + copies->room * stride;
        FN(copy_pairs)(copied, m, tangent, first, n, width);
        return copied;
    }
    for (ptrdiff_t cell = at / SA_KEYS_PER_TILE; cell * SA_KEYS_PER_TILE < at + n; ++cell) {
        if (!copies->filled[cell]) {
            const ptrdiff_t row = cell * SA_KEYS_PER_TILE, from = b->copied_from + row;
            FN(copy_pairs)(copies->rows + row * stride, m, tangent, from, SA_SMALLER(b->a->S - from, SA_KEYS_PER_TILE),
                           width);
            copies->filled[cell] = 1;
        }
    }
    return copies->rows + at * stride;
}

/* Copies the rows of an array to x and of its tangent to x_tangent, times a factor for each row. The tangent and then
 * the array, transposed to xT [2·width][nv·lanes], are a factor of products with pairs. True if all is finite. */
SA_ONCE bool FN(copy_both)(const char *const *row, const sa_matrix *m, const char *const *tangent_row,
                           const sa_matrix *tangent, int count, ptrdiff_t width, const real *factor, real *x,
                           real *x_tangent, real *xT, int nv) {
    real factors[FN(backward_rows)];
    for (int r = 0; r < count; ++r) {
        factors[r] = tangent_row[r] ? factor[r] : 0;
    }
    bool finite = FN(copy_rows)(row, m, count, width, factor, x);
    finite &= FN(copy_rows)(tangent_row, tangent, count, width, factors, x_tangent);
    FN(transpose_rows)(x_tangent, count, width, xT, nv);
    FN(transpose_rows)(x, count, width, xT + width * nv * SA_LANES, nv);
    return finite;
}

/* Begins a block: factors of its products, and the slopes' tangents. True if queries and tangents are finite. */
SA_ONCE bool FN(start_pairs)(const sa_block *b, FN(jvp_scratch) * s, int nv) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    real factor[FN(backward_rows)];
    FN(start_rows)(b, &s->s, nv);
    for (int r = 0; r < nv * SA_LANES; ++r) {
        factor[r] = (real)a->scale;
        s->slope_tangent[r] = a->alibi_tangent.m.data && r < rows->count ? (real)rows->slope_tangent[r] : 0;
        s->s.tile_sum[r] = 0;
    }
    FN(copy_queries)(b, &s->s, nv);
    return FN(copy_both)(rows->query, &a->query.m, rows->query_tangent, &a->query_tangent.m, rows->count, a->E, factor,
                         s->q_rows, s->q_tangent_rows, s->s.q + a->E * nv * SA_LANES, nv);
}

/* Writes a tile's scores to s->s.P as score_tile does, and the products of (7) to T. False if the whole tile is
 * closed. */
SA_ONCE bool FN(score_pairs)(const sa_block *b, FN(jvp_scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                             bool want_top, bool *masked) {
    FN(scratch) *own = &s->s;
    const ptrdiff_t E = b->a->E, lanes = nv * SA_LANES;
    const int state = FN(inspect_tile)(b, own, first, n);
    ptrdiff_t end[SA_BACKWARD_VECS];
    if (state == SA_TILE_CLOSED) {
        sa_fetch_rest(&own->ahead);
        *masked = true;
        return false;
    }
    FN(copy_vectors)(own->top, own->maximum, nv);
    own->factor = 1;
    FN(spread_ahead)(own, n);
    own->k = FN(pair_rows)(b, &b->key, &b->key_tangent, &s->keys, first, n, E);
    own->k_stride = FN(pair_stride)(E);
    FN(open_ends)(b->rows, own, first, n, nv, end);
    FN(rows_times_lanes)(own->q, own->k, own->k_stride, end, E, own->P, lanes, own->top, &own->ahead, nv);
    FN(rows_times_lanes)(own->q + E * lanes, own->k, own->k_stride, end, 2 * E, s->T, lanes, own->tile_sum, &own->ahead,
                         nv);
    sa_fetch_rest(&own->ahead);
    FN(finish_scores)(b, own, first, n, nv, state, true, want_top, masked);
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
    const ptrdiff_t Dv = b->a->Dv, lanes = nv * SA_LANES, stride = FN(pair_stride)(Dv);
    ptrdiff_t end[SA_BACKWARD_VECS];
    const real *v = FN(pair_rows)(b, &b->value, &b->value_tangent, &s->values, first, n, Dv);
    real *tangents = s->s.O + Dv * lanes;
    if (careful) {
        FN(values_careful)(s->s.P, s->s.P, v, stride, n, 2 * Dv, s->s.O, s->s.alpha, nv);
        FN(values_careful)(s->s.P, s->T, v, stride, n, Dv, tangents, s->s.ones, nv);
        return;
    }
    FN(open_ends)(b->rows, &s->s, first, n, nv, end);
    FN(columns_times_lanes)(s->s.P, v, stride, end, Dv, s->s.O, lanes, s->s.alpha, &s->s.ahead, nv);
    FN(columns_times_lanes)(s->s.P, v + Dv, stride, end, Dv, tangents, lanes, s->s.alpha, &s->s.ahead, nv);
    FN(columns_times_lanes)(s->T, v, stride, end, Dv, tangents, lanes, s->s.ones, &s->s.ahead, nv);
}

/* Subtracts r·O of (9), and writes r and z as statistics and r as the tangent of lse. */
SA_ONCE void FN(end_tangents)(const sa_block *b, FN(jvp_scratch) * s, int nv) {
    const sa_attention *a = b->a;
    const ptrdiff_t Dv = a->Dv, lanes = nv * SA_LANES;
    for (int r = 0; r < b->rows->count; ++r) {
        const real l = s->s.sum[r], mean = l == 0 ? 0 : s->r[r] / l;
        s->r[r] = mean;
        if (a->stats.m.data) {
            real *stats = (void *)b->rows->stats[r];
            stats[2] = mean;
            stats[3] = l == 0 ? 0 : s->z[r] / l;
        }
        if (a->lse.m.data) {
            memcpy(b->rows->lse[r] + a->lse_tangent, &mean, sizeof mean);
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

/* Writes O and Ȯ. True if all is finite. */
SA_ONCE bool FN(write_both)(const sa_block *b, FN(jvp_scratch) * s, int nv) {
    sa_rows *rows = b->rows;
    real *O = s->s.O;
    bool finite = FN(write_wide)(b, &s->s, s->s.alpha, NULL, nv);
    s->s.O += b->a->Dv * nv * SA_LANES;
    for (int r = 0; r < rows->count; ++r) {
        rows->out[r] += b->a->out_tangent;
    }
    finite &= FN(write_wide)(b, &s->s, s->s.alpha, NULL, nv);
    s->s.O = O;
    for (int r = 0; r < rows->count; ++r) {
        rows->out[r] -= b->a->out_tangent;
    }
    return finite;
}

/* True if the block must be computed again, carefully. */
SA_ONCE bool FN(run_jvp)(const sa_block *b, FN(jvp_scratch) * s, int nv, bool careful) {
    const sa_attention *a = b->a;
    bool masked = false;
    FN(start_pairs)(b, s, nv);
    memset(s->s.O, 0, (size_t)(2 * a->Dv * nv * SA_LANES) * sizeof(real));
    for (int r = 0; r < nv * SA_LANES; ++r) { /* the sink's weight is 1 so far */
        const bool sinks = a->sink_tangent.m.data && r < b->rows->count && s->s.sum[r] == 1;
        s->r[r] = sinks ? (real)b->rows->sink_tangent[r] : 0;
        s->z[r] = 0;
    }
    SA_EACH_KEY_TILE(b, first, n) {
        sa_plan_tile(b, &s->s.ahead, &b->value, a->Dv, first);
        if (!FN(score_pairs)(b, s, first, n, nv, SA_WITH_MAXIMA, &masked)) {
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
    return !FN(write_both)(b, s, nv) && (masked || FN(may_close)(b));
}

/* ---- the table's entries ----------------------------------------------------------------------------------------- */

SA_KERNEL size_t FN(jvp_scratch_bytes)(const sa_attention *a) {
    FN(jvp_scratch) s;
    return FN(lay_out_jvp)(a, SA_NOWHERE, &s);
}

SA_KERNEL void FN(attention_jvp)(const sa_block *b, void *scratch) {
    FN(jvp_scratch) s;
    FN(lay_out_jvp)(b->a, scratch, &s);
    FN(forget_pairs)(b, &s);
    const int nv = SA_CEIL_DIV(b->rows->count, SA_LANES);
    if (FN(run_jvp)(b, &s, nv, false)) {
        FN(run_jvp)(b, &s, nv, true);
    }
}
