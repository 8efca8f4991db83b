/* Operations that treat every row of an array by itself: softmax, norms, gelu, rotary embeddings, and their gradients. Structs and entry
 * points; arithmetic is in kernels/rowops, dtypes and shapes are checked by the caller. */
#ifndef SA_ROWS_H
#define SA_ROWS_H

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
    SA_SOFTMAX_BACKWARD, /* from here on the result is dx; the gradient of rotary is rotary with −sin */
    SA_LOG_SOFTMAX_BACKWARD,
    SA_LAYER_NORM_BACKWARD,
    SA_RMS_NORM_BACKWARD,
    SA_GELU_BACKWARD,
    SA_GELU_TANH_BACKWARD,
    SA_ROW_KINDS
} sa_row_kind;

/* No kind has both dy and tables: they share a place, so that the forward does not pay for an array that it lacks. */
enum { SA_ROW_X, SA_ROW_OUT, SA_ROW_COS, SA_ROW_SIN, SA_ROW_WEIGHT, SA_ROW_BIAS, SA_ROW_ARRAYS, SA_ROW_DY = SA_ROW_COS };

/* An array seen in the shape of x: strides in bytes along the axes of x, 0 where it is broadcast. */
typedef struct {
    char *data; /* NULL where it is absent */
    sa_dtype dtype;
    bool swapped;
    ptrdiff_t stride[SA_MAX_LEAD];
} sa_strided;

/* Where the gradient of a weight or bias goes: contiguous, in native byte order, as many elements as a row; or NULL. */
typedef struct {
    char *data;
    sa_dtype dtype;
} sa_row_gradient;

/* A call. out is a C-contiguous floating array of x's shape in native byte order that overlaps no input. dy has x's shape, cos and sin half
 * as many columns. A row of rotary is the last axis, of gelu anything. */
typedef struct {
    sa_row_kind kind;
    bool f64; /* computes in float64, else in float32 */
    double eps;
    int ndim;
    int first, last; /* a row is made of the axes first … last − 1; several only for norms, and then the last ones */
    ptrdiff_t shape[SA_MAX_LEAD];
    sa_strided array[SA_ROW_ARRAYS];
    sa_row_gradient dweight, dbias; /* of the norms' backward kinds */
} sa_row_call;

/* One axis, or several neighbours that all arrays step through evenly. */
typedef struct {
    ptrdiff_t n, stride[SA_ROW_ARRAYS];
} sa_row_axis;

/* How a call is cut up. Only `threads` depends on the number of threads, and no result does. */
typedef struct {
    int n_lead, n_row;
    ptrdiff_t n;             /* elements of a row */
    ptrdiff_t piece, pieces; /* of a row of gelu, of the columns, of which others have one */
    ptrdiff_t rows, block_rows, tasks;
    ptrdiff_t chunks, chunk_tasks; /* a chunk is done by one thread, task after task, and has its own sums for dweight, dbias */
    bool by_columns;               /* softmax along an axis that isn't last: a task is rows × some neighbouring columns */
    bool direct[SA_ROW_ARRAYS];
    const void *weight, *bias;
    double *partial;                    /* chunks × (dweight[n], dbias[n]), or NULL */
    size_t shared_bytes, scratch_bytes; /* once, and for each thread */
    int threads;
    sa_row_axis column;
    sa_row_axis lead[SA_MAX_LEAD], row[SA_MAX_LEAD];
} sa_row_plan;

sa_status sa_row_make_plan(const sa_row_call *c, int max_threads, sa_row_plan *plan);

/* scratch: plan.shared_bytes + plan.threads × plan.scratch_bytes, 64-byte aligned; may be NULL when that is 0. */
void sa_row_run(const sa_row_call *c, sa_row_plan *plan, void *scratch);

#endif
