/* What the transformer's passes share: the places of activations, the products of a layer, how tasks run. */
#ifndef SA_TRANSFORMER_TASKS_H
#define SA_TRANSFORMER_TASKS_H

#include "drivers/attention.h"
#include "drivers/transformer.h"

#define SA_NORM_ROWS 16

/* Few, as threads still spin after the last call. */
#define SA_TRANSFORMER_WORK_PER_THREAD 1000000.0

typedef struct {
    char *array[SA_ARRAYS];
    char *y; /* the next layer's x */
} sa_frame;

/* Backward through a norm: with dy the gradient of what left it, ds that of what entered. */
typedef struct {
    const void *weight;
    bool rms;
    char *unit, *scale;
    const char *dy;
    char *ds;
    bool adds; /* to ds */
    void *dweight, *dbias;
} sa_norm_pullback;

typedef struct {
    const sa_transformer *e;
    const sa_transformer_plan *plan;
    const sa_transformer_gradients *g;
    char *out;
    ptrdiff_t from, to; /* sequences */
    ptrdiff_t layer;
    char *frames;
    ptrdiff_t capacity; /* rows of a frame */
    ptrdiff_t origin;   /* the call's row that is row 0 of the frames */
    sa_frame f;         /* of the layer */
    sa_linear product;  /* of the phase, and how it is cut */
    sa_cut cut;
    /* Backward: the product's gradients, the norm whose rows come or came last, and buffers like the frame's arrays. */
    sa_linear_gradients gradients;
    sa_norm_pullback norm;
    sa_dropout dropout;
    bool norm_waits; /* for the gradients of its parameters */
    char *dy, *other, *dn, *dprojected[SA_OUTPUT], *dattended, *dwide, *dgates;
    char *scratch;
    char *partial; /* of all sequences, with a cache */
    int thread, team;
} sa_token_share;

typedef void sa_share_task(const sa_token_share *p, ptrdiff_t t);

/* Who takes a task: whoever is free, or who had these rows before, in its cache. Threads wait at a phase's end, unless
 * the next needs nothing of it. */
typedef enum { SA_BY_TURNS, SA_BY_ROWS, SA_BY_ROWS_AND_ON } sa_order;

/* A phase of independent tasks; all threads of the team call it. */
void sa_run_phase(const sa_token_share *p, ptrdiff_t tasks, sa_share_task *task, sa_order order);

static inline const sa_layer *sa_layer_of(const sa_token_share *p) { return &p->e->layer[p->layer]; }

/* Columns of queries, and of keys and values. */
static inline ptrdiff_t sa_queries_of(const sa_layer *l) { return l->heads * l->width; }
static inline ptrdiff_t sa_keys_of(const sa_layer *l) { return l->key_heads * l->width; }

static inline ptrdiff_t sa_bytes(const sa_transformer *e, ptrdiff_t elements) {
    return elements * (ptrdiff_t)sa_element_size(e->f64);
}

size_t sa_array_bytes(const sa_transformer *e, ptrdiff_t rows, ptrdiff_t columns);

/* Whether sizes fit: then products of rows, widths and layers do not overflow. */
bool sa_transformer_fits(const sa_transformer *e);

sa_layout sa_layout_of(const sa_transformer *e, ptrdiff_t rows, bool keep);

/* With keep every layer has its own, and after the last one are the rows that leave it, and unit and scale of the first
 * and of the final norm. */
sa_frame sa_frame_of(const sa_token_share *p);

/* Of the first norm (which 0) or the final one (1): (rows, d), (rows,). */
char *sa_outer_unit(const sa_token_share *p, int which, char **scale);

/* The products of a layer, for `rows` rows from row `row` of the frame on. */
typedef enum {
    SA_PROJECT,
    SA_PROJECT_OUTPUT,
    SA_PROJECT_GATE,
    SA_PROJECT_UP,
    SA_PROJECT_BOTH, /* up and gate, without the activation: for the backward pass */
    SA_PROJECT_DOWN,
    SA_PRODUCTS
} sa_product_kind;

sa_linear sa_product_of(const sa_token_share *p, sa_product_kind kind, ptrdiff_t row, ptrdiff_t rows);

/* Where output's result replaces x, but x must join what is dropped from: it goes to the unit first. */
bool sa_needs_detour(const sa_token_share *p);

/* Of one kind, for rows from row `row` of the frame on. */
sa_dropout sa_dropout_of(const sa_token_share *p, int kind, ptrdiff_t row);

/* Whether the layer has more than attention. */
static inline bool sa_has_feed_forward(const sa_layer *l) { return l->hidden > 0; }

/* Describes one head's attention in the sequence at row `row` of the frame. */
void sa_describe_head(const sa_token_share *p, ptrdiff_t sequence, ptrdiff_t row, ptrdiff_t length, ptrdiff_t head,
                      sa_attention *a);

/* With a cache (transformer_cache.c): how attention is cut, and its phases after the projections. */
size_t sa_plan_cache(const sa_transformer *e, sa_transformer_plan *plan);
void sa_attend_with_cache(const sa_token_share *p);

/* Tokens of a sequence that came before. */
static inline ptrdiff_t sa_past_of(const sa_transformer *e, ptrdiff_t sequence) {
    return e->cache.past == NULL ? 0 : (ptrdiff_t)e->cache.past[sequence];
}

/* A thread's: for products or attention, and backward for a head's dK, dV and delta. */
size_t sa_transformer_scratch(const sa_transformer *e, const sa_transformer_plan *plan, bool backward);

int sa_transformer_threads(const sa_transformer *e, double products, int max_threads);

#endif
