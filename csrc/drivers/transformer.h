/* The transformer: packed sequences through layers of attention and feed-forward networks, and the gradients of all
 * parameters. A layer computes
 *     s = x + output(attention(query(n), key(n), value(n)))     n = norm(x) if norm_first, else x
 *     y = s + down(activation(gate(m))·up(m))                   m = norm(s) if norm_first, else s
 * and without norm_first s = norm(x + …), y = norm(s + …). What has no weight is left out. The caller checks sizes and ids. */
#ifndef SA_TRANSFORMER_H
#define SA_TRANSFORMER_H

#include "drivers/attention.h"
#include "drivers/linear.h"

/* Parameters, each a weight and a bias or NULL. Weights of projections are (out, in), of norms (d,). */
enum { SA_QUERY, SA_KEY, SA_VALUE, SA_OUTPUT, SA_ATTENTION_NORM, SA_UP, SA_GATE, SA_DOWN, SA_LAST_NORM, SA_LAYER_PARAMETERS };

/* Dropout of the weights of attention, of output's result, of down's input, of down's result. */
enum { SA_DROP_WEIGHTS, SA_DROP_OUTPUT, SA_DROP_WIDE, SA_DROP_DOWN, SA_DROPOUTS };

typedef struct {
    const void *weight[SA_LAYER_PARAMETERS], *bias[SA_LAYER_PARAMETERS];
    sa_weights weights;                /* of projections: arrays, or each a sa_compact */
    ptrdiff_t heads, key_heads, width; /* of a head */
    ptrdiff_t hidden;                  /* of the feed-forward network; 0: none */
    double eps[2];                     /* of both norms */
    bool rms[2];
    bool norm_first, causal;
    ptrdiff_t window_left, window_right; /* SA_UNBOUNDED where open */
    double scale, softcap;
    sa_activation activation;
    sa_rotary rotary;
    double dropout[SA_DROPOUTS]; /* probabilities */
    uint64_t seed;
} sa_layer;

typedef struct {
    const void *weight, *bias;
    double eps;
    bool rms;
} sa_norm;

/* The keys and values of tokens that came before. The forward call appends those of the new tokens, and attends to all.
 * Layers have as many key heads, of one width. */
typedef struct {
    char *keys, *values; /* (layers, sequences, key heads, capacity, width) */
    const int64_t *past; /* (sequences,): tokens that are there; NULL: there is no cache */
    ptrdiff_t capacity;  /* no sequence has more, the new ones included */
} sa_cache;

/* Rows that leave for each sequence: all of its own, or one. */
typedef enum { SA_EACH_ROW, SA_MEAN_ROW, SA_FIRST_ROW, SA_LAST_ROW } sa_pooling;

typedef struct {
    bool f64;
    ptrdiff_t d, vocabulary, tokens, sequences, layers, longest;
    const void *table; /* (vocabulary, d), of quants a sa_compact; or NULL: rows are the input */
    sa_weights table_kind;
    const float *table_scale; /* (vocabulary, groups), of a table of int8 */
    const void *always;       /* (d,), added to every row of the table; or NULL */
    const void *positions;    /* (longest or more, d), or NULL */
    const int64_t *ids;
    const void *rows;      /* (tokens, d) */
    const int64_t *starts; /* (sequences + 1,), from 0 to tokens; none is empty, or longer than longest */
    sa_norm first_norm;    /* of what enters; weight NULL: none */
    sa_norm final_norm;    /* of what leaves */
    const sa_layer *layer;
    sa_tensor mask;     /* (sequences, heads, longest, longest), or data NULL; see selfattn.h */
    sa_tensor key_bias; /* (sequences, longest), likewise */
    sa_pooling pooling;
    sa_cache cache;  /* without mask and dropout, in a call that keeps nothing; all layers are causal */
    sa_watch *watch; /* or NULL; after a cancelled call results are undefined, and so is the cache after its past */
} sa_transformer;

/* The arrays of one layer, one after the other. Widths are of a row. Without a backward pass all layers share them, and
 * some share a place. */
enum {
    SA_X,       /* d */
    SA_NORMED,  /* d: n, if the norm comes first */
    SA_QUERIES, /* heads × width */
    SA_KEYS,    /* key heads × width, likewise values */
    SA_VALUES,
    SA_ATTENDED,    /* heads × width */
    SA_SCALED,      /* d: of the attention's norm, before weight and bias */
    SA_SCALE,       /* 1: and its scale */
    SA_STATS,       /* heads × 2: of attention, for the backward pass */
    SA_S,           /* d */
    SA_NORMED_S,    /* d: m, if the norm comes first */
    SA_GATES,       /* hidden: gate(m) */
    SA_WIDE,        /* hidden: up(m) */
    SA_ACTIVE,      /* hidden: what goes down */
    SA_LAST_SCALED, /* d, 1: of the last norm */
    SA_LAST_SCALE,
    SA_ARRAYS
};

/* Their offsets in bytes, for a number of rows. */
typedef struct {
    size_t at[SA_ARRAYS], bytes;
} sa_layout;

/* How a call is cut up: threads share the tokens, or tasks if shares are few. Bits depend on neither. */
typedef struct {
    bool keep;
    bool by_shares;
    bool far;                       /* weights come from memory */
    bool decoding;                  /* each sequence has a past and one new token */
    ptrdiff_t shares, share_tokens; /* a share begins at the first sequence from a multiple on … */
    ptrdiff_t share_rows;           /* … and has at most this many tokens */
    ptrdiff_t attend_rows;
    /* With a cache, for each sequence: tasks that attend, tasks that merge chunks of keys, whether attending tasks also append,
     * and bytes of its partial results. */
    ptrdiff_t attend_tasks, merge_tasks;
    bool joined;
    size_t partial_bytes;
    sa_layout layout; /* of all rows, or of a share's */
    int threads;
    size_t saved_bytes; /* for the backward pass, if kept */
    size_t shared_bytes;
    size_t scratch_bytes;
} sa_transformer_plan;

sa_status sa_transformer_make_plan(const sa_transformer *e, bool keep, int max_threads, sa_transformer_plan *plan);

/* out: (tokens, d), or with pooling (sequences, d). saved: plan.saved_bytes; scratch: plan.shared_bytes + plan.threads ×
 * plan.scratch_bytes; all 64-byte aligned. */
void sa_transformer_forward(const sa_transformer *e, const sa_transformer_plan *plan, void *out, void *saved, void *scratch);

/* Arrays like the parameters, written whole; those of absent parameters are NULL. */
typedef struct {
    void *weight[SA_LAYER_PARAMETERS], *bias[SA_LAYER_PARAMETERS];
} sa_layer_gradients;

typedef struct {
    const void *grad_out; /* like out */
    void *table;          /* like the table, or NULL */
    void *rows;           /* (tokens, d): of what enters the first norm or layer; or NULL */
    void *mask;           /* (heads, longest, longest), zeroed: of a float mask that all sequences share; or NULL */
    void *first_norm[2], *final_norm[2]; /* weight, bias */
    const sa_layer_gradients *layer;
} sa_transformer_gradients;

sa_status sa_transformer_plan_backward(const sa_transformer *e, int max_threads, sa_transformer_plan *plan);

/* saved is only read. Parameters must not have changed since the forward call. */
void sa_transformer_backward(const sa_transformer *e, const sa_transformer_gradients *g, const sa_transformer_plan *plan,
                             const void *saved, void *scratch);

/* ---- between the files of the transformer: the places of activations, the products of a layer, how tasks run ---------- */

#define SA_NORM_ROWS 16

/* Few, as threads still spin after the last call. */
#define SA_TRANSFORMER_WORK_PER_THREAD 1000000.0

typedef struct {
    char *array[SA_ARRAYS];
    char *y; /* the next layer's x */
} sa_frame;

/* Backward through a norm: dy is the gradient of its output, ds that of its input. */
typedef struct {
    const void *weight;
    bool rms;
    char *scaled, *scale;
    const char *dy;
    char *ds;
    bool adds; /* to ds */
    void *dweight, *dbias;
} sa_norm_pullback;

/* A thread's pass through the layers: its sequences, where it is, and the product of the phase. */
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
    /* Backward: the product's gradients, the current or last norm, and gradients of the frame's arrays. */
    sa_linear_gradients gradients;
    sa_norm_pullback norm;
    sa_dropout dropout;
    bool norm_waits; /* its parameters have no gradients yet */
    char *dy, *other, *dn, *dprojected[SA_OUTPUT], *dattended, *dwide, *dgates;
    char *scratch;
    char *partial; /* of all sequences, with a cache */
    int thread, team;
} sa_pass;

typedef void sa_pass_task(const sa_pass *p, ptrdiff_t t);

/* The thread that takes a task: any that is free, or the one that has these rows in its cache. Threads wait at the end of a
 * phase, unless the next needs none of its results. */
typedef enum { SA_BY_ANY_THREAD, SA_BY_ROWS, SA_BY_ROWS_AND_ON } sa_order;

/* A phase of independent tasks; all threads of the team call it. */
void sa_run_phase(const sa_pass *p, ptrdiff_t tasks, sa_pass_task *task, sa_order order);

static inline const sa_layer *sa_layer_of(const sa_pass *p) { return &p->e->layer[p->layer]; }

/* Columns of queries, and of keys and values. */
static inline ptrdiff_t sa_query_width(const sa_layer *l) { return l->heads * l->width; }
static inline ptrdiff_t sa_key_width(const sa_layer *l) { return l->key_heads * l->width; }

static inline ptrdiff_t sa_bytes(const sa_transformer *e, ptrdiff_t elements) {
    return elements * (ptrdiff_t)sa_element_size(e->f64);
}

size_t sa_array_bytes(const sa_transformer *e, ptrdiff_t rows, ptrdiff_t columns);

/* True if products of rows, widths and layers do not overflow. */
bool sa_transformer_fits(const sa_transformer *e);

/* Elements of all layers' projections. */
double sa_count_weights(const sa_transformer *e);

sa_layout sa_layout_of(const sa_transformer *e, ptrdiff_t rows, bool keep);

/* With keep each layer has its own arrays. After the last layer's come its output rows, and scaled and scale of the first and
 * final norms. */
sa_frame sa_frame_of(const sa_pass *p);

/* Scaled rows and scale of the first norm (which 0) or the final one (1): (rows, d), (rows,). */
char *sa_outer_scaled(const sa_pass *p, int which, char **scale);

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

sa_linear sa_product_of(const sa_pass *p, sa_product_kind kind, ptrdiff_t row, ptrdiff_t rows);

/* True if output's result would replace x, which is added after dropout: then the result goes to the scaled first. */
bool sa_needs_detour(const sa_pass *p);

/* Dropout of one kind, for rows from row `row` of the frame on. */
sa_dropout sa_dropout_of(const sa_pass *p, int kind, ptrdiff_t row);

/* True if the layer has more than attention. */
static inline bool sa_has_feed_forward(const sa_layer *l) { return l->hidden > 0; }

/* Describes one head's attention in the sequence at row `row` of the frame. */
void sa_describe_head(const sa_pass *p, ptrdiff_t sequence, ptrdiff_t row, ptrdiff_t length, ptrdiff_t head, sa_attention *a);

/* New tokens of a sequence, and those that came before. */
static inline ptrdiff_t sa_length_of(const sa_transformer *e, ptrdiff_t sequence) {
    return (ptrdiff_t)(e->starts[sequence + 1] - e->starts[sequence]);
}

static inline ptrdiff_t sa_past_of(const sa_transformer *e, ptrdiff_t sequence) {
    return e->cache.past == NULL ? 0 : (ptrdiff_t)e->cache.past[sequence];
}

/* Bytes of a thread's scratch: for products or attention, and backward for a head's dK, dV and delta. */
size_t sa_transformer_scratch(const sa_transformer *e, const sa_transformer_plan *plan, bool backward);

int sa_transformer_threads(const sa_transformer *e, double products, int max_threads);

#endif
