/* Products with weights in the blocks of a GGUF file, and their rows. */
#ifndef SA_BLOCKS_H
#define SA_BLOCKS_H

#include "drivers/linear.h"

/* A block: how many numbers of a row in how many bytes. */
typedef struct {
    const char *name; /* GGUF's */
    ptrdiff_t numbers, bytes;
} sa_block_shape;

const sa_block_shape *sa_block_shape_of(sa_block_type type);

/* Rows (out, in), `in` a multiple of the block's numbers, where they lie. */
sa_compact sa_blocks_at(sa_block_type type, ptrdiff_t out, ptrdiff_t in, const void *rows);

/* to (in,): row `row` as float32. */
void sa_blocks_row(const sa_compact *w, ptrdiff_t row, float *to);

/* x[r] = (row ids[r] + always) + positions[r], of w->in columns; NULL is zeros. */
void sa_blocks_look_up(const sa_compact *w, const float *always, const float *positions, const int64_t *ids, ptrdiff_t rows,
                       float *x);

/* Scratch beside that of matmul_nt, for as many columns as a product has at once. */
size_t sa_blocks_scratch(ptrdiff_t columns, ptrdiff_t in);

/* p->c += A·Bᵀ where B are the rows of w from `column` on; p->b is not set. The sums are those of float32 weights. */
void sa_blocks_multiply(const sa_compact *w, ptrdiff_t column, sa_product *p, void *matmul_scratch, float *scratch);

/* ---- rows of decoding ---------------------------------------------------------------------------------------------------- */

/* Whether there is a leaf for these weights: else rows of decoding are multiplied like others. */
bool sa_blocks_have_steps(const sa_compact *w);

/* A task's rows as digits, place for the last columns' blocks, and for sums. */
typedef struct {
    ptrdiff_t rows;
    sa_digits *x;
    char *weights;
    float *sums;
} sa_step_rows;

size_t sa_step_scratch(ptrdiff_t rows, ptrdiff_t in, ptrdiff_t row_bytes);

/* `again`: the rows are in scratch already. */
sa_step_rows sa_step_split(const float *x, ptrdiff_t rows, ptrdiff_t in, bool again, void *scratch);

/* p->c += A·Bᵀ as sa_blocks_multiply, with another order of the sums, for rows that are split. Rows with NaN or infinities, which
 * no digits hold, are left out. */
void sa_step_multiply(const sa_compact *w, ptrdiff_t column, const sa_step_rows *r, const sa_product *p);

static inline bool sa_step_spoiled(const sa_step_rows *r, ptrdiff_t row, ptrdiff_t in) {
    const float scale = in > 0 ? r->x[row * (in / SA_PIECE)].scale : 0;
    return scale != scale;
}

#endif
