/* matmul.h's products on the matrix unit (docs/decisions/0003-fused-training.md). Operands are split into three terms
 * (products/amx_tiles.h), which takes time, so a task should have many rows and columns. The numbers of a pair are half
 * a slice apart, so that rows are split without a shuffle.
 *
 * Subnormals are lost: numbers below 2^−100 have an error of up to 2^−126. If a number is NaN, infinite or close to
 * overflow, multiply-adds compute its row of A or panel of B, in matmul_tn the whole call.
 * Comes after kernels/products/amx_attention.h. */
#include "kernels/kernels.h"

#define SA_AMX(name) SA_PASTE4(sa_, name, f32, amx)
SA_MATMUL_ENTRIES(SA_DECLARE_ENTRY, f32, SA_ISA)
SA_DECLARE_ENTRY(begin_rows, f32, SA_ISA)

#define SA_SIDE 32 /* rows and columns of C at a time */
#define SA_TERMS 3
#define SA_SPLIT_TILE ((size_t)SA_TERMS * SA_TILE_BYTES)

/* Splitting narrower rows takes as long as multiplying them. */
enum { SA_AMX(splits_from) = 96 };

typedef struct {
    bool same_fits; /* all numbers of `same` can be split */
    char *same;     /* the split operand: A of matmul_nt and matmul_nn, B of matmul_tn */
    char *other;
    real *sums; /* SA_SIDE × SA_SIDE */
    void *plain;
} FN(product_scratch);

static size_t FN(lay_out_product)(char *base, ptrdiff_t rows, ptrdiff_t d, FN(product_scratch) * *scratch) {
    FN(product_scratch) unused, *s = base ? (FN(product_scratch) *)(void *)base : &unused;
    size_t used = (sizeof *s + 63) / 64 * 64;
    const size_t width = (size_t)(SA_CEIL_DIV(d, SA_SIDE) * SA_SIDE), most = (size_t)SA_LARGER(rows, SA_SUM_ROWS);
    const size_t depth = SA_LARGER(width, SA_SUM_ROWS), side = SA_WEIGHT_ROWS;
    SA_TAKE(same, char, (most + SA_SIDE) * width * SA_SPLIT_TILE / (SA_TILE_ROWS * SA_TILE_SLICE));
    SA_TAKE(other, char, side *depth *SA_SPLIT_TILE / (SA_TILE_ROWS * SA_TILE_SLICE));
    SA_TAKE(sums, real, SA_SIDE * SA_SIDE);
    SA_TAKE(plain, char, FN(matmul_scratch)(rows, d));
    if (base) {
        *scratch = s;
    }
    return used;
}

SA_KERNEL size_t SA_AMX(matmul_scratch)(ptrdiff_t rows, ptrdiff_t d) {
    FN(product_scratch) **unused = NULL;
    return d < SA_AMX(splits_from) ? FN(matmul_scratch)(rows, d) : FN(lay_out_product)(SA_NOWHERE, rows, d, unused);
}

/* Copies a square of at most SA_LANES × SA_LANES, padded with zeros. */
SA_ONCE void FN(pad_square)(const real *x, ptrdiff_t stride, ptrdiff_t rows, int columns, real *to) {
    for (int i = 0; i < SA_LANES; ++i) {
        vec row = V(set1)(0);
        if (i < rows) {
            row = FN(load_up_to)(x + i * stride, columns);
        }
        V(store)(to + i * SA_LANES, row);
    }
}

SA_INLINE void FN(load_square)(const real *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns,
                               const bool transposed, vec *to) {
    real padded[SA_LANES * SA_LANES];
    if (rows < SA_LANES || columns < SA_LANES) {
        FN(pad_square)(x, stride, rows, columns > 0 ? (int)SA_SMALLER(columns, SA_LANES) : 0, padded);
        x = padded;
        stride = SA_LANES;
    }
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        to[i] = V(load)(x + i * stride);
    }
    if (transposed) {
        FN(transpose)(to);
    }
}

/* Where the second half of a slice is. */
enum { SA_TO_THE_RIGHT, SA_BELOW };

/* Splits a slice of x[rows][columns]; its second half is `below` or to the right. Adds NaN to `wrong` on failure. */
SA_INLINE vec FN(split_square)(const real *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns, char *to,
                               size_t term_bytes, vec wrong, const bool below, const bool transposed) {
    vec a[SA_LANES], b[SA_LANES];
    FN(load_square)(x, stride, rows, columns, transposed, a);
    if (below) {
        FN(load_square)(x + SA_LANES * stride, stride, rows - SA_LANES, columns, transposed, b);
    } else {
        FN(load_square)(x + SA_LANES, stride, rows, columns - SA_LANES, transposed, b);
    }
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        wrong = wrong + FN(split_pairs)(a[i], b[i], to + i * 64, term_bytes, SA_TERMS, SA_NEAREST);
    }
    return wrong;
}

#define SA_SPLIT_SQUARE(name, below, transposed)                                                                       \
    SA_LEAF vec FN(name)(const real *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t columns, char *to,                 \
                         size_t term_bytes, vec wrong) {                                                               \
        return FN(split_square)(x, stride, rows, columns, to, term_bytes, wrong, below, transposed);                   \
    }
SA_SPLIT_SQUARE(split_square_right, SA_TO_THE_RIGHT, SA_AS_IS)
SA_SPLIT_SQUARE(split_square_right_transposed, SA_TO_THE_RIGHT, SA_TRANSPOSED)
SA_SPLIT_SQUARE(split_square_below, SA_BELOW, SA_AS_IS)
SA_SPLIT_SQUARE(split_square_below_transposed, SA_BELOW, SA_TRANSPOSED)
#undef SA_SPLIT_SQUARE

/* Splits A[m][n], or the transpose of A[n][m], to tiles [row tile][term][slice]. False if it cannot be split. */
SA_LEAF bool FN(split_left)(const real *x, ptrdiff_t stride, ptrdiff_t m, ptrdiff_t n, bool transposed, char *to) {
    const size_t term_bytes = (size_t)FN(slices_of)(n) * SA_TILE_BYTES;
    vec wrong = V(set1)(0);
    for (ptrdiff_t r = 0; r < m; r += SA_TILE_ROWS, to += SA_TERMS * term_bytes) {
        char *tile = to;
        for (ptrdiff_t k = 0; k < n; k += SA_TILE_SLICE, tile += SA_TILE_BYTES) {
            sa_tiles_stay_awake();
            if (transposed) {
                wrong = FN(split_square_below_transposed)(x + k * stride + r, stride, n - k, m - r, tile, term_bytes,
                                                          wrong);
            } else {
                wrong = FN(split_square_right)(x + r * stride + k, stride, m - r, n - k, tile, term_bytes, wrong);
            }
        }
    }
    return FN(is_finite)(wrong);
}

/* Splits B[n][width], or the transpose of B[width][n], width ≤ SA_SIDE, to tiles [slice][term][lane tile]. */
SA_LEAF bool FN(split_panel)(const real *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, bool transposed, char *to) {
    const ptrdiff_t lane_tiles = SA_CEIL_DIV(width, SA_LANES);
    const size_t term_bytes = (size_t)lane_tiles * SA_TILE_BYTES;
    vec wrong = V(set1)(0);
    for (ptrdiff_t k = 0; k < n; k += SA_TILE_SLICE, to += SA_TERMS * term_bytes) {
        for (ptrdiff_t v = 0; v < lane_tiles; ++v) {
            const ptrdiff_t c = v * SA_LANES;
            char *tile = to + v * SA_TILE_BYTES;
            sa_tiles_stay_awake();
            if (transposed) {
                wrong = FN(split_square_right_transposed)(x + c * stride + k, stride, width - c, n - k, tile,
                                                          term_bytes, wrong);
            } else {
                wrong = FN(split_square_below)(x + k * stride + c, stride, n - k, width - c, tile, term_bytes, wrong);
            }
        }
    }
    return FN(is_finite)(wrong);
}

SA_LEAF bool FN(row_fits)(const real *x, ptrdiff_t n) {
    char tiles[SA_TERMS][64] __attribute__((aligned(64)));
    vec wrong = V(set1)(0);
    for (ptrdiff_t k = 0; k < n; k += SA_LANES) {
        const vec t = FN(load_up_to)(x + k, n - k);
        wrong = wrong + FN(split_pairs)(t, t, tiles[0], sizeof tiles[0], SA_TERMS, SA_NEAREST);
    }
    return FN(is_finite)(wrong);
}

SA_LEAF void FN(product_low1)(const FN(operands) * o, real *c) {
    FN(product_any)(o, c, SA_SIDE * sizeof(real), SA_TERMS, SA_TERMS, SA_TERMS, 1, 1);
}
SA_LEAF void FN(product_low2)(const FN(operands) * o, real *c) {
    FN(product_any)(o, c, SA_SIDE * sizeof(real), SA_TERMS, SA_TERMS, SA_TERMS, 1, 2);
}

/* sums[rows][width] = left·right from row r on; rows and width ≤ SA_SIDE. Later elements of sums may be anything. */
SA_INLINE void FN(multiply)(const char *left, const char *right, ptrdiff_t r, ptrdiff_t rows, ptrdiff_t n,
                            ptrdiff_t width, real *sums) {
    const ptrdiff_t slices = FN(slices_of)(n), lane_tiles = SA_CEIL_DIV(width, SA_LANES);
    const size_t term_bytes = (size_t)slices * SA_TILE_BYTES;
    const FN(operands) o = {.left = left + (size_t)(r / SA_TILE_ROWS) * SA_TERMS * term_bytes,
                            .right = right,
                            .left_term = term_bytes,
                            .left_row = SA_TERMS * term_bytes,
                            .right_term = (size_t)lane_tiles * SA_TILE_BYTES,
                            .right_slice = (size_t)lane_tiles * SA_SPLIT_TILE,
                            .slices = slices};
    if (rows > SA_TILE_ROWS) {
        FN(product)(&o, sums, SA_SIDE * sizeof(real), SA_TERMS, SA_TERMS, (int)lane_tiles);
    } else if (lane_tiles == 2) {
        FN(product_low2)(&o, sums);
    } else {
        FN(product_low1)(&o, sums);
    }
}

/* C = sums, or C += sums. */
SA_LEAF void FN(take_sums)(const real *sums, ptrdiff_t rows, ptrdiff_t width, bool adds, real *c, ptrdiff_t c_stride) {
    for (ptrdiff_t at = 0; at < width; at += SA_LANES) {
        for (ptrdiff_t r = 0; r < rows; ++r) {
            real *to = c + r * c_stride + at;
            const vec first = adds ? FN(load_up_to)(to, width - at) : V(set1)(0);
            FN(store_up_to)(to, first + V(load)(sums + r * SA_SIDE + at), width - at);
        }
    }
}

static void FN(multiply_plainly)(const sa_product *p, ptrdiff_t r, ptrdiff_t rows, ptrdiff_t c, ptrdiff_t width,
                                 bool transposed, void *scratch) {
    sa_product some = *p;
    some.adds = true;
    some.m = rows;
    some.width = width;
    some.a = (const real *)p->a + r * p->a_stride;
    some.b = (const real *)p->b + (transposed ? c * p->b_stride : c);
    some.c = (real *)p->c + r * p->c_stride + c;
    if (transposed) {
        FN(matmul_nt)(&some, scratch);
    } else {
        FN(matmul_nn)(&some, scratch);
    }
}

SA_INLINE void FN(matmul_rows)(const sa_product *p, void *scratch, const bool transposed) {
    const real *a = p->a, *b = p->b;
    FN(product_scratch) *s = NULL;
    FN(lay_out_product)(scratch, p->m, p->n, &s);
    if (!p->adds) {
        FN(begin_rows)(p->c, p->c_stride, p->m, p->width, p->bias, SA_NO_RESIDUAL, SA_NO_SUMS);
    }
    sa_start_tiles();
    const unsigned before = sa_flush_subnormals();
    if (!p->again) {
        s->same_fits = FN(split_left)(a, p->a_stride, p->m, p->n, SA_AS_IS, s->same);
    }
    for (ptrdiff_t at = 0; at < p->width; at += SA_SIDE) {
        const ptrdiff_t width = SA_SMALLER(p->width - at, SA_SIDE);
        const real *b_at = b + (transposed ? at * p->b_stride : at);
        if (!FN(split_panel)(b_at, p->b_stride, p->n, width, transposed, s->other)) {
            FN(multiply_plainly)(p, 0, p->m, at, width, transposed, s->plain);
            continue;
        }
        for (ptrdiff_t r = 0; r < p->m; r += SA_SIDE) {
            const ptrdiff_t rows = SA_SMALLER(p->m - r, SA_SIDE);
            real *c = (real *)p->c + r * p->c_stride + at;
            FN(multiply)(s->same, s->other, r, rows, p->n, width, s->sums);
            if (s->same_fits) {
                FN(take_sums)(s->sums, rows, width, SA_ADDS, c, p->c_stride);
                continue;
            }
            for (ptrdiff_t i = 0; i < rows; ++i) {
                if (FN(row_fits)(a + (r + i) * p->a_stride, p->n)) {
                    FN(take_sums)(s->sums + i * SA_SIDE, 1, width, SA_ADDS, c + i * p->c_stride, 0);
                } else {
                    FN(multiply_plainly)(p, r + i, 1, at, width, transposed, s->plain);
                }
            }
        }
    }
    sa_restore_subnormals(before);
    sa_end_tiles();
}

SA_KERNEL void SA_AMX(matmul_nt)(const sa_product *p, void *scratch) {
    if (p->n < SA_AMX(splits_from)) {
        FN(matmul_nt)(p, scratch);
    } else {
        FN(matmul_rows)(p, scratch, SA_TRANSPOSED);
    }
}

SA_KERNEL void SA_AMX(matmul_nn)(const sa_product *p, void *scratch) {
    if (p->n < SA_AMX(splits_from)) {
        FN(matmul_nn)(p, scratch);
    } else {
        FN(matmul_rows)(p, scratch, SA_AS_IS);
    }
}

SA_KERNEL void SA_AMX(matmul_tn)(const sa_product *p, void *scratch) {
    const real *b = p->b;
    FN(product_scratch) *s = NULL;
    if (p->width < SA_AMX(splits_from)) {
        FN(matmul_tn)(p, scratch);
        return;
    }
    FN(lay_out_product)(scratch, 0, p->width, &s);
    const size_t panel_bytes = (size_t)FN(slices_of)(p->n) * 2 * SA_SPLIT_TILE;
    sa_start_tiles();
    const unsigned before = sa_flush_subnormals();
    if (!p->again) {
        s->same_fits = true;
    }
    for (ptrdiff_t at = 0; at < p->width && !p->again; at += SA_SIDE) {
        const ptrdiff_t width = SA_SMALLER(p->width - at, SA_SIDE);
        const bool fits =
            FN(split_panel)(b + at, p->b_stride, p->n, width, SA_AS_IS, s->same + (size_t)(at / SA_SIDE) * panel_bytes);
        s->same_fits = s->same_fits && fits;
    }
    if (!FN(split_left)(p->a, p->a_stride, p->m, p->n, SA_TRANSPOSED, s->other) || !s->same_fits) {
        FN(matmul_tn)(p, s->plain);
    } else {
        for (ptrdiff_t at = 0; at < p->width; at += SA_SIDE) {
            const ptrdiff_t width = SA_SMALLER(p->width - at, SA_SIDE);
            for (ptrdiff_t r = 0; r < p->m; r += SA_SIDE) {
                const ptrdiff_t rows = SA_SMALLER(p->m - r, SA_SIDE);
                FN(multiply)(s->other, s->same + (size_t)(at / SA_SIDE) * panel_bytes, r, rows, p->n, width, s->sums);
                FN(take_sums)(s->sums, rows, width, p->adds, (real *)p->c + r * p->c_stride + at, p->c_stride);
            }
        }
    }
    sa_restore_subnormals(before);
    sa_end_tiles();
}
#undef SA_SIDE
#undef SA_SPLIT_TILE
#undef SA_TERMS
