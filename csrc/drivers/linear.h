/* Products with weights as tasks that a team shares, forward and backward: y = x·weightᵀ + bias. */
#ifndef SA_LINEAR_H
#define SA_LINEAR_H

#include "drivers/common.h"

#define SA_MOST_WEIGHTS 3

/* Several weights may multiply the same rows: y_i = x·weight_iᵀ + bias_i. All arrays are contiguous. */
typedef struct {
    bool f64;
    sa_weights weights; /* the kind of all weights */
    bool far;           /* the weights come from memory, not from caches */
    /* Rows are new tokens: they multiply quants as SA_DIGITS digits, and sums are added in another order. */
    bool decoding;
    int digits; /* the digits as which other rows multiply quants; 0: quants are expanded to float32 */
    ptrdiff_t rows, in;
    int count;
    ptrdiff_t out[SA_MOST_WEIGHTS];
    /* Weights are (out, in), or a sa_compact; biases are (out,) or NULL. */
    const char *weight[SA_MOST_WEIGHTS], *bias[SA_MOST_WEIGHTS];
    const char *x;            /* (rows, in) */
    char *y[SA_MOST_WEIGHTS]; /* (rows, out) */
    const char *residual;     /* (rows, out), added to the only weight's y; or NULL */
    sa_activation activation; /* with one weight: active = activation(y), or … */
    const char *gate;         /* … activation(gate)·y, unless NULL */
    char *active;             /* (rows, out), may be y */
    sa_dropout dropout;       /* p > 0: drops elements of active, or of the product if there is no activation */
    sa_watch *watch;          /* for sa_linear_forward and sa_linear_backward; or NULL */
} sa_linear;

/* How a product is cut: the rows of a task, and the number of stripes of columns;
 * 0: a task for each panel of columns. */
typedef struct {
    ptrdiff_t rows, stripes, panel;
} sa_cut;

/* Cuts a product for a team of `threads`. With by_share one thread takes all rows. */
enum { SA_BY_TEAM, SA_BY_SHARE };
sa_cut sa_cut_product(const sa_linear *l, int threads, bool by_share);

/* The same for dx. */
sa_cut sa_cut_input(const sa_linear *l, int threads, bool by_share);

/* The digits as which rows are multiplied by quants; 0: as float32. */
int sa_linear_digits(const sa_linear *l);

/* The most scratch that a task of a product needs, forward or backward. */
size_t sa_linear_scratch(const sa_linear *l, int threads, bool by_share, bool backward);

ptrdiff_t sa_linear_tasks(const sa_linear *l, const sa_cut *cut);
void sa_linear_task(const sa_linear *l, const sa_cut *cut, ptrdiff_t t, void *scratch);

/* dx = Σ dy_i·weight_i, or dx += that sum if `adds`; dweight_i = dy_iᵀ·x;
 * dbias_i = Σ dy_i, for a weight with a bias. */
typedef struct {
    const sa_linear *l;
    const char *dy[SA_MOST_WEIGHTS];
    char *dx;
    bool adds; /* adds to dx */
    char *dweight[SA_MOST_WEIGHTS], *dbias[SA_MOST_WEIGHTS];
    /* If x was activation(pre), or activation(gate)·pre, dx becomes the gradient of pre. */
    sa_activation activation;
    const char *pre, *gate;
    char *dgate;
    sa_dropout dropout; /* the dropout of x */
} sa_linear_gradients;

ptrdiff_t sa_linear_input_tasks(const sa_linear_gradients *g, const sa_cut *cut);
void sa_linear_input_task(const sa_linear_gradients *g, const sa_cut *cut, ptrdiff_t t, void *scratch);

ptrdiff_t sa_linear_parameter_tasks(const sa_linear_gradients *g, int threads);
void sa_linear_parameter_task(const sa_linear_gradients *g, int threads, ptrdiff_t t, void *scratch);

/* For a product that is a whole call. scratch: threads × the bytes of sa_linear_scratch. */
int sa_linear_threads(const sa_linear *l, double products, int max_threads);
void sa_linear_forward(const sa_linear *l, int threads, void *scratch);
void sa_linear_backward(const sa_linear_gradients *g, int threads, void *scratch);

#endif
