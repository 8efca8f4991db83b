/* varlen_attention as Python calls it: makes the outputs, runs, and builds the result. selfattn/functional/varlen.py documents it. */
#include "python/run.h"
#include "python/varlen_call.h"

enum { UNROUNDED = SA_ARG_VARLEN_END }; /* of sa_py_varlen_forward alone */

static int make_outputs(sa_varlen_call *call, PyObject *const *values) {
    sa_call *c = &call->c;
    sa_attention *a = &c->a;
    const npy_intp shape[3] = {a->L, a->lead[1], a->Dv}, rows[3] = {a->lead[1], a->L, 2};
    const sa_dtype computes = a->f64 ? SA_F64 : SA_F32;
    sa_dtype dtype;
    PyArrayObject *out = sa_call_make_out(c, values, 3, shape, &dtype);
    if (out == NULL) {
        return -1;
    }
    if (sa_given(values[SA_ARG_OUT])) {
        if (sa_call_check_given(c, values[SA_ARG_CU_SEQLENS_Q], "cu_seqlens_q") < 0 ||
            sa_call_check_given(c, values[SA_ARG_CU_SEQLENS_K], "cu_seqlens_k") < 0) {
            return -1;
        }
        for (ptrdiff_t s = 0; call->mask_arrays && s < call->v.sequences; ++s) {
            if (call->mask_arrays[s] && sa_check_overlap(c->state, c->out, call->mask_arrays[s], "attn_mask") < 0) {
                return -1;
            }
        }
    }
    sa_fill_packed(&a->out, out, dtype, true);
    if (c->want_lse) {
        if ((c->lse = sa_new_array(2, rows, computes, NULL, false)) == NULL) {
            return -1;
        }
        sa_fill_packed(&a->lse, c->lse, computes, false);
    }
    if (c->want_stats) {
        if ((c->stats = sa_new_array(3, rows, computes, NULL, true)) == NULL) {
            return -1;
        }
        sa_fill_tensor(&a->stats, c->stats, computes, 2, 2);
    }
    return 0;
}

typedef struct {
    const sa_varlen *v;
    sa_varlen_plan plan;
} forward_run;

static sa_status compute(void *call, char *scratch, char *partial) {
    const forward_run *r = call;
    return sa_varlen_forward(r->v, &r->plan, scratch, partial);
}

static int run(sa_varlen_call *call, PyObject *module) {
    forward_run r = {.v = &call->v};
    const sa_status planned = sa_varlen_make_plan(&call->v, call->c.threads, call->items, &r.plan);
    return sa_run_job(module, &(sa_job){.planned = planned,
                                        .threads = r.plan.threads,
                                        .scratch_bytes = r.plan.scratch_bytes,
                                        .shared_bytes = r.plan.partial_bytes,
                                        .watch = &call->c.a.watch,
                                        .compute = compute,
                                        .call = &r});
}

static PyObject *forward(PyObject *module, sa_signature_id id, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    sa_varlen_call call;
    sa_call *c = &call.c;
    if (sa_parse(sa_state_of(module), id, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    if (sa_varlen_call_read(&call, module, values) == 0) {
        c->want_stats = id == SA_SIG_VARLEN_FORWARD;
        c->want_unrounded = c->want_stats && values[UNROUNDED] == Py_True;
        if (make_outputs(&call, values) == 0 &&
            (c->want_stats ? sa_call_read_fixed_seed : sa_call_read_seed)(c, values[SA_ARG_RNG]) == 0 &&
            run(&call, module) == 0) {
            result = sa_call_result(c);
        }
    }
    sa_varlen_call_release(&call);
    return result;
}

PyObject *sa_py_varlen(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return forward(module, SA_SIG_VARLEN, args, nargs, kwnames);
}

PyObject *sa_py_varlen_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return forward(module, SA_SIG_VARLEN_FORWARD, args, nargs, kwnames);
}
