/* Products of matrices with contiguous rows, on attention's register tiles. A panel has at most block_rows columns,
 * copied in pieces that stay in L1 or L2. An element of C is a sum in the order of n, in pieces that depend on n alone,
 * so bits do not depend on the cut into tasks.
 * Comes after kernels/products/tiles.h and kernels/transformer/rows.h. */
#include "kernels/kernels.h"

#define SA_PANEL FN(block_rows)
#define SA_PANEL_DEPTH 128
#define SA_SUMMED 64 /* rows of A and B that matmul_tn takes at a time, in L1 */

SA_KERNEL size_t FN(matmul_scratch)(ptrdiff_t rows, ptrdiff_t d) {
    (void)rows;
    (void)d;
    const size_t panel = SA_PANEL_DEPTH * SA_PANEL, rows_of_a = SA_WEIGHT_ROWS * SA_SUMMED;
    return (panel + SA_LARGER(panel, rows_of_a)) * sizeof(real);
}

/* panel[k][c] = b[k][c], k < n; zeros fill the last vector of columns. */
SA_ONCE void FN(fill_panel)(const real *b, ptrdiff_t b_stride, ptrdiff_t n, ptrdiff_t width, real *panel) {
    for (ptrdiff_t k = 0; k < n; ++k) {
        const real *from = b + k * b_stride;
        real *to = panel + k * SA_PANEL;
        for (ptrdiff_t c = 0; c < width; c += SA_LANES) {
            V(store)(to + c, FN(load_up_to)(from + c, width - c));
        }
    }
}

#if defined(SA_HAS_TRANSPOSED_LOADS) && !SA_REAL_IS_F64
#define SA_COPIED 4 /* the columns of a transposed load */
#else
#define SA_COPIED 0
#endif

/* Lane i of to[j] becomes x[i·stride + j], for a whole square. */
SA_INLINE void FN(load_square_transposed)(const real *x, ptrdiff_t stride, vec *to) {
#if SA_COPIED > 0
    SA_UNROLL
    for (int j = 0; j < SA_LANES; j += SA_COPIED) {
        V(load_transposed)(x + j, stride, to + j);
    }
#else
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        to[i] = V(load)(x + i * stride);
    }
    FN(transpose)(to);
#endif
}

/* panel[k][c] = b[c][k]; the panel's rows have `stride` elements. */
SA_KERNEL void FN(fill_panel_transposed)(const real *b, ptrdiff_t b_stride, ptrdiff_t n, ptrdiff_t width, real *panel,
                                         ptrdiff_t stride) {
    for (ptrdiff_t c = 0; c < width; c += SA_LANES) {
        const real *from = b + c * b_stride;
        ptrdiff_t k = 0;
        vec t[SA_LANES];
        for (; k + SA_LANES <= n && c + SA_LANES <= width; k += SA_LANES) {
            FN(load_square_transposed)(from + k, b_stride, t);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                V(store)(panel + (k + i) * stride + c, t[i]);
            }
        }
        for (; k < n; k += SA_LANES) {
            FN(load_transposed)(from + k, b_stride, width - c, n - k, t);
            for (int i = 0; i < SA_LANES && k + i < n; ++i) {
                V(store)(panel + (k + i) * stride + c, t[i]);
            }
        }
    }
}

/* ---- the next panel, while one is multiplied ------------------------------------------------------------------------
 * Between the rounds of a tile, the next piece of B is prepared, patch by patch. With transposed loads a patch is
 * copied to the next panel, since shuffles and multiply-adds run on different units of a core, and as much of the
 * piece after it is fetched, if B comes from memory. Otherwise a patch is a row, and is only fetched. Fetching all at
 * once would fill the core's buffers, and loads would have to wait. */

#define SA_ROUND 8     /* terms of a sum between two patches */
#define SA_FAR_ROWS 48 /* with more rows, products take longer than fetching */

typedef struct {
    const real *b; /* the first numbers of the next rows in this piece */
    ptrdiff_t stride, k, depth;
    real *panel;
    ptrdiff_t left;  /* patches */
    ptrdiff_t ahead; /* how far after a number its counterpart in the piece to fetch is; 0: none is fetched */
} FN(coming);

/* The piece of B at column c and number k, for `panel`. There are no patches if a vector would not be whole. */
SA_ONCE FN(coming) FN(coming_piece)(const sa_product *p, ptrdiff_t c, ptrdiff_t k, real *panel) {
    const ptrdiff_t width = SA_SMALLER(p->width - c, SA_PANEL);
    FN(coming)
    f = {.b = (const real *)p->b + c * p->b_stride + k,
         .stride = p->b_stride,
         .depth = SA_SMALLER(p->n - k, SA_PANEL_DEPTH),
         .panel = panel};
#if SA_COPIED > 0
    f.left =
        width > 0 && width % SA_LANES == 0 && f.depth % SA_COPIED == 0 ? width / SA_LANES * (f.depth / SA_COPIED) : 0;
    f.ahead = !p->far ? 0 : k + f.depth < p->n ? f.depth : SA_PANEL * p->b_stride - k;
#else
    f.left = p->far && p->m <= SA_FAR_ROWS ? (width > 0 ? width : SA_PANEL) : 0;
#endif
    return f;
}

SA_INLINE void FN(prepare)(FN(coming) * f, ptrdiff_t patches) {
    enum { of_line = 64 / sizeof(real), lines = (SA_COPIED > 0 ? SA_LANES * SA_COPIED : SA_PANEL_DEPTH) / of_line };
    for (; patches > 0 && f->left > 0; --patches, --f->left) {
#if SA_COPIED > 0
        const ptrdiff_t k = f->k, stride = f->stride;
        const real *from = f->b + k, *after = from + f->ahead + (k & (of_line - 1)) / SA_COPIED * lines * stride;
        real *to = f->panel + k * SA_PANEL;
        vec t[SA_COPIED];
        V(load_transposed)(from, stride, t);
        SA_UNROLL
        for (int i = 0; i < SA_COPIED; ++i) {
            V(store)(to + i * SA_PANEL, t[i]);
        }
        if (f->ahead != 0) { /* the copies of a line's columns fetch lines of different rows */
            SA_UNROLL
            for (int line = 0; line < lines; ++line) {
                __builtin_prefetch(after + line * stride, 0, 2);
            }
        }
        f->k += SA_COPIED;
        if (f->k == f->depth) {
            f->k = 0;
            f->b += SA_LANES * stride;
            f->panel += SA_LANES;
        }
#else
        SA_UNROLL
        for (int line = 0; line < lines; ++line) {
            __builtin_prefetch(f->b + line * of_line, 0, 2);
        }
        f->b += f->stride;
#endif
    }
}

/* Prepares all of the first piece. */
SA_ONCE void FN(prepare_now)(FN(coming) f) { FN(prepare)(&f, f.left); }

/* Like outer_tile, with the same sums. */
SA_INLINE void FN(preparing_tile)(const real *a, ptrdiff_t a_stride, const real *panel, ptrdiff_t depth,
                                  const real *from, ptrdiff_t from_stride, real *c, ptrdiff_t c_stride, FN(coming) * f,
                                  ptrdiff_t patches, const int rows) {
    vec sum[8][4];
    FN(set_to_zero)(sum, rows, SA_VECS);
    for (ptrdiff_t i = 0; i < depth;) {
        const ptrdiff_t end = depth - i < SA_ROUND ? depth : i + SA_ROUND;
        FN(prepare)(f, patches);
        for (; i < end; ++i) {
            FN(add_outer)(sum, a + i, a_stride, panel + i * SA_PANEL, rows, 0, SA_VECS, SA_OF_NUMBERS);
        }
    }
    FN(store_outer)(sum, from, from_stride, c, c_stride, SA_LANES, rows, SA_VECS);
}

/* C[m][SA_PANEL] = row + a·panel, or += that if row is NULL. */
SA_LEAF void FN(multiply_preparing)(const sa_product *p, const real *a, const real *panel, ptrdiff_t depth,
                                    const real *row, real *c, FN(coming) f) {
    const ptrdiff_t a_stride = p->a_stride, c_stride = p->c_stride, from_stride = row == NULL ? c_stride : 0;
    const ptrdiff_t tiles = SA_CEIL_DIV(p->m, SA_ROWS(SA_VECS)), rounds = tiles * SA_CEIL_DIV(depth, SA_ROUND);
    const ptrdiff_t patches = SA_CEIL_DIV(f.left, rounds);
    const real *from = row == NULL ? c : row;
#define SA_TILE(r, rows)                                                                                               \
    FN(preparing_tile)(a + (r) * a_stride, a_stride, panel, depth, from + (r) * from_stride, from_stride,              \
                       c + (r) * c_stride, c_stride, &f, patches, rows)
    SA_EACH_TILE(p->m, SA_VECS, SA_TILE, )
#undef SA_TILE
}

/* ---- few rows ---------------------------------------------------------------------------------------------------- */

/* sum[r] += a[r][i]·t[i], i < n ≤ SA_LANES. */
SA_INLINE void FN(add_few_rows)(vec *sum, const real *a, ptrdiff_t a_stride, const vec *t, ptrdiff_t n,
                                const int rows) {
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        if (i < n) {
            SA_UNROLL
            for (int r = 0; r < rows; ++r) {
                sum[r] = V(fma)(V(set1)(a[r * a_stride + i]), t[i], sum[r]);
            }
        }
    }
}

/* For one to four rows B is transposed in registers and not kept. The sums are the same. */
SA_INLINE void FN(few_rows)(const sa_product *p, const int rows) {
    const real *a = p->a;
    for (ptrdiff_t c = 0; c < p->width; c += SA_LANES) {
        const real *b = (const real *)p->b + c * p->b_stride, *next = b + SA_LANES * p->b_stride;
        real *to = (real *)p->c + c;
        for (ptrdiff_t first = 0; first < p->n; first += SA_PANEL_DEPTH) {
            const ptrdiff_t end = p->n - first < SA_PANEL_DEPTH ? p->n : first + SA_PANEL_DEPTH;
            vec sum[4], t[SA_LANES];
            SA_UNROLL
            for (int r = 0; r < rows; ++r) {
                sum[r] = V(set1)(0);
            }
            for (ptrdiff_t k = first; k < end; k += SA_LANES) {
                if (k + SA_LANES <= end && c + SA_LANES <= p->width) {
                    for (int i = 0; i < SA_LANES && p->far; ++i, next += SA_LANES) { /* rows of B are contiguous */
                        __builtin_prefetch(next, 0, 2);
                    }
                    FN(load_square_transposed)(b + k, p->b_stride, t);
                    FN(add_few_rows)(sum, a + k, p->a_stride, t, SA_LANES, rows);
                } else {
                    FN(load_transposed)(b + k, p->b_stride, p->width - c, end - k, t);
                    FN(add_few_rows)(sum, a + k, p->a_stride, t, end - k, rows);
                }
            }
            SA_UNROLL
            for (int r = 0; r < rows; ++r) {
                real *c_r = to + r * p->c_stride;
                FN(store_up_to)(c_r, FN(load_up_to)(c_r, p->width - c) + sum[r], p->width - c);
            }
        }
    }
}
SA_LEAF void FN(few_rows1)(const sa_product *p) { FN(few_rows)(p, 1); }
SA_LEAF void FN(few_rows2)(const sa_product *p) { FN(few_rows)(p, 2); }
SA_LEAF void FN(few_rows3)(const sa_product *p) { FN(few_rows)(p, 3); }
SA_LEAF void FN(few_rows4)(const sa_product *p) { FN(few_rows)(p, 4); }

/* ---- the products: the first piece of a sum is added to what C begins with --------------------------------------- */

static const real FN(zeros)[SA_PANEL];

/* Returns the row that C begins with, or NULL if it is in C before the product. */
SA_INLINE const real *FN(first_row)(const sa_product *p, bool before) {
    if (!p->adds && (before || p->n == 0)) {
        FN(begin_rows)(p->c, p->c_stride, p->m, p->width, p->bias, SA_NO_RESIDUAL, SA_NO_SUMS);
        return NULL;
    }
    return p->adds ? NULL : p->bias != NULL ? p->bias : FN(zeros);
}

/* C[m][width] = row + a·panel, or += that. */
SA_INLINE void FN(multiply_panel)(const sa_product *p, const real *a, ptrdiff_t a_stride, const real *panel,
                                  ptrdiff_t stride, ptrdiff_t depth, const real *row, real *c, ptrdiff_t width) {
    FN(outer)(a, a_stride, panel, stride, depth, p->m, row == NULL ? c : row, row == NULL ? p->c_stride : 0, c,
              p->c_stride, width);
}

/* True if columns of B are read in place: a whole panel whose rows are so close that few lines share a set of the
 * L1. */
SA_INLINE bool FN(is_panel)(const sa_product *p, ptrdiff_t width) {
    return width == SA_PANEL && p->b_stride <= 2 * SA_PANEL;
}

/* C may have any number of columns. */
SA_KERNEL void FN(matmul_nt)(const sa_product *p, void *scratch) {
    const real *row = FN(first_row)(p, p->m <= 4);
    switch (p->m) {
    case 0: return;
    case 1: FN(few_rows1)(p); return;
    case 2: FN(few_rows2)(p); return;
    case 3: FN(few_rows3)(p); return;
    case 4: FN(few_rows4)(p); return;
    default: break;
    }
    const bool copies = SA_COPIED > 0;
    real *panel = scratch, *next = copies ? panel + SA_PANEL_DEPTH * SA_PANEL : panel;
    FN(coming) f = FN(coming_piece)(p, 0, 0, panel);
    bool filled = copies && f.left > 0;
    if (filled) {
        FN(prepare_now)(f);
    }
    for (ptrdiff_t c = 0, k = 0; c < p->width && p->n > 0;) {
        const ptrdiff_t depth = f.depth, width = SA_SMALLER(p->width - c, SA_PANEL);
        const real *a = (const real *)p->a + k, *b = (const real *)p->b + c * p->b_stride + k;
        const real *from = k > 0 ? NULL : row == NULL || p->bias == NULL ? row : row + c;
        real *to = (real *)p->c + c;
        if (!filled) {
            FN(fill_panel_transposed)(b, p->b_stride, depth, width, panel, SA_PANEL);
        }
        k = k + depth < p->n ? k + depth : 0;
        c += k > 0 ? 0 : SA_PANEL;
        f = FN(coming_piece)(p, c, k, next);
        const bool prepares = f.left > 0 && width == SA_PANEL && SA_LEAF_VECS == SA_VECS;
        if (prepares) {
            FN(multiply_preparing)(p, a, panel, depth, from, to, f);
        } else {
            FN(multiply_panel)(p, a, p->a_stride, panel, SA_PANEL, depth, from, to, width);
        }
        filled = prepares && copies;
        real *done = panel;
        panel = next;
        next = done;
    }
}

SA_KERNEL void FN(matmul_nn)(const sa_product *p, void *scratch) {
    const real *a = p->a, *row = FN(first_row)(p, SA_STORED_WITH_SUMS);
    for (ptrdiff_t k = 0; k < p->n; k += SA_PANEL_DEPTH) {
        const ptrdiff_t depth = SA_SMALLER(p->n - k, SA_PANEL_DEPTH);
        const real *b = (const real *)p->b + k * p->b_stride;
        const bool in_place = FN(is_panel)(p, p->width);
        if (!in_place) {
            FN(fill_panel)(b, p->b_stride, depth, p->width, scratch);
            b = scratch;
        }
        FN(multiply_panel)(p, a + k, p->a_stride, b, in_place ? p->b_stride : SA_PANEL, depth, k > 0 ? NULL : row, p->c,
                           p->width);
    }
}

/* A is transposed once for all columns. */
SA_KERNEL void FN(matmul_tn)(const sa_product *p, void *scratch) {
    const real *a = p->a, *row = FN(first_row)(p, SA_STORED_WITH_SUMS);
    real *c = p->c, *panel = scratch, *aT = panel + SA_PANEL_DEPTH * SA_PANEL;
    const ptrdiff_t pieces = SA_CEIL_DIV(p->n, SA_SUMMED);
    for (ptrdiff_t piece = 0; piece < pieces; ++piece) {
        const ptrdiff_t k = p->n * piece / pieces, depth = p->n * (piece + 1) / pieces - k;
        FN(fill_panel_transposed)(a + k * p->a_stride, p->a_stride, p->m, depth, aT, SA_SUMMED);
        for (ptrdiff_t r = k + depth; r < k + 2 * depth && r < p->n; ++r) { /* fetched while this piece is multiplied */
            for (ptrdiff_t i = 0; i < p->m; i += 64 / (ptrdiff_t)sizeof(real)) {
                __builtin_prefetch(a + r * p->a_stride + i, 0, 2);
            }
        }
        for (ptrdiff_t at = 0; at < p->width; at += SA_PANEL) {
            const ptrdiff_t width = SA_SMALLER(p->width - at, SA_PANEL);
            const real *b = (const real *)p->b + k * p->b_stride + at;
            const bool in_place = FN(is_panel)(p, width);
            if (!in_place) {
                FN(fill_panel)(b, p->b_stride, depth, width, panel);
                b = panel;
            }
            FN(multiply_panel)(p, aT, SA_SUMMED, b, in_place ? p->b_stride : SA_PANEL, depth, piece > 0 ? NULL : row,
                               c + at, width);
        }
    }
}
#undef SA_PANEL
#undef SA_PANEL_DEPTH
#undef SA_SUMMED
#undef SA_COPIED
#undef SA_ROUND
#undef SA_FAR_ROWS
