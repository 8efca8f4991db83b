/* The sentence-embedding model: token ids of many sentences to one vector each, and the gradients of all parameters. x =
 * table[ids] + positions; in each block x = LayerNorm(x + attention(query(x), key(x), value(x))) within each sentence;
 * then the mean over its tokens. The caller checks sizes and ids. */
#ifndef SA_EMBEDDING_H
#define SA_EMBEDDING_H

#include "selfattn.h"

enum { SA_QUERY, SA_KEY, SA_VALUE, SA_PROJECTIONS };

/* Rows are contiguous; weights are (d, d), for y = x·weightᵀ + bias. */
typedef struct {
    const void *weight[SA_PROJECTIONS], *bias[SA_PROJECTIONS];
    const void *norm_weight, *norm_bias; /* (d,) */
    ptrdiff_t heads;                     /* divides d */
    double eps;
} sa_embedding_block;

typedef struct {
    bool f64;
    ptrdiff_t d, vocabulary, tokens, sentences, blocks, longest, most_heads;
    const void *table;     /* (vocabulary, d) */
    const void *positions; /* (longest or more, d) */
    const sa_embedding_block *block;
    const int64_t *ids;    /* (tokens,), each in 0 … vocabulary − 1 */
    const int64_t *starts; /* (sentences + 1,), from 0 to tokens; a sentence has 1 … longest tokens */
} sa_embedding;

/* How a call is cut up. Threads share out parts or, where those are few, tasks. Bits depend on neither. */
typedef struct {
    bool keep;
    bool by_parts;
    ptrdiff_t parts, part_rows; /* the most of a part */
    ptrdiff_t product_rows;     /* of one task */
    ptrdiff_t product_shares;   /* the most cuts of its columns; 0: any */
    ptrdiff_t attend_rows;      /* queries of one task */
    int threads;
    size_t saved_bytes;   /* what backward reads; 0 unless kept */
    size_t shared_bytes;  /* once */
    size_t scratch_bytes; /* for each thread */
} sa_embedding_plan;

/* keep: a backward pass will follow. */
sa_status sa_embedding_make_plan(const sa_embedding *e, bool keep, int max_threads, sa_embedding_plan *plan);

/* saved: plan.saved_bytes; scratch: plan.shared_bytes + plan.threads × plan.scratch_bytes; all 64-byte aligned. */
void sa_embedding_forward(const sa_embedding *e, const sa_embedding_plan *plan, void *out, void *saved, void *scratch);

/* Gradients: arrays like the parameters, written whole. */
typedef struct {
    void *weight[SA_PROJECTIONS], *bias[SA_PROJECTIONS], *norm_weight, *norm_bias;
} sa_embedding_block_gradients;

typedef struct {
    const void *grad_out; /* (sentences, d) */
    void *table;
    const sa_embedding_block_gradients *block;
} sa_embedding_gradients;

sa_status sa_embedding_plan_backward(const sa_embedding *e, int max_threads, sa_embedding_plan *plan);

/* saved is as the forward call left it, and stays so. Parameters must not have changed. */
void sa_embedding_backward(const sa_embedding *e, const sa_embedding_gradients *g, const sa_embedding_plan *plan,
                           const void *saved, void *scratch);

#endif
