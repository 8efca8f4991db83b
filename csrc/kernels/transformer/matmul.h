/* Products of matrices with contiguous rows, on attention's register tiles. A panel has at most block_rows columns, copied in
 * pieces that stay in L1. An element of C is a sum in the order of n, in pieces that depend on n alone, so bits do not depend
 * on the cut into tasks. */

#define SA_PANEL FN(block_rows)
#define SA_PANEL_DEPTH 128
#define SA_FAR_ROWS 48 /* with more rows, products take longer than fetching */
#define SA_SUMMED 64   /* rows of A and B that matmul_tn takes at a time, in L1 */

SA_KERNEL size_t FN(matmul_scratch)(ptrdiff_t rows, ptrdiff_t d) {
    (void)rows;
    (void)d;
    return (SA_PANEL_DEPTH * SA_PANEL + SA_WEIGHT_ROWS * SA_SUMMED) * sizeof(real);
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

/* Lane i of to[j] becomes x[i·stride + j], for a whole square. */
SA_INLINE void FN(load_square_transposed)(const real *x, ptrdiff_t stride, vec *to) {
#if defined(SA_HAS_TRANSPOSED_LOADS) && !SA_REAL_IS_F64
    V(load_transposed)(x, stride, to);
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

/* ---- few rows, and weights from memory ------------------------------------------------------------------------------------
 * While a piece of A is multiplied by a whole panel, the next piece of B is fetched, a few lines at a time: many at once would
 * fill the core's buffers, and loads would have to wait. */

#define SA_ROUNDS_BETWEEN 8

typedef struct {
    const char *next; /* the row to fetch */
    ptrdiff_t stride; /* bytes from row to row */
    ptrdiff_t left;   /* rows left to fetch */
    int at_once;
} FN(fetch);

SA_INLINE void FN(fetch_weights)(FN(fetch) * f) {
    for (int n = 0; n < f->at_once && f->left > 0; ++n, --f->left, f->next += f->stride) {
        SA_UNROLL
        for (int line = 0; line < (int)(SA_PANEL_DEPTH * sizeof(real) / 64); ++line) {
            __builtin_prefetch(f->next + 64 * line, 0, 2);
        }
    }
}

/* Like outer_tile, with the same sums. */
SA_INLINE void FN(fetching_tile)(const sa_product *p, ptrdiff_t r, ptrdiff_t k, ptrdiff_t depth, const real *panel,
                                 FN(fetch) * f, const int rows) {
    const real *a = (const real *)p->a + r * p->a_stride + k;
    vec sum[8][4];
    FN(set_to_zero)(sum, rows, SA_VECS);
    for (ptrdiff_t i = 0; i < depth;) {
        const ptrdiff_t end = depth - i < SA_ROUNDS_BETWEEN ? depth : i + SA_ROUNDS_BETWEEN;
        FN(fetch_weights)(f);
        for (; i < end; ++i) {
            FN(add_outer)(sum, a + i, p->a_stride, panel + i * SA_PANEL, rows, 0, SA_VECS, false);
        }
    }
    SA_UNROLL
    for (int n = 0; n < rows; ++n) {
        SA_UNROLL
        for (int v = 0; v < SA_VECS; ++v) {
            real *c = (real *)p->c + (r + n) * p->c_stride + v * SA_LANES;
            V(store)(c, V(load)(c) + sum[n][v]);
        }
    }
}

SA_LEAF void FN(multiply_fetching)(const sa_product *p, ptrdiff_t k, ptrdiff_t depth, const real *panel, const real *next) {
    const ptrdiff_t rounds = (p->m + SA_ROWS(SA_VECS) - 1) / SA_ROWS(SA_VECS) * (SA_PANEL_DEPTH / SA_ROUNDS_BETWEEN);
    FN(fetch)
    f = {(const char *)next, p->b_stride * (ptrdiff_t)sizeof(real), p->width, (int)((p->width + rounds - 1) / rounds)};
#define SA_TILE(r, rows) FN(fetching_tile)(p, r, k, depth, panel, &f, rows)
    SA_EACH_TILE(p->m, SA_VECS, SA_TILE, )
#undef SA_TILE
}

/* sum[r] += a[r][i]·t[i], i < n ≤ SA_LANES. */
SA_INLINE void FN(add_few_rows)(vec *sum, const real *a, ptrdiff_t a_stride, const vec *t, ptrdiff_t n, const int rows) {
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

/* ---- the products: the first piece of a sum is added to what C begins with ------------------------------------------------ */

static const real FN(zeros)[SA_PANEL];

/* Returns the row that C begins with, or NULL if it is in C. `before`: it must be in C before the product. */
SA_INLINE const real *FN(first_row)(const sa_product *p, bool before) {
    if (!p->adds && (before || p->n == 0)) {
        FN(begin_rows)(p->c, p->c_stride, p->m, p->width, p->bias, NULL, NULL);
        return NULL;
    }
    return p->adds ? NULL : p->bias != NULL ? p->bias : FN(zeros);
}

/* C[m][width] = row + a·panel, or += that. */
SA_INLINE void FN(multiply_panel)(const sa_product *p, const real *a, ptrdiff_t a_stride, const real *panel, ptrdiff_t stride,
                                  ptrdiff_t depth, const real *row, real *c, ptrdiff_t width) {
    FN(outer)(a, a_stride, panel, stride, depth, p->m, row == NULL ? c : row, row == NULL ? p->c_stride : 0, c, p->c_stride,
              width);
}

/* True if columns of B are read in place: a whole panel whose rows are so close that few lines share a set of the L1. */
SA_INLINE bool FN(is_panel)(const sa_product *p, ptrdiff_t width) { return width == SA_PANEL && p->b_stride <= 2 * SA_PANEL; }

SA_KERNEL void FN(matmul_nt)(const sa_product *p, void *scratch) {
    const bool fetches = p->far && p->m <= SA_FAR_ROWS && p->width == SA_PANEL && SA_LEAF_VECS == SA_VECS;
    const real *a = p->a, *b = p->b, *row = FN(first_row)(p, fetches || p->m <= 4);
    real *panel = scratch;
    switch (p->m) {
    case 0: return;
    case 1: FN(few_rows1)(p); return;
    case 2: FN(few_rows2)(p); return;
    case 3: FN(few_rows3)(p); return;
    case 4: FN(few_rows4)(p); return;
    default: break;
    }
    for (ptrdiff_t k = 0; k < p->n; k += SA_PANEL_DEPTH) {
        const ptrdiff_t depth = p->n - k < SA_PANEL_DEPTH ? p->n - k : SA_PANEL_DEPTH;
        FN(fill_panel_transposed)(b + k, p->b_stride, depth, p->width, panel, SA_PANEL);
        if (fetches) {
            FN(multiply_fetching)(p, k, depth, panel, k + depth < p->n ? b + k + depth : b + p->width * p->b_stride);
        } else {
            FN(multiply_panel)(p, a + k, p->a_stride, panel, SA_PANEL, depth, k > 0 ? NULL : row, p->c, p->width);
        }
    }
}

SA_KERNEL void FN(matmul_nn)(const sa_product *p, void *scratch) {
    const real *a = p->a, *row = FN(first_row)(p, false);
    for (ptrdiff_t k = 0; k < p->n; k += SA_PANEL_DEPTH) {
        const ptrdiff_t depth = p->n - k < SA_PANEL_DEPTH ? p->n - k : SA_PANEL_DEPTH;
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
    const real *a = p->a, *row = FN(first_row)(p, false);
    real *c = p->c, *panel = scratch, *aT = panel + SA_PANEL_DEPTH * SA_PANEL;
    const ptrdiff_t pieces = (p->n + SA_SUMMED - 1) / SA_SUMMED;
    for (ptrdiff_t piece = 0; piece < pieces; ++piece) {
        const ptrdiff_t k = p->n * piece / pieces, depth = p->n * (piece + 1) / pieces - k;
        FN(fill_panel_transposed)(a + k * p->a_stride, p->a_stride, p->m, depth, aT, SA_SUMMED);
        for (ptrdiff_t r = k + depth; r < k + 2 * depth && r < p->n; ++r) { /* fetched while this piece is multiplied */
            for (ptrdiff_t i = 0; i < p->m; i += 64 / (ptrdiff_t)sizeof(real)) {
                __builtin_prefetch(a + r * p->a_stride + i, 0, 2);
            }
        }
        for (ptrdiff_t at = 0; at < p->width; at += SA_PANEL) {
            const ptrdiff_t width = p->width - at < SA_PANEL ? p->width - at : SA_PANEL;
            const real *b = (const real *)p->b + k * p->b_stride + at;
            const bool in_place = FN(is_panel)(p, width);
            if (!in_place) {
                FN(fill_panel)(b, p->b_stride, depth, width, panel);
                b = panel;
            }
            FN(multiply_panel)(p, aT, SA_SUMMED, b, in_place ? p->b_stride : SA_PANEL, depth, piece > 0 ? NULL : row, c + at,
                               width);
        }
    }
}
#undef SA_PANEL
#undef SA_PANEL_DEPTH
#undef SA_SUMMED
#undef SA_FAR_ROWS
#undef SA_ROUNDS_BETWEEN
