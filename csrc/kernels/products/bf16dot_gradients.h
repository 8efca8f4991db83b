/* The gradients of a wide block by dot products of bfloat16 pairs (bf16dot.h, unit.h). P and dS are rounded to bfloat16
 * before they multiply Q, dO and K, whose rows are joined in pairs.
 * Comes after kernels/products/bf16dot.h. */
#include "kernels/kernels.h"

SA_ONCE size_t FN(bf16dot_lay_out_gradients)(const sa_attention_gradients *d, char *base, size_t used,
                                             FN(gradient_state) * s) {
    const sa_attention *a = d->a;
    if (!FN(bf16dot_take)(a) || a->value.m.dtype != SA_BF16 || d->grad_out.m.dtype != SA_BF16 || a->Dv < 16) {
        s->grad_out = NULL;
        return used;
    }
    const size_t key_bytes = FN(pair_row_bytes)(a->E), value_bytes = FN(pair_row_bytes)(a->Dv);
    used = FN(lay_out_cells)(&s->values, value_bytes, SA_KEYS_PER_TILE, FN(pair_cells)(a), base, used);
    used = FN(lay_out_cells)(&s->key_columns, 2 * key_bytes, SA_KEYS_PER_TILE / 2, FN(pair_cells)(a), base, used);
    SA_TAKE(grad_out, char, value_bytes *FN(backward_rows));
    SA_TAKE(query_rows, char, key_bytes *FN(backward_rows));
    SA_TAKE(grad_rows, char, value_bytes *FN(backward_rows));
    SA_TAKE(dscores, char, SA_KEYS_PER_TILE / 2 * FN(backward_rows) * sizeof(real));
    return used;
}

SA_ONCE void FN(bf16dot_start_gradients)(const sa_block *b, FN(gradient_state) * g) {
    if (g->grad_out && !b->holds_copies) {
        FN(forget_cells)(&g->values);
        FN(forget_cells)(&g->key_columns);
    }
}

/* Joins rows in pairs. True if pairs can represent them. */
SA_ONCE bool FN(join_block)(const FN(wide_state) * s, const char *const *rows, const sa_matrix *m, int count,
                            ptrdiff_t width, char *to) {
    int beyond = 0;
    for (int r = 0; r < count; r += 2) {
        beyond |= FN(join_rows)(rows[r], r + 1 < count ? rows[r + 1] : NULL, m, width, SA_LEAST_OF_GRADIENTS,
                                to + (size_t)r * FN(pair_row_bytes)(width), s->rows);
    }
    return !beyond;
}

SA_ONCE void FN(bf16dot_copy_gradients)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_state) * g,
                                        FN(factored) * x, real *q_rows, real *do_rows, int nv) {
    (void)q_rows, (void)do_rows;
    g->fit = g->grad_out_fits = false;
    if (!g->grad_out) {
        return;
    }
    const sa_attention *a = b->g->a;
    const int count = b->b.rows->count;
    bool finite = true;
    for (int r = 0; r < nv * SA_LANES; ++r) {
        g->factor[r] = r < count ? x->grad_factor[r] : 0;
        finite &= g->factor[r] - g->factor[r] == 0;
    }
    g->grad_out_fits = FN(pairs_of_lanes)(&s->wide, b->grads->grad_out, &b->g->grad_out.m, count, a->Dv,
                                          SA_LEAST_OF_GRADIENTS, g->grad_out, nv);
    g->fit = finite && g->grad_out_fits && s->wide.queries_fit &&
             FN(join_block)(&s->wide, b->b.rows->query, &a->query.m, count, a->E, g->query_rows) &&
             FN(join_block)(&s->wide, b->grads->grad_out, &b->g->grad_out.m, count, a->Dv, g->grad_rows);
}

/* Computes dP of (2), times the factors of dO's rows. */
SA_ONCE bool FN(bf16dot_dweights)(const sa_block *b, FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first,
                                  ptrdiff_t n, real *dS, int nv) {
    const ptrdiff_t Dv = b->a->Dv;
    const real *values =
        g->grad_out_fits ? FN(pairs_of_tile)(b, &g->values, &b->value, Dv, first, SA_LEAST_OF_GRADIENTS, SA_NOT_JOINED)
                         : NULL;
    if (values) {
        FN(rows_by_pairs)(b, s, &g->values, values, g->grad_out, Dv, g->factor, first, n, dS, s->tile_sum, nv);
    }
    return values != NULL;
}

SA_ONCE const real *FN(bf16dot_tile_keys)(const sa_block *b, const FN(scratch) * s, const FN(gradient_state) * g,
                                          ptrdiff_t first) {
    return g->fit ? FN(pairs_of_tile)(b, &g->key_columns, &b->key, b->a->E, first, SA_LEAST_OF_GRADIENTS, s->wide.rows)
                  : NULL;
}

/* For keys from … n − 1, rounds P times each lane's factor, and dS times the scale, in place to rows of bfloat16,
 * [keys][lanes / 2], pairs for sums over queries; `joined` gets dS as pairs of keys. `scores`: P holds scores, dS holds
 * dP. Lanes without a row become 0, as the last query may be paired with one. */
SA_INLINE void FN(pair_gradients_any)(real *P, real *dS, ptrdiff_t from, ptrdiff_t n, ptrdiff_t lanes,
                                      const real *maximum, const real *delta, const real *factor, real scale,
                                      real *joined, const int nv, const bool scores) {
    const vec zero = V(set1)(0), scales = V(set1)(scale);
    const ptrdiff_t at = lanes - nv * SA_LANES;
    for (ptrdiff_t j = from; j < n; j += 2) {
        const ptrdiff_t row = j * lanes + at, next = j + 1 < n ? row + lanes : row;
        vec a[SA_VECS], b[SA_VECS], da[SA_VECS], db[SA_VECS];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            a[v] = V(load)(P + row + v * SA_LANES);
            b[v] = V(load)(P + next + v * SA_LANES);
            if (scores) {
                const vec m = V(load)(maximum + at + v * SA_LANES);
                a[v] = a[v] - m;
                b[v] = b[v] - m;
            }
        }
        if (scores) {
            FN(exp2_each)(a, nv);
            FN(exp2_each)(b, nv);
        }
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            const vec f = V(load)(factor + at + v * SA_LANES);
            const lanemask none = V(eq)(f, zero);
            da[v] = V(load)(dS + row + v * SA_LANES);
            db[v] = V(load)(dS + next + v * SA_LANES);
            if (scores) {
                const vec d = V(load)(delta + at + v * SA_LANES);
                da[v] = a[v] * (da[v] - d);
                db[v] = b[v] * (db[v] - d);
            }
            a[v] = V(select)(none, zero, f * a[v]);
            b[v] = V(select)(none, zero, f * b[v]);
            da[v] = V(select)(none, zero, da[v]);
            db[v] = j + 1 < n ? V(select)(none, zero, db[v]) : zero;
        }
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            const ptrdiff_t half = (j * lanes + at + v * SA_LANES) / 2;
            V(store)(joined + j / 2 * lanes + at + v * SA_LANES, V(round_pairs)(da[v], db[v]));
            V(store_rounded)((char *)(P + half), a[v]);
            V(store_rounded)((char *)(dS + half), scales * da[v]);
            V(store_rounded)((char *)(P + lanes / 2 + half), b[v]);
            V(store_rounded)((char *)(dS + lanes / 2 + half), scales * db[v]);
        }
    }
}

#define SA_PAIR_GRADIENTS(nv)                                                                                          \
    SA_LEAF void FN(pair_gradients##nv)(real * P, real * dS, ptrdiff_t from, ptrdiff_t n, ptrdiff_t lanes,             \
                                        const real *maximum, const real *delta, const real *factor, real scale,        \
                                        real *joined, bool scores) {                                                   \
        if (scores) {                                                                                                  \
            FN(pair_gradients_any)(P, dS, from, n, lanes, maximum, delta, factor, scale, joined, nv, SA_HOLDS_SCORES); \
        } else {                                                                                                       \
            FN(pair_gradients_any)(P, dS, from, n, lanes, maximum, delta, factor, scale, joined, nv,                   \
                                   SA_HOLDS_WEIGHTS);                                                                  \
        }                                                                                                              \
    }
SA_LEAVES(SA_PAIR_GRADIENTS)
#undef SA_PAIR_GRADIENTS

/* Overwrites P and dS. */
SA_ONCE ptrdiff_t FN(bf16dot_gradients)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_state) * g,
                                        real *P, real *dS, const real *delta, real *dqT, ptrdiff_t first,
                                        ptrdiff_t done, ptrdiff_t n, int nv, bool scores, bool keeps) {
    const sa_attention *a = b->g->a;
    const real *keys = keeps ? NULL : FN(bf16dot_tile_keys)(&b->b, s, g, first);
    if (!keys) {
        return done;
    }
    const ptrdiff_t lanes = nv * SA_LANES, row = first - b->first_key, count = b->b.rows->count;
    const ptrdiff_t query_stride = (ptrdiff_t)(2 * FN(pair_row_bytes)(a->E) / sizeof(real));
    const ptrdiff_t grad_stride = (ptrdiff_t)(2 * FN(pair_row_bytes)(a->Dv) / sizeof(real));
    const real *query_rows = (const void *)g->query_rows, *grad_rows = (const void *)g->grad_rows;
    real *const dscores = (void *)g->dscores;
    real *dkey = (void *)b->dkey, *dvalue = (void *)b->dvalue;
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->b.rows, s, first, n, nv, end);
    for (ptrdiff_t v = 0, from = 0; v < nv; ++v) {
        if (end[v] > from) {
            SA_CALL_LEAF(pair_gradients, (int)(nv - v), P, dS, from, end[v], lanes, s->maximum, delta, g->factor,
                         (real)a->scale, dscores, scores)
            from = end[v];
        }
    }
    for (ptrdiff_t u = 0, from = 0; u < nv; ++u) {
        const ptrdiff_t open = end[u] - from, pair = u * (SA_LANES / 2), pairs = (count + 1) / 2 - pair;
        if (open <= 0) {
            continue;
        }
        if (dvalue) {
            FN(outer_pairs)(P + from * lanes / 2 + pair, lanes / 2, grad_rows + pair * grad_stride, grad_stride, pairs,
                            open, dvalue + (row + from) * b->dvalue_stride, b->dvalue_stride, a->Dv);
        }
        if (dkey) {
            FN(outer_pairs)(dS + from * lanes / 2 + pair, lanes / 2, query_rows + pair * query_stride, query_stride,
                            pairs, open, dkey + (row + from) * b->dkey_stride, b->dkey_stride, a->E);
        }
        from = end[u];
    }
    if (b->g->dquery.m.data) {
        FN(columns_times_pairs)(dscores, keys, query_stride, end, a->E, dqT, s->ones, &s->ahead, nv);
    }
    return n;
}
