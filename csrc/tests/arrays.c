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

/* A float with `bits` of precision and `width` in all: to nearest even, gradual underflow, overflow to infinity. */
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

void *dirty_memory(size_t size) {
    void *p = NULL;
    if (posix_memalign(&p, 64, size ? size : 64) != 0) {
        abort();
    }
    memset(p, 0xFF, size);
    return p;
}

enum { MARGIN = 64, PATTERN = 0xA5 };

/* `extent` spans the axes inside, and grows. */
static ptrdiff_t place(ptrdiff_t size, bool broadcast, bool flipped, ptrdiff_t padding, ptrdiff_t least, ptrdiff_t *extent) {
    if (broadcast) {
        return 0;
    }
    ptrdiff_t stride = *extent + padding;
    stride = stride < least ? least : stride;
    *extent = stride * (size > 0 ? size : 1);
    return flipped ? -stride : stride;
}

void array_make(array *a, const array_shape *shape, sa_dtype dtype, unsigned layout, unsigned broadcast, bool output) {
    const ptrdiff_t item = (ptrdiff_t)sa_itemsize(dtype);
    const int last = shape->n_lead - 1;
    const bool inside = (layout & HEADS_INSIDE) && last >= 0, across = (layout & TRANSPOSED) != 0;
    ptrdiff_t extent = item;
    memset(a, 0, sizeof *a);
    a->shape = *shape;
    sa_matrix *m = &a->tensor.m;
    m->dtype = dtype;
    m->swapped = (layout & SWAPPED) != 0;
    for (int step = 0; step < 3; ++step) {
        if (step == (across ? 2 : 0)) {
            extent *= layout & STEPPED_COLS ? 3 : 1;
            m->col_stride = place(shape->cols, broadcast & BROADCAST_COLS, layout & FLIPPED_COLS, 0, 0, &extent);
        } else if (step == 1 && inside) {
            a->tensor.lead_stride[last] =
                place(shape->lead[last], broadcast & 1u << last, layout & FLIPPED_LEAD, layout & ODD_LEAD ? 1 : 0, 0, &extent);
        } else if (step == (across ? 0 : 2)) {
            const ptrdiff_t odd = layout & ODD_ROWS ? 1 : 0, least = layout & LONG_ROWS ? 8192 + 3 * item : 0;
            m->row_stride = place(shape->rows, broadcast & BROADCAST_ROWS, layout & FLIPPED_ROWS, odd, least, &extent);
        }
    }
    for (int axis = inside ? last - 1 : last; axis >= 0; --axis) {
        a->tensor.lead_stride[axis] =
            place(shape->lead[axis], broadcast & 1u << axis, layout & FLIPPED_LEAD, layout & ODD_LEAD ? 1 : 0, 0, &extent);
    }

    ptrdiff_t least = 0, most = 0;
    bool empty = false;
    for (int axis = 0; axis < shape->n_lead + 2; ++axis) {
        const ptrdiff_t size = axis < shape->n_lead ? shape->lead[axis] : axis == shape->n_lead ? shape->rows : shape->cols;
        const ptrdiff_t stride = axis < shape->n_lead    ? a->tensor.lead_stride[axis]
                                 : axis == shape->n_lead ? m->row_stride
                                                         : m->col_stride;
        empty |= size == 0;
        least += stride < 0 && size > 0 ? stride * (size - 1) : 0;
        most += stride > 0 && size > 0 ? stride * (size - 1) : 0;
    }
    const ptrdiff_t before = (output ? MARGIN : 0) + (layout & UNALIGNED ? 1 : 0), after = output ? MARGIN : 0;
    a->bytes = (size_t)(before + after + (empty ? 0 : most - least + item));
    a->memory = malloc(a->bytes ? a->bytes : 1);
    memset(a->memory, output ? PATTERN : 0, a->bytes ? a->bytes : 1);
    m->data = a->memory + before - (empty ? 0 : least);
}

void array_free(array *a) {
    free(a->memory);
    free(a->before);
    memset(a, 0, sizeof *a);
}

void array_remember(array *a) {
    if (a->memory && !a->before) {
        a->before = malloc(a->bytes ? a->bytes : 1);
        memcpy(a->before, a->memory, a->bytes);
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

bool array_margins_intact(const array *a) {
    char *owned = calloc(a->bytes ? a->bytes : 1, 1);
    const size_t item = sa_itemsize(a->tensor.m.dtype);
    for (ptrdiff_t head = 0; head < head_count(a); ++head) {
        for (ptrdiff_t i = 0; i < a->shape.rows; ++i) {
            for (ptrdiff_t j = 0; j < a->shape.cols; ++j) {
                memset(owned + (array_at(a, head, 1, i, j) - a->memory), 1, item);
            }
        }
    }
    bool intact = true;
    for (size_t n = 0; n < a->bytes; ++n) {
        intact &= owned[n] || (unsigned char)a->memory[n] == PATTERN;
    }
    free(owned);
    return intact;
}

char *array_head(const array *a, ptrdiff_t head, ptrdiff_t gqa) {
    char *p = a->tensor.m.data;
    for (int axis = a->shape.n_lead - 1; axis >= 0; --axis) {
        ptrdiff_t size = a->shape.lead[axis], group = 1;
        if (axis == a->shape.n_lead - 1) { /* key heads */
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
