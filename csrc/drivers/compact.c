/* Driver of products with compact weights: packs them, rounds rows, and walks over tiles. An element is one exact sum, scaled
 * in one order: its bits depend on nothing but its row and its column. */
#include "drivers/compact.h"

#include <math.h>
#include <string.h>

/* A matrix unit reads whole tiles: so many bytes behind the last panel are zeros, and rows are whole lines. */
#define SA_BEHIND_PANELS 2048

/* Panels that stay in L2 while the rows go by. */
#define SA_PANELS_AT_ONCE ((ptrdiff_t)256 << 10)

static ptrdiff_t numbers_in_word(sa_weights kind) { return kind == SA_WEIGHTS_INT8 ? 4 : 2; }

static ptrdiff_t panel_bytes(ptrdiff_t steps) { return steps * SA_PANEL_COLUMNS * SA_WORD; }

size_t sa_compact_bytes(sa_weights kind, ptrdiff_t out, ptrdiff_t in) {
    const ptrdiff_t panels = sa_ceil_div(out, SA_PANEL_COLUMNS), steps = sa_ceil_div(in, numbers_in_word(kind));
    return (size_t)(panels * panel_bytes(steps) + SA_BEHIND_PANELS) + 2 * (size_t)(panels * SA_PANEL_COLUMNS) * sizeof(float);
}

sa_compact sa_compact_pack(sa_weights kind, ptrdiff_t out, ptrdiff_t in, const void *weight, const float *scale, char *memory) {
    const ptrdiff_t panels = sa_ceil_div(out, SA_PANEL_COLUMNS), columns = panels * SA_PANEL_COLUMNS;
    const ptrdiff_t numbers = numbers_in_word(kind), steps = sa_ceil_div(in, numbers), bytes = SA_WORD / numbers;
    float *scales = (float *)(void *)(memory + panels * panel_bytes(steps) + SA_BEHIND_PANELS), *offset = scales + columns;
    memset(memory, 0, sa_compact_bytes(kind, out, in));
    for (ptrdiff_t c = 0; c < out; ++c) {
        const char *row = (const char *)weight + c * in * bytes;
        char *to = memory + c / SA_PANEL_COLUMNS * panel_bytes(steps) + c % SA_PANEL_COLUMNS * SA_WORD;
        for (ptrdiff_t k = 0; k < steps; ++k) {
            const ptrdiff_t left = in - k * numbers;
            memcpy(to + k * SA_PANEL_COLUMNS * SA_WORD, row + k * SA_WORD,
                   left < numbers ? (size_t)(left * bytes) : (size_t)SA_WORD);
        }
        if (kind == SA_WEIGHTS_INT8) {
            int32_t sum = 0;
            for (ptrdiff_t k = 0; k < in; ++k) {
                sum += ((const int8_t *)weight)[c * in + k];
            }
            scales[c] = scale[c];
            offset[c] = scale[c] * (float)sum;
        }
    }
    return (sa_compact){kind, out, in, steps, memory, scales, offset};
}

/* An odd number of lines: many rows then do not share a few sets of the cache. */
static ptrdiff_t stride_of(sa_weights kind, ptrdiff_t in) {
    const ptrdiff_t bytes = in * SA_WORD / numbers_in_word(kind) * (sa_compact_active(kind)->widened ? 2 : 1);
    return (sa_ceil_div(bytes, SA_CACHE_LINE) | 1) * SA_CACHE_LINE;
}

static ptrdiff_t most_rows(sa_weights kind) { return sa_compact_active(kind)->most_rows; }

/* Rows that a tile may read, though they are none. */
static ptrdiff_t readable(sa_weights kind, ptrdiff_t rows) { return rows + most_rows(kind); }

size_t sa_compact_scratch(sa_weights kind, ptrdiff_t rows, ptrdiff_t in) {
    return (size_t)(readable(kind, rows) * stride_of(kind, in)) + sa_whole_lines((size_t)rows * sizeof(sa_rounded_row)) +
           (size_t)(most_rows(kind) * SA_PANEL_COLUMNS * SA_WORD);
}

/* n numbers, from the last on: in place. */
static void widen(uint8_t *x, ptrdiff_t n) {
    for (ptrdiff_t i = n - 1; i >= 0; --i) {
        const int16_t wide = x[i];
        memcpy(x + 2 * i, &wide, sizeof wide);
    }
}

sa_compact_rows sa_compact_round(const sa_linear *l, ptrdiff_t row, ptrdiff_t rows, void *scratch) {
    const sa_kernels *kernels = sa_kernels_active();
    const ptrdiff_t stride = stride_of(l->weights, l->in);
    const float *x = (const float *)(const void *)l->x + row * l->in;
    sa_compact_rows r = {.row = row, .rows = rows, .stride = stride, .x = scratch};
    r.rounded = (sa_rounded_row *)(void *)(r.x + readable(l->weights, rows) * stride);
    r.sums = (char *)r.rounded + sa_whole_lines((size_t)rows * sizeof(sa_rounded_row));
    if (l->weights == SA_WEIGHTS_INT8) {
        kernels->quantize_rows(x, rows, l->in, (uint8_t *)r.x, stride, r.rounded);
        for (ptrdiff_t i = 0; i < rows && sa_compact_active(l->weights)->widened; ++i) {
            widen((uint8_t *)r.x + i * stride, stride / 2);
        }
        return r;
    }
    for (ptrdiff_t i = 0; i < rows; ++i) {
        char *to = r.x + i * stride;
        kernels->narrow(x + i * l->in, l->in, SA_BF16, (uint16_t *)(void *)to);
        memset(to + l->in * 2, 0, (size_t)(stride - l->in * 2));
    }
    return r;
}

/* Column c of int8 weights times a row that is not rounded. */
static float plain_sum(const sa_compact *w, ptrdiff_t c, const float *x) {
    const signed char *from =
        (const signed char *)w->panels + c / SA_PANEL_COLUMNS * panel_bytes(w->steps) + c % SA_PANEL_COLUMNS * SA_WORD;
    float sum = 0;
    for (ptrdiff_t k = 0; k < w->in; ++k) {
        sum += x[k] * (w->scale[c] * (float)from[k / SA_WORD * SA_PANEL_COLUMNS * SA_WORD + k % SA_WORD]);
    }
    return sum;
}

/* What follows a product, for rows of y while they are near. */
static void activate(const sa_linear *l, ptrdiff_t at, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t out) {
    const ptrdiff_t bytes = at * (ptrdiff_t)sizeof(float);
    const sa_active active = {l->activation, rows, width, out, l->y[0] + bytes, l->gate == NULL ? NULL : l->gate + bytes};
    sa_kernels_active()->f32.activate(&active, l->active + bytes);
}

/* A row that is not rounded. */
static void spoiled_row(const sa_linear *l, int part, ptrdiff_t row, ptrdiff_t column, ptrdiff_t width) {
    const sa_compact *w = (const sa_compact *)(const void *)l->weight[part];
    const ptrdiff_t at = row * w->out + column;
    const float *bias = (const float *)(const void *)l->bias[part], *residual = (const float *)(const void *)l->residual;
    float *y = (float *)(void *)l->y[part] + at;
    for (ptrdiff_t c = 0; c < width; ++c) {
        const float start =
            (bias == NULL ? 0 : bias[column + c]) + (residual == NULL || l->dropout.p > 0 ? 0 : residual[at + c]);
        y[c] = start + plain_sum(w, column + c, (const float *)(const void *)l->x + row * l->in);
    }
    if (l->activation != SA_ACT_NONE) {
        activate(l, at, 1, width, w->out);
    }
}

/* Rows from … end − 1 of those rounded, none of them spoiled. */
static void tiles(const sa_linear *l, const sa_compact_rows *r, ptrdiff_t from, ptrdiff_t end, int part, ptrdiff_t column,
                  ptrdiff_t width) {
    const sa_compact *w = (const sa_compact *)(const void *)l->weight[part];
    const sa_compact_products *products = sa_compact_active(l->weights);
    const ptrdiff_t count = sa_ceil_div(end - from, products->most_rows), end_column = column + width;
    const ptrdiff_t at_once = sa_larger(SA_PANELS_AT_ONCE / sa_larger(panel_bytes(w->steps), 1), 1) * SA_PANEL_COLUMNS;
    const bool int8 = l->weights == SA_WEIGHTS_INT8;
    const float *bias = (const float *)(const void *)l->bias[part], *residual = (const float *)(const void *)l->residual;
    if (products->open != NULL) {
        products->open();
    }
    for (ptrdiff_t group = column; group < end_column; group += at_once) {
        const ptrdiff_t group_end = sa_smaller(end_column, group + at_once);
        for (ptrdiff_t tile = 0; tile < count; ++tile) {
            const ptrdiff_t first = from + (end - from) * tile / count, next = from + (end - from) * (tile + 1) / count;
            sa_compact_tile t = {next - first, w->steps, r->x + first * r->stride, r->stride, NULL, r->sums};
            for (ptrdiff_t c = group; c < group_end; c += SA_PANEL_COLUMNS) {
                const ptrdiff_t at = (r->row + first) * w->out + c, wide = sa_smaller(group_end - c, SA_PANEL_COLUMNS);
                t.panel = w->panels + c / SA_PANEL_COLUMNS * panel_bytes(w->steps);
                products->leaf(&t);
                const sa_compact_ends ends = {.rows = t.rows,
                                              .width = wide,
                                              .sums = r->sums,
                                              .row = int8 ? r->rounded + first : NULL,
                                              .scale = w->scale + c,
                                              .offset = w->offset + c,
                                              .bias = bias == NULL ? NULL : bias + c,
                                              .residual = residual == NULL || l->dropout.p > 0 ? NULL : residual + at,
                                              .y = (float *)(void *)l->y[part] + at,
                                              .stride = w->out};
                sa_kernels_active()->compact_ends(&ends);
                if (l->activation != SA_ACT_NONE) {
                    activate(l, at, t.rows, wide, w->out);
                }
            }
        }
    }
    if (products->close != NULL) {
        products->close();
    }
}

/* Spoiled rows part the others: their y is written once, as it may be the residual. */
void sa_compact_columns(const sa_linear *l, const sa_compact_rows *r, int part, ptrdiff_t column, ptrdiff_t width) {
    ptrdiff_t from = 0;
    for (ptrdiff_t i = 0; i < r->rows && l->weights == SA_WEIGHTS_INT8; ++i) {
        if (isnan(r->rounded[i].step)) {
            tiles(l, r, from, i, part, column, width);
            spoiled_row(l, part, r->row + i, column, width);
            from = i + 1;
        }
    }
    tiles(l, r, from, r->rows, part, column, width);
}
