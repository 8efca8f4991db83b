/* What the drivers of the embedding model's forward and backward pass share: where activations lie, and how the tasks of a
 * phase are run. Internal. */
#ifndef SA_EMBEDDING_TASKS_H
#define SA_EMBEDDING_TASKS_H

#include "drivers/attention.h"
#include "drivers/transformer.h"

/* The most rows of a product that one task works on where threads share out its tasks. Many of them pay for packing the
 * weights, which each task does. */
#define SA_PRODUCT_ROWS 240

/* The same where operands are split: the rows' parts stay in the L2 at d = 256. */
#define SA_SPLIT_ROWS 512

/* Rows that a task of a LayerNorm works on. */
#define SA_NORM_ROWS 16

/* Another thread pays from about this many multiply-adds per thread on, some 15 µs: it still spins after the last call in a
 * loop of training or inference, and joins within 2 µs. */
#define SA_EMBEDDING_WORK_PER_THREAD 1000000.0

/* The activations of one block, from row 0 on. All are (rows, d) but scale (rows,) and stats (rows, heads, 2). */
typedef struct {
    char *x, *projected[SA_PROJECTIONS], *attended, *unit, *scale, *stats;
    char *y; /* the next block's x */
} sa_embedding_frame;

/* Some sentences of a call, and where their activations go. */
typedef struct {
    const sa_embedding *e;
    const sa_embedding_plan *plan;
    const sa_embedding_gradients *g; /* backward */
    char *out;                       /* forward */
    ptrdiff_t from, to;              /* sentences */
    char *frames;
    ptrdiff_t capacity;                         /* rows that the arrays of a frame have */
    ptrdiff_t origin;                           /* the row of the call that stands in row 0 of the frames */
    char *dy, *ds, *dprojected[SA_PROJECTIONS]; /* backward, of all rows: dy of the block at hand, and of its sum */
} sa_embedding_part;

/* Tasks of a phase do not depend on each other. Where they go through the rows in order, each thread takes the same rows in
 * every phase, and finds them in its own cache: two threads that took turns needed 320 us each for the projections of 192 rows
 * at d = 256, of which one alone needs 440. */
typedef struct {
    ptrdiff_t (*count)(const sa_embedding_part *p, ptrdiff_t block);
    void (*task)(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch);
    bool by_rows;
    bool goes_on; /* the next phase needs nothing of this one: no thread waits for the others in between */
} sa_embedding_phase;

/* Runs a phase. team: called by all threads of a parallel region, which share the tasks out and wait for each other. */
void sa_embedding_run_phase(const sa_embedding_phase *phase, const sa_embedding_part *p, ptrdiff_t block, char *scratch,
                            bool team);

const sa_real_kernels *sa_embedding_kernels(const sa_embedding *e);
size_t sa_embedding_size(const sa_embedding *e); /* of an element */

/* Bytes of an array of rows × columns elements, rounded up to whole lines. */
size_t sa_embedding_array(const sa_embedding *e, ptrdiff_t rows, ptrdiff_t columns);

/* Whether every size of the call fits: the products of rows, widths and blocks below can then be formed. */
bool sa_embedding_fits(const sa_embedding *e);

size_t sa_embedding_frame_bytes(const sa_embedding *e, ptrdiff_t rows, bool keep);
sa_embedding_frame sa_embedding_frame_of(const sa_embedding_part *p, ptrdiff_t block);

/* Attention of one head within the sentence whose rows begin at row `row` of the frame. */
void sa_embedding_attention(const sa_embedding *e, ptrdiff_t block, const sa_embedding_frame *f, ptrdiff_t row,
                            ptrdiff_t length, ptrdiff_t head, sa_attention *a);

/* Whether products split both of their operands for a matrix unit. A task then takes all rows of few, and a share of the
 * columns: weights are split once, by the thread that needs them. Else it takes a thread's share of the rows, and few columns. */
bool sa_embedding_splits(const sa_embedding *e);

/* Sets product_rows and product_shares for a product of so many rows, where threads share out the tasks. */
void sa_embedding_cut_products(const sa_embedding *e, int threads, sa_embedding_plan *plan);

/* Columns of a product are cut between units of so many. */
ptrdiff_t sa_embedding_unit(const sa_embedding *e);

/* Into how many shares so many units are cut. */
ptrdiff_t sa_embedding_shares(const sa_embedding_plan *plan, ptrdiff_t units);

int sa_embedding_threads(const sa_embedding *e, double products, int max_threads);

#endif
