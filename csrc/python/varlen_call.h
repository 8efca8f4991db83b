/* A call of attention over packed sequences as Python makes it, forward or backward. */
#ifndef SA_PYTHON_VARLEN_CALL_H
#define SA_PYTHON_VARLEN_CALL_H

#include "python/attention_call.h"

#include "drivers/varlen.h"

/* Parameters beyond those of an attention call. */
enum { SA_ARG_CU_SEQLENS_Q = SA_ARG_NUM_THREADS + 1, SA_ARG_CU_SEQLENS_K, SA_ARG_VARLEN_END };

/* The call under way; c.a describes the packed arrays (varlen.h). */
typedef struct {
    sa_call c;
    sa_varlen v;
    PyArrayObject *offsets_q, *offsets_k; /* owned: copies that nobody else can change */
    PyArrayObject **mask_arrays;          /* owned, one for each sequence, NULL where it has none; NULL without masks */
    sa_tensor *masks;                     /* owned */
    sa_varlen_item *items;                /* owned */
} sa_varlen_call;

/* Reads and checks all arguments but `out` and `rng`; the call need not be initialised. Returns −1 with an exception set.
 * Release is due in any case. */
int sa_varlen_call_read(sa_varlen_call *call, PyObject *module, PyObject *const *values);
void sa_varlen_call_release(sa_varlen_call *call);

/* t as an array (rows, heads, cols), or with cols false (heads, rows): what the packed arrays are. */
void sa_fill_packed(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, bool cols);

#endif
