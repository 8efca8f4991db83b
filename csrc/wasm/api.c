/* What pages call in a browser: attention and its gradients, products, transformers. A script writes the structs of the
 * core, with the offsets that `layout` has; selfattn/views/live/kernel.js is that script. It owns the arrays, and
 * compares their lengths with the sizes of layers. Sizes of a call, ids, offsets and allocations are checked here: a
 * bad call returns a status. */
#include <stdlib.h>
#include <string.h>

#include "drivers/compact.h"
#include "drivers/optimizer.h"
#include "drivers/transformer.h"

#define EXPORT(name) __attribute__((export_name(#name))) name
enum { BAD_SIZE = 8, NO_MEMORY }; /* after those of sa_status */

/* Python looks for this text in the file; its number changes with these functions and with the text. The Makefile says
 * the version, and the commit or "unknown". */
const char *EXPORT(built_from)(void) { return "selfattn kernels 2 of " SA_VERSION ", commit " SA_COMMIT; }

/* ---- structs and constants, by their names ----------------------------------------------------------------------- */

typedef struct {
    const char *name;
    size_t value; /* an offset, a size or a constant */
    int kind;     /* of a field: 'd' a double, 'q' an integer of 64 bits, 'b' a bool; else 'i' */
} entry;

#define AT(type, field)                                                                                                \
    {#type "." #field, offsetof(type, field),                                                                          \
     _Generic(((type *)0)->field, double: 'd', int64_t: 'q', uint64_t: 'q', bool: 'b', default: 'i')}
#define SIZE(type) {#type, sizeof(type), 'i'}
#define CONSTANT(name) {#name, name, 'i'}
/* clang-format off */
#define T(field) AT(sa_tensor, field)
#define A(field) AT(sa_attention, field)
#define AG(field) AT(sa_attention_gradients, field)
#define P(field) AT(sa_linear, field)
#define PG(field) AT(sa_linear_gradients, field)
#define U(field) AT(sa_update, field)
#define UA(field) AT(sa_update_array, field)
#define L(field) AT(sa_layer, field)
#define M(field) AT(sa_transformer, field)
#define MG(field) AT(sa_transformer_gradients, field)
static const entry entries[] = {
    CONSTANT(SA_F32), CONSTANT(SA_F64), CONSTANT(SA_BOOL), CONSTANT(SA_UNBOUNDED), CONSTANT(SA_WEIGHTS_INT8),
    CONSTANT(SA_ADAM), CONSTANT(SA_MAX_LENGTH), CONSTANT(SA_MAX_WIDTH), CONSTANT(SA_LAYER_PARAMETERS), SIZE(sa_tensor),
    T(m.data), T(m.row_stride), T(m.col_stride), T(m.dtype), T(lead_stride[0]), SIZE(sa_attention), A(L), A(S), A(E),
    A(Dv), A(n_lead), A(lead[0]), A(gqa), A(f64), A(query), A(key), A(value), A(mask), A(alibi), A(sinks), A(out),
    A(weights), A(stats), A(scale), A(softcap), A(causal), A(diagonal), A(window_left), A(window_right), A(dropout_p),
    A(seed), SIZE(sa_attention_gradients), AG(a), AG(grad_out), AG(dquery), AG(dkey), AG(dvalue), AG(dmask),
    SIZE(sa_linear), P(f64), P(weights), P(decoding), P(rows), P(in), P(count), P(out[0]), P(weight[0]), P(bias[0]),
    P(x), P(y[0]), SIZE(sa_linear_gradients), PG(l), PG(dy[0]), PG(dx), PG(dweight[0]), PG(dbias[0]), SIZE(sa_update),
    U(kind), U(lr), U(weight_decay), U(beta1), U(beta2), U(eps), U(decoupled), U(count), U(arrays),
    SIZE(sa_update_array), UA(n), UA(step), UA(parameter), UA(gradient), UA(mean), UA(square), UA(peak), SIZE(sa_layer),
    L(weight[0]), L(bias[0]), L(weights), L(heads), L(key_heads), L(width), L(hidden), L(eps[0]), L(rms[0]),
    L(norm_first), L(causal), L(window_left), L(window_right), L(scale), L(softcap), L(activation), L(rotary.cos),
    L(rotary.sin), L(rotary.rotated), L(rotary.interleaved), SIZE(sa_transformer), M(d), M(vocabulary), M(tokens),
    M(sequences), M(layers), M(longest), M(table), M(table_kind), M(table_scale), M(token_type_row), M(positions),
    M(ids), M(rows), M(starts), M(embedding_norm.weight), M(embedding_norm.bias), M(embedding_norm.eps),
    M(embedding_norm.rms),
    M(final_norm.weight), M(final_norm.bias), M(final_norm.eps), M(final_norm.rms), M(layer), M(pooling), M(cache.keys),
    M(cache.values), M(cache.past), M(cache.capacity), M(weights), SIZE(sa_transformer_gradients), MG(grad_out),
    MG(table), MG(rows), MG(embedding_norm[0]), MG(final_norm[0]), MG(layer), SIZE(sa_layer_gradients),
    SIZE(sa_transformer_plan),
};
/* clang-format on */

/* The entries end with one without a name. */
const entry *EXPORT(layout)(void) {
    static entry all[sizeof entries / sizeof *entries + 1];
    return memcpy(all, entries, sizeof entries);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Zeroed, and aligned to a cache line; NULL if there is no memory. */
void *EXPORT(take)(size_t bytes) {
    void *memory = bytes < PTRDIFF_MAX - SA_CACHE_LINE ? aligned_alloc(SA_CACHE_LINE, sa_whole_lines(bytes + 1)) : NULL;
    return memory == NULL ? NULL : memset(memory, 0, bytes);
}

void EXPORT(give)(void *memory) { free(memory); }

/* ---- attention, products ----------------------------------------------------------------------------------------- */

static bool is_size(ptrdiff_t n, ptrdiff_t most) { return n >= 1 && n <= most; }

static int attend_backward(sa_attention_gradients *g) {
    sa_backward_plan plan;
    if (sa_attention_plan_backward(g, 1, &plan) != SA_OK) {
        return SA_TOO_LARGE;
    }
    char *scratch = take(plan.scratch_bytes);
    g->delta = take((size_t)plan.delta_count * sa_element_size(g->a->f64));
    const int status = scratch && g->delta ? (int)sa_attention_backward(g, &plan, scratch) : NO_MEMORY;
    free(scratch);
    free(g->delta);
    return status;
}

/* The forward call, then with g, which may be NULL, the gradients; a->stats is then there. */
int EXPORT(attention)(const sa_attention *a, sa_attention_gradients *g) {
    if (a->n_lead != 1 || !is_size(a->lead[0], SA_MAX_WIDTH) || !is_size(a->gqa, a->lead[0]) ||
        a->lead[0] % a->gqa != 0 || !is_size(a->L, SA_MAX_LENGTH) || !is_size(a->S, SA_MAX_LENGTH) ||
        !is_size(a->E, SA_MAX_WIDTH) || !is_size(a->Dv, SA_MAX_WIDTH) || !(a->dropout_p >= 0 && a->dropout_p <= 1) ||
        a->diagonal < -SA_MAX_LENGTH || a->diagonal > SA_MAX_LENGTH) {
        return BAD_SIZE;
    }
    sa_attention_plan plan;
    if (sa_attention_make_plan(a, 1, &plan) != SA_OK) {
        return SA_TOO_LARGE;
    }
    char *scratch = take(plan.scratch_bytes), *partial = take(plan.partial_bytes);
    const int status = scratch && partial ? (int)sa_attention_forward(a, &plan, scratch, partial) : NO_MEMORY;
    free(scratch);
    free(partial);
    return status == SA_OK && g != NULL ? attend_backward(g) : status;
}

/* Returns what products with weights of int8 read, in one piece: a sa_compact and its panels;
 * NULL if there is no memory. */
void *EXPORT(panels)(int out, int in, const int8_t *values, const float *scale) {
    const size_t before = sa_whole_lines(sizeof(sa_compact));
    const bool fits =
        is_size(out, SA_MAX_WIDTH) && is_size(in, SA_MAX_WIDTH) && out <= PTRDIFF_MAX / 4 / (in + SA_GROUP);
    char *memory = fits ? take(before + sa_compact_bytes(SA_WEIGHTS_INT8, out, in)) : NULL;
    if (memory != NULL) {
        *(sa_compact *)(void *)memory = sa_compact_fill(SA_WEIGHTS_INT8, out, in, values, scale, memory + before);
    }
    return memory;
}

/* One product, or with g, which may be NULL, its gradients. */
int EXPORT(linear)(const sa_linear *l, const sa_linear_gradients *g) {
    size_t bytes;
    if (!is_size(l->rows, SA_MAX_LENGTH) || !is_size(l->in, SA_MAX_WIDTH) || !is_size(l->out[0], SA_MAX_WIDTH) ||
        !sa_multiply((size_t)l->rows + 1, (size_t)(l->in + l->out[0] + 1), &bytes) || bytes > PTRDIFF_MAX / 64) {
        return BAD_SIZE;
    }
    char *scratch = take(sa_linear_scratch(l, 1, false, g != NULL));
    if (scratch == NULL) {
        return NO_MEMORY;
    }
    if (g != NULL) {
        sa_linear_backward(g, 1, scratch);
    } else {
        sa_linear_forward(l, 1, scratch);
    }
    free(scratch);
    return SA_OK;
}

void EXPORT(update)(sa_update *u) { sa_update_run(u, 1); }

/* ---- transformers ------------------------------------------------------------------------------------------------ */

/* Positions and angles have rows for sequences of `most` tokens. */
static bool is_call(const sa_transformer *e, ptrdiff_t most) {
    const int64_t past = e->cache.past == NULL ? 0 : *e->cache.past,
                  room = e->cache.past == NULL ? most : sa_smaller(most, e->cache.capacity);
    bool fits = is_size(e->d, SA_MAX_WIDTH) && is_size(e->tokens, SA_MAX_LENGTH) && is_size(e->sequences, e->tokens) &&
                past >= 0 && e->starts[0] == 0 && e->starts[e->sequences] == e->tokens &&
                (e->cache.past == NULL || e->sequences == 1);
    for (ptrdiff_t s = 0; fits && s < e->sequences; ++s) {
        const int64_t length = e->starts[s + 1] - e->starts[s];
        fits = e->starts[s] <= e->tokens && length >= 1 && length <= e->longest && length <= room - past;
    }
    for (ptrdiff_t t = 0; fits && e->table != NULL && t < e->tokens; ++t) {
        fits = e->ids[t] >= 0 && e->ids[t] < e->vocabulary;
    }
    return fits && (e->table != NULL || e->rows != NULL);
}

/* The result, and if `saved` is not NULL what gradients read: *saved is memory that the script gives back. With g the
 * gradients of such a call; all that e points to is unchanged. */
int EXPORT(transformer)(const sa_transformer *e, ptrdiff_t most, sa_transformer_plan *plan, void *out, char **saved,
                        const sa_transformer_gradients *g) {
    if (!is_call(e, most)) {
        return BAD_SIZE;
    }
    if ((g ? sa_transformer_plan_backward(e, 1, plan) : sa_transformer_make_plan(e, saved != NULL, 1, plan)) != SA_OK) {
        return SA_TOO_LARGE;
    }
    char *scratch = take(plan->shared_bytes + plan->scratch_bytes);
    if (saved != NULL && g == NULL) {
        *saved = take(plan->saved_bytes);
    }
    const int status = scratch == NULL || (saved != NULL && *saved == NULL) ? NO_MEMORY : SA_OK;
    if (status == SA_OK && g != NULL) {
        sa_transformer_backward(e, g, plan, *saved, scratch);
    } else if (status == SA_OK) {
        sa_transformer_forward(e, plan, out, saved == NULL ? NULL : *saved, scratch);
    }
    free(scratch);
    return status;
}
