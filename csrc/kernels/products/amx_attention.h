/* The products of a wide block (unit.h) on the matrix unit (amx_tiles.h). A tile of keys has a cell: keys and values
 * are split when they are first needed, and kept for the head's next blocks.
 * Comes after simd/amx.h and isa/avx512_unit.h. */

#include "kernels/kernels.h"
#include "kernels/products/amx_tiles.h"

/* True if all arrays are float16, or all bfloat16: queries lack the scale, the maximum may lag,
 * the unit adds to O in place. */
SA_INLINE bool FN(is_of_16_bits)(const sa_attention *a) {
    const sa_dtype dtype = a->query.m.dtype;
    return (dtype == SA_F16 || dtype == SA_BF16) && a->key.m.dtype == dtype && a->value.m.dtype == dtype;
}

/* Terms of keys and values: 1 if both are bfloat16. */
SA_INLINE int FN(terms_of_call)(const sa_attention *a) {
    int terms = FN(left_terms)(a->query.m.dtype);
    const int of_key = FN(left_terms)(a->key.m.dtype), of_value = FN(left_terms)(a->value.m.dtype);
    terms = SA_LARGER(of_key, terms);
    return SA_LARGER(of_value, terms);
}

/* With smaller sizes padding costs more than the unit saves. Few queries do not fill a wide block. Queries without the
 * scale need an ordinary scale. */
SA_ONCE bool FN(amx_take)(const sa_attention *a) {
    return a->E >= 16 && a->Dv >= 16 && (a->by_rows || (a->S >= 32 && a->L > SA_LANES / a->gqa)) &&
           (!FN(is_of_16_bits)(a) || FN(factor_is_ordinary)(a));
}

SA_INLINE ptrdiff_t FN(slices_of)(ptrdiff_t n) { return SA_CEIL_DIV(n, SA_TILE_SLICE); }
SA_INLINE ptrdiff_t FN(row_tiles_of)(ptrdiff_t n) { return SA_CEIL_DIV(n, 2 * SA_TILE_ROWS) * 2; }

enum { FN(key_tiles) = SA_KEYS_PER_TILE / 16, FN(key_slices) = SA_KEYS_PER_TILE / 32 };

SA_ONCE size_t FN(amx_lay_out)(const sa_attention *a, char *base, size_t used, FN(wide_state) * s) {
    const int terms = FN(terms_of_call)(a);
    const ptrdiff_t cells = SA_CEIL_DIV(a->S, SA_KEYS_PER_TILE);
    const size_t right = (size_t)(SA_RIGHT_TERMS * SA_VECS) * SA_TILE_BYTES;
    s->of_16_bits = FN(is_of_16_bits)(a);
    s->query_terms = s->of_16_bits ? terms : SA_RIGHT_TERMS;
    s->weight_terms = terms == 1 ? 2 : SA_RIGHT_TERMS;
    const size_t of_keys = (size_t)(FN(key_tiles) * FN(slices_of)(a->E)) * SA_TILE_BYTES;
    const size_t of_values = (size_t)(FN(row_tiles_of)(a->Dv) * FN(key_slices)) * SA_TILE_BYTES;
    used = FN(lay_out_cells)(&s->keys, of_keys, terms, cells, base, used);
    used = FN(lay_out_cells)(&s->values, of_values, terms, cells, base, used);
    SA_TAKE(queries, char, right *(size_t)FN(slices_of)(a->E));
    SA_TAKE(weights, char, right *FN(key_slices));
    SA_TAKE(product, real, 2 * SA_TILE_ROWS * 2 * SA_LANES);
    return used;
}

SA_ONCE void FN(amx_start)(const sa_block *b, FN(wide_state) * s) {
    if (!FN(amx_take)(b->a)) {
        return;
    }
    if (!b->holds_copies) {
        FN(forget_cells)(&s->keys);
        FN(forget_cells)(&s->values);
    }
    /* With gaps, a tile may begin inside a cell. */
    if ((b->rows->count > SA_LANES || b->a->by_rows) && b->rows->gaps == 0) {
        s->terms = FN(terms_of_call)(b->a);
        sa_start_tiles();
    }
}

SA_ONCE void FN(amx_end)(void) { sa_end_tiles(); }

/* True if rows are read in place: numbers of 16 bits without gaps. */
SA_INLINE bool FN(is_taken)(const sa_matrix *m, int terms) {
    return terms < 3 && terms == FN(left_terms)(m->dtype) && !m->swapped && m->col_stride == 2;
}

/* What a cell is made of: keys or values, split as rows or as columns. */
enum { SA_OF_KEYS, SA_OF_VALUES };
enum { SA_AS_ROWS, SA_AS_COLUMNS };

/* Returns the tile's cell, or NULL if terms cannot represent the tile. */
SA_ONCE const char *FN(cell_of)(const sa_block *b, FN(scratch) * s, const FN(cells) * cells, ptrdiff_t first,
                                const bool of_values, const bool as_columns) {
    const sa_attention *a = b->a;
    const ptrdiff_t at = (first - b->copied_from) / SA_KEYS_PER_TILE, cell = SA_SMALLER(at, cells->room);
    char *tiles = cells->tiles + (size_t)cell * cells->bytes;
    if (at >= cells->room || cells->state[cell] == SA_CELL_UNKNOWN) {
        const ptrdiff_t n = SA_SMALLER(b->keys - first, SA_KEYS_PER_TILE);
        const ptrdiff_t width = of_values ? a->Dv : a->E;
        const ptrdiff_t row_tiles = as_columns ? FN(row_tiles_of)(width) : FN(key_tiles);
        const ptrdiff_t slices = as_columns ? FN(key_slices) : FN(slices_of)(width);
        const sa_matrix *m = of_values ? &b->value : &b->key;
        const int terms = s->wide.terms;
        bool fits;
        if (FN(is_taken)(m, terms)) {
            const char *x = m->data + first * m->row_stride;
            fits = as_columns ? FN(take_columns)(x, m->row_stride, n, width, row_tiles, slices, tiles, terms)
                              : FN(take_rows)(x, m->row_stride, n, width, row_tiles, slices, tiles, terms);
        } else {
            ptrdiff_t stride;
            const real *x = FN(tile_rows)(b, m, of_values ? &s->value : &s->key, first, n, width, &stride);
            fits = as_columns ? FN(split_columns)(x, stride, n, width, row_tiles, slices, tiles, terms)
                              : FN(split_rows)(x, stride, n, width, row_tiles, slices, tiles, terms);
        }
        if (at >= cells->room) {
            return fits ? tiles : NULL;
        }
        cells->state[cell] = fits ? SA_CELL_HOLDS : SA_CELL_BEYOND;
    }
    return cells->state[cell] == SA_CELL_HOLDS ? tiles : NULL;
}

/* Makes operands of the queries, without the factor in a call of 16 bits. */
SA_ONCE void FN(amx_queries)(const sa_block *b, FN(scratch) * s, int nv) {
    FN(wide_state) *wide = &s->wide;
    const ptrdiff_t E = b->a->E;
    if (wide->of_16_bits && FN(is_taken)(&b->a->query.m, wide->terms)) {
        wide->queries_fit = FN(take_lanes)(b->rows->query, b->rows->count, E, nv, wide->queries, wide->terms);
        return;
    }
    const bool direct = FN(rows_in_place)(b->rows->query, b->rows->count, &b->a->query.m);
    real factor[SA_LANES];
    V(store)(factor, V(set1)(wide->of_16_bits ? 1 : FN(factor_of)(b->a)));
    wide->queries_fit = true;
    for (int v = 0; v < nv; ++v) {
        const real *q[SA_LANES];
        const int n = FN(queries_of_vector)(b, s, direct, v, q);
        wide->queries_fit &= FN(split_lanes)(q, factor, n, E, nv, wide->queries + v * SA_TILE_BYTES, wide->query_terms);
    }
}

/* Finds for each slice of keys the first open vector, rounded down to an even number. */
SA_ONCE void FN(open_slices)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                             int *from) {
    ptrdiff_t end[SA_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_SLICE) {
        int v = 0;
        while (v < nv - 1 && end[v] <= j) {
            ++v;
        }
        from[j / SA_TILE_SLICE] = v & ~1;
    }
}

/* to[n][nv·lanes] = a cell's rows, `width` wide, times the right operand. */
SA_ONCE void FN(amx_rows)(const sa_block *b, const FN(scratch) * s, const FN(cells) * cells, const char *cell,
                          const char *right, int right_terms, ptrdiff_t width, ptrdiff_t first, ptrdiff_t n, real *to,
                          bool exact, int nv) {
    const ptrdiff_t slices = FN(slices_of)(width);
    int from[FN(key_slices)];
    FN(open_slices)(b, s, first, n, nv, from);
    FN(operands)
    o = {.left_term = cells->row_bytes,
         .left_row = (size_t)slices * SA_TILE_BYTES,
         .right_term = (size_t)(slices * nv) * SA_TILE_BYTES,
         .right_slice = (size_t)nv * SA_TILE_BYTES,
         .slices = slices,
         .exact = exact};
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_SLICE) {
        o.left = cell + (size_t)(j / SA_TILE_ROWS) * o.left_row;
        for (int v = from[j / SA_TILE_SLICE]; v < nv; v += 2) {
            o.right = right + v * SA_TILE_BYTES;
            FN(product)(&o, to + (j * nv + v) * SA_LANES, (size_t)nv * SA_LANES * sizeof(real), s->wide.terms,
                        right_terms, v + 1 < nv ? 2 : 1);
        }
    }
}

SA_ONCE bool FN(amx_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const FN(wide_state) *wide = &s->wide;
    const char *keys = wide->queries_fit ? FN(cell_of)(b, s, &wide->keys, first, SA_OF_KEYS, SA_AS_ROWS) : NULL;
    if (keys) {
        FN(amx_rows)(b, s, &wide->keys, keys, wide->queries, wide->query_terms, b->a->E, first, n, s->P,
                     wide->of_16_bits, nv);
        s->factor = wide->of_16_bits ? FN(factor_of)(b->a) : 1;
    }
    return keys != NULL;
}

/* True if values have 16 bits and are within the bounds of terms: then weights may exceed 1. */
SA_ONCE bool FN(amx_may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first) {
    return s->wide.of_16_bits && FN(cell_of)(b, s, &s->wide.values, first, SA_OF_VALUES, SA_AS_COLUMNS);
}

/* The weight of a score; with two terms a short exponential is exact enough. */
SA_INLINE vec FN(weight)(const real *p, vec factor, vec maximum, const bool scores, const int terms) {
    const vec x = V(load)(p);
    if (!scores) {
        return x;
    }
    const vec below = V(fma)(x, factor, -maximum);
    return terms == 2 ? FN(exp2_short)(below) : FN(exp2)(below);
}

/* Makes a row of the right operand of the weights of keys j and j + 1, of one key, or of none. */
SA_INLINE void FN(split_pair)(const real *p, ptrdiff_t lanes, char *to, size_t term_bytes, vec factor,
                              const vec *maximum, vec *sum, const int vectors, const int keys, const bool scores,
                              const int terms) {
    SA_UNROLL
    for (int v = 0; v < vectors; ++v) {
        vec a = V(set1)(0), b = V(set1)(0);
        if (keys > 0) {
            a = FN(weight)(p + v * SA_LANES, factor, maximum[v], scores, terms);
        }
        if (keys > 1) {
            b = FN(weight)(p + lanes + v * SA_LANES, factor, maximum[v], scores, terms);
        }
        sum[v] = sum[v] + (a + b);
        FN(split_pairs)(a, b, to + v * SA_TILE_BYTES, term_bytes, terms, SA_TOWARDS_ZERO);
    }
}

SA_INLINE void FN(split_slice)(const real *P, ptrdiff_t lanes, char *to, ptrdiff_t n, size_t term_bytes, real scale,
                               const real *maximum, real *sum, const int vectors, const bool scores, const int terms) {
    const vec factor = V(set1)(scale);
    vec m[SA_VECS], more[SA_VECS];
    SA_UNROLL
    for (int v = 0; v < vectors; ++v) {
        m[v] = V(load)(maximum + v * SA_LANES);
        more[v] = V(load)(sum + v * SA_LANES);
    }
    for (ptrdiff_t j = 0; j < SA_TILE_SLICE; j += 2, P += 2 * lanes, to += 64) {
        if (j % (terms == 3 ? 16 : 32) == 0) {
            sa_tiles_stay_awake();
        }
        if (j + 1 < n) {
            FN(split_pair)(P, lanes, to, term_bytes, factor, m, more, vectors, 2, scores, terms);
        } else if (j < n) {
            FN(split_pair)(P, lanes, to, term_bytes, factor, m, more, vectors, 1, scores, terms);
        } else {
            FN(split_pair)(P, lanes, to, term_bytes, factor, m, more, vectors, 0, scores, terms);
        }
    }
    SA_UNROLL
    for (int v = 0; v < vectors && scores; ++v) {
        V(store)(sum + v * SA_LANES, more[v]);
    }
}

#define SA_SPLIT_LEAF(vectors, terms)                                                                                  \
    SA_LEAF void FN(split_slice##vectors##terms)(const real *P, ptrdiff_t lanes, char *to, ptrdiff_t n,                \
                                                 size_t term_bytes, real scale, const real *maximum, real *sum,        \
                                                 bool scores) {                                                        \
        if (scores) {                                                                                                  \
            FN(split_slice)(P, lanes, to, n, term_bytes, scale, maximum, sum, vectors, SA_HOLDS_SCORES, terms);        \
        } else {                                                                                                       \
            FN(split_slice)(P, lanes, to, n, term_bytes, scale, maximum, sum, vectors, SA_HOLDS_WEIGHTS, terms);       \
        }                                                                                                              \
    }
#define SA_SPLITS(X) X(1, 2) X(2, 2) X(4, 2) X(1, 3) X(2, 3) X(4, 3)
SA_SPLITS(SA_SPLIT_LEAF)
#undef SA_SPLIT_LEAF
#define SA_SPLIT_CASE(vectors, terms)                                                                                  \
    case 10 * vectors + terms:                                                                                         \
        FN(split_slice##vectors##terms)(P, lanes, to, here, term_bytes, s->factor, m, sum, scores);                    \
        break;
_Static_assert(SA_RIGHT_TERMS == 3, "the leaves of split_slice");

/* Makes the right operand from P, which does not change.
 * `scores`: weights are 2^(P·factor − maximum), and s->tile_sum gets their sums. */
SA_ONCE void FN(split_weights)(FN(scratch) * s, ptrdiff_t n, int nv, bool scores, int terms) {
    const size_t term_bytes = (size_t)(FN(key_slices) * nv) * SA_TILE_BYTES;
    const ptrdiff_t lanes = nv * SA_LANES;
    if (scores) {
        FN(clear_rows)(s->tile_sum);
    }
    for (ptrdiff_t slice = 0; slice < FN(slices_of)(n); ++slice) {
        const ptrdiff_t here = n - slice * SA_TILE_SLICE;
        for (int v = s->wide.from[slice], now; v < nv; v += now) {
            const real *P = s->P + slice * SA_TILE_SLICE * lanes + v * SA_LANES, *m = s->maximum + v * SA_LANES;
            char *to = s->wide.weights + (slice * nv + v) * SA_TILE_BYTES;
            real *sum = s->tile_sum + v * SA_LANES;
            now = nv - v == 4 ? 4 : nv - v >= 2 ? 2 : 1;
            switch (10 * now + terms) { SA_SPLITS(SA_SPLIT_CASE) }
        }
    }
}

/* False also if a weight is NaN. */
SA_ONCE bool FN(amx_weights)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool scores) {
    if (!(s->wide.values_now = FN(cell_of)(b, s, &s->wide.values, first, SA_OF_VALUES, SA_AS_COLUMNS))) {
        return false;
    }
    FN(open_slices)(b, s, first, n, nv, s->wide.from);
    const unsigned before = sa_flush_subnormals();
    FN(split_weights)(s, n, nv, scores, s->wide.weight_terms);
    sa_restore_subnormals(before);
    for (int v = 0; v < nv; ++v) {
        if (V(any)(V(not_lt)(V(load)(s->tile_sum + v * SA_LANES), V(set1)((real)INFINITY)))) {
            return false;
        }
    }
    return true;
}

SA_INLINE void FN(amx_add_product)(const real *product, const real *alpha, real *O, ptrdiff_t lanes, ptrdiff_t rows,
                                   const int lane_tiles) {
    vec f[2];
    SA_UNROLL
    for (int u = 0; u < lane_tiles; ++u) {
        f[u] = V(load)(alpha + u * SA_LANES);
    }
    for (ptrdiff_t i = 0; i < rows; ++i) {
        SA_UNROLL
        for (int u = 0; u < lane_tiles; ++u) {
            real *o = O + i * lanes + u * SA_LANES;
            V(store)(o, V(fma)(f[u], V(load)(o), V(load)(product + (i * lane_tiles + u) * SA_LANES)));
        }
    }
}

SA_INLINE bool FN(all_one)(const real *alpha, int vectors) {
    const vec one = V(set1)(1), last = V(load)(alpha + (vectors - 1) * SA_LANES);
    const lanemask ones = V(both)(V(eq)(V(load)(alpha), one), V(eq)(last, one));
    return !V(any)(V(not_lt)(V(zero_unless)(ones, -one), V(set1)(0)));
}

SA_ONCE void FN(amx_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    (void)first;
    const ptrdiff_t Dv = b->a->Dv, lanes = nv * SA_LANES, all_slices = FN(slices_of)(n), odd = Dv % (2 * SA_TILE_ROWS);
    const bool empty = s->empty;
    s->empty = false;
    if (empty) {
        memset(s->O + (Dv - odd) * lanes, 0, (size_t)(odd * lanes) * sizeof(real));
    }
    FN(operands)
    o = {.left_term = s->wide.values.row_bytes,
         .left_row = FN(key_slices) * SA_TILE_BYTES,
         .right_term = (size_t)(FN(key_slices) * nv) * SA_TILE_BYTES,
         .right_slice = (size_t)nv * SA_TILE_BYTES};
    for (int v = 0; v < nv; v += 2) { /* this is the outer loop, so that weights stay in L1 */
        const int vectors = v + 1 < nv ? 2 : 1;
        const real *alpha = s->alpha + v * SA_LANES;
        /* Sums of 64 products are more exact if they start at zero, but results of 16 bits do not show it. */
        const bool adds = s->wide.of_16_bits && FN(all_one)(alpha, vectors);
        for (o.slices = 0; o.slices < all_slices && s->wide.from[o.slices] <= v;) {
            ++o.slices;
        }
        o.right = s->wide.weights + v * SA_TILE_BYTES;
        for (ptrdiff_t d = 0; d < Dv; d += 2 * SA_TILE_ROWS) {
            const ptrdiff_t rows = SA_SMALLER(Dv - d, 2 * SA_TILE_ROWS);
            real *O = s->O + d * lanes + v * SA_LANES;
            o.left = s->wide.values_now + (size_t)(d / SA_TILE_ROWS) * o.left_row;
            const bool in_place = (adds || empty) && rows == 2 * SA_TILE_ROWS;
            o.adds = in_place && !empty;
            const size_t c_bytes = (size_t)(in_place ? lanes : vectors * SA_LANES) * sizeof(real);
            FN(product)(&o, in_place ? O : s->wide.product, c_bytes, s->wide.terms, s->wide.weight_terms, vectors);
            if (!in_place && vectors == 2) {
                FN(amx_add_product)(s->wide.product, alpha, O, lanes, rows, 2);
            } else if (!in_place) {
                FN(amx_add_product)(s->wide.product, alpha, O, lanes, rows, 1);
            }
        }
    }
}
