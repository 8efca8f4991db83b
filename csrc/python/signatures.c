/* Owns the signatures of the functions that take keywords, and the sorting of a call's arguments into them. It loops over
 * the arguments that were given, not over the parameters: a plain call pays for three. */
#include "python/module.h"

#define SA_ATTENTION_NAMES                                                                                                     \
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "causal", "window", "softcap",      \
        "alibi_slopes", "sinks", "key_lengths", "block_mask", "rng", "return_lse", "return_weights", "out", "num_threads"

const sa_signature sa_signatures[SA_SIGNATURES] = {
    [SA_SIG_ATTENTION] = {"scaled_dot_product_attention", 6, 3, {SA_ATTENTION_NAMES}},
    [SA_SIG_ATTENTION_FORWARD] = {"scaled_dot_product_attention_forward", 6, 3, {SA_ATTENTION_NAMES, "unrounded"}},
    [SA_SIG_ATTENTION_BACKWARD] = {"scaled_dot_product_attention_backward",
                                   6,
                                   3,
                                   {SA_ATTENTION_NAMES, "grad_out", "statistics", "grad_lse", "wrt", "gradients"}},
    [SA_SIG_ATTENTION_CACHED] = {"_cached_attention", 3, 3, {SA_ATTENTION_NAMES, "query_lengths"}},
    [SA_SIG_VARLEN] = {"varlen_attention", 3, 3, {SA_ATTENTION_NAMES, "cu_seqlens_q", "cu_seqlens_k"}},
    [SA_SIG_VARLEN_FORWARD] = {"varlen_attention", 3, 3, {SA_ATTENTION_NAMES, "cu_seqlens_q", "cu_seqlens_k", "unrounded"}},
    [SA_SIG_VARLEN_BACKWARD] = {"varlen_attention_backward",
                                3,
                                3,
                                {SA_ATTENTION_NAMES, "cu_seqlens_q", "cu_seqlens_k", "grad_out", "statistics", "grad_lse",
                                 "wrt"}},
    [SA_SIG_SOFTMAX] = {"softmax", 2, 1, {"x", "axis"}},
    [SA_SIG_LOG_SOFTMAX] = {"log_softmax", 2, 1, {"x", "axis"}},
    [SA_SIG_LAYER_NORM] = {"layer_norm", 5, 2, {"x", "normalized_shape", "weight", "bias", "eps"}},
    [SA_SIG_RMS_NORM] = {"rms_norm", 4, 2, {"x", "normalized_shape", "weight", "eps"}},
    [SA_SIG_GELU] = {"gelu", 2, 1, {"x", "approximate"}},
    [SA_SIG_ROTARY] = {"apply_rotary_emb", 4, 3, {"x", "cos", "sin", "interleaved"}},
};

/* The parameter that a keyword names, or −1: by identity, since names in source code are interned, then by value. */
static int find_name(PyObject *const *names, PyObject *keyword) {
    for (int i = 0; i < SA_MAX_PARAMETERS && names[i] != NULL; ++i) {
        if (names[i] == keyword) {
            return i;
        }
    }
    for (int i = 0; i < SA_MAX_PARAMETERS && names[i] != NULL; ++i) {
        if (PyUnicode_Compare(names[i], keyword) == 0) {
            return i;
        }
    }
    return -1;
}

int sa_parse(const sa_state *state, sa_signature_id id, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values) {
    const sa_signature *signature = &sa_signatures[id];
    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments (%zd given)", signature->function,
                     signature->positional, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) {
        values[i] = args[i];
    }
    memset(values + nargs, 0, (size_t)(SA_MAX_PARAMETERS - nargs) * sizeof *values);
    const Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t k = 0; k < keywords; ++k) {
        PyObject *keyword = PyTuple_GET_ITEM(kwnames, k);
        const int i = find_name(state->names[id], keyword);
        if (i < 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", signature->function, keyword);
            return -1;
        }
        if (values[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", signature->function, keyword);
            return -1;
        }
        values[i] = args[nargs + k];
    }
    for (int i = 0; i < signature->required; ++i) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument: '%s'", signature->function, signature->names[i]);
            return -1;
        }
    }
    return 0;
}
