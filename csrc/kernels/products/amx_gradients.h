/* The gradients of a wide block on the matrix unit (amx_attention.h, unit.h), from tiles P[keys][queries]:
 *
 *     dP = V·dOᵀ (2)                  rows of values by lanes of dOᵀ
 *     dV += P·dO (1), dK += dS·Q (6)  P and dS as left operands: sums run along queries
 *     dQᵀ += Kᵀ·dS (3)                dS as the right operand: sums run along keys
 *
 * Left operands have the queries of two vectors in the order 0, 16, 1, 17, …, so that a pair is made from two vectors,
 * as in a right operand. Rows of Q and dO are paired in the same way.
 * Comes after kernels/products/amx_attention.h. */
#include "kernels/kernels.h"

_Static_assert(SA_BACKWARD_VECS == SA_VECS, "what these products take of the scratch is the same in both passes");

SA_ONCE size_t FN(amx_lay_out_gradients)(const sa_attention_gradients *d, char *base, size_t used,
                                         FN(gradient_state) * s) {
    const sa_attention *a = d->a;
    if (!FN(amx_take)(a)) {
        return used;
    }
    const ptrdiff_t cells = SA_CEIL_DIV(a->S, SA_KEYS_PER_TILE), query_slices = FN(slices_of)(FN(backward_rows));
    s->terms = FN(terms_of_call)(a) == 3 ? 3 : 2;
    const size_t slice = (size_t)s->terms * SA_TILE_BYTES, left = slice * (size_t)(2 * query_slices);
    const size_t of_keys = (size_t)(FN(row_tiles_of)(a->E) * FN(key_slices)) * SA_TILE_BYTES;
    used = FN(lay_out_cells)(&s->key_columns, of_keys, FN(terms_of_call)(a), cells, base, used);
    SA_TAKE(grad_out, char, slice *(size_t)(FN(slices_of)(a->Dv) * SA_BACKWARD_VECS));
    SA_TAKE(query_rows, char, slice *(size_t)(query_slices * SA_CEIL_DIV(a->E, SA_LANES)));
    SA_TAKE(grad_rows, char, slice *(size_t)(query_slices * SA_CEIL_DIV(a->Dv, SA_LANES)));
    SA_TAKE(weights, char, left);
    SA_TAKE(dscores, char, left);
    return used;
}

SA_ONCE void FN(amx_start_gradients)(const sa_block *b, FN(gradient_state) * g) {
    if (FN(amx_take)(b->a) && !b->holds_copies) {
        FN(forget_cells)(&g->key_columns);
    }
}

/* Points row[r] to each row of m, in place or loaded; NULL where the factor is 0. */
SA_ONCE void FN(rows_as_real)(const char *const *from, const sa_matrix *m, int count, ptrdiff_t width,
                              const real *factor, real *loaded, const real **row) {
    const bool in_place = FN(rows_in_place)(from, count, m);
    const size_t stride = FN(round_up)(width);
    for (int r = 0; r < count; ++r) {
        row[r] = (const void *)from[r];
        if (!in_place) {
            FN(load_row)(loaded + (size_t)r * stride, from[r], m->col_stride, width, m->dtype, m->swapped);
            row[r] = loaded + (size_t)r * stride;
        }
        if (factor[r] == 0) {
            row[r] = NULL;
        }
    }
}

/* Splits Q and dO as rows (in q_rows and do_rows) and as lanes. */
SA_ONCE void FN(amx_copy_gradients)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_state) * g,
                                    FN(factored) * x, real *q_rows, real *do_rows, int nv) {
    const sa_attention *a = b->g->a;
    const char *const *query = b->b.rows->query, *const *grad_out = b->grads->grad_out;
    FN(rows_as_real)(query, &a->query.m, b->b.rows->count, a->E, x->query_factor, q_rows, x->query);
    FN(rows_as_real)(grad_out, &b->g->grad_out.m, b->b.rows->count, a->Dv, x->grad_factor, do_rows, x->grad_out);
    g->fit = s->wide.queries_fit;
    const int count = b->b.rows->count;
    for (int v = 0; v < nv && g->fit; ++v) {
        const int row = v * SA_LANES, n = SA_SMALLER(count - row, SA_LANES);
        g->fit = FN(split_lanes)(x->grad_out + row, x->grad_factor + row, n, a->Dv, nv, g->grad_out + v * SA_TILE_BYTES,
                                 g->terms);
    }
    g->fit = g->fit &&
             (b->mask_only || (FN(split_summands)(x->query, x->query_factor, count, a->E, g->query_rows, g->terms) &&
                               FN(split_summands)(x->grad_out, x->grad_factor, count, a->Dv, g->grad_rows, g->terms)));
}

SA_ONCE bool FN(amx_dweights)(const sa_block *b, FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first,
                              ptrdiff_t n, real *dS, int nv) {
    const char *values = g->fit ? FN(cell_of)(b, s, &s->wide.values, first, SA_OF_VALUES, SA_AS_ROWS) : NULL;
    if (values) {
        FN(amx_rows)(b, s, &s->wide.values, values, g->grad_out, g->terms, b->a->Dv, first, n, dS, SA_LARGE_TERMS, nv);
    }
    return values != NULL;
}

/* Makes the terms, cut towards zero, of P and dS as left operands and of dS as the right operand. scores: P holds
 * scores and dS holds dP; both stay, but `keeps` stores dS. False if some dS is not finite. */
SA_INLINE bool FN(split_dscores)(const FN(scratch) * s, const FN(gradient_state) * g, const real *P, real *dS,
                                 const real *delta, int from, ptrdiff_t n, int nv, const int terms, const bool scores,
                                 bool keeps) {
    const ptrdiff_t query_slices = FN(slices_of)(nv * SA_LANES);
    const size_t left_term = (size_t)(2 * query_slices) * SA_TILE_BYTES, right_term = (size_t)nv * SA_TILE_BYTES;
    const vec zero = V(set1)(0);
    vec check = zero;
    for (ptrdiff_t j = 0; j < SA_TILE_SLICE; j += 2) {
        const ptrdiff_t left_at = j / SA_TILE_ROWS * query_slices * SA_TILE_BYTES + j % SA_TILE_ROWS * 64;
        char *right = s->wide.weights + j * 32;
        if (j % 8 == 0) {
            sa_tiles_stay_awake();
        }
        SA_UNROLL
        for (int v = 0; v < SA_VECS; v += 2) {
            if (v < from || v >= nv) {
                continue;
            }
            const ptrdiff_t left = left_at + v / 2 * SA_TILE_BYTES;
            vec p[2][2], ds[2][2]; /* [row][vector] */
            SA_UNROLL
            for (int i = 0; i < 4; ++i) {
                const int row = i / 2, u = i % 2;
                const ptrdiff_t at = ((j + row) * nv + v + u) * SA_LANES;
                p[row][u] = ds[row][u] = zero;
                if (j + row < n && v + u < nv) {
                    p[row][u] = V(load)(P + at);
                    ds[row][u] = V(load)(dS + at);
                    if (scores) {
                        p[row][u] = FN(exp2)(p[row][u] - V(load)(s->maximum + (v + u) * SA_LANES));
                        ds[row][u] = p[row][u] * (ds[row][u] - V(load)(delta + (v + u) * SA_LANES));
                        if (keeps) {
                            V(store)(dS + at, ds[row][u]);
                        }
                    }
                }
                check = V(fma)(ds[row][u], zero, check);
            }
            for (int row = 0; row < 2; ++row) {
                FN(split_pairs)(p[row][0], p[row][1], g->weights + left + row * 64, left_term, terms, SA_TOWARDS_ZERO);
                FN(split_pairs)(ds[row][0], ds[row][1], g->dscores + left + row * 64, left_term, terms,
                                SA_TOWARDS_ZERO);
            }
            FN(split_pairs)(ds[0][0], ds[1][0], right + v * SA_TILE_BYTES, right_term, terms, SA_TOWARDS_ZERO);
            if (v + 1 < nv) {
                FN(split_pairs)(ds[0][1], ds[1][1], right + (v + 1) * SA_TILE_BYTES, right_term, terms,
                                SA_TOWARDS_ZERO);
            }
        }
    }
    return FN(is_finite)(check);
}

#define SA_SPLIT_DSCORES(terms)                                                                                        \
    SA_LEAF bool FN(split_dscores##terms)(const FN(scratch) * s, const FN(gradient_state) * g, const real *P,          \
                                          real *dS, const real *delta, int from, ptrdiff_t n, int nv, bool scores,     \
                                          bool keeps) {                                                                \
        return scores ? FN(split_dscores)(s, g, P, dS, delta, from, n, nv, terms, SA_HOLDS_SCORES, keeps)              \
                      : FN(split_dscores)(s, g, P, dS, delta, from, n, nv, terms, SA_HOLDS_WEIGHTS, keeps);            \
    }
SA_SPLIT_DSCORES(2)
SA_SPLIT_DSCORES(3)
#undef SA_SPLIT_DSCORES

/* to[n][stride] += left·right, 32 rows by `width` lanes; sums begin at query slice `from`. */
SA_ONCE void FN(add_rows_product)(const FN(scratch) * s, int terms, const char *left, const char *right, ptrdiff_t from,
                                  ptrdiff_t query_slices, ptrdiff_t width, ptrdiff_t n, real *to, ptrdiff_t stride) {
    const ptrdiff_t lane_tiles = SA_CEIL_DIV(width, SA_LANES);
    FN(operands)
    o = {.left = left + from * SA_TILE_BYTES,
         .left_term = (size_t)(2 * query_slices) * SA_TILE_BYTES,
         .left_row = (size_t)query_slices * SA_TILE_BYTES,
         .right_term = (size_t)(query_slices * lane_tiles) * SA_TILE_BYTES,
         .right_slice = (size_t)lane_tiles * SA_TILE_BYTES,
         .slices = query_slices - from};
    for (ptrdiff_t v = 0; v < lane_tiles; v += 2) {
        const int tiles = v + 1 < lane_tiles ? 2 : 1;
        o.right = right + from * lane_tiles * SA_TILE_BYTES + v * SA_TILE_BYTES;
        o.adds = n == SA_TILE_SLICE && width - v * SA_LANES >= tiles * SA_LANES;
        if (o.adds) {
            FN(product)(&o, to + v * SA_LANES, (size_t)stride * sizeof(real), terms, terms, tiles);
            continue;
        }
        FN(product)(&o, s->wide.product, (size_t)tiles * SA_LANES * sizeof(real), terms, terms, tiles);
        for (ptrdiff_t r = 0; r < n; ++r) {
            for (int u = 0; u < tiles; ++u) {
                real *row = to + r * stride + (v + u) * SA_LANES;
                const vec more = V(load)(s->wide.product + (r * tiles + u) * SA_LANES);
                const ptrdiff_t columns = width - (v + u) * SA_LANES;
                FN(store_up_to)(row, FN(load_up_to)(row, columns) + more, columns);
            }
        }
    }
}

/* dqT[E][nv·lanes] += a slice of columns times dS. */
SA_ONCE void FN(add_columns_product)(const sa_block *b, const FN(scratch) * s, const FN(gradient_state) * g,
                                     const char *columns, int from, real *dqT, int nv) {
    const ptrdiff_t lanes = nv * SA_LANES;
    FN(operands)
    o = {.left_term = g->key_columns.row_bytes,
         .left_row = FN(key_slices) * SA_TILE_BYTES,
         .right_term = (size_t)nv * SA_TILE_BYTES,
         .slices = 1,
         .adds = true};
    for (ptrdiff_t e = 0; e < b->a->E; e += 2 * SA_TILE_ROWS) {
        o.left = columns + (size_t)(e / SA_TILE_ROWS) * o.left_row;
        for (int v = from; v < nv; v += 2) {
            o.right = s->wide.weights + v * SA_TILE_BYTES;
            FN(product)(&o, dqT + e * lanes + v * SA_LANES, (size_t)lanes * sizeof(real), s->wide.terms, g->terms,
                        v + 1 < nv ? 2 : 1);
        }
    }
}

/* Works on one slice at a time, whose operands stay in L1. dqT has E rounded up to row tiles. */
SA_ONCE ptrdiff_t FN(amx_gradients)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_state) * g, real *P,
                                    real *dS, const real *delta, real *dqT, ptrdiff_t first, ptrdiff_t done,
                                    ptrdiff_t n, int nv, bool scores, bool keeps) {
    const sa_attention *a = b->g->a;
    const char *columns = NULL;
    if (!g->fit || (b->g->dquery.m.data &&
                    !(columns = FN(cell_of)(&b->b, s, &g->key_columns, first, SA_OF_KEYS, SA_AS_COLUMNS)))) {
        return done;
    }
    FN(open_slices)(&b->b, s, first, n, nv, s->wide.from);
    const ptrdiff_t query_slices = FN(slices_of)(nv * SA_LANES);
    for (; done < n; done += SA_TILE_SLICE) {
        const int from = s->wide.from[done / SA_TILE_SLICE];
        const ptrdiff_t keys = SA_SMALLER(n - done, SA_TILE_SLICE), at = done * nv * SA_LANES;
        const ptrdiff_t row = first + done - b->first_key;
        for (ptrdiff_t j = 0; keeps && from > 0 && j < keys; ++j) { /* keys that causal closes */
            memset(dS + at + j * nv * SA_LANES, 0, (size_t)(from * SA_LANES) * sizeof(real));
        }
        const unsigned before = sa_flush_subnormals();
        const bool finite = g->terms == 3
                                ? FN(split_dscores3)(s, g, P + at, dS + at, delta, from, keys, nv, scores, keeps)
                                : FN(split_dscores2)(s, g, P + at, dS + at, delta, from, keys, nv, scores, keeps);
        sa_restore_subnormals(before);
        if (!finite) {
            return done;
        }
        if (b->dvalue) {
            FN(add_rows_product)(s, g->terms, g->weights, g->grad_rows, from / 2, query_slices, a->Dv, keys,
                                 (real *)(void *)b->dvalue + row * b->dvalue_stride, b->dvalue_stride);
        }
        if (b->dkey) {
            FN(add_rows_product)(s, g->terms, g->dscores, g->query_rows, from / 2, query_slices, a->E, keys,
                                 (real *)(void *)b->dkey + row * b->dkey_stride, b->dkey_stride);
        }
        if (columns) {
            FN(add_columns_product)(&b->b, s, g, columns + done / SA_TILE_SLICE * SA_TILE_BYTES, from, dqT, nv);
        }
    }
    return n;
}
