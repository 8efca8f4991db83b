/* Optimisers: one step of SGD or Adam over many arrays at once. Structs and entry points; arithmetic is in kernels/optimizer. */
#ifndef SA_UPDATE_H
#define SA_UPDATE_H

#include "selfattn.h"

typedef enum { SA_SGD, SA_ADAM, SA_UPDATE_KINDS } sa_update_kind;

/* n elements of float64 or float32, each array contiguous and aligned. No two arrays that are written to overlap. */
typedef struct {
    bool f64;
    ptrdiff_t n;
    int64_t step; /* of this array, from 1 on */
    void *parameter;
    const void *gradient;
    void *mean;   /* of the gradient: Adam's exp_avg, SGD's momentum_buffer (NULL without momentum; not read at step 1) */
    void *square; /* Adam's exp_avg_sq */
} sa_update_array;

typedef struct {
    sa_update_kind kind;
    double lr, weight_decay;
    double momentum, dampening; /* SGD */
    bool nesterov;
    double beta1, beta2, eps; /* Adam */
    bool decoupled;           /* the decay shrinks the parameter and stays out of the gradient: AdamW */
    ptrdiff_t count;
    const sa_update_array *arrays;
} sa_update;

/* Elements of one array do not meet, so the bits depend on neither the number of threads nor the instruction set. */
void sa_update_run(const sa_update *u, int max_threads);

#endif
