/* Vectors of attention, packed sequences, row operations and optimisers. A table binds names to the fields of a struct;
 * vectors.c compares what the call wrote. */
#include <stdio.h>
#include <string.h>

#include "drivers/optimizer.h"
#include "drivers/rowops.h"
#include "drivers/varlen.h"
#include "tests/vectors.h"

/* ---- attention --------------------------------------------------------------------------------------------------- */

#define ATTENTION(kind, member) FIELD(sa_attention, kind, member)
static const field attention_fields[] = {
    ATTENTION(SIZE, L),
    ATTENTION(SIZE, S),
    ATTENTION(SIZE, E),
    ATTENTION(SIZE, Dv),
    ATTENTION(TENSOR, query),
    ATTENTION(TENSOR, key),
    ATTENTION(TENSOR, value),
    ATTENTION(TENSOR, mask),
    ATTENTION(TENSOR, gate),
    ATTENTION(TENSOR, offset_bias),
    ATTENTION(TENSOR, key_bias),
    ATTENTION(TENSOR, alibi),
    ATTENTION(TENSOR, sinks),
    ATTENTION(TENSOR, key_lengths),
    ATTENTION(TENSOR, query_lengths),
    ATTENTION(TENSOR, out),
    ATTENTION(TENSOR, lse),
    ATTENTION(TENSOR, weights),
    ATTENTION(TENSOR, stats),
    ATTENTION(SIZE, gqa),
    ATTENTION(FLAG, f64),
    ATTENTION(FLAG, by_rows),
    ATTENTION(REAL, scale),
    ATTENTION(REAL, softcap),
    ATTENTION(FLAG, causal),
    ATTENTION(SIZE, diagonal),
    ATTENTION(SIZE, window_left),
    ATTENTION(SIZE, window_right),
    ATTENTION(REAL, dropout_p),
    ATTENTION(WORD, seed),
    ATTENTION(FLAG, with_tangents),
    ATTENTION(TENSOR, query_tangent),
    ATTENTION(TENSOR, key_tangent),
    ATTENTION(TENSOR, value_tangent),
    ATTENTION(TENSOR, mask_tangent),
    ATTENTION(TENSOR, offset_bias_tangent),
    ATTENTION(TENSOR, alibi_tangent),
    {"sinks_tangent", TENSOR, offsetof(sa_attention, sink_tangent)},
};
#define OF_GRADIENTS(member) FIELD(sa_attention_gradients, TENSOR, member)
static const field gradient_fields[] = {
    OF_GRADIENTS(grad_out),         OF_GRADIENTS(grad_lse),
    OF_GRADIENTS(dquery),           OF_GRADIENTS(dkey),
    OF_GRADIENTS(dvalue),           OF_GRADIENTS(dmask),
    OF_GRADIENTS(dslope_rows),      OF_GRADIENTS(dsink_rows),
    OF_GRADIENTS(doffset_bias),     OF_GRADIENTS(grad_out_tangent),
    OF_GRADIENTS(grad_lse_tangent),
};
#define MASK(kind, member) FIELD(sa_block_mask, kind, member)
static const field block_mask_fields[] = {
    MASK(TENSOR, classes), MASK(SIZE, class_rows), MASK(DATA, starts),   MASK(DATA, runs),
    MASK(FLAG, gaps),      MASK(TENSOR, prefix),   MASK(SIZE, diagonal), MASK(REAL, open_fraction),
};

/* A call and its gradients, with their block masks. */
typedef struct {
    sa_attention a;
    sa_attention_gradients g;
    sa_block_mask masks[SA_MAX_BLOCK_MASKS];
} attention_call;

/* Row i begins at element L − 1 − i. */
static void shift_rows(sa_tensor *t, ptrdiff_t L) {
    t->m.data += t->m.data ? (L - 1) * t->m.col_stride : 0;
    t->m.row_stride = -t->m.col_stride;
}

/* A result's tangent is an array of its own, some bytes from the result. */
static void bind_tangents(vector_case *c, attention_call *to) {
    static const char *const results[] = {"out", "lse", "dquery", "dkey", "dvalue", "dmask"};
    sa_attention *a = &to->a;
    sa_attention_gradients *g = &to->g;
    ptrdiff_t *const bytes[] = {&a->out_tangent,  &a->lse_tangent,    &g->dquery_tangent,
                                &g->dkey_tangent, &g->dvalue_tangent, &g->dmask_tangent};
    for (int n = 0; n < 6; ++n) {
        const char *result = find_data(c, "%s", results[n]), *tangent = find_data(c, "%s_tangent", results[n]);
        *bytes[n] = result && tangent ? (intptr_t)tangent - (intptr_t)result : 0;
    }
}

static void bind_attention(vector_case *c, attention_call *to) {
    memset(to, 0, sizeof *to);
    sa_attention *a = &to->a;
    a->window_left = a->window_right = SA_UNBOUNDED;
    BIND(c, "", attention_fields, a);
    const vector_array *out = find_array(c, "out");
    a->n_lead = out->axes - 2;
    memcpy(a->lead, out->shape, (size_t)a->n_lead * sizeof *a->lead);
    for (char prefix[] = "0."; BIND(c, prefix, block_mask_fields, &to->masks[a->block_mask_count]) > 0; ++prefix[0]) {
        ++a->block_mask_count;
    }
    a->block_masks = to->masks;
    to->g.a = a;
    BIND(c, "", gradient_fields, &to->g);
    shift_rows(&a->offset_bias, a->L);
    shift_rows(&a->offset_bias_tangent, a->L);
    bind_tangents(c, to);
}

/* Leaves out some of the outputs that a caller may not want. On AMX the bits of dkey and dvalue depend on dquery where
 * keys are out of its range (docs/guide/semantics.md). */
static void leave_out(vector_case *c) {
    static const char *const optional[] = {"lse",   "weights",     "dquery",     "dkey",        "dvalue",
                                           "dmask", "dslope_rows", "dsink_rows", "doffset_bias"};
    for (int n = 0; n < 9; ++n) {
        vector_array *const both[] = {find_array(c, "%s", optional[n]), find_array(c, "%s_tangent", optional[n])};
        for (int i = 0; i < 2 && both[i]; ++i) {
            both[i]->left_out =
                (n + c->name[strlen(c->name) - 1]) % 3 == 0 && !(n == 2 && strcmp(sa_isa_name(), "amx") == 0);
        }
    }
}

static void run_attention(attention_call *call, int threads) {
    sa_attention *a = &call->a;
    sa_attention_plan plan;
    sa_watch watch = {.cancelled = 1};
    CHECK(sa_attention_make_plan(a, threads, &plan) == SA_OK, "a plan");
    plan.threads = threads;
    void *scratch = scratch_memory((size_t)threads * plan.scratch_bytes), *partial = scratch_memory(plan.partial_bytes);
    a->watch = &watch;
    CHECK(plan.tasks == 0 || sa_attention_forward(a, &plan, scratch, partial) == SA_CANCELLED, "it is cancelled");
    watch.cancelled = 0;
    CHECK(sa_attention_forward(a, &plan, scratch, partial) == SA_OK, "it is not cancelled");
    if (call->g.grad_out.m.data == NULL) {
        return;
    }
    sa_backward_plan back;
    CHECK(sa_attention_plan_backward(&call->g, threads, &back) == SA_OK, "a plan of gradients");
    if (back.groups > 0) {
        scratch = scratch_memory((size_t)back.threads * back.scratch_bytes);
        call->g.delta = scratch_memory((size_t)back.delta_count * sizeof(double));
        call->g.diagonals = scratch_memory((size_t)back.diagonal_count * (a->f64 ? sizeof(double) : sizeof(float)));
        CHECK(sa_attention_backward(&call->g, &back, scratch) == SA_OK, "gradients");
    }
}

void replay_attention(vector_case *c, int run) {
    attention_call call;
    if (run == OTHERWISE) {
        leave_out(c);
    }
    bind_attention(c, &call);
    run_attention(&call, threads_of(run));
}

/* ---- packed sequences -------------------------------------------------------------------------------------------- */

enum { MOST_SEQUENCES = 16 };

static void skip_rows(sa_tensor *t, int64_t rows) { t->m.data += t->m.data ? (ptrdiff_t)rows * t->m.row_stride : 0; }

static void skip_sequences(sa_tensor *t, ptrdiff_t s) { t->m.data += t->m.data ? s * t->lead_stride[0] : 0; }

/* Runs a sequence by itself: it must have the bits that it has among others. */
static void run_sequence(const attention_call *packed, const sa_varlen *v, const sa_tensor *dmasks, ptrdiff_t s) {
    attention_call own = *packed;
    sa_attention *a = &own.a;
    sa_attention_gradients *g = &own.g;
    sa_tensor *const of_queries[] = {&a->query,    &a->out,    &a->lse,         &a->stats,     &g->grad_out,
                                     &g->grad_lse, &g->dquery, &g->dslope_rows, &g->dsink_rows};
    sa_tensor *const of_keys[] = {&a->key, &a->value, &g->dkey, &g->dvalue};
    for (int n = 0; n < 9; ++n) {
        skip_rows(of_queries[n], v->begin_q[s]);
        skip_rows(of_keys[n % 4], n < 4 ? v->begin_k[s] : 0);
    }
    skip_sequences(&a->alibi, s);
    skip_sequences(&a->sinks, s);
    a->lead[0] = 1;
    a->L = (ptrdiff_t)(v->begin_q[s + 1] - v->begin_q[s]);
    a->S = (ptrdiff_t)(v->begin_k[s + 1] - v->begin_k[s]);
    a->first_head = s * a->lead[1];
    a->diagonal = v->lower_right ? a->S - a->L : 0;
    if (v->masks) {
        a->mask = v->masks[s];
        g->dmask = dmasks[s];
    }
    g->a = a;
    run_attention(&own, 1);
}

void replay_varlen(vector_case *c, int run) {
    attention_call call;
    bind_attention(c, &call);
    sa_tensor masks[MOST_SEQUENCES] = {{.lead_stride = {0}}}, dmasks[MOST_SEQUENCES] = {{.lead_stride = {0}}};
    sa_varlen v = {.packed = &call.a,
                   .sequences = (ptrdiff_t)find_number(c, "sequences", 0),
                   .begin_q = (const int64_t *)(void *)find_data(c, "begin_q"),
                   .begin_k = (const int64_t *)(void *)find_data(c, "begin_k"),
                   .lower_right = find_number(c, "lower_right", 0) != 0};
    for (ptrdiff_t s = 0; s < v.sequences; ++s) {
        char prefix[NAME];
        snprintf(prefix, sizeof prefix, "%td.", s);
        const field of_mask[] = {{"mask", TENSOR, 0}}, of_gradient[] = {{"dmask", TENSOR, 0}};
        v.masks = BIND(c, prefix, of_mask, &masks[s]) + BIND(c, prefix, of_gradient, &dmasks[s]) > 0 ? masks : v.masks;
    }
    if (run == TEAM) {
        for (ptrdiff_t s = 0; s < v.sequences; ++s) {
            run_sequence(&call, &v, dmasks, s);
        }
        return;
    }
    call.a.lead[0] = v.sequences;
    const int threads = run == ALONE ? 1 : 3;
    const sa_varlen_gradients g = {&v, &call.g, v.masks ? dmasks : NULL};
    sa_varlen_item items[MOST_SEQUENCES];
    sa_varlen_plan plan;
    CHECK(sa_varlen_make_plan(&v, threads, items, &plan) == SA_OK, "a plan");
    plan.threads = threads;
    char *scratch = scratch_memory((size_t)threads * plan.scratch_bytes), *partial = scratch_memory(plan.partial_bytes);
    CHECK(sa_varlen_forward(&v, &plan, scratch, partial) == SA_OK, "forward");
    call.g.delta = scratch_memory((size_t)(call.a.L * call.a.lead[1]) * sizeof(double));
    CHECK(sa_varlen_plan_backward(&g, threads, items, &plan) == SA_OK, "a plan of gradients");
    plan.threads = threads;
    CHECK(sa_varlen_backward(&g, &plan, scratch_memory((size_t)threads * plan.scratch_bytes)) == SA_OK, "gradients");
}

/* ---- row operations ---------------------------------------------------------------------------------------------- */

static const field row_fields[] = {
    FIELD(sa_row_call, CODE, kind),
    FIELD(sa_row_call, FLAG, f64),
    FIELD(sa_row_call, REAL, eps),
    FIELD(sa_row_call, CODE, first),
    FIELD(sa_row_call, CODE, last),
    FIELD(sa_row_call, GRADIENT, dweight),
    FIELD(sa_row_call, GRADIENT, dbias),
    {"x", STRIDED, offsetof(sa_row_call, array[SA_ROW_X])},
    {"out", STRIDED, offsetof(sa_row_call, array[SA_ROW_OUT])},
    {"dy", STRIDED, offsetof(sa_row_call, array[SA_ROW_DY])},
    {"cos", STRIDED, offsetof(sa_row_call, array[SA_ROW_COS])},
    {"sin", STRIDED, offsetof(sa_row_call, array[SA_ROW_SIN])},
    {"weight", STRIDED, offsetof(sa_row_call, array[SA_ROW_WEIGHT])},
    {"bias", STRIDED, offsetof(sa_row_call, array[SA_ROW_BIAS])},
};

void replay_rows(vector_case *c, int run) {
    sa_row_call call = {0};
    BIND(c, "", row_fields, &call);
    const vector_array *x = find_array(c, "x");
    call.ndim = x->axes;
    memcpy(call.shape, x->shape, sizeof x->shape);
    sa_row_plan plan;
    CHECK(sa_row_make_plan(&call, threads_of(run), &plan) == SA_OK, "a plan");
    sa_row_run(&call, &plan, scratch_memory(plan.shared_bytes + (size_t)plan.threads * plan.scratch_bytes));
}

/* ---- optimisers -------------------------------------------------------------------------------------------------- */

#define UPDATE(kind, member) FIELD(sa_update, kind, member)
static const field update_fields[] = {
    UPDATE(CODE, kind),      UPDATE(REAL, lr),        UPDATE(REAL, weight_decay), UPDATE(REAL, momentum),
    UPDATE(REAL, dampening), UPDATE(FLAG, nesterov),  UPDATE(REAL, beta1),        UPDATE(REAL, beta2),
    UPDATE(REAL, eps),       UPDATE(FLAG, decoupled),
};
#define UPDATED(kind, member) FIELD(sa_update_array, kind, member)
static const field update_array_fields[] = {UPDATED(FLAG, f64),
                                            UPDATED(DATA, parameter),
                                            UPDATED(DATA, gradient),
                                            UPDATED(DATA, mean),
                                            UPDATED(DATA, square),
                                            UPDATED(DATA, peak),
                                            {"n", SIZE, offsetof(sa_update_array, n)}};

void replay_update(vector_case *c, int run) {
    sa_update_array one = {.step = find_number(c, "step", 1)};
    BIND(c, "", update_array_fields, &one);
    sa_update u = {.count = 1, .arrays = &one};
    BIND(c, "", update_fields, &u);
    sa_update_run(&u, threads_of(run));
}
