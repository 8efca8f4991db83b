/* One step of SGD or Adam over many arrays. kernels/optimizer/update.h has the arithmetic. */
#ifndef SA_OPTIMIZER_H
#define SA_OPTIMIZER_H

#include "kernels/kernels.h"

/* An array of n float64 or float32 elements, contiguous and aligned. Arrays that are written overlap no other array. */
typedef struct {
    bool f64;
    ptrdiff_t n;
    int64_t step; /* counted from 1 */
    void *parameter;
    const void *gradient;
    void *mean;   /* Adam's exp_avg, SGD's momentum_buffer (NULL without momentum; not read at step 1) */
    void *square; /* Adam's exp_avg_sq */
    void *peak;   /* its largest values so far, max_exp_avg_sq of AMSGrad; else NULL */
} sa_update_array;

typedef struct {
    sa_update_kind kind;
    double lr, weight_decay;
    double momentum, dampening;
    bool nesterov;
    double beta1, beta2, eps;
    bool decoupled; /* AdamW: decay shrinks the parameter and is not added to the gradient */
    ptrdiff_t count;
    const sa_update_array *arrays;
} sa_update;

/* Bits depend neither on threads nor on the instruction set. */
void sa_update_run(sa_update *u, int max_threads);

#endif
