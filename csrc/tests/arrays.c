/* Random numbers, elements of any dtype, arrays of any layout. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

uint64_t random_bits(random_source *r) {
    uint64_t z = (r->state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

ptrdiff_t random_below(random_source *r, ptrdiff_t n) { return (ptrdiff_t)((random_bits(r) >> 1) % (uint64_t)n); }

double random_between(random_source *r, double least, double most) {
    return least + (most - least) * ((double)(random_bits(r) >> 11) * 0x1p-53);
}

bool random_chance(random_source *r, double p) { return random_between(r, 0, 1) < p; }

/* Encodes a float of `width` bits, `bits` of them precision: to nearest even, gradual underflow, overflow to infinity. */
static uint64_t encode(double x, int bits, int width) {
    const int bias = (1 << (width - bits - 1)) - 1;
    const uint64_t sign = signbit(x) ? UINT64_C(1) << (width - 1) : 0;
    const uint64_t infinity = (uint64_t)(2 * bias + 1) << (bits - 1);
    if (isnan(x)) {
        return sign | infinity | UINT64_C(1) << (bits - 2);
    }
    x = fabs(x);
    if (x == 0 || isinf(x)) {
        return sign | (x == 0 ? 0 : infinity);
    }
    int exponent = ilogb(x);
    exponent = exponent < 1 - bias ? 1 - bias : exponent;
    const uint64_t significand = (uint64_t)nearbyint(ldexp(x, bits - 1 - exponent));
    const uint64_t code = significand + ((uint64_t)(exponent + bias - 1) << (bits - 1)); /* a carry moves the exponent */
    return sign | (code > infinity ? infinity : code);
}

static double decode(uint64_t code, int bits, int width) {
    const int bias = (1 << (width - bits - 1)) - 1;
    const uint64_t significand = code & ((UINT64_C(1) << (bits - 1)) - 1);
    const int exponent = (int)(code >> (bits - 1)) & (2 * bias + 1);
    const double sign = code >> (width - 1) ? -1 : 1;
    if (exponent == 2 * bias + 1) {
        return significand ? (double)NAN : sign * (double)INFINITY;
    }
    if (exponent == 0) {
        return sign * ldexp((double)significand, 2 - bias - bits);
    }
    return sign * ldexp((double)(significand | UINT64_C(1) << (bits - 1)), exponent - bias - bits + 1);
}

static void copy_bytes(char *to, const char *from, size_t n, bool swapped) {
    for (size_t i = 0; i < n; ++i) {
        to[i] = from[swapped ? n - 1 - i : i];
    }
}

#define ELEMENTS(GET_OR_SET)                                                                                                   \
    switch (dtype) {                                                                                                           \
    case SA_BOOL:                                                                                                              \
    case SA_U8: GET_OR_SET(uint8_t)                                                                                            \
    case SA_I8: GET_OR_SET(int8_t)                                                                                             \
    case SA_I16: GET_OR_SET(int16_t)                                                                                           \
    case SA_U16: GET_OR_SET(uint16_t)                                                                                          \
    case SA_I32: GET_OR_SET(int32_t)                                                                                           \
    case SA_U32: GET_OR_SET(uint32_t)                                                                                          \
    case SA_I64: GET_OR_SET(int64_t)                                                                                           \
    case SA_U64: GET_OR_SET(uint64_t)                                                                                          \
    case SA_F32: GET_OR_SET(float)                                                                                             \
    case SA_F64: GET_OR_SET(double)                                                                                            \
    default: break;                                                                                                            \
    }

double element_get(const char *p, sa_dtype dtype, bool swapped) {
    if (dtype == SA_F16 || dtype == SA_BF16) {
        uint16_t code;
        copy_bytes((char *)&code, p, 2, swapped);
        return decode(code, dtype == SA_F16 ? 11 : 8, 16);
    }
#define GET(type)                                                                                                              \
    {                                                                                                                          \
        type x;                                                                                                                \
        copy_bytes((char *)&x, p, sizeof x, swapped);                                                                          \
        return (double)x;                                                                                                      \
    }
    ELEMENTS(GET)
    return (double)NAN;
}

void element_set(char *p, sa_dtype dtype, bool swapped, double value) {
    if (dtype == SA_F16 || dtype == SA_BF16) {
        const uint16_t code = (uint16_t)encode(value, dtype == SA_F16 ? 11 : 8, 16);
        copy_bytes(p, (const char *)&code, 2, swapped);
        return;
    }
#define SET(type)                                                                                                              \
    {                                                                                                                          \
        const type x = (type)value;                                                                                            \
        copy_bytes(p, (const char *)&x, sizeof x, swapped);                                                                    \
        return;                                                                                                                \
    }
    ELEMENTS(SET)
}

double unit_roundoff(sa_dtype dtype) {
    return dtype == SA_F64 ? 0x1p-53 : dtype == SA_F32 ? 0x1p-24 : dtype == SA_F16 ? 0x1p-11 : 0x1p-8;
}

static void **owned;
static size_t owned_count, owned_most;

static void *own(void *p) {
    if (owned_count == owned_most) {
        owned_most = 2 * owned_most + 1024;
        owned = realloc(owned, owned_most * sizeof *owned);
    }
    if (p == NULL || owned == NULL) {
        abort();
    }
    return owned[owned_count++] = p;
}

size_t memory_count(void) { return owned_count; }

void memory_free(const size_t *before) {
    while (owned_count > *before) {
        free(owned[--owned_count]);
    }
}

void *dirty_memory(size_t size) {
    void *p = NULL;
    return memset(own(posix_memalign(&p, 64, size ? size : 64) == 0 ? p : NULL), 0xFF, size);
}

void *zero_memory(size_t size) { return own(calloc(size ? size : 1, 1)); }

double real_get(const void *x, bool f64, ptrdiff_t i) { return f64 ? ((const double *)x)[i] : (double)((const float *)x)[i]; }

void real_set(void *x, bool f64, ptrdiff_t i, double value) {
    const sa_dtype dtype = f64 ? SA_F64 : SA_F32;
    element_set((char *)x + i * (ptrdiff_t)sa_itemsize(dtype), dtype, false, value);
}

void *draw_reals(ptrdiff_t n, bool f64, random_source *r) {
    void *x = zero_memory((size_t)n * sa_itemsize(f64 ? SA_F64 : SA_F32));
    for (ptrdiff_t i = 0; i < n; ++i) {
        real_set(x, f64, i, random_between(r, -1, 1));
    }
    return x;
}

enum { MARGIN = 64, PATTERN = 0xA5 };

void array_make(array *a, const array_shape *shape, sa_dtype dtype, unsigned layout, unsigned broadcast, bool output) {
    const ptrdiff_t item = (ptrdiff_t)sa_itemsize(dtype), long_row = 8192 + 3 * item;
    const int rows = shape->n_lead, cols = rows + 1, last = rows - 1; /* numbers of these axes */
    const bool inside = (layout & HEADS_INSIDE) && last >= 0, across = (layout & TRANSPOSED) != 0;
    memset(a, 0, sizeof *a);
    a->shape = *shape;
    sa_matrix *m = &a->tensor.m;
    m->dtype = dtype;
    m->swapped = (layout & SWAPPED) != 0;

    int order[SA_MAX_LEAD + 2], count = 0; /* from the innermost axis on */
    order[count++] = across ? rows : cols;
    if (inside) {
        order[count++] = last;
    }
    order[count++] = across ? cols : rows;
    for (int axis = inside ? last - 1 : last; axis >= 0; --axis) {
        order[count++] = axis;
    }
    ptrdiff_t extent = item, least = 0, most = 0;
    bool empty = false;
    for (int i = 0; i < count; ++i) {
        const int axis = order[i];
        const bool is_row = axis == rows, is_col = axis == cols;
        const ptrdiff_t size = is_row ? shape->rows : is_col ? shape->cols : shape->lead[axis];
        ptrdiff_t *stride = is_row ? &m->row_stride : is_col ? &m->col_stride : &a->tensor.lead_stride[axis];
        extent *= is_col && layout & STEPPED_COLS ? 3 : 1;
        if (!(broadcast & (is_row ? BROADCAST_ROWS : is_col ? BROADCAST_COLS : 1u << axis))) {
            extent += layout & (is_row ? ODD_ROWS : is_col ? 0 : ODD_LEAD) ? 1 : 0;
            extent = is_row && layout & LONG_ROWS && extent < long_row ? long_row : extent;
            *stride = layout & (is_row ? FLIPPED_ROWS : is_col ? FLIPPED_COLS : FLIPPED_LEAD) ? -extent : extent;
            extent *= size > 0 ? size : 1;
        }
        empty |= size == 0;
        *(*stride < 0 ? &least : &most) += size > 0 ? *stride * (size - 1) : 0;
    }
    const ptrdiff_t before = (output ? MARGIN : 0) + (layout & UNALIGNED ? 1 : 0), after = output ? MARGIN : 0;
    a->bytes = (size_t)(before + after + (empty ? 0 : most - least + item));
    a->memory = memset(zero_memory(a->bytes), output ? PATTERN : 0, a->bytes);
    m->data = a->memory + before - (empty ? 0 : least);
}

void array_remember(array *a) {
    if (a->memory && !a->before) {
        a->before = memcpy(zero_memory(a->bytes), a->memory, a->bytes);
    }
}

bool array_unchanged(const array *a) { return a->before == NULL || memcmp(a->before, a->memory, a->bytes) == 0; }

static ptrdiff_t head_count(const array *a) {
    ptrdiff_t heads = 1;
    for (int axis = 0; axis < a->shape.n_lead; ++axis) {
        heads *= a->shape.lead[axis];
    }
    return heads;
}

void array_draw(array *a, double least, double most, random_source *r) {
    for (ptrdiff_t head = 0; head < head_count(a); ++head) {
        for (ptrdiff_t i = 0; i < a->shape.rows; ++i) {
            for (ptrdiff_t j = 0; j < a->shape.cols; ++j) {
                element_set(array_at(a, head, 1, i, j), a->tensor.m.dtype, a->tensor.m.swapped, random_between(r, least, most));
            }
        }
    }
}

void array_fill(array *a, double x) { array_draw(a, x, x, &(random_source){0}); }

bool array_margins_intact(const array *a) {
    FREES_AT_END;
    char *inside = zero_memory(a->bytes);
    const size_t item = sa_itemsize(a->tensor.m.dtype);
    for (ptrdiff_t head = 0; head < head_count(a); ++head) {
        for (ptrdiff_t i = 0; i < a->shape.rows; ++i) {
            for (ptrdiff_t j = 0; j < a->shape.cols; ++j) {
                const char *at = array_at(a, head, 1, i, j);
                memset(inside + (at - a->memory), 1, item);
                note_result(array_get(a, head, 1, i, j));
            }
        }
    }
    bool intact = true;
    for (size_t n = 0; n < a->bytes; ++n) {
        intact &= inside[n] || (unsigned char)a->memory[n] == PATTERN;
    }
    return intact;
}

char *array_head(const array *a, ptrdiff_t head, ptrdiff_t gqa) {
    char *p = a->tensor.m.data;
    for (int axis = a->shape.n_lead - 1; axis >= 0; --axis) {
        ptrdiff_t size = a->shape.lead[axis], group = 1;
        if (axis == a->shape.n_lead - 1) { /* this axis counts key heads */
            size *= gqa;
            group = gqa;
        }
        p += head % size / group * a->tensor.lead_stride[axis];
        head /= size;
    }
    return p;
}

char *array_at(const array *a, ptrdiff_t head, ptrdiff_t gqa, ptrdiff_t row, ptrdiff_t col) {
    return array_head(a, head, gqa) + row * a->tensor.m.row_stride + col * a->tensor.m.col_stride;
}

double array_get(const array *a, ptrdiff_t head, ptrdiff_t gqa, ptrdiff_t row, ptrdiff_t col) {
    return element_get(array_at(a, head, gqa, row, col), a->tensor.m.dtype, a->tensor.m.swapped);
}
