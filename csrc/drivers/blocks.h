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

#endif
