/* Scores and weighted values of a wide block on the matrix unit (parts.h), where there is one. A tile of keys is a cell: its
 * keys and values are split once, when they are first asked for, and stay in the thread's scratch for the next blocks of the
 * same head, up to SA_CACHE_BYTES for each of the two. What parts cannot hold goes through multiply-adds, tile by tile:
 * which way a tile goes depends on its numbers and on nothing else. */

#if defined(SA_HAS_TILES)
#include "parts.h"

enum { SA_CELL_UNKNOWN, SA_CELL_SPLIT, SA_CELL_BEYOND_PARTS };

/* Below these sizes padding to whole tiles costs more than the unit gains. Calls of few queries have no wide blocks. */
SA_INLINE bool FN(uses_parts)(const sa_attention *a) {
    return a->S >= 32 && a->E >= 16 && a->Dv >= 16 && a->L > SA_LANES / a->gqa;
}

SA_INLINE int FN(parts_of_call)(const sa_attention *a) {
    int parts = FN(left_parts)(a->query.m.dtype);
    const int of_key = FN(left_parts)(a->key.m.dtype), of_value = FN(left_parts)(a->value.m.dtype);
    parts = of_key > parts ? of_key : parts;
    return of_value > parts ? of_value : parts;
}

SA_INLINE ptrdiff_t FN(tiles_in)(ptrdiff_t n, ptrdiff_t size) { return (n + size - 1) / size; }
SA_INLINE ptrdiff_t FN(steps_of)(ptrdiff_t n) { return FN(tiles_in)(n, SA_TILE_STEP); }
/* Row tiles are worked on in twos. */
SA_INLINE ptrdiff_t FN(row_tiles_of)(ptrdiff_t n) { return FN(tiles_in)(n, 2 * SA_TILE_ROWS) * 2; }

enum { FN(key_tiles) = SA_KEYS_PER_TILE / 16, FN(key_steps) = SA_KEYS_PER_TILE / 32 };

SA_INLINE void FN(lay_out_cells)(FN(cells) * cells, ptrdiff_t tiles, ptrdiff_t count, int parts) {
    cells->part_bytes = (size_t)tiles * SA_TILE_BYTES;
    cells->bytes = cells->part_bytes * (size_t)parts;
    const ptrdiff_t most = (ptrdiff_t)(SA_CACHE_BYTES / cells->bytes);
    cells->room = count < most ? count : most;
}

SA_INLINE size_t FN(lay_out_parts)(const sa_attention *a, char *base, size_t used, FN(parts) * s) {
    const int parts = FN(parts_of_call)(a);
    const ptrdiff_t cells = FN(tiles_in)(a->S, SA_KEYS_PER_TILE);
    const size_t right = (size_t)(SA_RIGHT_PARTS * SA_VECS) * SA_TILE_BYTES;
    FN(lay_out_cells)(&s->keys, FN(key_tiles) * FN(steps_of)(a->E), cells, parts);
    FN(lay_out_cells)(&s->values, FN(row_tiles_of)(a->Dv) * FN(key_steps), cells, parts);
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

/* The cell of the keys or values from `first` on, as they are or transposed, or NULL when parts do not hold it. */
SA_INLINE const char *FN(cell_of)(const sa_block *b, FN(scratch) * s, const FN(cells) * cells, ptrdiff_t first,
                                  const bool of_values, const bool transposed) {
    const sa_attention *a = b->a;
    const ptrdiff_t at = (first - b->cache_from) / SA_KEYS_PER_TILE, cell = at < cells->room ? at : cells->room;
    char *tiles = cells->tiles + (size_t)cell * cells->bytes;
    if (at >= cells->room || cells->state[cell] == SA_CELL_UNKNOWN) {
        const ptrdiff_t n = a->S - first < SA_KEYS_PER_TILE ? a->S - first : SA_KEYS_PER_TILE;
        const ptrdiff_t width = of_values ? a->Dv : a->E;
        ptrdiff_t stride;
        const real *x = of_values ? FN(tile_rows)(b, &b->value, &s->value, first, n, width, &stride)
                                  : FN(tile_rows)(b, &b->key, &s->key, first, n, width, &stride);
        const bool fits =
            transposed ? FN(split_columns)(x, stride, n, width, FN(row_tiles_of)(width), FN(key_steps), tiles, s->parts.count)
                       : FN(split_rows)(x, stride, n, width, FN(key_tiles), FN(steps_of)(width), tiles, s->parts.count);
        if (at >= cells->room) {
            return fits ? tiles : NULL;
        }
        cells->state[cell] = fits ? SA_CELL_SPLIT : SA_CELL_BEYOND_PARTS;
    }
    return cells->state[cell] == SA_CELL_SPLIT ? tiles : NULL;
}

/* The packed queries as the right operand. */
SA_INLINE void FN(split_queries)(const sa_block *b, FN(scratch) * s, const int nv) {
    if (s->parts.count) {
        s->parts.queries_fit = FN(split_lanes)(s->q, b->a->E, nv, s->parts.queries, SA_RIGHT_PARTS);
    }
}

/* to[n][nv·lanes] = the rows of a cell of keys or values, `width` wide, times the right operand of as many; but for vectors
 * that causal closes. */
SA_INLINE void FN(rows_by_parts)(const sa_block *b, const FN(parts) * s, const FN(cells) * cells, const char *cell,
                                 const char *right, int right_parts, ptrdiff_t width, ptrdiff_t first, ptrdiff_t n, real *to,
                                 const int nv) {
    const ptrdiff_t steps = FN(steps_of)(width);
    FN(operands)
    o = {.left_part = cells->part_bytes,
         .left_row = (size_t)steps * SA_TILE_BYTES,
         .right_part = (size_t)(steps * nv) * SA_TILE_BYTES,
         .right_step = (size_t)nv * SA_TILE_BYTES,
         .steps = steps};
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_STEP) {
        ptrdiff_t keys;
        o.left = cell + (size_t)(j / SA_TILE_ROWS) * o.left_row;
        for (int v = FN(first_open_vector)(b->rows, first + j, n - j, nv, &keys) & ~1; v < nv; v += 2) {
            o.right = right + v * SA_TILE_BYTES;
            FN(product)(&o, to + (j * nv + v) * SA_LANES, (size_t)nv * SA_LANES * sizeof(real), s->count, right_parts,
                        v + 1 < nv ? 2 : 1);
        }
    }
}

/* Leaves the products of the tile's keys with the queries in s->P. False: nothing was done. */
SA_INLINE bool FN(scores_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    const char *keys = s->parts.count && s->parts.queries_fit ? FN(cell_of)(b, s, &s->parts.keys, first, false, false) : NULL;
    if (keys) {
        FN(rows_by_parts)(b, &s->parts, &s->parts.keys, keys, s->parts.queries, SA_RIGHT_PARTS, b->a->E, first, n, s->P, nv);
    }
    return keys != NULL;
}

/* For each step of keys, the first vector that causal leaves open, in twos. */
SA_INLINE void FN(open_steps)(const sa_block *b, FN(parts) * s, ptrdiff_t first, ptrdiff_t n, const int nv) {
    for (ptrdiff_t j = 0; j < n; j += SA_TILE_STEP) {
        ptrdiff_t to;
        s->from[j / SA_TILE_STEP] = FN(first_open_vector)(b->rows, first + j, n - j, nv, &to) & ~1;
    }
}

/* P as the right operand, cut towards zero, from vector s->parts.from of each step on; zeros from row n to the end of a step.
 * With `scores` the weights are 2^(P − maximum), P stays as it is, and their sums go to s->tile_sum. */
SA_INLINE void FN(split_weights)(FN(scratch) * s, ptrdiff_t n, const int nv, const bool scores) {
    const size_t part_bytes = (size_t)(FN(key_steps) * nv) * SA_TILE_BYTES;
    vec m[4], sum[4];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(s->maximum + v * SA_LANES);
        sum[v] = V(set1)(0);
    }
    for (ptrdiff_t j = 0; j < FN(steps_of)(n) * SA_TILE_STEP; j += 2) {
        const ptrdiff_t step = j / SA_TILE_STEP;
        const int from = s->parts.from[step];
        char *to = s->parts.weights + step * nv * SA_TILE_BYTES + j % SA_TILE_STEP * 32;
        if (j % 16 == 0) {
            sa_tiles_stay_awake();
        }
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            if (v < from) {
                continue;
            }
            const real *p = s->P + (j * nv + v) * SA_LANES;
            vec a = V(set1)(0), b = V(set1)(0);
            if (j < n) {
                a = scores ? FN(exp2)(V(load)(p) - m[v]) : V(load)(p);
            }
            if (j + 1 < n) {
                b = scores ? FN(exp2)(V(load)(p + nv * SA_LANES) - m[v]) : V(load)(p + nv * SA_LANES);
            }
            sum[v] = sum[v] + (a + b);
            FN(split_pairs)(a, b, to + v * SA_TILE_BYTES, part_bytes, SA_RIGHT_PARTS, false);
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
    FN(open_steps)(b, &s->parts, first, n, nv);
    const unsigned before = sa_flush_subnormals();
    FN(split_weights)(s, n, nv, scores);
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

/* O = alpha·O + Vᵀ·P with the weights of weights_by_parts, of n keys. */
SA_INLINE void FN(values_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t n, const int nv) {
    const ptrdiff_t Dv = b->a->Dv, lanes = nv * SA_LANES, all_steps = FN(steps_of)(n);
    FN(operands)
    o = {.left_part = s->parts.values.part_bytes,
         .left_row = FN(key_steps) * SA_TILE_BYTES,
         .right_part = (size_t)(FN(key_steps) * nv) * SA_TILE_BYTES,
         .right_step = (size_t)nv * SA_TILE_BYTES};
    for (ptrdiff_t d = 0; d < Dv; d += 2 * SA_TILE_ROWS) {
        const ptrdiff_t rows = Dv - d < 2 * SA_TILE_ROWS ? Dv - d : 2 * SA_TILE_ROWS;
        o.left = s->parts.values_now + (size_t)(d / SA_TILE_ROWS) * o.left_row;
        for (int v = 0; v < nv; v += 2) {
            real *O = s->O + d * lanes + v * SA_LANES;
            const real *alpha = s->alpha + v * SA_LANES;
            for (o.steps = 0; o.steps < all_steps && s->parts.from[o.steps] <= v;) {
                ++o.steps;
            }
            o.right = s->parts.weights + v * SA_TILE_BYTES;
            if (v + 1 < nv) {
                FN(product)(&o, s->parts.product, 2 * SA_LANES * sizeof(real), s->parts.count, SA_RIGHT_PARTS, 2);
                FN(add_product)(s->parts.product, alpha, O, lanes, rows, 2);
            } else {
                FN(product)(&o, s->parts.product, SA_LANES * sizeof(real), s->parts.count, SA_RIGHT_PARTS, 1);
                FN(add_product)(s->parts.product, alpha, O, lanes, rows, 1);
            }
        }
    }
}

#else /* everything by multiply-adds */

SA_INLINE bool FN(uses_parts)(const sa_attention *a) { return (void)a, false; }
SA_INLINE size_t FN(lay_out_parts)(const sa_attention *a, char *base, size_t used, FN(parts) * s) {
    return (void)a, (void)base, (void)s, used;
}
SA_INLINE void FN(parts_open)(const sa_block *b, FN(parts) * s) { (void)b, (void)s; }
SA_INLINE void FN(parts_close)(const FN(parts) * s) { (void)s; }
SA_INLINE void FN(split_queries)(const sa_block *b, FN(scratch) * s, int nv) { (void)b, (void)s, (void)nv; }
SA_INLINE bool FN(scores_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    return (void)b, (void)s, (void)first, (void)n, (void)nv, false;
}
SA_INLINE bool FN(weights_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool scores) {
    return (void)b, (void)s, (void)first, (void)n, (void)nv, (void)scores, false;
}
SA_INLINE void FN(values_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t n, int nv) {
    (void)b, (void)s, (void)n, (void)nv;
}

#endif
