/* What the embedding model's passes share: where activations lie, how tasks run. */
#ifndef SA_TRANSFORMER_TASKS_H
#define SA_TRANSFORMER_TASKS_H

#include "drivers/attention.h"
#include "drivers/transformer.h"

/* The most rows of a task's product: each task packs the weights. */
#define SA_PRODUCT_ROWS 240

/* Likewise where operands are split: terms stay in L2. */
#define SA_SPLIT_ROWS 512

#define SA_NORM_ROWS 16

/* Few, as threads still spin after the last call. */
#define SA_EMBEDDING_WORK_PER_THREAD 1000000.0

/* Activations of one block: (rows, d), but scale (rows,) and stats (rows, heads, 2). */
typedef struct {
    char *x, *projected[SA_PROJECTIONS], *attended, *unit, *scale, *stats;
    char *y; /* the next block's x */
} sa_embedding_frame;

typedef struct {
    const sa_embedding *e;
    const sa_embedding_plan *plan;
    const sa_embedding_gradients *g;
    char *out;
    ptrdiff_t from, to;
    ptrdiff_t block;
    char *frames;
    ptrdiff_t capacity;
    ptrdiff_t origin;                           /* the call's row that is row 0 of the frames */
    char *dy, *ds, *dprojected[SA_PROJECTIONS]; /* backward: dy of the block, and of its sum */
    char *scratch;
    int thread, team;
} sa_embedding_part;

typedef void sa_embedding_task(const sa_embedding_part *p, ptrdiff_t t);

/* Who takes a task: whoever is free, or who had these rows before, in its cache. Threads wait at a phase's end, unless
 * the next needs nothing of it. */
typedef enum { SA_BY_TURNS, SA_BY_ROWS, SA_BY_ROWS_AND_ON } sa_embedding_order;

/* A phase of independent tasks; all threads of the team call it. */
void sa_embedding_run(const sa_embedding_part *p, ptrdiff_t tasks, sa_embedding_task *task, sa_embedding_order order);

ptrdiff_t sa_embedding_bytes(const sa_embedding *e, ptrdiff_t elements);

/* The first columns of rows `stride` elements apart. */
sa_tensor sa_embedding_matrix(const sa_embedding *e, char *data, ptrdiff_t stride);

size_t sa_embedding_array(const sa_embedding *e, ptrdiff_t rows, ptrdiff_t columns);

/* Whether sizes fit: then products of rows, widths and blocks do not overflow. */
bool sa_embedding_fits(const sa_embedding *e);

size_t sa_embedding_frame_bytes(const sa_embedding *e, ptrdiff_t rows, bool keep);
sa_embedding_frame sa_embedding_frame_of(const sa_embedding_part *p);

/* Describes one head's attention in the sentence at row `row`. */
void sa_embedding_attention(const sa_embedding *e, ptrdiff_t block, const sa_embedding_frame *f, ptrdiff_t row,
                            ptrdiff_t length, ptrdiff_t head, sa_attention *a);

/* Whether products split operands for a matrix unit. Then a task takes many rows and a share of columns, to split weights
 * once; else a thread's share of rows. */
bool sa_embedding_splits(const sa_embedding *e);

void sa_embedding_cut_products(const sa_embedding *e, int threads, sa_embedding_plan *plan);

/* A product's columns are cut at multiples of this. */
ptrdiff_t sa_embedding_unit(const sa_embedding *e);

ptrdiff_t sa_embedding_shares(const sa_embedding_plan *plan, ptrdiff_t units);

/* A thread's: for products or attention, and backward for a head's dK, dV and delta. */
size_t sa_embedding_scratch(const sa_embedding *e, const sa_embedding_plan *plan, bool backward);

int sa_embedding_threads(const sa_embedding *e, double products, int max_threads);

#endif
