/* The transformer: packed sequences through layers of attention and feed-forward networks, and the gradients of all
 * parameters. A layer computes
 *     s = x + output(attention(query(n), key(n), value(n)))     n = norm(x) if norm_first, else x
 *     y = s + down(activation(gate(m))·up(m))                   m = norm(s) if norm_first, else s
 * and without norm_first s = norm(x + …), y = norm(s + …). What has no weight is left out. The caller checks sizes and ids. */
#ifndef SA_TRANSFORMER_H
#define SA_TRANSFORMER_H

#include "drivers/linear.h"

/* Parameters, each a weight and a bias or NULL. Weights of projections are (out, in), of norms (d,). */
enum { SA_QUERY, SA_KEY, SA_VALUE, SA_OUTPUT, SA_ATTENTION_NORM, SA_UP, SA_GATE, SA_DOWN, SA_LAST_NORM, SA_LAYER_PARAMETERS };

/* What is dropped: weights of attention, what output gives, what goes down, and what down gives. */
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

/* What becomes of a sequence's rows: all of them, or one. */
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
    sa_watch *watch; /* or NULL; of a call that is cancelled all results are undefined, and the cache after its past */
} sa_transformer;

/* The arrays of one layer, one after the other. Widths are of a row. Without a backward pass all layers share them, and
 * some share a place. */
enum {
    SA_X,       /* d */
    SA_NORMED,  /* d: n, if the norm comes first */
    SA_QUERIES, /* heads × width */
    SA_KEYS,    /* key heads × width, likewise values */
    SA_VALUES,
    SA_ATTENDED,  /* heads × width */
    SA_UNIT,      /* d: of the attention's norm, before weight and bias */
    SA_SCALE,     /* 1: and its scale */
    SA_STATS,     /* heads × 2: of attention, for the backward pass */
    SA_S,         /* d */
    SA_NORMED_S,  /* d: m, if the norm comes first */
    SA_GATES,     /* hidden: gate(m) */
    SA_WIDE,      /* hidden: up(m) */
    SA_ACTIVE,    /* hidden: what goes down */
    SA_LAST_UNIT, /* d, 1: of the last norm */
    SA_LAST_SCALE,
    SA_ARRAYS
};

/* Their offsets in bytes, for a number of rows. */
typedef struct {
    size_t at[SA_ARRAYS], bytes;
} sa_layout;

/* How a call is cut up: threads share out the tokens, or tasks if shares are few. Bits depend on neither. */
typedef struct {
    bool keep;
    bool by_shares;
    bool far;                       /* weights come from memory */
    bool decoding;                  /* each sequence has a past and one new token */
    ptrdiff_t shares, share_tokens; /* a share begins at the first sequence from a multiple on … */
    ptrdiff_t share_rows;           /* … and has at most this many tokens */
    ptrdiff_t attend_rows;
    /* With a cache: tasks of a sequence that attend, and that merge chunks of keys; whether the former also append; and a
     * sequence's partial results, after what else is shared. */
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

#endif
