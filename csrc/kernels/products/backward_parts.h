/* The products of the backward pass on the matrix unit (parts.h), where there is one; numbers are those of docs/theory/backward.md.
 * Tiles are P[keys][queries] as everywhere, so that
 *
 *     dP = V·dOᵀ (2)       rows of a cell of values by the lanes of dOᵀ, as the scores are rows of keys by the lanes of Qᵀ
 *     dV += P·dO (1), dK += dS·Q (6)   P and dS as left operands: sums run along the queries
 *     dQᵀ += Kᵀ·dS (3)     dS as the right operand: sums run along the keys
 *
 * The left operands' sums take the queries in the order 0, 16, 1, 17, … of two vectors: their pairs are then two vectors, side
 * by side, as the pairs of a right operand are. The rows of Q and dO are paired alike. */

/* The block's rows of Q (all times the scale) and of dO (each times its factor), as they lie or packed. NULL stands for a row
 * of zeros. */
typedef struct {
    const real *query[FN(backward_rows)], *grad_out[FN(backward_rows)];
    real query_factor[FN(backward_rows)], grad_factor[FN(backward_rows)];
} FN(gradient_rows);

#if defined(SA_HAS_TILES)

_Static_assert(SA_BACKWARD_VECS == SA_VECS, "what parts take of the scratch is the same in both passes");

typedef struct {
    FN(cells) key_columns;
    char *grad_out;               /* dOᵀ, right operand [Dv] by queries */
    char *query_rows, *grad_rows; /* Q and dO, right operands [queries] by E and by Dv, paired half a step apart */
    char *weights, *dscores;      /* P and dS, left operands [keys of a step] by queries */
    int count;                    /* parts of each of these */
    bool fit;                     /* all of Q and dO */
} FN(gradient_parts);

SA_INLINE size_t FN(lay_out_gradient_parts)(const sa_attention_gradients *d, char *base, size_t used, FN(gradient_parts) * s) {
    const sa_attention *a = d->a;
    if (!FN(uses_parts)(a)) {
        return used;
    }
    const ptrdiff_t cells = FN(tiles_in)(a->S, SA_KEYS_PER_TILE), query_steps = FN(steps_of)(FN(backward_rows));
    s->count = FN(parts_of_call)(a) == 3 ? 3 : 2;
    const size_t step = (size_t)s->count * SA_TILE_BYTES, left = step * (size_t)(2 * query_steps);
    FN(lay_out_cells)(&s->key_columns, (size_t)(FN(row_tiles_of)(a->E) * FN(key_steps)) * SA_TILE_BYTES, FN(parts_of_call)(a),
                      cells);
    SA_TAKE(key_columns.tiles, char, (size_t)(s->key_columns.room + 1) * s->key_columns.bytes);
    SA_TAKE(key_columns.state, unsigned char, (size_t)s->key_columns.room);
    SA_TAKE(grad_out, char, step *(size_t)(FN(steps_of)(a->Dv) * SA_BACKWARD_VECS));
    SA_TAKE(query_rows, char, step *(size_t)(query_steps * FN(tiles_in)(a->E, SA_LANES)));
    SA_TAKE(grad_rows, char, step *(size_t)(query_steps * FN(tiles_in)(a->Dv, SA_LANES)));
    SA_TAKE(weights, char, left);
    SA_TAKE(dscores, char, left);
    return used;
}

/* Forgets the cells, unless they are this block's: also where the block itself goes through multiply-adds. */
SA_INLINE void FN(open_gradient_cells)(const sa_block *b, FN(gradient_parts) * g) {
    if (FN(uses_parts)(b->a) && !b->cache_holds) {
        memset(g->key_columns.state, SA_CELL_UNKNOWN, (size_t)g->key_columns.room);
    }
}

/* Rows of m as they lie, or in `loaded`; NULL where the factor is 0. */
SA_INLINE void FN(rows_as_real)(const char *const *from, const sa_matrix *m, int count, ptrdiff_t width, const real *factor,
                                real *loaded, const real **row) {
    const bool in_place = FN(rows_in_place)(from, count, m);
    const size_t stride = FN(round_up)(width);
    for (int r = 0; r < count; ++r) {
        row[r] = (const real *)(const void *)from[r];
        if (!in_place) {
            FN(load_row)(loaded + (size_t)r * stride, from[r], m->col_stride, width, m->dtype, m->swapped);
            row[r] = loaded + (size_t)r * stride;
        }
        if (factor[r] == 0) {
            row[r] = NULL;
        }
    }
}

/* Splits Q and dO, as rows (which q_rows and do_rows have room for) and as lanes. */
SA_INLINE void FN(open_gradient_parts)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_parts) * g,
                                       FN(gradient_rows) * x, real *q_rows, real *do_rows, const int nv) {
    const sa_attention *a = b->g->a;
    const char *const *query = b->b.rows->query, *const *grad_out = b->rows->grad_out;
    FN(rows_as_real)(query, &a->query.m, b->b.rows->count, a->E, x->query_factor, q_rows, x->query);
    FN(rows_as_real)(grad_out, &b->g->grad_out.m, b->b.rows->count, a->Dv, x->grad_factor, do_rows, x->grad_out);
    g->fit = s->parts.queries_fit;
    const int count = b->b.rows->count;
    for (int v = 0; v < nv && g->fit; ++v) {
        const int row = v * SA_LANES, n = count - row < SA_LANES ? count - row : SA_LANES;
        g->fit =
            FN(split_lanes)(x->grad_out + row, x->grad_factor + row, n, a->Dv, nv, g->grad_out + v * SA_TILE_BYTES, g->count);
    }
    g->fit =
        g->fit && (b->mask_only || (FN(split_summands)(x->query, x->query_factor, count, a->E, g->query_rows, g->count) &&
                                    FN(split_summands)(x->grad_out, x->grad_factor, count, a->Dv, g->grad_rows, g->count)));
}

/* (2), in dS. False: nothing was done. */
SA_INLINE bool FN(dweights_by_parts)(const sa_block *b, FN(scratch) * s, const FN(gradient_parts) * g, ptrdiff_t first,
                                     ptrdiff_t n, real *dS, const int nv) {
    const char *values = s->parts.count && g->fit ? FN(cell_of)(b, s, &s->parts.values, first, true, false) : NULL;
    if (values) {
        FN(rows_by_parts)(b, s, &s->parts.values, values, g->grad_out, g->count, b->a->Dv, first, n, dS, false, nv);
    }
    return values != NULL;
}

/* The parts of P and dS as left operands and of dS as a right operand (in s->parts.weights), all cut towards zero: n rows of a
 * step, vectors from `from` on. Plain: P holds scores and dS holds dP as yet, and stay so, but that dS is stored if it `keeps`.
 * False when some dS is not finite. */
SA_INLINE bool FN(split_dscores)(const FN(scratch) * s, const FN(gradient_parts) * g, const real *P, real *dS,
                                 const real *delta, int from, ptrdiff_t n, const int nv, const int parts, const bool plain,
                                 bool keeps) {
    const ptrdiff_t query_steps = FN(steps_of)(nv * SA_LANES);
    const size_t left_part = (size_t)(2 * query_steps) * SA_TILE_BYTES, right_part = (size_t)nv * SA_TILE_BYTES;
    const vec zero = V(set1)(0);
    vec check = zero; /* 0·x is 0 for a finite x and NaN for any other */
    for (ptrdiff_t j = 0; j < SA_TILE_STEP; j += 2) {
        const ptrdiff_t left_at = j / SA_TILE_ROWS * query_steps * SA_TILE_BYTES + j % SA_TILE_ROWS * 64;
        char *right = s->parts.weights + j * 32;
        if (j % 8 == 0) {
            sa_tiles_stay_awake();
        }
        SA_UNROLL
        for (int v = 0; v < nv; v += 2) {
            if (v < from) {
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
                    if (plain) {
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
                FN(split_pairs)(p[row][0], p[row][1], g->weights + left + row * 64, left_part, parts, false);
                FN(split_pairs)(ds[row][0], ds[row][1], g->dscores + left + row * 64, left_part, parts, false);
            }
            FN(split_pairs)(ds[0][0], ds[1][0], right + v * SA_TILE_BYTES, right_part, parts, false);
            if (v + 1 < nv) {
                FN(split_pairs)(ds[0][1], ds[1][1], right + (v + 1) * SA_TILE_BYTES, right_part, parts, false);
            }
        }
    }
    return !V(any)(V(not_lt)(check, V(set1)(1)));
}

/* to[n][stride] += left·right, 32 rows of the left operand, `width` lanes; sums from query step `from` on. */
SA_INLINE void FN(add_rows_product)(const FN(scratch) * s, int parts, const char *left, const char *right, ptrdiff_t from,
                                    ptrdiff_t query_steps, ptrdiff_t width, ptrdiff_t n, real *to, ptrdiff_t stride) {
    const ptrdiff_t lane_tiles = FN(tiles_in)(width, SA_LANES);
    FN(operands)
    o = {.left = left + from * SA_TILE_BYTES,
         .left_part = (size_t)(2 * query_steps) * SA_TILE_BYTES,
         .left_row = (size_t)query_steps * SA_TILE_BYTES,
         .right_part = (size_t)(query_steps * lane_tiles) * SA_TILE_BYTES,
         .right_step = (size_t)lane_tiles * SA_TILE_BYTES,
         .steps = query_steps - from};
    for (ptrdiff_t v = 0; v < lane_tiles; v += 2) {
        const int tiles = v + 1 < lane_tiles ? 2 : 1;
        o.right = right + from * lane_tiles * SA_TILE_BYTES + v * SA_TILE_BYTES;
        o.adds = n == SA_TILE_STEP && width - v * SA_LANES >= tiles * SA_LANES;
        if (o.adds) {
            FN(product)(&o, to + v * SA_LANES, (size_t)stride * sizeof(real), parts, parts, tiles);
            continue;
        }
        FN(product)(&o, s->parts.product, (size_t)tiles * SA_LANES * sizeof(real), parts, parts, tiles);
        for (ptrdiff_t r = 0; r < n; ++r) {
            for (int u = 0; u < tiles; ++u) {
                real *row = to + r * stride + (v + u) * SA_LANES;
                const vec more = V(load)(s->parts.product + (r * tiles + u) * SA_LANES);
                const ptrdiff_t left_columns = width - (v + u) * SA_LANES;
                if (left_columns >= SA_LANES) {
                    V(store)(row, V(load)(row) + more);
                } else {
                    V(store_n)(row, V(load_n)(row, (int)left_columns) + more, (int)left_columns);
                }
            }
        }
    }
}

/* dqT[E][nv·lanes] += a step of the cell's columns times dS, vectors from `from` on. */
SA_INLINE void FN(add_columns_product)(const sa_block *b, const FN(scratch) * s, const FN(gradient_parts) * g,
                                       const char *columns, int from, real *dqT, const int nv) {
    const ptrdiff_t lanes = nv * SA_LANES;
    FN(operands)
    o = {.left_part = g->key_columns.part_bytes,
         .left_row = FN(key_steps) * SA_TILE_BYTES,
         .right_part = (size_t)nv * SA_TILE_BYTES,
         .steps = 1,
         .adds = true};
    for (ptrdiff_t e = 0; e < b->a->E; e += 2 * SA_TILE_ROWS) {
        o.left = columns + (size_t)(e / SA_TILE_ROWS) * o.left_row;
        for (int v = from; v < nv; v += 2) {
            o.right = s->parts.weights + v * SA_TILE_BYTES;
            FN(product)(&o, dqT + e * lanes + v * SA_LANES, (size_t)lanes * sizeof(real), s->parts.count, g->count,
                        v + 1 < nv ? 2 : 1);
        }
    }
}

SA_INLINE const real *FN(keys_by_parts)(const sa_block *b, const FN(scratch) * s, const FN(gradient_parts) * g,
                                        ptrdiff_t first) {
    return (void)b, (void)s, (void)g, (void)first, NULL;
}

/* (1), (3) and (6) of a tile of n keys from its key `done` on, a step at a time: what is split then stays in the L1 (whole tiles
 * took 3 to 10 % longer). dqT has E rounded up to row tiles. `plain` and `keeps` as in split_dscores. Returns where it came to:
 * n, or the first key of the step that goes through multiply-adds. */
SA_INLINE ptrdiff_t FN(gradients_by_parts)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_parts) * g,
                                           const real *P, real *dS, const real *delta, real *dqT, ptrdiff_t first,
                                           ptrdiff_t done, ptrdiff_t n, const int nv, const bool plain, bool keeps) {
    const sa_attention *a = b->g->a;
    const char *columns = NULL;
    if (!s->parts.count || !g->fit ||
        (b->g->dquery.m.data && !(columns = FN(cell_of)(&b->b, s, &g->key_columns, first, false, true)))) {
        return done;
    }
    FN(open_steps)(&b->b, s, first, n, nv, s->parts.from);
    const ptrdiff_t query_steps = FN(steps_of)(nv * SA_LANES);
    for (; done < n; done += SA_TILE_STEP) {
        const int from = s->parts.from[done / SA_TILE_STEP];
        const ptrdiff_t keys = n - done < SA_TILE_STEP ? n - done : SA_TILE_STEP, at = done * nv * SA_LANES;
        const ptrdiff_t row = first + done - b->first_key;
        for (ptrdiff_t j = 0; keeps && from > 0 && j < keys; ++j) { /* what causal closes */
            memset(dS + at + j * nv * SA_LANES, 0, (size_t)(from * SA_LANES) * sizeof(real));
        }
        const unsigned before = sa_flush_subnormals();
        const bool finite = g->count == 3 ? FN(split_dscores)(s, g, P + at, dS + at, delta, from, keys, nv, 3, plain, keeps)
                                          : FN(split_dscores)(s, g, P + at, dS + at, delta, from, keys, nv, 2, plain, keeps);
        sa_restore_subnormals(before);
        if (!finite) {
            return done;
        }
        if (b->dvalue) {
            FN(add_rows_product)(s, g->count, g->weights, g->grad_rows, from / 2, query_steps, a->Dv, keys,
                                 (real *)(void *)b->dvalue + row * b->dvalue_stride, b->dvalue_stride);
        }
        if (b->dkey) {
            FN(add_rows_product)(s, g->count, g->dscores, g->query_rows, from / 2, query_steps, a->E, keys,
                                 (real *)(void *)b->dkey + row * b->dkey_stride, b->dkey_stride);
        }
        if (columns) {
            FN(add_columns_product)(&b->b, s, g, columns + done / SA_TILE_STEP * SA_TILE_BYTES, from, dqT, nv);
        }
    }
    return n;
}

#else

#if defined(SA_HAS_BF16_PRODUCTS)

typedef struct {
    FN(cells) values, key_columns;  /* rows as they are; keys joined in twos */
    char *grad_out;                 /* dOᵀ as lanes of pairs, without its factor */
    real factor[FN(backward_rows)]; /* and that */
    char *query_rows, *grad_rows;   /* rows of the block joined in twos, [W / 2][width], without their factors */
    real *dscores;                  /* dS as pairs of keys, [keys / 2][nv·lanes] */
    bool fit;                       /* the block's rows of Q and dO are pairs: they are finite */
    bool grad_out_fits;
} FN(gradient_parts);

SA_INLINE size_t FN(lay_out_gradient_parts)(const sa_attention_gradients *d, char *base, size_t used, FN(gradient_parts) * s) {
    const sa_attention *a = d->a;
    if (!FN(uses_parts)(a) || a->value.m.dtype != SA_BF16 || d->grad_out.m.dtype != SA_BF16 || a->Dv < 16) {
        s->grad_out = NULL;
        return used;
    }
    const size_t key_bytes = FN(pair_row_bytes)(a->E), value_bytes = FN(pair_row_bytes)(a->Dv);
    FN(lay_out_cells)(&s->values, value_bytes, SA_KEYS_PER_TILE, FN(pair_cells)(a));
    FN(lay_out_cells)(&s->key_columns, 2 * key_bytes, SA_KEYS_PER_TILE / 2, FN(pair_cells)(a));
    SA_TAKE(values.tiles, char, (size_t)(s->values.room + 1) * s->values.bytes);
    SA_TAKE(values.state, unsigned char, (size_t)s->values.room);
    SA_TAKE(key_columns.tiles, char, (size_t)(s->key_columns.room + 1) * s->key_columns.bytes);
    SA_TAKE(key_columns.state, unsigned char, (size_t)s->key_columns.room);
    SA_TAKE(grad_out, char, value_bytes *FN(backward_rows));
    SA_TAKE(query_rows, char, key_bytes *FN(backward_rows));
    SA_TAKE(grad_rows, char, value_bytes *FN(backward_rows));
    SA_TAKE(dscores, real, SA_KEYS_PER_TILE / 2 * FN(backward_rows));
    return used;
}

/* Forgets the cells, unless they are this block's: also where the block itself goes through multiply-adds. */
SA_INLINE void FN(open_gradient_cells)(const sa_block *b, FN(gradient_parts) * g) {
    if (g->grad_out && !b->cache_holds) {
        memset(g->values.state, SA_CELL_UNKNOWN, (size_t)g->values.room);
        memset(g->key_columns.state, SA_CELL_UNKNOWN, (size_t)g->key_columns.room);
    }
}

/* The block's rows in twos. Tells whether pairs hold them. */
SA_INLINE bool FN(join_block)(const FN(parts) * s, const char *const *rows, const sa_matrix *m, int count, ptrdiff_t width,
                              char *to) {
    int beyond = 0;
    for (int r = 0; r < count; r += 2) {
        beyond |= FN(join_rows)(rows[r], r + 1 < count ? rows[r + 1] : NULL, m, width, SA_LEAST_OF_GRADIENTS,
                                to + (size_t)r * FN(pair_row_bytes)(width), s->rows);
    }
    return !beyond;
}

SA_INLINE void FN(open_gradient_parts)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_parts) * g,
                                       FN(gradient_rows) * x, real *q_rows, real *do_rows, const int nv) {
    (void)q_rows, (void)do_rows;
    g->fit = g->grad_out_fits = false;
    if (!g->grad_out) {
        return;
    }
    const sa_attention *a = b->g->a;
    const int count = b->b.rows->count;
    for (int r = 0; r < nv * SA_LANES; ++r) {
        g->factor[r] = r < count ? x->grad_factor[r] : 0;
    }
    g->grad_out_fits = FN(pairs_of_lanes)(&s->parts, b->rows->grad_out, &b->g->grad_out.m, count, a->Dv, SA_LEAST_OF_GRADIENTS,
                                          g->grad_out, nv);
    g->fit = g->grad_out_fits && s->parts.queries_fit &&
             FN(join_block)(&s->parts, b->b.rows->query, &a->query.m, count, a->E, g->query_rows) &&
             FN(join_block)(&s->parts, b->rows->grad_out, &b->g->grad_out.m, count, a->Dv, g->grad_rows);
}

/* (2), in dS, times the factors of dO. False: nothing was done. */
SA_INLINE bool FN(dweights_by_parts)(const sa_block *b, FN(scratch) * s, const FN(gradient_parts) * g, ptrdiff_t first,
                                     ptrdiff_t n, real *dS, const int nv) {
    const ptrdiff_t Dv = b->a->Dv;
    const real *values = s->parts.count && g->grad_out_fits
                             ? FN(pairs_of_tile)(b, &g->values, &b->value, Dv, first, SA_LEAST_OF_GRADIENTS, NULL)
                             : NULL;
    if (values) {
        FN(rows_by_pairs)(b, s, &g->values, values, g->grad_out, Dv, g->factor, first, n, dS, s->tile_sum, nv);
    }
    return values != NULL;
}

/* The keys of a tile whose products (1), (3) and (6) go by pairs, joined in twos; else NULL. They are finite. */
SA_INLINE const real *FN(keys_by_parts)(const sa_block *b, const FN(scratch) * s, const FN(gradient_parts) * g,
                                        ptrdiff_t first) {
    return s->parts.count && g->fit
               ? FN(pairs_of_tile)(b, &g->key_columns, &b->key, b->a->E, first, SA_LEAST_OF_GRADIENTS, s->parts.rows)
               : NULL;
}

/* Of the keys from … n − 1 of a tile and its last nv vectors, in place: P times the factor of each lane and dS times the scale as
 * rows of bfloat16, [keys][lanes / 2] from the first row on, pairs for sums over queries; and in `joined` dS as pairs of keys, for
 * sums over keys. With `scores` P holds scores as yet, and dS dP. A lane without a row has anything for weights: they count as 0,
 * for the last query may be paired with it. */
SA_INLINE void FN(pair_gradients_any)(real *P, real *dS, ptrdiff_t from, ptrdiff_t n, ptrdiff_t lanes, const real *maximum,
                                      const real *delta, const real *factor, real scale, real *joined, const int nv,
                                      const bool scores) {
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

#define SA_PAIR_GRADIENTS(nv)                                                                                                  \
    SA_NOINLINE void FN(pair_gradients##nv)(real * P, real * dS, ptrdiff_t from, ptrdiff_t n, ptrdiff_t lanes,                 \
                                            const real *maximum, const real *delta, const real *factor, real scale,            \
                                            real *joined, bool scores) {                                                       \
        if (scores) {                                                                                                          \
            FN(pair_gradients_any)(P, dS, from, n, lanes, maximum, delta, factor, scale, joined, nv, true);                    \
        } else {                                                                                                               \
            FN(pair_gradients_any)(P, dS, from, n, lanes, maximum, delta, factor, scale, joined, nv, false);                   \
        }                                                                                                                      \
    }
SA_PAIR_GRADIENTS(1)
SA_PAIR_GRADIENTS(2)
SA_PAIR_GRADIENTS(3)
SA_PAIR_GRADIENTS(4)
#undef SA_PAIR_GRADIENTS

/* (1), (3) and (6) of a tile, whose P and dS are used up. Vectors of lanes that causal closes for some of the keys are left out. */
SA_INLINE ptrdiff_t FN(gradients_by_parts)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_parts) * g, real *P,
                                           real *dS, const real *delta, real *dqT, ptrdiff_t first, ptrdiff_t done, ptrdiff_t n,
                                           const int nv, bool plain, bool keeps) {
    const sa_attention *a = b->g->a;
    const real *keys = keeps ? NULL : FN(keys_by_parts)(&b->b, s, g, first);
    if (!keys) {
        return done;
    }
    const ptrdiff_t lanes = nv * SA_LANES, row = first - b->first_key, count = b->b.rows->count;
    const ptrdiff_t query_stride = (ptrdiff_t)(2 * FN(pair_row_bytes)(a->E) / sizeof(real));
    const ptrdiff_t grad_stride = (ptrdiff_t)(2 * FN(pair_row_bytes)(a->Dv) / sizeof(real));
    const real *query_rows = (const real *)(const void *)g->query_rows, *grad_rows = (const real *)(const void *)g->grad_rows;
    real *dkey = (real *)(void *)b->dkey, *dvalue = (real *)(void *)b->dvalue;
    ptrdiff_t end[SA_BACKWARD_VECS];
    FN(open_ends)(b->b.rows, s, first, n, nv, end);
    for (ptrdiff_t v = 0, from = 0; v < nv; ++v) {
        const real *m = s->maximum, *f = g->factor, scale = (real)a->scale;
        switch (end[v] > from ? nv - v : 0) {
        case 0: continue;
        case 1: FN(pair_gradients1)(P, dS, from, end[v], lanes, m, delta, f, scale, g->dscores, plain); break;
        case 2: FN(pair_gradients2)(P, dS, from, end[v], lanes, m, delta, f, scale, g->dscores, plain); break;
        case 3: FN(pair_gradients3)(P, dS, from, end[v], lanes, m, delta, f, scale, g->dscores, plain); break;
        default: FN(pair_gradients4)(P, dS, from, end[v], lanes, m, delta, f, scale, g->dscores, plain); break;
        }
        from = end[v];
    }
    for (ptrdiff_t u = 0, from = 0; u < nv; ++u) {
        const ptrdiff_t open = end[u] - from, pair = u * (SA_LANES / 2), pairs = (count + 1) / 2 - pair;
        if (open <= 0) {
            continue;
        }
        if (dvalue) {
            FN(outer_pairs)(P + from * lanes / 2 + pair, lanes / 2, grad_rows + pair * grad_stride, grad_stride, pairs, open,
                            dvalue + (row + from) * b->dvalue_stride, b->dvalue_stride, a->Dv);
        }
        if (dkey) {
            FN(outer_pairs)(dS + from * lanes / 2 + pair, lanes / 2, query_rows + pair * query_stride, query_stride, pairs,
                            open, dkey + (row + from) * b->dkey_stride, b->dkey_stride, a->E);
        }
        from = end[u];
    }
    if (b->g->dquery.m.data) {
        FN(value_pairs_wide)(g->dscores, keys, query_stride, end, a->E, dqT, s->ones, &s->ahead, nv);
    }
    return n;
}

#else

typedef struct {
    bool fit;
} FN(gradient_parts);

SA_INLINE size_t FN(lay_out_gradient_parts)(const sa_attention_gradients *d, char *base, size_t used, FN(gradient_parts) * s) {
    return (void)d, (void)base, (void)s, used;
}
SA_INLINE void FN(open_gradient_cells)(const sa_block *b, FN(gradient_parts) * g) { (void)b, (void)g; }
SA_INLINE void FN(open_gradient_parts)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_parts) * g,
                                       FN(gradient_rows) * x, real *q_rows, real *do_rows, int nv) {
    (void)b, (void)s, (void)g, (void)x, (void)q_rows, (void)do_rows, (void)nv;
}
SA_INLINE bool FN(dweights_by_parts)(const sa_block *b, FN(scratch) * s, const FN(gradient_parts) * g, ptrdiff_t first,
                                     ptrdiff_t n, real *dS, int nv) {
    return (void)b, (void)s, (void)g, (void)first, (void)n, (void)dS, (void)nv, false;
}

SA_INLINE const real *FN(keys_by_parts)(const sa_block *b, const FN(scratch) * s, const FN(gradient_parts) * g,
                                        ptrdiff_t first) {
    return (void)b, (void)s, (void)g, (void)first, NULL;
}
SA_INLINE ptrdiff_t FN(gradients_by_parts)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_parts) * g,
                                           const real *P, real *dS, const real *delta, real *dqT, ptrdiff_t first,
                                           ptrdiff_t done, ptrdiff_t n, int nv, bool plain, bool keeps) {
    (void)plain, (void)keeps;
    return (void)b, (void)s, (void)g, (void)P, (void)dS, (void)delta, (void)dqT, (void)first, (void)n, (void)nv, done;
}

#endif

#endif
