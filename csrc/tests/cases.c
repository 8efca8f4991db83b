/* Cases: a call described by a few numbers, its arrays filled, run, and compared with the reference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

test_case plain_case(sa_dtype dtype, ptrdiff_t L, ptrdiff_t S, ptrdiff_t E, ptrdiff_t Dv) {
    const bool floating = dtype <= SA_F64;
    return (test_case){.L = L,
                       .S = S,
                       .E = E,
                       .Dv = Dv,
                       .n_lead = 1,
                       .lead = {2},
                       .gqa = 1,
                       .query = dtype,
                       .key = dtype,
                       .value = dtype,
                       .out = floating ? dtype : SA_F64,
                       .mask = SA_DTYPES,
                       .lse = true,
                       .window_left = SA_UNBOUNDED,
                       .window_right = SA_UNBOUNDED,
                       .scale = E > 0 ? 1 / sqrt((double)E) : 1,
                       .magnitude = floating ? 2 : 3,
                       .closed = 0.3,
                       .mask_finite = 3};
}

void case_describe(const test_case *t, char *text, size_t size) {
    snprintf(text, size,
             "L %td S %td E %td Dv %td lead %d (%td %td %td) gqa %td dtypes q%d k%d v%d o%d m%d layouts q%x k%x v%x m%x o%x "
             "broadcast q%x k%x v%x m%x s%x%s%s%s%s%s%s o=%td window %td %td scale %g softcap %g dropout %g magnitude %g "
             "closed %g finite %g block masks %d poison %d threads %d%s",
             t->L, t->S, t->E, t->Dv, t->n_lead, t->lead[0], t->lead[1], t->lead[2], t->gqa, t->query, t->key, t->value, t->out,
             t->mask, t->query_layout, t->key_layout, t->value_layout, t->mask_layout, t->out_layout, t->query_broadcast,
             t->key_broadcast, t->value_broadcast, t->mask_broadcast, t->scalar_broadcast, t->alibi ? " alibi" : "",
             t->sinks ? " sinks" : "", t->lengths ? " lengths" : "", t->lse ? " lse" : "", t->weights ? " weights" : "",
             t->causal ? " causal" : "", t->diagonal, t->window_left, t->window_right, t->scale, t->softcap, t->dropout_p,
             t->magnitude, t->closed, t->mask_finite, t->block_masks, t->poison, t->threads, t->unsplit ? " unsplit" : "");
}

/* ---- filling ------------------------------------------------------------------------------------------------------- */

static void fill(array *a, ptrdiff_t heads, double magnitude, random_source *r) {
    const sa_dtype dtype = a->tensor.m.dtype;
    for (ptrdiff_t head = 0; head < heads; ++head) {
        for (ptrdiff_t i = 0; i < a->shape.rows; ++i) {
            for (ptrdiff_t j = 0; j < a->shape.cols; ++j) {
                double x = random_between(r, -magnitude, magnitude);
                if (dtype > SA_F64) {
                    x = rint(x);
                    x = x < 0 && (dtype == SA_U8 || dtype == SA_U16 || dtype == SA_U32 || dtype == SA_U64) ? -x : x;
                }
                element_set(array_at(a, head, 1, i, j), dtype, a->tensor.m.swapped, x);
            }
        }
    }
}

/* A quarter of the tiles is closed or open altogether, the rest element by element. */
static void fill_mask(array *a, ptrdiff_t heads, const test_case *t, random_source *r) {
    for (ptrdiff_t head = 0; head < heads; ++head) {
        const int whole = (int)random_below(r, 8); /* 0: all closed, 1: all open */
        for (ptrdiff_t i = 0; i < a->shape.rows; ++i) {
            for (ptrdiff_t j = 0; j < a->shape.cols; ++j) {
                const bool closed = whole == 0 || (whole > 1 && random_chance(r, t->closed));
                double x = !closed;
                if (t->mask != SA_BOOL) {
                    x = closed ? (double)-INFINITY : random_between(r, -t->mask_finite, t->mask_finite);
                }
                element_set(array_at(a, head, 1, i, j), t->mask, a->tensor.m.swapped, x);
            }
        }
    }
}

/* NaN and infinities into rows of keys and values: into those that no query may see, or into one in eight. */
static void poison(live_case *c, random_source *r) {
    array *const arrays[2] = {&c->key, &c->value};
    const uint64_t marked = UINT64_C(0x7ff8000020000001); /* a NaN whose payload reaches float32's last bit, and float64's */
    double bad[4] = {(double)NAN, 0, (double)INFINITY, (double)-INFINITY};
    memcpy(&bad[1], &marked, sizeof marked);
    for (int n = 0; n < 2; ++n) {
        array *a = arrays[n];
        if (a->tensor.m.dtype > SA_F64 || a->bytes == 0) {
            continue;
        }
        char *seen = calloc(a->bytes, 1);
        for (ptrdiff_t head = 0; head < c->heads && c->spec.poison == POISON_CLOSED; ++head) {
            for (ptrdiff_t j = 0; j < c->spec.S && a->shape.cols > 0; ++j) {
                for (ptrdiff_t i = 0; i < c->spec.L; ++i) {
                    if (case_allows(c, head, i, j)) {
                        seen[array_at(a, head, c->spec.gqa, j, 0) - a->memory] = 1;
                    }
                }
            }
        }
        for (ptrdiff_t head = 0; head < c->heads; ++head) {
            for (ptrdiff_t j = 0; j < c->spec.S && a->shape.cols > 0; ++j) {
                const bool hit = c->spec.poison == POISON_CLOSED ? !seen[array_at(a, head, c->spec.gqa, j, 0) - a->memory]
                                                                 : random_chance(r, 0.125);
                for (ptrdiff_t d = 0; d < a->shape.cols && hit; ++d) {
                    if (random_chance(r, 0.5)) { /* −inf in open keys makes rows dead by arithmetic: another question */
                        const double x = bad[random_below(r, c->spec.poison == POISON_CLOSED ? 4 : 2)];
                        element_set(array_at(a, head, c->spec.gqa, j, d), a->tensor.m.dtype, a->tensor.m.swapped, x);
                    }
                }
            }
        }
        free(seen);
    }
}

static array_shape shape_of(const live_case *c, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t gqa) {
    array_shape s = {.n_lead = c->call.n_lead, .rows = rows, .cols = cols};
    memcpy(s.lead, c->call.lead, sizeof s.lead);
    if (s.n_lead > 0) {
        s.lead[s.n_lead - 1] /= gqa;
    }
    return s;
}

void case_make(live_case *c, const test_case *t, uint64_t seed) {
    random_source r = {seed};
    memset(c, 0, sizeof *c);
    c->spec = *t;
    c->call = (sa_attention){.L = t->L,
                             .S = t->S,
                             .E = t->E,
                             .Dv = t->Dv,
                             .n_lead = t->n_lead,
                             .gqa = t->gqa,
                             .f64 = t->out == SA_F64,
                             .scale = t->scale,
                             .softcap = t->softcap,
                             .causal = t->causal,
                             .diagonal = t->diagonal,
                             .window_left = t->window_left,
                             .window_right = t->window_right,
                             .dropout_p = t->dropout_p,
                             .seed = t->seed};
    c->heads = 1;
    for (int axis = 0; axis < t->n_lead; ++axis) {
        c->call.lead[axis] = t->lead[axis];
        c->heads *= t->lead[axis];
    }
    const ptrdiff_t key_heads = c->heads / t->gqa;
    const array_shape query = shape_of(c, t->L, t->E, 1), key = shape_of(c, t->S, t->E, t->gqa);
    const array_shape value = shape_of(c, t->S, t->Dv, t->gqa), pairs = shape_of(c, t->L, t->S, 1);
    const array_shape out = shape_of(c, t->L, t->Dv, 1), scalar = shape_of(c, 1, 1, 1), column = shape_of(c, t->L, 1, 1);

    array_make(&c->query, &query, t->query, t->query_layout, t->query_broadcast, false);
    array_make(&c->key, &key, t->key, t->key_layout, t->key_broadcast, false);
    array_make(&c->value, &value, t->value, t->value_layout, t->value_broadcast, false);
    fill(&c->query, c->heads, t->magnitude, &r);
    fill(&c->key, key_heads, t->magnitude, &r);
    fill(&c->value, key_heads, t->query <= SA_F64 ? 1 : 9, &r);
    if (t->mask != SA_DTYPES) {
        array_make(&c->mask, &pairs, t->mask, t->mask_layout, t->mask_broadcast, false);
        fill_mask(&c->mask, c->heads, t, &r);
    }
    if (t->alibi) {
        array_make(&c->alibi, &scalar, SA_F64, 0, t->scalar_broadcast, false);
        fill(&c->alibi, c->heads, 0.2, &r);
    }
    if (t->sinks) {
        array_make(&c->sinks, &scalar, SA_F64, 0, t->scalar_broadcast, false);
        fill(&c->sinks, c->heads, 4, &r);
    }
    if (t->lengths) {
        array_make(&c->lengths, &scalar, SA_I64, 0, t->scalar_broadcast, false);
        for (ptrdiff_t head = 0; head < c->heads; ++head) {
            const double n = random_chance(&r, 0.3) ? 0.0 : (double)random_below(&r, t->S + 1);
            element_set(array_at(&c->lengths, head, 1, 0, 0), SA_I64, false, n);
        }
    }
    array_make(&c->out, &out, t->out, t->out_layout, 0, true);
    if (t->lse) {
        array_make(&c->lse, &column, t->out == SA_F64 ? SA_F64 : SA_F32, 0, 0, true);
    }
    if (t->weights) {
        array_make(&c->weights, &pairs, t->out, t->out_layout, 0, true);
    }
    c->call.query = c->query.tensor;
    c->call.key = c->key.tensor;
    c->call.value = c->value.tensor;
    c->call.mask = c->mask.tensor;
    c->call.alibi = c->alibi.tensor;
    c->call.sinks = c->sinks.tensor;
    c->call.key_lengths = c->lengths.tensor;
    c->call.out = c->out.tensor;
    c->call.lse = c->lse.tensor;
    c->call.weights = c->weights.tensor;
    block_masks_make(c, &r);
    if (t->poison != NOT_POISONED) {
        poison(c, &r);
    }
    array *const inputs[7] = {&c->query, &c->key, &c->value, &c->mask, &c->alibi, &c->sinks, &c->lengths};
    for (int n = 0; n < 7; ++n) {
        array_remember(inputs[n]);
    }
}

void case_free(live_case *c) {
    block_masks_free(c);
    array *const all[10] = {&c->query, &c->key,     &c->value, &c->mask, &c->alibi,
                            &c->sinks, &c->lengths, &c->out,   &c->lse,  &c->weights};
    for (int n = 0; n < 10; ++n) {
        array_free(all[n]);
    }
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

static void blank(array *a, ptrdiff_t heads, double x) {
    for (ptrdiff_t head = 0; head < heads && a->memory; ++head) {
        for (ptrdiff_t i = 0; i < a->shape.rows; ++i) {
            for (ptrdiff_t j = 0; j < a->shape.cols; ++j) {
                element_set(array_at(a, head, 1, i, j), a->tensor.m.dtype, false, x);
            }
        }
    }
}

sa_status case_run(live_case *c) {
    sa_attention_plan plan;
    blank(&c->out, c->heads, (double)NAN);
    blank(&c->lse, c->heads, (double)NAN);
    blank(&c->weights, c->heads, 0);
    sa_status status = sa_attention_make_plan(&c->call, 2, &plan);
    if (status != SA_OK) {
        return status;
    }
    if (c->spec.threads > 0) {
        plan.threads = c->spec.threads;
    }
    if (c->spec.unsplit && plan.tasks > 0) {
        plan.tasks /= plan.chunks;
        plan.chunks = 1;
        plan.chunk_keys = c->spec.S;
    }
    c->chunks = plan.chunks;
    void *scratch = dirty_memory((size_t)plan.threads * plan.scratch_bytes), *partial = dirty_memory(plan.partial_bytes);
    status = sa_attention_forward(&c->call, &plan, scratch, partial);
    free(scratch);
    free(partial);
    return status;
}

/* ---- comparing ----------------------------------------------------------------------------------------------------- */

bool case_allows(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j) {
    const sa_attention *a = &c->call;
    const ptrdiff_t at = i + a->diagonal;
    if (a->key_lengths.m.data && j >= (ptrdiff_t)array_get(&c->lengths, head, 1, 0, 0)) {
        return false;
    }
    if (a->causal && j > at) {
        return false;
    }
    if (a->window_left != SA_UNBOUNDED && j < at - a->window_left) {
        return false;
    }
    if (a->window_right != SA_UNBOUNDED && j > at + a->window_right) {
        return false;
    }
    if (!block_masks_allow(c, head, i, j)) {
        return false;
    }
    if (a->mask.m.data) {
        const double x = array_get(&c->mask, head, 1, i, j);
        return a->mask.m.dtype == SA_BOOL ? x != 0 : x != (double)-INFINITY;
    }
    return true;
}

/* NaN must be NaN and an infinity that infinity. What overflows only by its error, or only in 16 bits, is let off. */
static bool agrees(double got, wide right, double error, sa_dtype dtype) {
    const double most = dtype == SA_F16 ? 65504 : dtype == SA_F64 ? DBL_MAX : (double)FLT_MAX;
    if (isnan(right)) {
        return isnan(got);
    }
    if (isinf(right) || fabs((double)right) > most) {
        return got == (right > 0 ? (double)INFINITY : (double)-INFINITY);
    }
    return fabs((double)(got - right)) <= error;
}

void case_verify(live_case *c, const char *title) {
    const sa_attention *a = &c->call;
    char text[1000], first[200] = "";
    long wrong = 0;
    reference_row r = {.out = calloc((size_t)a->Dv + 1, sizeof *r.out),
                       .weights = calloc((size_t)a->S + 1, sizeof *r.weights),
                       .out_error = calloc((size_t)a->Dv + 1, sizeof *r.out_error),
                       .weights_error = calloc((size_t)a->S + 1, sizeof *r.weights_error)};
#define COMPARE(array, row, col, right, error)                                                                                 \
    do {                                                                                                                       \
        const double got_ = array_get(&c->array, head, 1, row, col);                                                           \
        if (!agrees(got_, right, error, c->array.tensor.m.dtype) && wrong++ == 0) {                                            \
            snprintf(first, sizeof first, #array " head %td row %td col %td: %.17g, not %.17Lg ± %.3g", head,                  \
                     (ptrdiff_t)(row), (ptrdiff_t)(col), got_, (long double)(right), error);                                   \
        }                                                                                                                      \
    } while (0)
    for (ptrdiff_t head = 0; head < c->heads; ++head) {
        for (ptrdiff_t i = 0; i < a->L; ++i) {
            reference_attention_row(c, head, i, &r);
            for (ptrdiff_t d = 0; d < a->Dv; ++d) {
                COMPARE(out, i, d, r.out[d], r.out_error[d]);
            }
            if (c->spec.lse) {
                COMPARE(lse, i, 0, r.lse, r.lse_error);
            }
            for (ptrdiff_t j = 0; j < a->S && c->spec.weights; ++j) {
                COMPARE(weights, i, j, r.weights[j], r.weights_error[j]);
            }
        }
    }
#undef COMPARE
    free(r.out);
    free(r.weights);
    free(r.out_error);
    free(r.weights_error);
    array *const inputs[7] = {&c->query, &c->key, &c->value, &c->mask, &c->alibi, &c->sinks, &c->lengths};
    bool unchanged = true;
    for (int n = 0; n < 7; ++n) {
        unchanged &= array_unchanged(inputs[n]);
    }
    const bool intact = array_margins_intact(&c->out) && (!c->spec.lse || array_margins_intact(&c->lse)) &&
                        (!c->spec.weights || array_margins_intact(&c->weights));
    case_describe(&c->spec, text, sizeof text);
    CHECK(wrong == 0 && unchanged && intact, "%s: %ld wrong%s%s; %s\n    %s", title, wrong,
          unchanged ? "" : ", an input was changed", intact ? "" : ", written outside an output", first, text);
}

void case_try(const test_case *spec, uint64_t seed, const char *title) {
    live_case c;
    case_make(&c, spec, seed);
    const sa_status status = case_run(&c);
    if (status == SA_OK) {
        case_verify(&c, title);
    } else {
        CHECK(false, "%s: status %d", title, status);
    }
    case_free(&c);
}
