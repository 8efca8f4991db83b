/* A call of the transformer: transformer_model.c reads the model from Python, transformer.c the inputs, and runs it. */
#ifndef SA_PYTHON_TRANSFORMER_H
#define SA_PYTHON_TRANSFORMER_H

#include "python/binding.h"

#include "drivers/attention.h"
#include "drivers/transformer.h"

/* An array that has a gradient, and where the struct of the gradients has the pointer to that. */
typedef struct {
    PyArrayObject *array; /* borrowed */
    Py_ssize_t layer;     /* −1: the model's own */
    size_t to;            /* the offset in sa_layer_gradients, or in sa_transformer_gradients */
} sa_trained;

typedef struct {
    sa_transformer e;
    const sa_state *state;
    npy_intp most;    /* the most tokens of a sequence */
    PyObject **owned; /* all objects whose memory the call reads */
    Py_ssize_t owned_count;
    sa_trained *parameters; /* in the order of their gradients */
    Py_ssize_t parameter_count;
    PyArrayObject *mask, *key_bias; /* borrowed, or NULL */
    sa_layer *layer;
    int64_t *numbers; /* ids, offsets and lengths of the past, from the arena */
    void *saved;      /* from the arena; NULL without a backward pass */
    void *out;
    sa_transformer_gradients g;
    sa_transformer_plan plan;
} sa_transformer_call;

static inline int sa_transformer_type(const sa_transformer_call *c) { return c->e.f64 ? NPY_DOUBLE : NPY_FLOAT; }

static inline const char *sa_transformer_type_name(const sa_transformer_call *c) {
    return c->e.f64 ? "float64" : "float32";
}

/* Steals a reference, which the call then owns; returns it borrowed. */
static inline void *sa_transformer_own(sa_transformer_call *c, void *object) {
    return c->owned[c->owned_count++] = object;
}

static inline npy_intp sa_rows_of(const PyArrayObject *array) { return array == NULL ? 0 : PyArray_DIM(array, 0); }

/* Reads and checks the model and what the call adds, into an empty call. One that fails must be released, too. */
int sa_transformer_read_model(sa_transformer_call *c, PyObject *module, PyObject *model, PyObject *call);

void sa_transformer_release(sa_transformer_call *c);

#endif
