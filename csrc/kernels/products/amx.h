/* Scores and weighted values of a wide block on the matrix unit (parts.h), where there is one. A tile of keys is a cell: its
 * keys and values are split once, when they are first asked for, and stay in the thread's scratch for the next blocks of the
 * same head, up to SA_CACHE_BYTES for each of the two. What parts cannot hold goes through multiply-adds, tile by tile:
 * which way a tile goes depends on its numbers and on nothing else. */

#if defined(SA_HAS_TILES)
#include "kernels/products/amx_tiles.h"

/* Whether all is of float16, or all of bfloat16. Queries are then multiplied as they are, with nothing lost, and the scale is
 * applied to the scores; the running maximum lags, and the unit adds to the output in place. */
SA_INLINE bool FN(is_of_16_bits)(const sa_attention *a) {
    const sa_dtype dtype = a->query.m.dtype;
    return (dtype == SA_F16 || dtype == SA_BF16) && a->key.m.dtype == dtype && a->value.m.dtype == dtype;
}

/* Of keys and values: 1 when all is of bfloat16. */
SA_INLINE int FN(parts_of_call)(const sa_attention *a) {
    int parts = FN(left_parts)(a->query.m.dtype);
    const int of_key = FN(left_parts)(a->key.m.dtype), of_value = FN(left_parts)(a->value.m.dtype);
    parts = of_key > parts ? of_key : parts;
    return of_value > parts ? of_value : parts;
}

/* Below these sizes padding to whole tiles costs more than the unit gains. Calls of few queries have no wide blocks. Products
 * without the scale need an ordinary one. */
SA_INLINE bool FN(uses_parts)(const sa_attention *a) {
    const real factor = FN(factor_of)(a);
    return a->S >= 32 && a->E >= 16 && a->Dv >= 16 && a->L > SA_LANES / a->gqa &&
           (!FN(is_of_16_bits)(a) || (factor >= 0x1p-40f && factor <= 0x1p40f));
}

SA_INLINE ptrdiff_t FN(tiles_in)(ptrdiff_t n, ptrdiff_t size) { return (n + size - 1) / size; }
SA_INLINE ptrdiff_t FN(steps_of)(ptrdiff_t n) { return FN(tiles_in)(n, SA_TILE_STEP); }
/* Row tiles are worked on in twos. */
SA_INLINE ptrdiff_t FN(row_tiles_of)(ptrdiff_t n) { return FN(tiles_in)(n, 2 * SA_TILE_ROWS) * 2; }

enum { FN(key_tiles) = SA_KEYS_PER_TILE / 16, FN(key_steps) = SA_KEYS_PER_TILE / 32 };

SA_INLINE size_t FN(lay_out_parts)(const sa_attention *a, char *base, size_t used, FN(parts) * s) {
    const int parts = FN(parts_of_call)(a);
    const ptrdiff_t cells = FN(tiles_in)(a->S, SA_KEYS_PER_TILE);
    const size_t right = (size_t)(SA_RIGHT_PARTS * SA_VECS) * SA_TILE_BYTES;
    s->of_16_bits = FN(is_of_16_bits)(a);
    s->of_queries = s->of_16_bits ? parts : SA_RIGHT_PARTS;
    s->of_weights = parts == 1 ? 2 : SA_RIGHT_PARTS;
    FN(lay_out_cells)(&s->keys, (size_t)(FN(key_tiles) * FN(steps_of)(a->E)) * SA_TILE_BYTES, parts, cells);
    FN(lay_out_cells)(&s->values, (size_t)(FN(row_tiles_of)(a->Dv) * FN(key_steps)) * SA_TILE_BYTES, parts, cells);
    SA_TAKE(keys.tiles, char, (size_t)(s->keys.room + 1) * s->keys.bytes);
    SA_TAKE(values.tiles, char, (size_t)(s->values.room + 1) * s->values.bytes);
    SA_TAKE(keys.state, unsigned char, (size_t)s->keys.room);
    SA_TAKE(values.state, unsigned char, (size_t)s->values.room);
    SA_TAKE(queries, char, right *(size_t)FN(steps_of)(a->E));
    SA_TAKE(weights, char, right *FN(key_steps));
    SA_TAKE(product, real, 2 * SA_TILE_ROWS * 2 * SA_LANES);
    return used;
}

SA_INLINE void FN(parts_open)(const sa_block *b, FN(parts) * s) {
    if (!FN(uses_parts)(b->a)) {
        return;
    }
    if (!b->cache_holds) {
        memset(s->keys.state, SA_CELL_UNKNOWN, (size_t)s->keys.room);
        memset(s->values.state, SA_CELL_UNKNOWN, (size_t)s->values.room);
    }
    if (b->rows->count > SA_LANES && b->rows->gaps == 0) { /* tiles of block masks with gaps begin anywhere */
        s->count = FN(parts_of_call)(b->a);
        sa_tiles_open();
    }
}

SA_INLINE void FN(parts_close)(const FN(parts) * s) {
    if (s->count) {
        sa_tiles_close();
    }
}

/* Whether rows are taken as they lie in memory: numbers of 16 bits without gaps, of so many parts. */
SA_INLINE bool FN(is_taken)(const sa_matrix *m, int parts) {
    return parts < 3 && parts == FN(left_parts)(m->dtype) && !m->swapped && m->col_stride == 2;
}

/* The cell of the keys or values from `first` on, as they are or transposed, or NULL when parts do not hold it. */
SA_INLINE const char *FN(cell_of)(const sa_block *b, FN(scratch) * s, const FN(cells) * cells, ptrdiff_t first,
                                  const bool of_values, const bool transposed) {
    const sa_attention *a = b->a;
    const ptrdiff_t at = (first - b->cache_from) / SA_KEYS_PER_TILE, cell = at < cells->room ? at : cells->room;
    char *tiles = cells->tiles + (size_t)cell * cells->bytes;
    if (at >= cells->room || cells->state[cell] == SA_CELL_UNKNOWN) {
        const ptrdiff_t n = b->keys - first < SA_KEYS_PER_TILE ? b->keys - first : SA_KEYS_PER_TILE;
        const ptrdiff_t width = of_values ? a->Dv : a->E;
        const ptrdiff_t row_tiles = transposed ? FN(row_tiles_of)(width) : FN(key_tiles);
        const ptrdiff_t steps = transposed ? FN(key_steps) : FN(steps_of)(width);
        const sa_matrix *m = of_values ? &b->value : &b->key;
        const int parts = s->parts.count;
        bool fits;
        if (FN(is_taken)(m, parts)) {
            const char *x = m->data + first * m->row_stride;
            fits = transposed ? FN(take_columns)(x, m->row_stride, n, width, row_tiles, steps, tiles, parts)
                              : FN(take_rows)(x, m->row_stride, n, width, row_tiles, steps, tiles, parts);
        } else {
            ptrdiff_t stride;
            const real *x = FN(tile_rows)(b, m, of_values ? &s->value : &s->key, first, n, width, &stride);
            fits = transposed ? FN(split_columns)(x, stride, n, width, row_tiles, steps, tiles, parts)
                              : FN(split_rows)(x, stride, n, width, row_tiles, steps, tiles, parts);
        }
        if (at >= cells->room) {
            return fits ? tiles : NULL;
        }
        cells->state[cell] = fits ? SA_CELL_HOLDS : SA_CELL_BEYOND;
    }
    return cells->state[cell] == SA_CELL_HOLDS ? tiles : NULL;
}

/* The queries as the right operand; in a call of 16 bits as they are, without the factor. */
SA_INLINE void FN(split_queries)(const sa_block *b, FN(scratch) * s, const int nv) {
    FN(parts) *parts = &s->parts;
    if (!parts->count) {
        return;
    }
    const ptrdiff_t E = b->a->E;
    if (parts->of_16_bits && FN(is_taken)(&b->a->query.m, parts->count)) {
        parts->queries_fit = FN(take_lanes)(b->rows->query, b->rows->count, E, nv, parts->queries, parts->count);
        return;
    }
    const bool direct = FN(rows_in_place)(b->rows->query, b->rows->count, &b->a->query.m);
    real factor[SA_LANES];
    V(store)(factor, V(set1)(parts->of_16_bits ? 1 : FN(factor_of)(b->a)));
    parts->queries_fit = true;
    for (int v = 0; v < nv; ++v) {
        const real *q[SA_LANES];
        const int n = FN(queries_of_vector)(b, s, direct, v, q);
        parts->queries_fit &= FN(split_lanes)(q, factor, n, E, nv, parts->queries + v * SA_TILE_BYTES, parts->of_queries);
    }
}

/* For each step of keys, the first vector that causal leaves open, in twos. */
SA_INLINE void FN(open_steps)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv, int *from) {
    ptrdiff_t end[SA_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_STEP) {
        int v = 0;
        while (v < nv - 1 && end[v] <= j) {
            ++v;
        }
        from[j / SA_TILE_STEP] = v & ~1;
    }
}

/* to[n][nv·lanes] = the rows of a cell of keys or values, `width` wide, times the right operand of as many; but for vectors
 * that causal closes. `exact` as in FN(operands). */
SA_INLINE void FN(rows_by_parts)(const sa_block *b, const FN(scratch) * s, const FN(cells) * cells, const char *cell,
                                 const char *right, int right_parts, ptrdiff_t width, ptrdiff_t first, ptrdiff_t n, real *to,
                                 bool exact, const int nv) {
    const ptrdiff_t steps = FN(steps_of)(width);
    int from[FN(key_steps)];
    FN(open_steps)(b, s, first, n, nv, from);
    FN(operands)
    o = {.left_part = cells->part_bytes,
         .left_row = (size_t)steps * SA_TILE_BYTES,
         .right_part = (size_t)(steps * nv) * SA_TILE_BYTES,
         .right_step = (size_t)nv * SA_TILE_BYTES,
         .steps = steps,
         .exact = exact};
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_STEP) {
        o.left = cell + (size_t)(j / SA_TILE_ROWS) * o.left_row;
        for (int v = from[j / SA_TILE_STEP]; v < nv; v += 2) {
            o.right = right + v * SA_TILE_BYTES;
            FN(product)(&o, to + (j * nv + v) * SA_LANES, (size_t)nv * SA_LANES * sizeof(real), s->parts.count, right_parts,
                        v + 1 < nv ? 2 : 1);
        }
    }
}

/* Leaves the products of the tile's keys with the queries in s->P. False: nothing was done. */
SA_INLINE bool FN(scores_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    const FN(parts) *parts = &s->parts;
    const char *keys = parts->count && parts->queries_fit ? FN(cell_of)(b, s, &parts->keys, first, false, false) : NULL;
    if (keys) {
        FN(rows_by_parts)(b, s, &parts->keys, keys, parts->queries, parts->of_queries, b->a->E, first, n, s->P,
                          parts->of_16_bits, nv);
        s->factor = parts->of_16_bits ? FN(factor_of)(b->a) : 1;
    }
    return keys != NULL;
}

/* Whether the maximum of a tile may be anything near: weights have more room above 1 than 16-bit values within the bounds of parts
 * can use up. */
SA_INLINE bool FN(may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first) {
    return s->parts.count && s->parts.of_16_bits && FN(cell_of)(b, s, &s->parts.values, first, true, true);
}

/* The weight of a score, or the weight itself, as exact as so many parts hold it. */
SA_INLINE vec FN(weight)(const real *p, vec factor, vec maximum, const bool scores, const int parts) {
    const vec x = V(load)(p);
    if (!scores) {
        return x;
    }
    const vec below = V(fma)(x, factor, -maximum);
    return parts == 2 ? FN(exp2_short)(below) : FN(exp2)(below);
}

/* The weights of the pairs of keys j and j + 1, or of key j alone, as a row of the right operand, from vector `from` on. */
SA_INLINE void FN(split_pair)(const real *p, char *to, size_t part_bytes, vec factor, const vec *maximum, vec *sum,
                              const int nv, const int from, const int keys, const bool scores, const int parts) {
    SA_UNROLL
    for (int v = from; v < nv; ++v) {
        vec a = V(set1)(0), b = V(set1)(0);
        if (keys > 0) {
            a = FN(weight)(p + v * SA_LANES, factor, maximum[v], scores, parts);
        }
        if (keys > 1) {
            b = FN(weight)(p + (nv + v) * SA_LANES, factor, maximum[v], scores, parts);
        }
        sum[v] = sum[v] + (a + b);
        FN(split_pairs)(a, b, to + v * SA_TILE_BYTES, part_bytes, parts, false);
    }
}

/* The same for the n keys of one step; zeros from row n to its end. */
SA_INLINE void FN(split_step)(const real *P, char *to, ptrdiff_t n, size_t part_bytes, vec factor, const vec *maximum, vec *sum,
                              const int nv, const int from, const bool scores, const int parts) {
    for (ptrdiff_t j = 0; j < SA_TILE_STEP; j += 2, P += 2 * nv * SA_LANES, to += 64) {
        if (j % (parts == 3 ? 16 : 32) == 0) {
            sa_tiles_stay_awake();
        }
        if (j + 1 < n) {
            FN(split_pair)(P, to, part_bytes, factor, maximum, sum, nv, from, 2, scores, parts);
        } else if (j < n) {
            FN(split_pair)(P, to, part_bytes, factor, maximum, sum, nv, from, 1, scores, parts);
        } else {
            FN(split_pair)(P, to, part_bytes, factor, maximum, sum, nv, from, 0, scores, parts);
        }
    }
}

/* P as the right operand, from vector s->parts.from of each step on. With `scores` the weights are 2^(P·factor − maximum), P stays
 * as it is, and their sums go to s->tile_sum. */
SA_INLINE void FN(split_weights)(FN(scratch) * s, ptrdiff_t n, const int nv, const bool scores, const int parts) {
    const size_t part_bytes = (size_t)(FN(key_steps) * nv) * SA_TILE_BYTES;
    const vec factor = V(set1)(s->factor);
    vec m[4], sum[4];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(s->maximum + v * SA_LANES);
        sum[v] = V(set1)(0);
    }
    for (ptrdiff_t step = 0; step < FN(steps_of)(n); ++step) {
        const real *P = s->P + step * SA_TILE_STEP * nv * SA_LANES;
        char *to = s->parts.weights + step * nv * SA_TILE_BYTES;
        const ptrdiff_t here = n - step * SA_TILE_STEP;
        if (s->parts.from[step] == 0) {
            FN(split_step)(P, to, here, part_bytes, factor, m, sum, nv, 0, scores, parts);
        } else if (nv > 2) { /* a multiple of 2 */
            FN(split_step)(P, to, here, part_bytes, factor, m, sum, nv, 2, scores, parts);
        }
    }
    SA_UNROLL
    for (int v = 0; v < nv && scores; ++v) {
        V(store)(s->tile_sum + v * SA_LANES, sum[v]);
    }
}

/* The right operand from P, which holds scores, or the weights themselves. False: nothing was done, or some weight is NaN. */
SA_INLINE bool FN(weights_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv,
                                    const bool scores) {
    if (!s->parts.count || !(s->parts.values_now = FN(cell_of)(b, s, &s->parts.values, first, true, true))) {
        return false;
    }
    FN(open_steps)(b, s, first, n, nv, s->parts.from);
    const unsigned before = sa_flush_subnormals();
    if (s->parts.of_weights == 2) {
        FN(split_weights)(s, n, nv, scores, 2);
    } else {
        FN(split_weights)(s, n, nv, scores, SA_RIGHT_PARTS);
    }
    sa_restore_subnormals(before);
    for (int v = 0; v < nv; ++v) {
        if (V(any)(V(not_lt)(V(load)(s->tile_sum + v * SA_LANES), V(set1)((real)INFINITY)))) {
            return false;
        }
    }
    return true;
}

/* O[32][nv·lanes] = alpha·O + product, `rows` rows of it. */
SA_INLINE void FN(add_product)(const real *product, const real *alpha, real *O, ptrdiff_t lanes, ptrdiff_t rows,
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

/* O = alpha·O + Vᵀ·P with the weights of weights_by_parts, of n keys. */
SA_INLINE void FN(values_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    (void)first;
    const ptrdiff_t Dv = b->a->Dv, lanes = nv * SA_LANES, all_steps = FN(steps_of)(n), odd = Dv % (2 * SA_TILE_ROWS);
    const bool empty = s->empty;
    s->empty = false;
    if (empty) {
        memset(s->O + (Dv - odd) * lanes, 0, (size_t)(odd * lanes) * sizeof(real));
    }
    FN(operands)
    o = {.left_part = s->parts.values.part_bytes,
         .left_row = FN(key_steps) * SA_TILE_BYTES,
         .right_part = (size_t)(FN(key_steps) * nv) * SA_TILE_BYTES,
         .right_step = (size_t)nv * SA_TILE_BYTES};
    for (int v = 0; v < nv; v += 2) { /* outside, so that their weights stay in the L1 */
        const int vectors = v + 1 < nv ? 2 : 1;
        const real *alpha = s->alpha + v * SA_LANES;
        /* Sums of 64 products from zero on are the more exact ones: 16 bits can do without. */
        const bool adds = s->parts.of_16_bits && FN(all_one)(alpha, vectors);
        for (o.steps = 0; o.steps < all_steps && s->parts.from[o.steps] <= v;) {
            ++o.steps;
        }
        o.right = s->parts.weights + v * SA_TILE_BYTES;
        for (ptrdiff_t d = 0; d < Dv; d += 2 * SA_TILE_ROWS) {
            const ptrdiff_t rows = Dv - d < 2 * SA_TILE_ROWS ? Dv - d : 2 * SA_TILE_ROWS;
            real *O = s->O + d * lanes + v * SA_LANES;
            o.left = s->parts.values_now + (size_t)(d / SA_TILE_ROWS) * o.left_row;
            const bool in_place = (adds || empty) && rows == 2 * SA_TILE_ROWS;
            o.adds = in_place && !empty;
            const size_t c_bytes = (size_t)(in_place ? lanes : vectors * SA_LANES) * sizeof(real);
            FN(product)(&o, in_place ? O : s->parts.product, c_bytes, s->parts.count, s->parts.of_weights, vectors);
            if (!in_place && vectors == 2) {
                FN(add_product)(s->parts.product, alpha, O, lanes, rows, 2);
            } else if (!in_place) {
                FN(add_product)(s->parts.product, alpha, O, lanes, rows, 1);
            }
        }
    }
}

SA_INLINE void FN(round_weights)(FN(scratch) * s, ptrdiff_t count) { (void)s, (void)count; }

#endif
