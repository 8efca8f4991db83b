/* Test cases: a call described by a few numbers is filled, run, and compared with the reference. */
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

static void case_describe(const test_case *t, char *text, size_t size) {
    snprintf(text, size,
             "L %td S %td E %td Dv %td lead %d (%td %td %td) gqa %td dtypes q%d k%d v%d o%d m%d layouts q%x k%x v%x m%x o%x "
             "broadcast q%x k%x v%x m%x s%x%s%s%s%s%s%s%s%s%s without %x o=%td window %td %td scale %g softcap %g dropout %g "
             "magnitude %g closed %g finite %g block masks %d poison %d threads %d%s",
             t->L, t->S, t->E, t->Dv, t->n_lead, t->lead[0], t->lead[1], t->lead[2], t->gqa, t->query, t->key, t->value, t->out,
             t->mask, t->query_layout, t->key_layout, t->value_layout, t->mask_layout, t->out_layout, t->query_broadcast,
             t->key_broadcast, t->value_broadcast, t->mask_broadcast, t->scalar_broadcast, t->key_bias ? " key bias" : "",
             t->alibi ? " alibi" : "", t->sinks ? " sinks" : "", t->lengths ? " lengths" : "", t->lse ? " lse" : "",
             t->weights ? " weights" : "", t->causal ? " causal" : "", t->backward ? " backward" : "",
             t->grad_lse ? " grad_lse" : "", t->without, t->diagonal, t->window_left, t->window_right, t->scale, t->softcap,
             t->dropout_p, t->magnitude, t->closed, t->mask_finite, t->block_masks, t->poison, t->threads,
             t->unsplit ? " unsplit" : "");
}

char *case_at(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col) {
    const bool by_key_heads = which == KEY || which == VALUE || which == KEY_BIAS || which == D_KEY || which == D_VALUE;
    return array_at(&c->arrays[which], head, by_key_heads ? c->spec.gqa : 1, row, col);
}

size_t case_index(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col) {
    const array *a = &c->arrays[which];
    return (size_t)(case_at(c, which, head, row, col) - a->memory) / sa_itemsize(a->tensor.m.dtype);
}

double case_get(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col) {
    if (which < INPUTS && c->numbers[which]) {
        const array_shape *s = &c->arrays[which].shape;
        return c->numbers[which][(head * s->rows + row) * s->cols + col];
    }
    return element_get(case_at(c, which, head, row, col), c->arrays[which].tensor.m.dtype, c->arrays[which].tensor.m.swapped);
}

void case_set(live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col, double x) {
    element_set(case_at(c, which, head, row, col), c->arrays[which].tensor.m.dtype, c->arrays[which].tensor.m.swapped, x);
}

/* ---- filling ------------------------------------------------------------------------------------------------------- */

static void fill(live_case *c, int which, double magnitude, random_source *r) {
    const array *a = &c->arrays[which];
    const sa_dtype dtype = a->tensor.m.dtype;
    const ptrdiff_t rows = a->shape.rows, cols = a->shape.cols; /* 0 for an array that is absent */
    for (ptrdiff_t n = 0; n < c->heads * rows * cols; ++n) {
        double x = random_between(r, -magnitude, magnitude);
        if (dtype > SA_F64) {
            x = rint(x);
            x = x < 0 && (dtype == SA_U8 || dtype == SA_U16 || dtype == SA_U32 || dtype == SA_U64) ? -x : x;
        }
        case_set(c, which, n / cols / rows, n / cols % rows, n % cols, x);
    }
}

static double least_of(sa_dtype dtype) {
    return dtype == SA_F32 ? (double)-FLT_MAX : dtype == SA_F64 ? -DBL_MAX : dtype == SA_F16 ? -65504 : -0x1.fep127;
}

static void fill_mask(live_case *c, random_source *r) {
    const test_case *t = &c->spec;
    for (ptrdiff_t head = 0; head < c->heads; ++head) {
        const int whole = (int)random_below(r, 8); /* 0: closed, 1: open */
        for (ptrdiff_t i = 0; i < t->L; ++i) {
            for (ptrdiff_t j = 0; j < t->S; ++j) {
                const bool closed = whole == 0 || (whole > 1 && random_chance(r, t->closed));
                const double finite = t->mask_finite < INFINITY ? random_between(r, -t->mask_finite, t->mask_finite)
                                      : random_chance(r, 0.1)   ? 0.5
                                                                : least_of(t->mask);
                const double x = t->mask == SA_BOOL ? !closed : closed ? (double)-INFINITY : finite;
                case_set(c, MASK, head, i, j, x);
            }
        }
    }
}

/* The bias has zeros, some numbers, and closed keys: all, or those at the end. */
static void fill_key_bias(live_case *c, random_source *r) {
    for (ptrdiff_t head = 0; head < c->heads; ++head) {
        const ptrdiff_t end = random_chance(r, 0.1) ? 0 : random_below(r, c->spec.S + 1);
        for (ptrdiff_t j = 0; j < c->spec.S; ++j) {
            case_set(c, KEY_BIAS, head, 0, j,
                     j >= end                ? (double)-INFINITY
                     : random_chance(r, 0.5) ? 0
                                             : random_between(r, -3, 3));
        }
    }
}

/* Replaces half of a row by one of `count` special numbers. */
static void poison_row(live_case *c, int which, ptrdiff_t head, ptrdiff_t row, int count, random_source *r) {
    const uint64_t marked = UINT64_C(0x7ff8000020000001); /* a NaN with a payload in the last bits */
    double bad[4] = {(double)NAN, 0, (double)INFINITY, (double)-INFINITY};
    memcpy(&bad[1], &marked, sizeof marked);
    for (ptrdiff_t d = 0; d < c->arrays[which].shape.cols; ++d) {
        if (random_chance(r, 0.5)) {
            case_set(c, which, head, row, d, bad[random_below(r, count)]);
        }
    }
}

/* Poisons rows that no query sees, or that see nothing. A broadcast row counts as seen if any head sees it. */
static void poison_closed(live_case *c, int which, random_source *r) {
    const array *a = &c->arrays[which];
    const bool of_keys = which == KEY || which == VALUE;
    const ptrdiff_t rows = a->shape.rows, others = of_keys ? c->spec.L : c->spec.S;
    char *seen = zero_memory(a->bytes + 1);
    for (int pass = 0; pass < 2; ++pass) {
        for (ptrdiff_t head = 0; head < c->heads; ++head) {
            for (ptrdiff_t row = 0; row < rows && a->shape.cols > 0; ++row) {
                char *mark = &seen[case_at(c, which, head, row, 0) - a->memory];
                for (ptrdiff_t other = 0; other < others && pass == 0; ++other) {
                    *mark |= case_allows(c, head, of_keys ? other : row, of_keys ? row : other);
                }
                if (pass == 1 && !*mark) {
                    poison_row(c, which, head, row, 4, r);
                }
            }
        }
    }
}

static void poison(live_case *c, random_source *r) {
    const int kind = c->spec.poison, rows = kind == POISON_QUERIES ? QUERY : VALUE;
    const ptrdiff_t n = c->arrays[rows].shape.rows;
    for (int which = 0; which < INPUTS && kind == POISON_CLOSED; ++which) {
        if (which <= VALUE || which == GRAD_OUT) {
            if (c->arrays[which].memory && c->arrays[which].tensor.m.dtype <= SA_F64) {
                poison_closed(c, which, r);
            }
        }
    }
    for (ptrdiff_t head = 0; head < c->heads && c->spec.query <= SA_F64; ++head) {
        for (ptrdiff_t row = 0; row < n; ++row) {
            if (kind == POISON_WEIGHTLESS && c->spec.E > 0) {
                for (ptrdiff_t i = 0; i < c->spec.L; ++i) {
                    case_set(c, QUERY, head, i, 0, 1);
                }
                if (row % 97 == 1) { /* the weight is 0, but 0·NaN is NaN */
                    case_set(c, KEY, head, row, 0, (double)-INFINITY);
                    poison_row(c, VALUE, head, row, 2, r);
                }
            } else if (kind == POISON_QUERIES && row % 3 == 0) {
                poison_row(c, QUERY, head, row, 2, r);
            } else if (kind == POISON_SOME && random_chance(r, 0.125)) { /* −inf in open keys is for POISON_WEIGHTLESS */
                poison_row(c, random_chance(r, 0.5) ? KEY : VALUE, head, row, 2, r);
            }
        }
    }
}

/* ---- making -------------------------------------------------------------------------------------------------------- */

static void make(live_case *c, int which, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t gqa, sa_dtype dtype, unsigned layout,
                 unsigned broadcast) {
    array_shape s = {.n_lead = c->call.n_lead, .rows = rows, .cols = cols};
    memcpy(s.lead, c->call.lead, sizeof s.lead);
    if (s.n_lead > 0) {
        s.lead[s.n_lead - 1] /= gqa;
    }
    array_make(&c->arrays[which], &s, dtype, layout, broadcast, which >= INPUTS);
}

/* Axes along which query heads share one gradient of keys and values. */
static unsigned group_axes(const test_case *t) {
    unsigned axes = 0;
    int axis = t->n_lead - 1;
    if (axis >= 0 && t->gqa > 1 && t->lead[axis--] != t->gqa) {
        return 0;
    }
    for (; axis >= 0 && t->key_broadcast & t->value_broadcast & 1u << axis; --axis) {
        axes |= 1u << axis;
    }
    return axes;
}

static void make_gradients(live_case *c) {
    const test_case *t = &c->spec;
    const sa_dtype computes = c->call.f64 ? SA_F64 : SA_F32;
    const unsigned group = group_axes(t);
    make(c, STATS, t->L, 2, 1, computes, 0, 0);
    make(c, GRAD_OUT, t->L, t->Dv, 1, t->out, t->out_layout, 0);
    if (t->grad_lse) {
        make(c, GRAD_LSE, t->L, 1, 1, computes, 0, 0);
    }
    const bool wanted[] = {true, true, true, t->mask <= SA_F64, t->alibi, t->sinks};
    const ptrdiff_t rows[] = {t->L, t->S, t->S, t->L, t->L, t->L}, cols[] = {t->E, t->E, t->Dv, t->S, 3, 1};
    for (int n = 0; n < 6; ++n) {
        if (wanted[n] && !(t->without & 1u << (D_QUERY + n))) {
            const bool of_keys = n == 1 || n == 2;
            make(c, D_QUERY + n, rows[n], cols[n], of_keys ? t->gqa : 1, computes, 0,
                 of_keys  ? group
                 : n == 3 ? t->mask_broadcast
                          : 0);
        }
    }
}

void case_tensors(sa_attention *a, sa_attention_gradients *g, sa_tensor **tensors) {
    sa_tensor *const all[ARRAYS] = {&a->query, &a->key,    &a->value,       &a->mask,        &a->key_bias,
                                    &a->alibi, &a->sinks,  &a->key_lengths, &g->grad_out,    &g->grad_lse,
                                    &a->out,   &a->lse,    &a->weights,     &a->stats,       &g->dquery,
                                    &g->dkey,  &g->dvalue, &g->dmask,       &g->dslope_rows, &g->dsink_rows};
    memcpy(tensors, all, sizeof all);
}

static void attach(live_case *c) {
    sa_attention *a = &c->call;
    sa_attention_gradients *g = &c->gradients;
    sa_tensor *tensors[ARRAYS];
    case_tensors(a, g, tensors);
    for (int which = 0; which < ARRAYS; ++which) {
        *tensors[which] = c->arrays[which].tensor;
    }
    if (c->spec.backward && c->spec.mask <= SA_F64 && g->dmask.m.data == NULL) { /* its strides are read nevertheless */
        make(c, D_MASK, c->spec.L, c->spec.S, 1, a->f64 ? SA_F64 : SA_F32, 0, c->spec.mask_broadcast);
        g->dmask = c->arrays[D_MASK].tensor;
        g->dmask.m.data = NULL;
        c->arrays[D_MASK] = (array){.memory = NULL};
    }
    g->a = a;
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
    make(c, QUERY, t->L, t->E, 1, t->query, t->query_layout, t->query_broadcast);
    make(c, KEY, t->S, t->E, t->gqa, t->key, t->key_layout, t->key_broadcast);
    make(c, VALUE, t->S, t->Dv, t->gqa, t->value, t->value_layout, t->value_broadcast);
    if (t->mask != SA_DTYPES) {
        make(c, MASK, t->L, t->S, 1, t->mask, t->mask_layout, t->mask_broadcast);
        fill_mask(c, &r);
    }
    if (t->key_bias) {
        make(c, KEY_BIAS, 1, t->S, t->gqa, c->call.f64 ? SA_F64 : SA_F32, 0, group_axes(t));
        fill_key_bias(c, &r);
    }
    const bool scalars[] = {t->alibi, t->sinks, t->lengths};
    for (int n = 0; n < 3; ++n) {
        if (scalars[n]) {
            make(c, ALIBI + n, 1, 1, 1, n == 2 ? SA_I64 : SA_F64, 0, t->scalar_broadcast);
        }
    }
    make(c, OUT, t->L, t->Dv, 1, t->out, t->out_layout & ~(unsigned)SWAPPED, 0);
    if (t->lse) {
        make(c, LSE, t->L, 1, 1, c->call.f64 ? SA_F64 : SA_F32, 0, 0);
    }
    if (t->weights) {
        make(c, WEIGHTS, t->L, t->S, 1, t->out, t->out_layout & ~(unsigned)SWAPPED, 0);
    }
    if (t->backward) {
        make_gradients(c);
    }
    fill(c, QUERY, t->magnitude, &r);
    fill(c, KEY, t->magnitude, &r);
    fill(c, VALUE, t->query <= SA_F64 ? 1 : 9, &r);
    fill(c, ALIBI, 0.2, &r);
    fill(c, SINKS, 4, &r);
    fill(c, GRAD_OUT, 1, &r);
    fill(c, GRAD_LSE, 1.5, &r);
    for (ptrdiff_t head = 0; head < c->heads && t->lengths; ++head) {
        case_set(c, LENGTHS, head, 0, 0, random_chance(&r, 0.3) ? 0.0 : (double)random_below(&r, t->S + 1));
    }
    attach(c);
    block_masks_make(c, &r);
    poison(c, &r);
    for (int which = 0; which < INPUTS; ++which) {
        array_remember(&c->arrays[which]);
    }
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

static live_case *looking; /* the case whose looks are counted */

static void count_looks(sa_watch *watch) {
    (void)watch;
    ++looking->looks;
}

static sa_status run_backward(live_case *c) {
    sa_backward_plan plan;
    sa_status status = sa_attention_plan_backward(&c->gradients, c->spec.threads > 0 ? c->spec.threads : 2, &plan);
    if (status != SA_OK || plan.groups == 0) {
        return status;
    }
    void *scratch = dirty_memory((size_t)plan.threads * plan.scratch_bytes);
    c->gradients.delta = dirty_memory((size_t)plan.delta_count * sizeof(double));
    sa_watch watch = {.poll = count_looks};
    looking = c;
    c->looks = 0;
    c->call.watch = &watch;
    status = sa_attention_backward(&c->gradients, &plan, scratch);
    c->call.watch = NULL;
    return status;
}

sa_status case_run(live_case *c) {
    FREES_AT_END;
    sa_attention_plan plan;
    for (int which = OUT; which < ARRAYS; ++which) {
        array_fill(&c->arrays[which], which == OUT || which == LSE ? (double)NAN : 0);
    }
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
    return status == SA_OK && c->spec.backward ? run_backward(c) : status;
}

/* ---- comparing ----------------------------------------------------------------------------------------------------- */

bool case_allows(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j) {
    const sa_attention *a = &c->call;
    const ptrdiff_t at = i + a->diagonal;
    if ((a->key_lengths.m.data && j >= (ptrdiff_t)case_get(c, LENGTHS, head, 0, 0)) || (a->causal && j > at) ||
        (a->window_left != SA_UNBOUNDED && j < at - a->window_left) ||
        (a->window_right != SA_UNBOUNDED && j > at + a->window_right) || !block_masks_allow(c, head, i, j) ||
        (a->key_bias.m.data && case_get(c, KEY_BIAS, head, 0, j) == (double)-INFINITY)) {
        return false;
    }
    if (a->mask.m.data) {
        const double x = case_get(c, MASK, head, i, j);
        return a->mask.m.dtype == SA_BOOL ? x != 0 : x != (double)-INFINITY;
    }
    return true;
}

/* NaN must be NaN, and an infinity the same infinity. Overflow is allowed in 16 bits, or by rounding error. */
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

/* Returns the number of wrong elements; `first` describes one of them. */
static long compare(const live_case *c, int which, const expected_array *expected, char *first, size_t size) {
    static const char *const names[ARRAYS] = {
        [OUT] = "out",        [LSE] = "lse",      [WEIGHTS] = "weights", [D_QUERY] = "dquery", [D_KEY] = "dkey",
        [D_VALUE] = "dvalue", [D_MASK] = "dmask", [D_SLOPES] = "slope",  [D_SINKS] = "sink"};
    const array *a = &c->arrays[which];
    long wrong = 0;
    const ptrdiff_t rows = a->shape.rows, cols = which == D_SLOPES ? 1 : a->shape.cols;
    for (ptrdiff_t n = 0; n < c->heads * rows * cols && names[which]; ++n) {
        const ptrdiff_t head = n / cols / rows, i = n / cols % rows, j = n % cols;
        const size_t at = case_index(c, which, head, i, j);
        double got = case_get(c, which, head, i, j);
        if (which == D_SLOPES) {
            got -= case_get(c, which, head, i, 1) * case_get(c, which, head, i, 2);
        }
        if (!agrees(got, expected->value[at], expected->error[at], a->tensor.m.dtype) && wrong++ == 0 && !*first) {
            snprintf(first, size, "%s head %td row %td col %td: %.17g, not %.17Lg ± %.3g", names[which], head, i, j, got,
                     (long double)expected->value[at], expected->error[at]);
        }
    }
    return wrong;
}

/* Reads all inputs once, as the reference needs them often. */
static void read_numbers(live_case *c) {
    for (int which = 0; which < INPUTS; ++which) {
        const ptrdiff_t rows = c->arrays[which].shape.rows, cols = c->arrays[which].shape.cols;
        double *numbers = c->arrays[which].memory ? zero_memory((size_t)(c->heads * rows * cols) * sizeof *numbers) : NULL;
        for (ptrdiff_t n = 0; n < c->heads * rows * cols && numbers; ++n) {
            numbers[n] = case_get(c, which, n / cols / rows, n / cols % rows, n % cols);
        }
        c->numbers[which] = numbers;
    }
}

void case_verify(live_case *c, const char *title) {
    FREES_AT_END;
    expected_array expected[ARRAYS];
    char text[1000], first[200] = "";
    long wrong = 0;
    bool unchanged = true, intact = true;
    for (int which = 0; which < ARRAYS; ++which) {
        const size_t n = c->arrays[which].bytes / sa_itemsize(c->arrays[which].tensor.m.dtype) + 1;
        expected[which].count = c->arrays[which].memory ? n : 0;
        expected[which].value = zero_memory(n * sizeof *expected[which].value);
        expected[which].error = zero_memory(n * sizeof *expected[which].error);
    }
    read_numbers(c);
    for (ptrdiff_t head = 0; head < c->heads; ++head) {
        for (ptrdiff_t i = 0; i < c->call.L; ++i) {
            reference_row(c, head, i, expected);
        }
    }
    memset(c->numbers, 0, sizeof c->numbers);
    for (int which = 0; which < ARRAYS; ++which) {
        wrong += compare(c, which, &expected[which], first, sizeof first);
        unchanged &= which >= INPUTS || array_unchanged(&c->arrays[which]);
        intact &= which < INPUTS || array_margins_intact(&c->arrays[which]);
    }
    case_describe(&c->spec, text, sizeof text);
    CHECK(wrong == 0 && unchanged && intact, "%s: %ld wrong%s%s; %s\n    %s", title, wrong,
          unchanged ? "" : ", an input was changed", intact ? "" : ", written outside an output", first, text);
}

bool case_same_bits(const live_case *c, const live_case *other) {
    bool same = true;
    for (int which = OUT; which < ARRAYS; ++which) {
        const array *a = &c->arrays[which], *b = &other->arrays[which];
        same &= !a->memory || !b->memory || (a->bytes == b->bytes && memcmp(a->memory, b->memory, a->bytes) == 0);
    }
    return same;
}

void case_try(const test_case *spec, uint64_t seed, const char *title) {
    FREES_AT_END;
    live_case c;
    case_make(&c, spec, seed);
    const sa_status status = case_run(&c);
    if (status == SA_OK) {
        case_verify(&c, title);
    } else {
        CHECK(false, "%s: status %d", title, status);
    }
}
