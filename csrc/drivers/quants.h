/* Products with weights in the quants of a GGUF file, and rows of these weights. */
#ifndef SA_QUANTS_H
#define SA_QUANTS_H

#include "drivers/linear.h"

/* Weights from rows (out, in), where `in` is a multiple of the quant's numbers; nothing is copied. */
sa_compact sa_quants_at(sa_quant_type type, ptrdiff_t out, ptrdiff_t in, const void *rows);

/* Expands row `row` to float32, to (in,). */
void sa_quants_row(const sa_compact *w, ptrdiff_t row, float *to);

/* x[r] = (row ids[r] + token_type_row) + positions[r], with w->in columns; NULL means zeros. */
void sa_quants_look_up(const sa_compact *w, const float *token_type_row, const float *positions, const int64_t *ids,
                       ptrdiff_t rows, float *x);

/* Scratch in addition to matmul_nt's, for the columns that a product has at once. */
size_t sa_quants_scratch(ptrdiff_t columns, ptrdiff_t in);

/* p->c += A·Bᵀ, where B are the rows of w from `column` on; p->b is not set.
 * The sums are the same as for float32 weights. */
void sa_quants_multiply(const sa_compact *w, ptrdiff_t column, sa_product *p, void *matmul_scratch, float *scratch);

/* ---- rows as digits ---------------------------------------------------------------------------------------------- */

/* True if there is a leaf for these weights. If not, they are expanded. */
bool sa_quants_have_gemv(const sa_compact *w);

/* Weights that have pieces, and w->out × w->row_bytes bytes for their copy. */
typedef struct {
    sa_compact *w;
    char *strips;
} sa_copied_quants;

/* Copies the whole strips of `count` weights. Without this copy each product makes it. */
void sa_quants_fill(const sa_copied_quants *of, ptrdiff_t count, int threads);

/* A task's rows as digits, and memory for a strip, for a panel and for sums. */
typedef struct {
    ptrdiff_t rows;
    int digits;
    bool whole; /* no row has NaN or infinities, which digits cannot represent */
    sa_digits *x;
    char *weights, *panel;
    float *sums;
} sa_gemv_rows;

size_t sa_gemv_scratch(ptrdiff_t rows, ptrdiff_t in, int digits, ptrdiff_t row_bytes);

/* Splits rows into digits. `again`: the rows are already in scratch. */
sa_gemv_rows sa_gemv_split(const float *x, ptrdiff_t rows, ptrdiff_t in, int digits, bool again, void *scratch);

/* p->c = p->bias + residual + A·Bᵀ, with sums in another order than sa_quants_multiply, for split rows. Skips the
 * others. residual, or NULL, begins with p->c's first column and has its stride. */
void sa_multiply_quants(const sa_compact *w, ptrdiff_t column, const sa_gemv_rows *r, const float *residual,
                        const sa_product *p);

static inline bool sa_gemv_is_unsplit(const sa_gemv_rows *r, ptrdiff_t row, ptrdiff_t in) {
    const float scale = in > 0 ? sa_digits_at(r->x, row * (in / SA_PIECE), r->digits)->scale : 0;
    return scale != scale;
}

#endif
