/* What the embedding model's forward and backward pass share: where activations lie, and how tasks are run. Internal. */
#ifndef SA_EMBEDDING_TASKS_H
#define SA_EMBEDDING_TASKS_H

#include "drivers/attention.h"
#include "drivers/transformer.h"

/* The most rows of a product that one task works on where threads share out its tasks. Each task packs the weights. */
#define SA_PRODUCT_ROWS 240

/* The same where operands are split: the terms of so many rows stay in the L2. */
#define SA_SPLIT_ROWS 512

/* Rows that a task of a LayerNorm works on. */
#define SA_NORM_ROWS 16

/* Another thread pays from about so many multiply-adds for each: in a loop of training or inference it still spins after the last call. */
#define SA_EMBEDDING_WORK_PER_THREAD 1000000.0

/* The activations of one block, from row 0 on. All are (rows, d) but scale (rows,) and stats (rows, heads, 2). */
typedef struct {
    char *x, *projected[SA_PROJECTIONS], *attended, *unit, *scale, *stats;
    char *y; /* the next block's x */
} sa_embedding_frame;

/* What a thread works on: some sentences of a call, where their activations go, and the block at hand. */
typedef struct {
    const sa_embedding *e;
    const sa_embedding_plan *plan;
    const sa_embedding_gradients *g; /* backward */
    char *out;                       /* forward */
    ptrdiff_t from, to;              /* sentences */
    ptrdiff_t block;
    char *frames;
    ptrdiff_t capacity;                         /* rows that the arrays of a frame have */
    ptrdiff_t origin;                           /* the row of the call that stands in row 0 of the frames */
    char *dy, *ds, *dprojected[SA_PROJECTIONS]; /* backward, of all rows: dy of the block at hand, and of its sum */
    char *scratch;                              /* the thread's own */
    int thread, team;                           /* the threads that share out the tasks */
} sa_embedding_part;

typedef void sa_embedding_task(const sa_embedding_part *p, ptrdiff_t t);

/* Who takes which tasks of a phase: whoever is free the next one, or each thread the same rows in every phase, which its own cache holds.
 * Threads wait for each other at the end, unless the next phase needs nothing of this one. */
typedef enum { SA_BY_TURNS, SA_BY_ROWS, SA_BY_ROWS_AND_ON } sa_embedding_order;

/* A phase: tasks that do not depend on each other. Called by all threads of the team. */
void sa_embedding_run(const sa_embedding_part *p, ptrdiff_t tasks, sa_embedding_task *task, sa_embedding_order order);

ptrdiff_t sa_embedding_bytes(const sa_embedding *e, ptrdiff_t elements);

/* The first columns of rows that are `stride` elements apart. */
sa_tensor sa_embedding_matrix(const sa_embedding *e, char *data, ptrdiff_t stride);

/* Bytes of an array of rows × columns elements, rounded up to whole lines. */
size_t sa_embedding_array(const sa_embedding *e, ptrdiff_t rows, ptrdiff_t columns);

/* Whether every size of the call fits: the products of rows, widths and blocks below can then be formed. */
bool sa_embedding_fits(const sa_embedding *e);

size_t sa_embedding_frame_bytes(const sa_embedding *e, ptrdiff_t rows, bool keep);
sa_embedding_frame sa_embedding_frame_of(const sa_embedding_part *p);

/* Attention of one head within the sentence whose rows begin at row `row` of the frame. */
void sa_embedding_attention(const sa_embedding *e, ptrdiff_t block, const sa_embedding_frame *f, ptrdiff_t row,
                            ptrdiff_t length, ptrdiff_t head, sa_attention *a);

/* Whether products split both operands for a matrix unit. A task then takes many rows and a share of the columns, so that weights are
 * split once. Else it takes a thread's share of the rows, and few columns. */
bool sa_embedding_splits(const sa_embedding *e);

/* Sets product_rows and product_shares for a product of so many rows, where threads share out the tasks. */
void sa_embedding_cut_products(const sa_embedding *e, int threads, sa_embedding_plan *plan);

/* Columns of a product are cut between units of so many. */
ptrdiff_t sa_embedding_unit(const sa_embedding *e);

/* Into how many shares so many units are cut. */
ptrdiff_t sa_embedding_shares(const sa_embedding_plan *plan, ptrdiff_t units);

int sa_embedding_threads(const sa_embedding *e, double products, int max_threads);

#endif
