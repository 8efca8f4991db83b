/* Operations that treat every row of an array by itself: softmax, norms, gelu, rotary embeddings. Structs and entry points;
 * arithmetic is in kernels/rows.h, dtypes and shapes are checked by the caller. */
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
    SA_ROW_KINDS
} sa_row_kind;

enum { SA_ROW_X, SA_ROW_OUT, SA_ROW_COS, SA_ROW_SIN, SA_ROW_WEIGHT, SA_ROW_BIAS, SA_ROW_ARRAYS };

/* An array seen in the shape of x: strides in bytes along the axes of x, 0 where it is broadcast. */
typedef struct {
    char *data; /* NULL where it is absent */
    sa_dtype dtype;
    bool swapped;
    ptrdiff_t stride[SA_MAX_LEAD];
} sa_strided;

/* A call. out is a floating array of x's shape in native byte order that overlaps no input. cos and sin have half as many
 * columns as x; a row of rotary is the last axis, of gelu anything. */
typedef struct {
    sa_row_kind kind;
    bool f64; /* computes in float64, else in float32 */
    double eps;
    int ndim;
    int first, last; /* a row is made of the axes first … last − 1; several only for norms, and then the last ones */
    ptrdiff_t shape[SA_MAX_LEAD];
    sa_strided array[SA_ROW_ARRAYS];
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
    bool by_columns; /* softmax along an axis that isn't last: a task is rows × some neighbouring columns */
    bool direct[SA_ROW_ARRAYS];
    const void *weight, *bias;
    size_t shared_bytes, scratch_bytes; /* once, and for each thread */
    int threads;
    sa_row_axis column;
    sa_row_axis lead[SA_MAX_LEAD], row[SA_MAX_LEAD];
} sa_row_plan;

sa_status sa_row_make_plan(const sa_row_call *c, int max_threads, sa_row_plan *plan);

/* scratch: plan.shared_bytes + plan.threads × plan.scratch_bytes, 64-byte aligned; may be NULL when that is 0. */
void sa_row_forward(const sa_row_call *c, sa_row_plan *plan, void *scratch);

#endif
