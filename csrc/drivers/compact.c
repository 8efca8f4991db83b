/* Driver of products with compact weights: makes panels, rounds rows, and multiplies tile by tile. An element is one
 * exact sum, scaled in a fixed order, so its bits depend on its row and column alone. */
#include "drivers/compact.h"

#include <math.h>
#include <string.h>

/* A matrix unit reads whole tiles, so this many bytes after the last panel are zeros,
 * and rows are whole cache lines. */
#define SA_AFTER_PANELS 2048

/* Bytes of panels that are multiplied by all rows before the next, so that they stay in L2. */
#define SA_PANELS_AT_ONCE ((ptrdiff_t)256 << 10)

static ptrdiff_t numbers_in_word(sa_weights kind) { return kind == SA_WEIGHTS_INT8 ? 4 : 2; }

/* The number of groups in a row of int8; bfloat16 has no scales. */
static ptrdiff_t groups_of(sa_weights kind, ptrdiff_t in) {
    return kind == SA_WEIGHTS_INT8 ? sa_ceil_div(sa_larger(in, 1), SA_GROUP) : 0;
}

/* Words of a row: at least one, which has zeros if there are no numbers. */
static ptrdiff_t words_of(sa_weights kind, ptrdiff_t in) {
    return sa_ceil_div(sa_larger(in, 1), numbers_in_word(kind));
}

static ptrdiff_t panel_bytes(ptrdiff_t words) { return words * SA_PANEL_COLUMNS * SA_WORD; }

size_t sa_compact_bytes(sa_weights kind, ptrdiff_t out, ptrdiff_t in) {
    const ptrdiff_t panels = sa_ceil_div(out, SA_PANEL_COLUMNS), words = words_of(kind, in);
    return (size_t)(panels * panel_bytes(words) + SA_AFTER_PANELS) +
           2 * (size_t)(panels * groups_of(kind, in) * SA_PANEL_COLUMNS) * sizeof(float);
}

/* Fills column c of the panels, which is row c of the weight. */
static void fill_column(const sa_compact *w, ptrdiff_t c, const char *row, char *panels) {
    const ptrdiff_t numbers = numbers_in_word(w->kind), bytes = SA_WORD / numbers;
    char *to = panels + c / SA_PANEL_COLUMNS * panel_bytes(w->words) + c % SA_PANEL_COLUMNS * SA_WORD;
    for (ptrdiff_t k = 0; k < w->words; ++k, to += SA_PANEL_COLUMNS * SA_WORD) {
        const ptrdiff_t left = (w->in - k * numbers) * bytes;
        memcpy(to, row + k * SA_WORD, (size_t)sa_smaller(left, SA_WORD));
    }
}

static float sum_of_group(const int8_t *row, ptrdiff_t n) {
    int32_t sum = 0;
    for (ptrdiff_t k = 0; k < n; ++k) {
        sum += row[k];
    }
    return (float)sum;
}

sa_compact sa_compact_fill(sa_weights kind, ptrdiff_t out, ptrdiff_t in, const void *weight, const float *scale,
                           char *memory) {
    const ptrdiff_t panels = sa_ceil_div(out, SA_PANEL_COLUMNS), words = words_of(kind, in);
    const ptrdiff_t groups = groups_of(kind, in), bytes = SA_WORD / numbers_in_word(kind);
    float *scales = (void *)(memory + panels * panel_bytes(words) + SA_AFTER_PANELS);
    float *offset = scales + panels * groups * SA_PANEL_COLUMNS;
    const sa_compact w = {.kind = kind,
                          .out = out,
                          .in = in,
                          .words = words,
                          .groups = groups,
                          .panels = memory,
                          .scale = scales,
                          .offset = offset};
    memset(memory, 0, sa_compact_bytes(kind, out, in));
    for (ptrdiff_t c = 0; c < out; ++c) {
        const char *row = (const char *)weight + c * in * bytes;
        fill_column(&w, c, row, memory);
        for (ptrdiff_t g = 0; g < groups && g * SA_GROUP < in; ++g) {
            const ptrdiff_t at = (c / SA_PANEL_COLUMNS * groups + g) * SA_PANEL_COLUMNS + c % SA_PANEL_COLUMNS;
            scales[at] = scale[c * groups + g];
            offset[at] =
                scales[at] * sum_of_group((const int8_t *)row + g * SA_GROUP, sa_smaller(SA_GROUP, in - g * SA_GROUP));
        }
    }
    return w;
}

/* An odd number of cache lines, so that rows use many sets of the cache. */
static ptrdiff_t stride_of(sa_weights kind, ptrdiff_t in) {
    const ptrdiff_t bytes = in * SA_WORD / numbers_in_word(kind) * (sa_compact_active(kind)->widened ? 2 : 1);
    return (sa_ceil_div(bytes, SA_CACHE_LINE) | 1) * SA_CACHE_LINE;
}

/* How many rows a tile may read, with rows after the last one. */
static ptrdiff_t readable(sa_weights kind, ptrdiff_t rows) { return rows + sa_compact_active(kind)->most_rows; }

static size_t rounded_bytes(sa_weights kind, ptrdiff_t rows, ptrdiff_t in) {
    return sa_whole_lines((size_t)(rows * groups_of(kind, in)) * sizeof(sa_rounded));
}

size_t sa_compact_scratch(sa_weights kind, ptrdiff_t rows, ptrdiff_t in) {
    return (size_t)(readable(kind, rows) * stride_of(kind, in)) + rounded_bytes(kind, rows, in) +
           (size_t)(SA_GROUPS_AT_ONCE * SA_MOST_TILE_ROWS * SA_PANEL_COLUMNS * SA_WORD);
}

/* Widens n numbers in place, from the last to the first. */
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
    sa_compact_rows r = {
        .row = row, .rows = rows, .stride = stride, .unit = sa_compact_active(l->weights), .x = scratch};
    r.rounded = (sa_rounded *)(void *)(r.x + readable(l->weights, rows) * stride);
    r.sums = (char *)r.rounded + rounded_bytes(l->weights, rows, l->in);
    if (l->in == 0) {
        memset(scratch, 0, sa_compact_scratch(l->weights, rows, l->in));
        return r;
    }
    if (l->weights == SA_WEIGHTS_INT8) {
        kernels->quantize_rows(x, rows, l->in, (uint8_t *)r.x, stride, r.rounded);
        for (ptrdiff_t i = 0; i < rows && r.unit->widened; ++i) {
            widen((uint8_t *)r.x + i * stride, stride / 2);
        }
        return r;
    }
    for (ptrdiff_t i = 0; i < rows; ++i) {
        char *to = r.x + i * stride;
        kernels->narrow(x + i * l->in, l->in, SA_BF16, (void *)to);
        memset(to + l->in * 2, 0, (size_t)(stride - l->in * 2));
    }
    return r;
}

/* Multiplies column c of int8 weights by a row that cannot be rounded. */
static float plain_sum(const sa_compact *w, ptrdiff_t c, const float *x) {
    const ptrdiff_t panel = c / SA_PANEL_COLUMNS, column = c % SA_PANEL_COLUMNS;
    const signed char *from = (const signed char *)w->panels + panel * panel_bytes(w->words) + column * SA_WORD;
    float sum = 0;
    for (ptrdiff_t k = 0; k < w->in; ++k) {
        const float scale = w->scale[(panel * w->groups + k / SA_GROUP) * SA_PANEL_COLUMNS + column];
        sum += x[k] * (scale * (float)from[k / SA_WORD * SA_PANEL_COLUMNS * SA_WORD + k % SA_WORD]);
    }
    return sum;
}

/* Activates the result of a product, while rows of y are in a CPU cache. */
static void activate(const sa_linear *l, ptrdiff_t at, ptrdiff_t rows, ptrdiff_t width, ptrdiff_t out) {
    const ptrdiff_t bytes = at * (ptrdiff_t)sizeof(float);
    const sa_active active = {
        l->activation, rows, width, out, l->y[0] + bytes, l->gate == NULL ? NULL : l->gate + bytes};
    sa_kernels_active()->f32.activate(&active, l->active + bytes);
}

static void unrounded_row(const sa_linear *l, int which, ptrdiff_t row, ptrdiff_t column, ptrdiff_t width) {
    const sa_compact *w = (const void *)l->weight[which];
    const ptrdiff_t at = row * w->out + column;
    const float *bias = (const void *)l->bias[which], *residual = (const void *)l->residual;
    float *y = (float *)(void *)l->y[which] + at;
    for (ptrdiff_t c = 0; c < width; ++c) {
        const float start =
            (bias == NULL ? 0 : bias[column + c]) + (residual == NULL || l->dropout.p > 0 ? 0 : residual[at + c]);
        y[c] = start + plain_sum(w, column + c, (const float *)(const void *)l->x + row * l->in);
    }
    if (l->activation != SA_ACT_NONE) {
        activate(l, at, 1, width, w->out);
    }
}

/* Multiplies a tile of rows by a panel, a few groups at a time. */
static void multiply_tile(const sa_linear *l, const sa_compact_rows *r, ptrdiff_t first, ptrdiff_t rows, int which,
                          ptrdiff_t column, ptrdiff_t width) {
    const sa_compact *w = (const void *)l->weight[which];
    const bool int8 = l->weights == SA_WEIGHTS_INT8, gelu = int8 && l->activation == SA_ACT_GELU && l->gate == NULL;
    const ptrdiff_t at = (r->row + first) * w->out + column, panel = column / SA_PANEL_COLUMNS;
    const ptrdiff_t group = int8 ? SA_GROUP_WORDS : w->words, word_bytes = r->unit->widened ? 2 * SA_WORD : SA_WORD;
    const float *bias = (const void *)l->bias[which], *residual = (const void *)l->residual;
    float *y = (float *)(void *)l->y[which] + at;
    sa_compact_ends ends = {.rows = rows,
                            .width = width,
                            .sums = r->sums,
                            .row_stride = w->groups,
                            .bias = bias == NULL ? NULL : bias + column,
                            .residual = residual == NULL || l->dropout.p > 0 ? NULL : residual + at,
                            .y = y,
                            .stride = w->out};
    for (ptrdiff_t word = 0, first_group = 0; word < w->words; first_group += SA_GROUPS_AT_ONCE) {
        ends.groups = 0;
        for (; word < w->words && ends.groups < SA_GROUPS_AT_ONCE; word += group, ++ends.groups) {
            const sa_compact_tile t = {rows,
                                       sa_smaller(group, w->words - word),
                                       r->x + first * r->stride + word * word_bytes,
                                       r->stride,
                                       w->panels + panel * panel_bytes(w->words) + word * SA_PANEL_COLUMNS * SA_WORD,
                                       (char *)r->sums + ends.groups * SA_MOST_TILE_ROWS * SA_PANEL_COLUMNS * SA_WORD};
            r->unit->leaf(&t);
        }
        const bool last = word >= w->words;
        ends.row = int8 ? r->rounded + first * w->groups + first_group : NULL;
        ends.scale = w->scale + (panel * w->groups + first_group) * SA_PANEL_COLUMNS;
        ends.offset = w->offset + (panel * w->groups + first_group) * SA_PANEL_COLUMNS;
        ends.gelu = last && gelu;
        ends.to = ends.gelu ? (float *)(void *)l->active + at : y;
        sa_kernels_active()->compact_ends(&ends);
        ends.adds = true;
        ends.residual = NULL;
    }
    if (l->activation != SA_ACT_NONE && !gelu) {
        activate(l, at, rows, width, w->out);
    }
}

/* Multiplies rounded rows from … end − 1, all of which could be rounded. */
static void multiply_rows(const sa_linear *l, const sa_compact_rows *r, ptrdiff_t from, ptrdiff_t end, int which,
                          ptrdiff_t column, ptrdiff_t width) {
    const sa_compact *w = (const void *)l->weight[which];
    const sa_compact_unit *unit = r->unit;
    const ptrdiff_t tiles = sa_ceil_div(end - from, unit->most_rows), end_column = column + width;
    const ptrdiff_t at_once = sa_larger(SA_PANELS_AT_ONCE / sa_larger(panel_bytes(w->words), 1), 1) * SA_PANEL_COLUMNS;
    if (unit->start != NULL) {
        unit->start();
    }
    for (ptrdiff_t near = column; near < end_column; near += at_once) {
        const ptrdiff_t near_end = sa_smaller(end_column, near + at_once);
        for (ptrdiff_t tile = 0; tile < tiles; ++tile) {
            const ptrdiff_t first = from + (end - from) * tile / tiles, next = from + (end - from) * (tile + 1) / tiles;
            for (ptrdiff_t c = near; c < near_end; c += SA_PANEL_COLUMNS) {
                multiply_tile(l, r, first, next - first, which, c, sa_smaller(near_end - c, SA_PANEL_COLUMNS));
            }
        }
    }
    if (unit->end != NULL) {
        unit->end();
    }
}

/* A row that cannot be rounded is multiplied alone, between the rows before and after it.
 * y may be the residual, so each row is written once. */
void sa_compact_columns(const sa_linear *l, const sa_compact_rows *r, int which, ptrdiff_t column, ptrdiff_t width) {
    ptrdiff_t from = 0;
    for (ptrdiff_t i = 0; i < r->rows && l->weights == SA_WEIGHTS_INT8; ++i) {
        if (isnan(r->rounded[i * groups_of(l->weights, l->in)].scale)) {
            multiply_rows(l, r, from, i, which, column, width);
            unrounded_row(l, which, r->row + i, column, width);
            from = i + 1;
        }
    }
    multiply_rows(l, r, from, r->rows, which, column, width);
}
