/* The transformer: packed sequences through layers of attention and feed-forward networks, and the gradients of all
 * parameters. A layer computes
 *     s = x + post(output(attention(query(n), key(n), value(n))))     n = norm(x) if norm_first, else x
 *     y = s + post(down(activation(gate(m))·up(m)))                   m = norm(s) if norm_first, else s
 * and without norm_first, which has no post norms, s = norm(x + …), y = norm(s + …). Each head of queries and of keys
 * may have a norm before it is rotated. What has no weight is skipped. The caller checks sizes and ids. */
#ifndef SA_TRANSFORMER_H
#define SA_TRANSFORMER_H

#include "drivers/attention.h"
#include "drivers/linear.h"

/* The parameters, each a weight and a bias or NULL. Weights of projections are (out, in), of norms (d,),
 * of norms of heads (width,). */
enum { SA_QUERY, SA_KEY, SA_VALUE, SA_OUTPUT, SA_ATTENTION_NORM, SA_UP, SA_GATE, SA_DOWN, SA_FEED_FORWARD_NORM };
enum {
    SA_QUERY_NORM = SA_FEED_FORWARD_NORM + 1,
    SA_KEY_NORM,
    SA_ATTENTION_POST_NORM,
    SA_FEED_FORWARD_POST_NORM,
    SA_LAYER_PARAMETERS
};

/* Dropout is applied to attention weights, to output's result, to down's input and to down's result. */
enum { SA_DROP_WEIGHTS, SA_DROP_OUTPUT, SA_DROP_WIDE, SA_DROP_DOWN, SA_DROPOUTS };

typedef struct {
    const void *weight[SA_LAYER_PARAMETERS], *bias[SA_LAYER_PARAMETERS];
    sa_weights weights;                /* the form of all projections' weights: arrays or sa_compact */
    ptrdiff_t heads, key_heads, width; /* width of a head */
    ptrdiff_t hidden;                  /* width of the feed-forward network; 0: there is none */
    double eps[SA_LAYER_PARAMETERS];   /* of norms */
    bool rms[SA_LAYER_PARAMETERS];
    bool norm_first, causal;
    ptrdiff_t window_left, window_right; /* SA_UNBOUNDED: no bound */
    double scale, softcap;
    sa_activation activation;
    sa_rotary rotary;
    double dropout[SA_DROPOUTS]; /* probabilities of SA_DROP_… */
    uint64_t seed;
} sa_layer;

typedef struct {
    const void *weight, *bias;
    double eps;
    bool rms;
} sa_norm;

/* The keys and values of earlier tokens. The forward call appends the keys and values of the new tokens, and attends to
 * all. A call is decoding if each sequence has a past and one new token, and `prompt` is false. Any other call computes
 * prompts: their rows have the same bits in one call as in several, one after the other. All layers have the same
 * number of key heads, of one width. */
typedef struct {
    char *keys, *values; /* (layers, sequences, key heads, capacity, width) */
    const int64_t *past; /* (sequences,): tokens in the cache; NULL: there is no cache */
    ptrdiff_t capacity;  /* the most tokens of a sequence, new ones included */
    bool narrow;         /* keys and values are rounded to the 16 bits of dtype, unless they are float64 */
    sa_dtype dtype;      /* SA_F16 or SA_BF16 */
    bool prompt;         /* new tokens belong to prompts, even if each sequence has only one */
} sa_cache;

/* The output rows of a sequence: all, or one. */
typedef enum { SA_EACH_ROW, SA_MEAN_ROW, SA_FIRST_ROW, SA_LAST_ROW } sa_pooling;

typedef struct {
    bool f64;
    ptrdiff_t d, vocabulary, tokens, sequences, layers, longest;
    const void *table; /* (vocabulary, d), for quants a sa_compact; or NULL: rows are the input */
    sa_weights table_kind;
    const float *table_scale; /* (vocabulary, groups), for a table of int8 */
    /* Multiplies rows of the table, which then has neither token_type_row nor positions; 0: there is none. */
    double table_factor;
    const void *token_type_row; /* (d,), added to every row of the table; or NULL */
    const void *positions;      /* (longest or more, d), or NULL */
    const int64_t *ids;
    const void *rows;       /* (tokens, d) */
    const int64_t *starts;  /* (sequences + 1,), from 0 to tokens; no sequence is empty, or longer than longest */
    sa_norm embedding_norm; /* the norm before the first layer; weight NULL: there is none */
    sa_norm final_norm;     /* the norm after the last layer */
    const sa_layer *layer;
    sa_tensor mask;     /* (sequences, heads, longest, longest), or data NULL; see selfattn.h */
    sa_tensor key_bias; /* (sequences, longest), or data NULL */
    sa_pooling pooling;
    int prompt_precision; /* the digits as which rows of prompts multiply quants; 0: quants are expanded */
    sa_cache cache;       /* only without mask, dropout and a backward pass, and with causal layers */
    /* Of attention, (layers, sequences, heads, longest, longest), zeroed;
     * with a cache (layers, heads, tokens, keys), and one sequence; or NULL. */
    char *weights;
    sa_watch *watch; /* or NULL; a cancelled call leaves results, and the cache after its past, undefined */
} sa_transformer;

/* The arrays of one layer, one after the other, with the width of a row. Without a backward pass all layers use the
 * same arrays, and some arrays the same memory. */
enum {
    SA_X,       /* d */
    SA_NORMED,  /* d: n, if the norm comes first */
    SA_QUERIES, /* heads × width */
    SA_KEYS,    /* key heads × width; values have the same */
    SA_VALUES,
    SA_ATTENDED,            /* heads × width */
    SA_SCALED,              /* d: the attention's norm, before weight and bias */
    SA_SCALE,               /* 1: its scale */
    SA_STATS,               /* heads × 2: attention's statistics, for the backward pass */
    SA_S,                   /* d */
    SA_NORMED_S,            /* d: m, if the norm comes first */
    SA_GATES,               /* hidden: gate(m) */
    SA_WIDE,                /* hidden: up(m); the same memory as the next if ReLU is applied to it */
    SA_ACTIVE,              /* hidden: the input of down */
    SA_FEED_FORWARD_SCALED, /* d, 1: the norm of the feed-forward, before weight and bias, and its scale */
    SA_FEED_FORWARD_SCALE,
    SA_POST_SCALED, /* d, 1: the same of both post norms */
    SA_POST_SCALE,
    SA_FEED_FORWARD_POST_SCALED,
    SA_FEED_FORWARD_POST_SCALE,
    SA_QUERY_SCALED, /* heads × width, heads: the same of the norms of heads */
    SA_QUERY_SCALE,
    SA_KEY_SCALED,
    SA_KEY_SCALE,
    SA_ARRAYS
};

/* The offsets of these arrays in bytes, for a number of rows. */
typedef struct {
    size_t at[SA_ARRAYS], bytes;
} sa_layout;

/* How a call is cut up: threads take shares of the tokens, or tasks if there are few shares.
 * Bits do not depend on it. */
typedef struct {
    bool keep;
    bool by_shares;
    bool far;      /* weights come from memory, not from CPU caches */
    bool decoding; /* each sequence has a past and one new token */
    /* Share k begins at the first sequence from token k·share_tokens on, and has at most share_rows tokens. */
    ptrdiff_t shares, share_tokens, share_rows;
    ptrdiff_t attend_rows; /* query rows of a task of attention */
    /* With a cache, for each sequence: tasks that attend, tasks that merge chunks of keys, whether attending tasks also
     * append, and bytes of its partial results. */
    ptrdiff_t attend_tasks, merge_tasks;
    bool joined;
    size_t partial_bytes;
    sa_layout layout; /* for all rows, or for the rows of a share */
    int threads;
    size_t saved_bytes; /* bytes that are kept for the backward pass */
    size_t shared_bytes;
    size_t scratch_bytes;
} sa_transformer_plan;

sa_status sa_transformer_make_plan(const sa_transformer *e, bool keep, int max_threads, sa_transformer_plan *plan);

/* out: (tokens, d), or with pooling (sequences, d). saved has plan.saved_bytes bytes, scratch
 * plan.shared_bytes + plan.threads × plan.scratch_bytes; all are 64-byte aligned. */
void sa_transformer_forward(const sa_transformer *e, const sa_transformer_plan *plan, void *out, void *saved,
                            void *scratch);

/* Arrays of the parameters' shapes, written whole; NULL for absent parameters, and all NULL if only rows are wanted. */
typedef struct {
    void *weight[SA_LAYER_PARAMETERS], *bias[SA_LAYER_PARAMETERS];
} sa_layer_gradients;

typedef struct {
    const void *grad_out; /* has out's shape */
    void *table;          /* has the table's shape; or NULL */
    void *rows;           /* (tokens, d): the gradient of the first norm's or layer's input; or NULL */
    void *mask; /* (heads, longest, longest), zeroed: the gradient of a float mask of all sequences; or NULL */
    void *embedding_norm[2], *final_norm[2]; /* gradients of weight and bias */
    const sa_layer_gradients *layer;
} sa_transformer_gradients;

sa_status sa_transformer_plan_backward(const sa_transformer *e, int max_threads, sa_transformer_plan *plan);

/* saved is only read. The parameters must be the same as in the forward call. */
void sa_transformer_backward(const sa_transformer *e, const sa_transformer_gradients *g,
                             const sa_transformer_plan *plan, const void *saved, void *scratch);

/* ---- for the files of the transformer alone: where activations are, the products of a layer, how tasks run ------- */

#define SA_NORM_ROWS 16

/* A small number, as threads still spin after the last call. */
#define SA_TRANSFORMER_WORK_PER_THREAD 1000000.0

typedef struct {
    char *array[SA_ARRAYS];
    char *y; /* the output: the next layer's x */
} sa_frame;

/* A norm's backward pass: dy (rows, d) is the gradient of its output, ds the gradient of its input. */
typedef struct {
    ptrdiff_t rows, d;
    const void *weight;
    bool rms;
    char *scaled, *scale;
    const char *dy;
    char *ds;
    bool adds; /* adds to ds */
    void *dweight, *dbias;
} sa_norm_pullback;

/* A thread's pass through the layers: its sequences, its layer, and the product of the phase. */
typedef struct {
    const sa_transformer *e;
    const sa_transformer_plan *plan;
    const sa_transformer_gradients *g;
    char *out;
    ptrdiff_t from, to; /* sequences from … to − 1 */
    ptrdiff_t layer;
    char *frames;
    ptrdiff_t capacity; /* rows of a frame */
    ptrdiff_t origin;   /* the row of the call that is row 0 of the frames */
    sa_frame f;         /* the layer's arrays */
    sa_linear product;  /* the product of the phase, and how it is cut */
    sa_cut cut;
    /* Backward: the product's gradients, the current or last norm, and gradients of the frame's arrays. */
    sa_linear_gradients gradients;
    sa_norm_pullback norm;
    sa_dropout dropout;
    const char *dropped; /* the gradient of a product after dropout */
    bool norm_waits;     /* the norm's parameters have no gradients yet */
    char *dy, *other, *dn, *dprojected[SA_OUTPUT], *dattended, *dwide, *dgates;
    char *scratch;
    char *partial; /* partial results of all sequences, with a cache */
    int thread, team;
} sa_pass;

typedef void sa_pass_task(const sa_pass *p, ptrdiff_t t);

/* Which thread takes a task: any free one, or the thread that has the task's rows in its CPU cache. Threads wait at the
 * end of a phase, unless the next phase needs none of its results. */
typedef enum { SA_BY_ANY_THREAD, SA_BY_ROWS, SA_BY_ROWS_AND_ON } sa_order;

/* Runs a phase of independent tasks; all threads of the team call it. */
void sa_run_phase(const sa_pass *p, ptrdiff_t tasks, sa_pass_task *task, sa_order order);

static inline const sa_layer *sa_layer_of(const sa_pass *p) { return &p->e->layer[p->layer]; }

/* The norm that a parameter is; weight NULL: there is none. */
static inline sa_norm sa_norm_of(const sa_layer *l, int which) {
    return (sa_norm){l->weight[which], l->bias[which], l->eps[which], l->rms[which]};
}

/* The width of a row of queries, and of a row of keys or values. */
static inline ptrdiff_t sa_query_width(const sa_layer *l) { return l->heads * l->width; }
static inline ptrdiff_t sa_key_width(const sa_layer *l) { return l->key_heads * l->width; }

static inline ptrdiff_t sa_bytes(const sa_transformer *e, ptrdiff_t elements) {
    return elements * (ptrdiff_t)sa_element_size(e->f64);
}

size_t sa_array_bytes(const sa_transformer *e, ptrdiff_t rows, ptrdiff_t columns);

/* True if products of rows, widths and layers do not overflow. */
bool sa_transformer_fits(const sa_transformer *e, bool keep);

/* The number of elements of all projections. */
double sa_count_weights(const sa_transformer *e);

sa_layout sa_layout_of(const sa_transformer *e, ptrdiff_t rows, bool keep);

/* With keep each layer has its own arrays. The last layer's are followed by its output rows, and by scaled rows and
 * scales of the first and final norms. */
sa_frame sa_frame_of(const sa_pass *p);

/* The scaled rows (rows, d) and scales (rows,) of the first norm or the final norm. */
enum { SA_FIRST_NORM, SA_FINAL_NORM };
char *sa_outer_scaled(const sa_pass *p, int which, char **scale);

/* A product of a layer, for `rows` rows from row `row` of the frame on. */
typedef enum {
    SA_PROJECT,
    SA_PROJECT_OUTPUT,
    SA_PROJECT_GATE,
    SA_PROJECT_UP,
    SA_PROJECT_BOTH, /* up and gate without the activation, for the backward pass */
    SA_PROJECT_DOWN,
    SA_PRODUCTS
} sa_product_kind;

sa_linear sa_product_of(const sa_pass *p, sa_product_kind kind, ptrdiff_t row, ptrdiff_t rows);

/* True if the output projection would overwrite x, which is added after dropout.
 * Its result then goes to SA_SCALED first. */
bool sa_needs_detour(const sa_pass *p);

/* The dropout of one kind, for rows from row `row` of the frame on. */
sa_dropout sa_dropout_of(const sa_pass *p, int kind, ptrdiff_t row);

static inline bool sa_has_feed_forward(const sa_layer *l) { return l->hidden > 0; }

/* Describes one head's attention in the sequence at row `row` of the frame. */
void sa_describe_head(const sa_pass *p, ptrdiff_t sequence, ptrdiff_t row, ptrdiff_t length, ptrdiff_t head,
                      sa_attention *a);

/* The first new token of a sequence in the call, and the numbers of its new and of its earlier tokens. */
static inline ptrdiff_t sa_start_of(const sa_transformer *e, ptrdiff_t sequence) {
    return (ptrdiff_t)e->starts[sequence];
}

static inline ptrdiff_t sa_length_of(const sa_transformer *e, ptrdiff_t sequence) {
    return sa_start_of(e, sequence + 1) - sa_start_of(e, sequence);
}

static inline ptrdiff_t sa_past_of(const sa_transformer *e, ptrdiff_t sequence) {
    return e->cache.past == NULL ? 0 : (ptrdiff_t)e->cache.past[sequence];
}

/* Bytes of a thread's scratch: for products or attention; in the backward pass also for a head's dK, dV and delta. */
enum { SA_FORWARD_PASS, SA_BACKWARD_PASS };
size_t sa_transformer_scratch(const sa_transformer *e, const sa_transformer_plan *plan, bool backward);

int sa_transformer_threads(const sa_transformer *e, double products, int max_threads);

#endif
