/* A row operation's call, and how it is cut up: what drivers pass to the kernels of this folder. */
#ifndef SA_ROW_CALL_H
#define SA_ROW_CALL_H

#include "selfattn.h"

typedef enum {
    SA_SOFTMAX,
    SA_LOG_SOFTMAX,
    SA_LAYER_NORM,
    SA_RMS_NORM,
    SA_GELU,
    SA_GELU_TANH,
    SA_ROTARY,
    SA_ROTARY_INTERLEAVED,
    SA_SOFTMAX_BACKWARD, /* from here on results are dx; the gradient of rotary is rotary with −sin */
    SA_LOG_SOFTMAX_BACKWARD,
    SA_LAYER_NORM_BACKWARD,
    SA_RMS_NORM_BACKWARD,
    SA_GELU_BACKWARD,
    SA_GELU_TANH_BACKWARD,
    SA_ROW_KINDS
} sa_row_kind;

/* A macro: kernels could not inline a function (simd/macros.h). */
#define SA_IS_ELEMENTWISE(kind)                                                                                        \
    ((kind) == SA_GELU || (kind) == SA_GELU_TANH || (kind) == SA_GELU_BACKWARD || (kind) == SA_GELU_TANH_BACKWARD)

/* dy and the tables have one index, as no kind has both. */
enum {
    SA_ROW_X,
    SA_ROW_OUT,
    SA_ROW_COS,
    SA_ROW_SIN,
    SA_ROW_WEIGHT,
    SA_ROW_BIAS,
    SA_ROW_ARRAYS,
    SA_ROW_DY = SA_ROW_COS
};

/* An array of x's shape, with byte strides along its axes, 0 along broadcast ones. */
typedef struct {
    char *data;
    sa_dtype dtype;
    bool swapped;
    ptrdiff_t stride[SA_MAX_LEAD];
} sa_strided;

/* The gradient of a weight or bias: contiguous, in native byte order, as long as a row; or NULL. */
typedef struct {
    char *data;
    sa_dtype dtype;
} sa_row_gradient;

/* A call. out is of a floating dtype, x's shape and native byte order, and overlaps no input. It is C-contiguous, or
 * for GELU contiguous with axes in any order. dy has x's shape, cos and sin have half its columns. A row is the last
 * axis for rotary, and any axes for GELU. */
typedef struct {
    sa_row_kind kind;
    bool f64;
    double eps;
    int ndim;
    int first, last; /* axes first … last − 1 make a row; only norms have several, up to the last axis */
    ptrdiff_t shape[SA_MAX_LEAD];
    sa_strided array[SA_ROW_ARRAYS];
    sa_row_gradient dweight, dbias;
} sa_row_call;

/* An axis, or neighbouring axes merged because every array has one stride for them. */
typedef struct {
    ptrdiff_t n, stride[SA_ROW_ARRAYS];
} sa_row_axis;

/* How a call is cut up. Only `threads` depends on the number of threads, so results do not. */
typedef struct {
    int n_lead, n_row;
    ptrdiff_t n;
    ptrdiff_t piece, pieces; /* pieces of a GELU row, or of columns; else one piece */
    ptrdiff_t rows, block_rows, tasks;
    ptrdiff_t chunks, chunk_tasks; /* one thread computes a chunk, in order, with sums of its own */
    bool by_columns;               /* softmax along an earlier axis: a task has all rows of some columns */
    bool direct[SA_ROW_ARRAYS];
    const void *weight, *bias;
    double *partial; /* chunks × (dweight[n], dbias[n]), or NULL */
    size_t shared_bytes, scratch_bytes;
    int threads;
    sa_row_axis column;
    sa_row_axis lead[SA_MAX_LEAD], row[SA_MAX_LEAD];
} sa_row_plan;

#endif
