/* The products of a wide block (unit.h) as products of bfloat16 pairs, which are exact in float32; sums and factors are
 * float32. With bfloat16 values, weights are rounded to bfloat16 after they are summed
 * (docs/decisions/0007-bf16dot.md).
 *
 * A tile of keys has a cell, [keys][slices · 32] bfloat16 padded with zeros, kept for the head's next blocks. Queries
 * are lanes of pairs, [E / 2][nv·lanes]. Values are pairs of rows, [keys / 2][slices · 32][2], weights pairs of keys,
 * [keys / 2][nv·lanes].
 * Comes after simd/avx512bf16.h and isa/avx512_unit.h. */
#include "kernels/kernels.h"

enum { SA_PAIR_STEP = 32 };

/* The bounds of pairs, as exponents of 2. Below 2^50 products stay within float32. Scores may lose subnormals. Values
 * and dO are 0 or at least 2^−60, so that no product is subnormal. */
enum { SA_LEAST_OF_SCORES = -127, SA_LEAST_OF_GRADIENTS = -60, SA_MOST_OF_PAIRS = 50 };

/* False for short sums, few keys, or a factor that takes products out of range. */
SA_INLINE bool FN(pairs_take)(const sa_attention *a) {
    return a->query.m.dtype == SA_BF16 && a->key.m.dtype == SA_BF16 && a->S >= 32 && a->E >= 16 &&
           FN(factor_is_ordinary)(a);
}

/* Multiply-adds compute wide blocks of one vector. */
SA_ONCE bool FN(bf16dot_take)(const sa_attention *a) { return FN(pairs_take)(a) && a->L > SA_LANES / a->gqa; }

SA_INLINE size_t FN(pair_row_bytes)(ptrdiff_t width) {
    return (size_t)SA_CEIL_DIV(width, SA_PAIR_STEP) * SA_PAIR_STEP * 2;
}

SA_INLINE ptrdiff_t FN(pair_cells)(const sa_attention *a) { return SA_CEIL_DIV(a->S, SA_KEYS_PER_TILE); }

SA_INLINE bool FN(pairs_take_values)(const sa_attention *a) { return a->value.m.dtype == SA_BF16 && a->Dv > 0; }

SA_ONCE size_t FN(bf16dot_lay_out)(const sa_attention *a, char *base, size_t used, FN(wide_state) * s) {
    used = FN(lay_out_cells)(&s->keys, FN(pair_row_bytes)(a->E), SA_KEYS_PER_TILE, FN(pair_cells)(a), base, used);
    SA_TAKE(queries, char, FN(pair_row_bytes)(a->E) * SA_MAX_BLOCK_ROWS);
    SA_TAKE(rows, char, FN(pair_row_bytes)(SA_LARGER(a->E, a->Dv)) * SA_LANES);
    s->weight_terms = FN(pairs_take_values)(a);
    if (s->weight_terms) {
        used = FN(lay_out_cells)(&s->values, 2 * FN(pair_row_bytes)(a->Dv), SA_KEYS_PER_TILE / 2, FN(pair_cells)(a),
                                 base, used);
    }
    return used;
}

SA_ONCE void FN(bf16dot_start)(const sa_block *b, FN(wide_state) * s) {
    if (!FN(bf16dot_take)(b->a)) {
        return;
    }
    if (!b->holds_copies) {
        FN(forget_cells)(&s->keys);
        if (s->weight_terms) {
            FN(forget_cells)(&s->values);
        }
    }
    s->terms = b->rows->count > SA_LANES && b->rows->gaps == 0; /* with gaps, a tile may begin inside a cell */
}

SA_ONCE void FN(bf16dot_end)(void) {}

/* Makes pairs of keys of the weights of keys from … n − 1, in place; an odd last key is paired with 0. `scores`: P
 * holds scores, and tile_sum gets the weights before they are rounded. */
SA_INLINE void FN(pair_weights_any)(real *P, ptrdiff_t from, ptrdiff_t n, ptrdiff_t lanes, const real *maximum,
                                    real *tile_sum, const int nv, const bool scores) {
    vec m[SA_VECS], sum[SA_VECS];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(maximum + v * SA_LANES);
        sum[v] = V(load)(tile_sum + v * SA_LANES);
    }
    for (ptrdiff_t j = from; j < n; j += 2) {
        const real *p = P + j * lanes, *next = j + 1 < n ? p + lanes : p;
        vec a[SA_VECS], b[SA_VECS];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            a[v] = V(load)(p + v * SA_LANES);
            b[v] = V(load)(next + v * SA_LANES);
            if (scores) {
                a[v] = a[v] - m[v];
                b[v] = b[v] - m[v];
            }
        }
        if (scores) {
            FN(exp2_each)(a, nv);
            FN(exp2_each)(b, nv);
        }
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            b[v] = j + 1 < n ? b[v] : V(set1)(0);
            sum[v] = sum[v] + (a[v] + b[v]);
            V(store)(P + j / 2 * lanes + v * SA_LANES, V(round_pairs)(a[v], b[v]));
        }
    }
    SA_UNROLL
    for (int v = 0; v < nv && scores; ++v) {
        V(store)(tile_sum + v * SA_LANES, sum[v]);
    }
}

#define SA_PAIR_LEAVES(nv)                                                                                             \
    SA_LEAF void FN(rows_times_pairs##nv)(const real *qT, const real *k, ptrdiff_t k_stride, ptrdiff_t n, ptrdiff_t E, \
                                          real *P, ptrdiff_t lanes, const real *factor, real *top, sa_ahead *ahead) {  \
        FN(rows_times_lanes_any)(qT, k, k_stride, n, E, P, lanes, factor, top, ahead, nv, SA_OF_PAIRS);                \
    }                                                                                                                  \
    SA_LEAF void FN(columns_times_pairs##nv)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end,   \
                                             ptrdiff_t Dv, real *O, ptrdiff_t lanes, const real *alpha,                \
                                             sa_ahead *ahead) {                                                        \
        FN(columns_times_lanes_any)(P, v, v_stride, end, Dv, O, lanes, alpha, ahead, nv, SA_OF_PAIRS);                 \
    }                                                                                                                  \
    SA_LEAF void FN(outer_pairs##nv)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride,             \
                                     ptrdiff_t n, ptrdiff_t m, real *C, ptrdiff_t c_stride, int tail) {                \
        FN(outer_any)(p, p_stride, x, x_stride, n, m, C, c_stride, C, c_stride, tail, nv, SA_OF_PAIRS);                \
    }                                                                                                                  \
    SA_LEAF void FN(pair_weights##nv)(real * P, ptrdiff_t from, ptrdiff_t n, ptrdiff_t lanes, const real *maximum,     \
                                      real *tile_sum, bool scores) {                                                   \
        if (scores) {                                                                                                  \
            FN(pair_weights_any)(P, from, n, lanes, maximum, tile_sum, nv, SA_HOLDS_SCORES);                           \
        } else {                                                                                                       \
            FN(pair_weights_any)(P, from, n, lanes, maximum, tile_sum, nv, SA_HOLDS_WEIGHTS);                          \
        }                                                                                                              \
    }
SA_LEAVES(SA_PAIR_LEAVES)
#undef SA_PAIR_LEAVES

/* Like rows_times_lanes, times a factor for each lane. */
SA_ONCE void FN(rows_times_pairs)(const real *qT, const real *k, ptrdiff_t k_stride, const ptrdiff_t *end, ptrdiff_t E,
                                  real *P, ptrdiff_t lanes, const real *factor, real *top, sa_ahead *ahead, int nv) {
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t n = end[v] - j, at = v * SA_LANES;
        if (n <= 0) {
            continue;
        }
        SA_CALL_LEAF(rows_times_pairs, nv - v, qT + at, k + j * k_stride, k_stride, n, E, P + j * lanes + at, lanes,
                     factor + at, top + at, ahead)
        j = end[v];
    }
}

SA_ONCE void FN(columns_times_pairs)(const real *P, const real *v, ptrdiff_t v_stride, const ptrdiff_t *end,
                                     ptrdiff_t Dv, real *O, const real *alpha, sa_ahead *ahead, int nv) {
    ptrdiff_t pairs[SA_VECS];
    for (int i = 0; i < nv; ++i) {
        pairs[i] = (end[i] + 1) / 2;
    }
    SA_CALL_LEAF(columns_times_pairs, nv, P, v, v_stride, pairs, Dv, O, nv * SA_LANES, alpha, ahead)
}

/* Like outer; n counts pairs of columns of p and of rows of x. */
SA_ONCE void FN(outer_pairs)(const real *p, ptrdiff_t p_stride, const real *x, ptrdiff_t x_stride, ptrdiff_t n,
                             ptrdiff_t m, real *C, ptrdiff_t c_stride, ptrdiff_t width) {
    for (ptrdiff_t d = 0; d < width;) {
        int tail;
        const int nv = FN(vectors_at_once)(width - d, &tail);
        SA_CALL_LEAF(outer_pairs, nv, p, p_stride, x + d, x_stride, n, m, C + d, c_stride, tail)
        d += nv * SA_LANES;
    }
}

/* Like pass_exp, but makes pairs of keys. */
SA_ONCE void FN(pass_pair_weights)(real *P, const ptrdiff_t *end, const real *maximum, real *tile_sum, int nv,
                                   bool scores) {
    const ptrdiff_t lanes = nv * SA_LANES;
    if (scores) {
        FN(clear_rows)(tile_sum);
    }
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t at = v * SA_LANES;
        if (end[v] > j) {
            SA_CALL_LEAF(pair_weights, nv - v, P + at, j, end[v], lanes, maximum + at, tile_sum + at, scores)
            j = end[v];
        }
    }
}

/* Copies n elements and zeros up to a whole slice. Returns nonzero if pairs cannot represent an element. */
SA_ONCE int FN(copy_pairs)(const char *row, const sa_matrix *m, ptrdiff_t n, int least, char *to) {
    if (m->swapped || m->col_stride != 2) {
        for (ptrdiff_t e = 0; e < n; ++e) {
            const char *from = row + e * m->col_stride;
            to[2 * e] = from[m->swapped];
            to[2 * e + 1] = from[!m->swapped];
        }
        row = to;
    }
    int beyond = 0;
    for (ptrdiff_t e = 0; e < n; e += SA_PAIR_STEP) {
        const vec pairs = V(load_pairs)(row + 2 * e, n - e);
        beyond |= V(bf16_beyond)(pairs, least, SA_MOST_OF_PAIRS);
        V(store)((void *)(to + 2 * e), pairs);
    }
    return beyond;
}

/* Joins two rows, or one and zeros, as pairs for sums over rows. */
SA_ONCE int FN(join_rows)(const char *row, const char *second, const sa_matrix *m, ptrdiff_t width, int least, char *to,
                          char *two) {
    const size_t bytes = FN(pair_row_bytes)(width);
    int beyond = FN(copy_pairs)(row, m, width, least, two);
    if (second) {
        beyond |= FN(copy_pairs)(second, m, width, least, two + bytes);
    }
    for (size_t at = 0; at < bytes; at += 2 * SA_LANES) {
        V(store)((void *)(to + 2 * at), V(zip_pairs)(two + at, SA_LANES, two + bytes + at, second ? SA_LANES : 0));
    }
    return beyond;
}

/* Returns the tile's cell, or NULL if pairs cannot represent it.
 * With `two`, room for two rows, rows are joined in pairs; else it is SA_NOT_JOINED. */
#define SA_NOT_JOINED NULL
SA_ONCE const real *FN(pairs_of_tile)(const sa_block *b, const FN(cells) * cells, const sa_matrix *m, ptrdiff_t width,
                                      ptrdiff_t first, int least, char *two) {
    const ptrdiff_t at = (first - b->copied_from) / SA_KEYS_PER_TILE, cell = SA_SMALLER(at, cells->room);
    char *const tile = cells->tiles + (size_t)cell * cells->bytes, *to = tile;
    unsigned char none = SA_CELL_UNKNOWN, *state = at < cells->room ? &cells->state[cell] : &none;
    if (*state == SA_CELL_UNKNOWN) {
        const ptrdiff_t n = SA_SMALLER(b->keys - first, SA_KEYS_PER_TILE);
        const char *row = m->data + first * m->row_stride;
        int beyond = 0;
        for (ptrdiff_t j = 0; j < n; j += two ? 2 : 1, row += (two ? 2 : 1) * m->row_stride, to += cells->row_bytes) {
            beyond |= two ? FN(join_rows)(row, j + 1 < n ? row + m->row_stride : NULL, m, width, least, to, two)
                          : FN(copy_pairs)(row, m, width, least, to);
        }
        *state = beyond ? SA_CELL_BEYOND : SA_CELL_HOLDS;
    }
    return *state == SA_CELL_HOLDS ? (const void *)tile : NULL;
}

/* Writes rows as pairs to to[width / 2 rounded up to slices][nv·lanes]; other lanes are 0.
 * False if a number does not fit. */
SA_ONCE bool FN(pairs_of_lanes)(const FN(wide_state) * s, const char *const *rows, const sa_matrix *m, int count,
                                ptrdiff_t width, int least, char *to, int nv) {
    const size_t bytes = FN(pair_row_bytes)(width);
    int beyond = 0;
    for (int v = 0; v < nv; ++v) {
        const int left = count - v * SA_LANES, n = SA_SMALLER(left, SA_LANES);
        for (int i = 0; i < n; ++i) {
            beyond |= FN(copy_pairs)(rows[v * SA_LANES + i], m, width, least, s->rows + (size_t)i * bytes);
        }
        for (size_t at = 0; at < bytes; at += 64) {
            vec x[SA_LANES];
            FN(load_transposed)((const void *)(s->rows + at), (ptrdiff_t)(bytes / sizeof(real)), n, SA_LANES, x);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                V(store)((real *)(void *)to + ((ptrdiff_t)(at / 4) + i) * nv * SA_LANES + v * SA_LANES, x[i]);
            }
        }
    }
    return !beyond;
}

SA_ONCE void FN(bf16dot_queries)(const sa_block *b, FN(scratch) * s, int nv) {
    s->wide.queries_fit = FN(pairs_of_lanes)(&s->wide, b->rows->query, &b->a->query.m, b->rows->count, b->a->E,
                                             SA_LEAST_OF_SCORES, s->wide.queries, nv);
}

/* to[n][nv·lanes] = factor times a cell's rows times lanes of pairs; top takes the maxima. */
SA_ONCE void FN(rows_by_pairs)(const sa_block *b, FN(scratch) * s, const FN(cells) * cells, const real *cell,
                               const char *lanes_of_pairs, ptrdiff_t width, const real *factor, ptrdiff_t first,
                               ptrdiff_t n, real *to, real *top, int nv) {
    ptrdiff_t end[SA_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(rows_times_pairs)((const void *)lanes_of_pairs, cell, (ptrdiff_t)(cells->row_bytes / sizeof(real)), end,
                         (width + 1) / 2, to, nv * SA_LANES, factor, top, &s->ahead, nv);
}

SA_ONCE bool FN(bf16dot_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const FN(wide_state) *wide = &s->wide;
    const ptrdiff_t E = b->a->E;
    const real *keys = wide->queries_fit
                           ? FN(pairs_of_tile)(b, &wide->keys, &b->key, E, first, SA_LEAST_OF_SCORES, SA_NOT_JOINED)
                           : NULL;
    if (keys) {
        real factor[SA_MAX_BLOCK_ROWS];
        for (int v = 0; v < nv; ++v) {
            V(store)(factor + v * SA_LANES, V(set1)(FN(factor_of)(b->a)));
        }
        FN(rows_by_pairs)(b, s, &wide->keys, keys, wide->queries, E, factor, first, n, s->P, s->top, nv);
    }
    return keys != NULL;
}

SA_ONCE bool FN(bf16dot_weights)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                                 bool scores) {
    FN(wide_state) *wide = &s->wide;
    const real *values = wide->weight_terms ? FN(pairs_of_tile)(b, &wide->values, &b->value, b->a->Dv, first,
                                                                SA_LEAST_OF_GRADIENTS, wide->rows)
                                            : NULL;
    wide->values_now = (const char *)values;
    if (values) {
        ptrdiff_t end[SA_VECS];
        FN(open_ends)(b->rows, s, first, n, nv, end);
        FN(pass_pair_weights)(s->P, end, s->maximum, s->tile_sum, nv, scores);
    }
    return values != NULL;
}

SA_ONCE void FN(bf16dot_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    ptrdiff_t end[SA_VECS];
    FN(open_ends)(b->rows, s, first, n, nv, end);
    FN(start_output)(b, s, nv);
    FN(columns_times_pairs)(s->P, (const void *)s->wide.values_now,
                            (ptrdiff_t)(s->wide.values.row_bytes / sizeof(real)), end, b->a->Dv, s->O, s->alpha,
                            &s->ahead, nv);
}

/* Rounds weights as in tiles of pairs, because the numbers of closed keys must not change how exact other keys are. */
SA_ONCE void FN(bf16dot_round)(FN(scratch) * s, ptrdiff_t count) {
    for (real *p = s->P; p < s->P + count; p += SA_LANES) {
        V(store)(p, V(round_pairs)(V(set1)(0), V(load)(p)));
    }
}
