/* The sentence-embedding model in one call: token ids of many sentences to one vector each, and the gradients of all
 * parameters. x = table[ids] + positions; block by block x = LayerNorm(x + attention(query(x), key(x), value(x))) within each
 * sentence; the mean over its tokens. Structs and entry points; sizes and ids have been checked by the caller. */
#ifndef SA_EMBEDDING_H
#define SA_EMBEDDING_H

#include "selfattn.h"

enum { SA_QUERY, SA_KEY, SA_VALUE, SA_PROJECTIONS };

/* Rows are contiguous; weights (d, d) lie as in y = x·weightᵀ + bias. */
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
    const int64_t *starts; /* (sentences + 1,), from 0 to tokens, each sentence of 1 … longest tokens */
} sa_embedding;

/* How a call is cut up. Threads share out parts, or where those are few the tasks of every phase; bits depend on neither. */
typedef struct {
    bool keep;
    bool by_parts;
    ptrdiff_t parts, part_rows; /* the most rows of a part */
    ptrdiff_t product_rows;     /* rows of one task of a product with weights */
    ptrdiff_t product_shares;   /* into how many tasks its columns are cut, at most; 0: into as many as can be */
    ptrdiff_t attend_rows;      /* queries of one task of attention */
    int threads;
    size_t saved_bytes;   /* what the backward pass reads; 0 unless it is kept */
    size_t shared_bytes;  /* once */
    size_t scratch_bytes; /* for each thread */
} sa_embedding_plan;

/* keep: a backward pass will follow. */
sa_status sa_embedding_make_plan(const sa_embedding *e, bool keep, int max_threads, sa_embedding_plan *plan);

/* out: (sentences, d). saved: plan.saved_bytes; scratch: plan.shared_bytes + plan.threads × plan.scratch_bytes; all 64-byte
 * aligned. */
void sa_embedding_forward(const sa_embedding *e, const sa_embedding_plan *plan, void *out, void *saved, void *scratch);

/* Where gradients go: arrays like the parameters, written whole. */
typedef struct {
    void *weight[SA_PROJECTIONS], *bias[SA_PROJECTIONS], *norm_weight, *norm_bias;
} sa_embedding_block_gradients;

typedef struct {
    const void *grad_out; /* (sentences, d) */
    void *table;
    const sa_embedding_block_gradients *block;
} sa_embedding_gradients;

sa_status sa_embedding_plan_backward(const sa_embedding *e, int max_threads, sa_embedding_plan *plan);

/* saved: as the forward call left it; it is only read. The parameters must be what they were then. */
void sa_embedding_backward(const sa_embedding *e, const sa_embedding_gradients *g, const sa_embedding_plan *plan,
                           const void *saved, void *scratch);

#endif
