/* A call of the transformer: transformer_model.c reads it from Python, transformer.c runs it. */
#ifndef SA_PYTHON_TRANSFORMER_H
#define SA_PYTHON_TRANSFORMER_H

#include "python/binding.h"

#include "drivers/attention.h"
#include "drivers/transformer.h"

/* The arrays of a model, NULL if absent: table, the row that is always added, positions, mask, keys' bias, weight and bias of
 * the first norm; then for each layer the weight and bias of each parameter in the core's order, cosines and sines; then weight
 * and bias of the final norm. */
enum {
    TABLE,
    ALWAYS,
    POSITIONS,
    MASK,
    KEY_BIAS,
    FIRST_NORM,
    FIRST_OF_LAYERS = FIRST_NORM + 2,
    OWN_ARRAYS = FIRST_OF_LAYERS + 2
};
enum { COSINES = 2 * SA_LAYER_PARAMETERS, SINES, LAYER_ARRAYS };

typedef struct {
    sa_transformer e;
    npy_intp most; /* the most tokens of a sequence */
    Py_ssize_t arrays;
    PyArrayObject **array; /* owned, or NULL */
    PyArrayObject *rows;   /* owned, or NULL: the input rows */
    PyObject **compact;    /* owned, or NULL: each layer's compact weights */
    PyObject *table_owner; /* owned, or NULL: the scales of a table of int8, or quants */
    PyObject *cached[2];   /* owned, or NULL: keys, values */
    sa_layer *layer;
    int64_t *numbers; /* ids, offsets and lengths of the past, from the arena */
    void *saved;      /* from the arena; NULL without a backward pass */
    void *out;
    sa_transformer_gradients g;
    sa_transformer_plan plan;
} sa_transformer_call;

static inline int sa_transformer_type(const sa_transformer_call *c) { return c->e.f64 ? NPY_DOUBLE : NPY_FLOAT; }

static inline const char *sa_transformer_type_name(const sa_transformer_call *c) { return c->e.f64 ? "float64" : "float32"; }

/* Reads and checks the model, then its inputs, into an empty call. cache: None, or (keys, values, past). A call that fails must
 * be released, too. */
int sa_transformer_read(sa_transformer_call *c, PyObject *module, PyObject *model, PyObject *inputs, PyObject *starts,
                        PyObject *cache);

void sa_transformer_release(sa_transformer_call *c);

#endif
