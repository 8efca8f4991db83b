/* The sentence-embedding model: a vector for each sentence of token ids, and the gradients of all parameters.
 * x = table[ids] + positions; block by block x = LayerNorm(x + attention(query(x), key(x), value(x))) within each
 * sentence; the mean over its tokens. The caller checks sizes and ids. */
#ifndef SA_TRANSFORMER_H
#define SA_TRANSFORMER_H

#include "selfattn.h"

enum { SA_QUERY, SA_KEY, SA_VALUE, SA_PROJECTIONS };

/* Contiguous rows; weights (d, d) for y = x·weightᵀ + bias. */
typedef struct {
    const void *weight[SA_PROJECTIONS], *bias[SA_PROJECTIONS];
    const void *norm_weight, *norm_bias;
    ptrdiff_t heads; /* divides d */
    double eps;
} sa_embedding_block;

typedef struct {
    bool f64;
    ptrdiff_t d, vocabulary, tokens, sentences, blocks, longest, most_heads;
    const void *table;     /* (vocabulary, d) */
    const void *positions; /* (longest or more, d) */
    const sa_embedding_block *block;
    const int64_t *ids;
    const int64_t *starts; /* (sentences + 1,), from 0 to tokens; no sentence is empty, or longer than longest */
} sa_embedding;

/* How a call is cut up: threads share out parts, or tasks if parts are few. Bits depend on neither. */
typedef struct {
    bool keep;
    bool by_parts;
    ptrdiff_t parts, part_rows; /* the most of a part */
    ptrdiff_t product_rows;
    ptrdiff_t product_shares;
    ptrdiff_t attend_rows;
    int threads;
    size_t saved_bytes; /* for the backward pass, if kept */
    size_t shared_bytes;
    size_t scratch_bytes;
} sa_embedding_plan;

sa_status sa_embedding_make_plan(const sa_embedding *e, bool keep, int max_threads, sa_embedding_plan *plan);

/* saved: plan.saved_bytes; scratch: plan.shared_bytes + plan.threads × plan.scratch_bytes; all 64-byte aligned. */
void sa_embedding_forward(const sa_embedding *e, const sa_embedding_plan *plan, void *out, void *saved, void *scratch);

/* Arrays like the parameters, written whole. */
typedef struct {
    void *weight[SA_PROJECTIONS], *bias[SA_PROJECTIONS], *norm_weight, *norm_bias;
} sa_embedding_block_gradients;

typedef struct {
    const void *grad_out;
    void *table;
    const sa_embedding_block_gradients *block;
} sa_embedding_gradients;

sa_status sa_embedding_plan_backward(const sa_embedding *e, int max_threads, sa_embedding_plan *plan);

/* saved is only read. Parameters must not have changed since the forward call. */
void sa_embedding_backward(const sa_embedding *e, const sa_embedding_gradients *g, const sa_embedding_plan *plan,
                           const void *saved, void *scratch);

#endif
