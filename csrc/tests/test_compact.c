/* Compact weights: each leaf that this CPU runs against plain loops; whole products, in any cut, against the same rounded
 * numbers multiplied in double; rows that are not finite. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/compact.h"
#include "tests/test.h"

#define U 0x1p-24 /* the relative error of a rounding to float32 */
#define LINE 64

/* The error of GELU after int8, without a gate. */
#define ROUGH_GELU 3e-5

/* Rows are rounded if the range of each group is 0 or between these (kernels/transformer/compact_rows.h). */
#define LEAST_RANGE 1e-30f
#define MOST_RANGE 1e30f

#define MOST_GROUPS 48
static ptrdiff_t groups_of(ptrdiff_t n) { return sa_ceil_div(n, SA_GROUP); }

static float of_bfloat16(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- leaves -------------------------------------------------------------------------------------------------------------- */

/* drivers/compact.c lets a leaf read most_rows rows, a panel and these bytes after it, and write most_rows rows of sums, here
 * between guards. Zeros follow a row; anything may follow the panel. */
#define AFTER_PANELS 2048

typedef struct {
    sa_compact_tile t;
    char *x, *panel, *sums;
    size_t guarded;
} tile;

static void tile_make(tile *m, const sa_compact_unit *p, ptrdiff_t rows, ptrdiff_t words) {
    const ptrdiff_t bytes = words * SA_WORD * (p->widened ? 2 : 1), stride = (sa_ceil_div(bytes, LINE) | 1) * LINE;
    const ptrdiff_t each = SA_PANEL_COLUMNS * SA_WORD;
    m->guarded = (size_t)(p->most_rows * each) + 2 * LINE;
    m->x = dirty_memory((size_t)(p->most_rows * stride));
    m->panel = dirty_memory((size_t)(words * each) + AFTER_PANELS);
    m->sums = dirty_memory(m->guarded);
    memset(m->x, 0, (size_t)(rows * stride));
    m->t = (sa_compact_tile){rows, words, m->x, stride, m->panel, m->sums + LINE};
}

static void tile_run(tile *m, const sa_compact_unit *p) {
    static const unsigned char untouched[LINE] = {[0 ... LINE - 1] = 0xFF};
    if (p->start != NULL) {
        p->start();
    }
    p->leaf(&m->t);
    if (p->end != NULL) {
        p->end();
    }
    CHECK(memcmp(m->sums, untouched, LINE) == 0 && memcmp(m->sums + m->guarded - LINE, untouched, LINE) == 0,
          "%s, %td rows, %td words: writes outside its sums", p->name, m->t.rows, m->t.words);
}

/* The numbers of a factor: any, only the most or only the least, or one of these two. */
enum { ANY, MOST, LEAST, ENDS };

static int number_of(int kind, int least, int most, random_source *random) {
    switch (kind) {
    case ANY: return least + (int)random_below(random, most - least + 1);
    case MOST: return most;
    case LEAST: return least;
    default: return random_chance(random, 0.5) ? most : least;
    }
}

/* Sets number i of a row, which may have int8 as int16. */
static void put_x(const sa_compact_unit *p, bool int8, char *row, ptrdiff_t i, double x) {
    if (int8 && !p->widened) {
        ((uint8_t *)row)[i] = (uint8_t)x;
    } else {
        ((uint16_t *)(void *)row)[i] = int8 ? (uint16_t)x : to_bfloat16((float)x);
    }
}

static double get_x(const sa_compact_unit *p, bool int8, const char *row, ptrdiff_t i) {
    const uint16_t *halves = (const uint16_t *)(const void *)row;
    return !int8 ? (double)of_bfloat16(halves[i]) : p->widened ? halves[i] : ((const uint8_t *)row)[i];
}

static double get_weight(bool int8, const void *panel, ptrdiff_t at) {
    return int8 ? ((const int8_t *)panel)[at] : (double)of_bfloat16(((const uint16_t *)panel)[at]);
}

/* Sums of int8 are exact. In bfloat16 the number `odd`, unless it is 0, is in the middle row and must not reach another row. */
static void try_leaf(const sa_compact_unit *p, bool int8, ptrdiff_t rows, ptrdiff_t words, const int kinds[2], double odd) {
    FREES_AT_END;
    random_source random = {(uint64_t)(rows * 1000 + words)};
    const ptrdiff_t each = int8 ? SA_WORD : SA_WORD / 2, n = words * each, odd_row = odd == 0 ? -1 : rows / 2;
    tile m;
    tile_make(&m, p, rows, words);
    for (ptrdiff_t r = 0; r < rows; ++r) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            put_x(p, int8, m.x + r * m.t.stride, i,
                  int8                         ? number_of(kinds[0], 0, 255, &random)
                  : r == odd_row && i == n / 2 ? odd
                                               : random_between(&random, -1, 1));
        }
    }
    for (ptrdiff_t i = 0; i < n * SA_PANEL_COLUMNS + AFTER_PANELS * each / SA_WORD; ++i) {
        if (int8) {
            m.panel[i] = (char)number_of(kinds[1], -128, 127, &random);
        } else {
            ((uint16_t *)(void *)m.panel)[i] = to_bfloat16((float)random_between(&random, -1, 1));
        }
    }
    tile_run(&m, p);
    double worst = 0;
    for (ptrdiff_t at = 0; at < rows * SA_PANEL_COLUMNS; ++at) {
        const ptrdiff_t r = at / SA_PANEL_COLUMNS, c = at % SA_PANEL_COLUMNS;
        const double got = int8 ? ((const int32_t *)m.t.sums)[at] : (double)((const float *)m.t.sums)[at];
        double sum = 0, size = 0x1p-100;
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double term = get_x(p, int8, m.x + r * m.t.stride, i) *
                                get_weight(int8, m.panel, (i / each * SA_PANEL_COLUMNS + c) * each + i % each);
            sum += term;
            size += fabs(term);
        }
        const double error = fabs(got - sum) / (int8 ? 0x1p-100 : (double)(n + 2) * U * size);
        if (r != odd_row) {
            worst = isnan(error) ? INFINITY : fmax(worst, error);
        } else if (isfinite(got)) {
            worst = INFINITY;
        }
    }
    CHECK(worst <= 1, "%d bits by %s, %td rows, %td words, numbers %d and %d, %g in a row: off by %g bounds", int8 ? 8 : 16,
          p->name, rows, words, kinds[0], kinds[1], odd, worst);
}

static void try_leaves(bool int8) {
    static const ptrdiff_t words[] = {0, 1, 2, 15, 16, 17, 96, 130, 300};
    static const int kinds[][2] = {{ANY, ANY}, {MOST, LEAST}, {ENDS, ENDS}, {MOST, MOST}};
    int leaves = 0;
    for (const sa_compact_unit *const *p = int8 ? sa_kernels_active()->int8 : sa_kernels_active()->bf16; *p != NULL; ++p) {
        const bool runs = sa_cpu_runs((*p)->name);
        leaves += runs;
        CHECK(runs || !int8 || p[1] != NULL, "int8: the last leaf, %s, does not run", (*p)->name);
        CHECK((*p)->most_rows <= SA_MOST_TILE_ROWS, "%s: more rows than there are sums", (*p)->name);
        for (ptrdiff_t rows = 1; runs && rows <= (*p)->most_rows; ++rows) {
            for (size_t i = 0; i < sizeof words / sizeof *words; ++i) {
                for (int kind = quick ? (int)rows % 2 : 0; int8 && kind < 4; kind += quick ? 2 : 1) {
                    try_leaf(*p, true, rows, words[i], kinds[kind], 0);
                }
                for (int odd = 0; !int8 && odd < (words[i] > 0 ? 2 : 1); ++odd) {
                    try_leaf(*p, false, rows, words[i], kinds[0], odd == 0 ? 0 : i % 2 == 0 ? (double)NAN : (double)INFINITY);
                }
            }
        }
    }
    CHECK(!int8 || (leaves > 0 && sa_compact_active(SA_WEIGHTS_INT8) != NULL), "int8 is not multiplied");
}

/* ---- rounding ------------------------------------------------------------------------------------------------------------ */

/* Rounds as the kernels must, to the bit. A row that cannot be rounded has a first scale of NaN, and zeros. */
static void round_row(const float *x, ptrdiff_t n, uint8_t *q, sa_rounded *group) {
    bool unrounded = false;
    group[0] = (sa_rounded){0, 0};
    for (ptrdiff_t from = 0; from < n; from += SA_GROUP, ++group) {
        const ptrdiff_t end = sa_smaller(n, from + SA_GROUP);
        float least = x[from], most = least;
        for (ptrdiff_t i = from; i < end; ++i) {
            unrounded = unrounded || !isfinite(x[i]);
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        const float range = fabsf(most - least), inverse = 255 / range; /* makes 0 of −0 */
        unrounded = unrounded || (range != 0 && !(range >= LEAST_RANGE && range <= MOST_RANGE));
        for (ptrdiff_t i = from; i < end; ++i) {
            q[i] = range > 0 && !unrounded ? (uint8_t)rintf((x[i] - least) * inverse) : 0;
        }
        *group = (sa_rounded){least + 0.0f, range / 255};
    }
    if (unrounded) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            q[i] = 0;
        }
        group[-groups_of(n)].scale = NAN;
    }
}

/* The kinds of rows. From OVERFLOWS on there is a special number at either end. */
enum { PLAIN_ROW, ZEROS, SIGNED_ZEROS, CONSTANT, LARGE_CONSTANT, HUGE, SMALL, TINY, SUBNORMAL, NARROW, LONE, FINITE_KINDS };
enum { OVERFLOWS = FINITE_KINDS, SPOILED_BY_SIZE, ONE_NAN, ONE_INFINITY, BOTH_INFINITIES, ALL_KINDS };

static void draw_row(float *x, ptrdiff_t n, int kind, random_source *random) {
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double t = random_between(random, -1, 1), half = random_chance(random, 0.5) ? -1 : 1;
        switch (kind) {
        case ZEROS: x[i] = 0; break;
        case SIGNED_ZEROS: x[i] = (float)copysign(0, t); break;
        case CONSTANT: x[i] = 0.37f; break;
        case LARGE_CONSTANT: x[i] = -3e34f; break;
        case HUGE: x[i] = (float)(0.5e30 * t); break;
        case SMALL: x[i] = (float)(1e-28 * t); break;
        case TINY: x[i] = (float)(1e-32 * t); break;
        case SUBNORMAL: x[i] = (float)(1e-40 * t); break;
        case NARROW: x[i] = (float)(1 + 20 * t * FLT_EPSILON); break;
        case LONE: x[i] = i == n / 3 ? -7 : 0; break;
        case OVERFLOWS: x[i] = (float)(i == 0 ? 3e38 : i == n - 1 ? -3e38 : t); break;
        case SPOILED_BY_SIZE: x[i] = (float)(1e37 * half); break;
        default: x[i] = (float)t;
        }
    }
    if (n > 0 && kind == ONE_NAN) {
        x[n / 2] = NAN;
    }
    if (n > 0 && kind >= ONE_INFINITY) {
        x[n - 1] = INFINITY;
        x[0] = kind == BOTH_INFINITIES ? -INFINITY : x[0];
    }
}

static float *draw_floats(ptrdiff_t n, random_source *random) {
    float *x = dirty_memory((size_t)n * sizeof *x);
    draw_row(x, n, PLAIN_ROW, random);
    return x;
}

static void try_rounding(ptrdiff_t n) {
    FREES_AT_END;
    random_source random = {(uint64_t)n};
    const ptrdiff_t stride = sa_ceil_div(n + 1, LINE) * LINE;
    float *x = dirty_memory((size_t)(ALL_KINDS * n) * sizeof *x);
    uint8_t *to = dirty_memory((size_t)(ALL_KINDS * stride)), *q = dirty_memory((size_t)stride);
    const ptrdiff_t groups = groups_of(n);
    sa_rounded *row = dirty_memory((size_t)(ALL_KINDS * groups) * sizeof *row);
    sa_rounded right[MOST_GROUPS];
    for (int kind = 0; kind < ALL_KINDS; ++kind) {
        draw_row(x + kind * n, n, kind, &random);
    }
    sa_kernels_active()->quantize_rows(x, ALL_KINDS, n, to, stride, row);
    for (int kind = 0; kind < ALL_KINDS; ++kind) {
        const sa_rounded *got = row + kind * groups;
        memset(q, 0, (size_t)stride);
        round_row(x + kind * n, n, q, right);
        const bool unrounded = n > 0 && isnan(right[0].scale);
        CHECK(!unrounded || isnan(got[0].scale), "a row of %td, kind %d: is rounded", n, kind);
        for (ptrdiff_t g = 0; g < groups && !unrounded; ++g) {
            CHECK(memcmp(&got[g], &right[g], sizeof *got) == 0,
                  "group %td of %td, kind %d: least %g and scale %g, not %g and %g", g, n, kind, (double)got[g].least,
                  (double)got[g].scale, (double)right[g].least, (double)right[g].scale);
        }
        CHECK(memcmp(q, to + kind * stride, (size_t)stride) == 0, "a row of %td, kind %d: wrong bytes", n, kind);
    }
}

/* ---- tables -------------------------------------------------------------------------------------------------------------- */

/* Rows that are looked up must have the bits of the same numbers in float32. */
static void try_table(ptrdiff_t d, bool int8, bool always, bool positions) {
    FREES_AT_END;
    enum { ROWS = 5, VOCABULARY = 9 };
    random_source random = {(uint64_t)d};
    int8_t *numbers = dirty_memory((size_t)(VOCABULARY * d));
    uint16_t *halves = dirty_memory((size_t)(VOCABULARY * d) * sizeof *halves);
    const ptrdiff_t groups = groups_of(d);
    float *whole = dirty_memory((size_t)(VOCABULARY * d) * sizeof *whole);
    float *scale = dirty_memory((size_t)(VOCABULARY * groups) * sizeof *scale);
    float *got = dirty_memory((size_t)(ROWS * d) * sizeof *got), *right = dirty_memory((size_t)(ROWS * d) * sizeof *right);
    static const int64_t ids[ROWS] = {8, 0, 3, 3, 7};
    for (ptrdiff_t i = 0; i < VOCABULARY * d; ++i) {
        float *own = scale + i / d * groups + i % d / SA_GROUP;
        *own = i % d % SA_GROUP == 0 ? (float)random_between(&random, 0.001, 0.01) : *own;
        numbers[i] = (int8_t)number_of(ANY, -128, 127, &random);
        halves[i] = to_bfloat16((float)random_between(&random, -1, 1));
        whole[i] = int8 ? *own * (float)numbers[i] : of_bfloat16(halves[i]);
    }
    const float *more = always ? draw_floats(d, &random) : NULL, *places = positions ? draw_floats(ROWS * d, &random) : NULL;
    const void *table = int8 ? (const void *)numbers : halves;
    sa_kernels_active()->look_up_compact(table, int8 ? scale : NULL, more, places, ids, ROWS, d, got);
    sa_kernels_active()->f32.look_up(whole, more, places, ids, ROWS, d, right);
    CHECK(memcmp(got, right, (size_t)(ROWS * d) * sizeof *got) == 0, "rows of %td looked up in %s", d,
          int8 ? "int8" : "bfloat16");
}

/* ---- products ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    sa_weights kind;
    ptrdiff_t rows, in;
    int count;
    ptrdiff_t out[SA_MOST_WEIGHTS];
    bool bias, residual, gate, in_place; /* in place: y begins as the residual, or becomes `active` */
    sa_activation activation;
    double dropout;
    bool positive; /* all weights are positive */
} product_shape;

typedef struct {
    product_shape shape;
    sa_linear l;
    sa_compact compact[SA_MOST_WEIGHTS];
    void *weight[SA_MOST_WEIGHTS];
    float *scale[SA_MOST_WEIGHTS], *bias[SA_MOST_WEIGHTS], *x, *residual, *gate;
    ptrdiff_t results; /* results of all weights, one after the other */
} product;

static void draw_weight(product *m, int which, random_source *random) {
    const product_shape *s = &m->shape;
    const ptrdiff_t n = s->out[which] * s->in;
    const double size = 1 / sqrt((double)s->in + 1);
    const ptrdiff_t scales = s->out[which] * groups_of(s->in);
    float *scale = m->scale[which] = dirty_memory((size_t)scales * sizeof *scale);
    for (ptrdiff_t c = 0; c < scales; ++c) {
        scale[c] = (float)(random_between(random, 0.5, 2) / 127 * size);
    }
    const bool int8 = s->kind == SA_WEIGHTS_INT8;
    m->weight[which] = dirty_memory((size_t)(int8 ? n : 2 * n));
    for (ptrdiff_t i = 0; i < n; ++i) {
        if (int8) {
            ((int8_t *)m->weight[which])[i] = (int8_t)number_of(ANY, s->positive ? 0 : -128, 127, random);
        } else {
            ((uint16_t *)m->weight[which])[i] = to_bfloat16((float)random_between(random, s->positive ? 0 : -size, size));
        }
    }
}

static void product_make(product *m, const product_shape *s) {
    random_source random = {(uint64_t)(s->rows * 7919 + s->in * 31 + s->out[0])};
    *m = (product){.shape = *s};
    m->l = (sa_linear){.weights = s->kind,
                       .rows = s->rows,
                       .in = s->in,
                       .count = s->count,
                       .activation = s->activation,
                       .dropout = {.p = s->dropout, .seed = 5}};
    m->x = draw_floats(s->rows * s->in, &random);
    m->l.x = (const char *)m->x;
    for (int which = 0; which < s->count; ++which) {
        const ptrdiff_t out = m->l.out[which] = s->out[which];
        draw_weight(m, which, &random);
        void *panels = dirty_memory(sa_compact_bytes(s->kind, out, s->in));
        m->compact[which] = sa_compact_fill(s->kind, out, s->in, m->weight[which], m->scale[which], panels);
        m->l.weight[which] = (const char *)&m->compact[which];
        m->bias[which] = s->bias ? draw_floats(out, &random) : NULL;
        m->l.bias[which] = (const char *)m->bias[which];
        m->results += s->rows * out;
    }
    m->residual = s->residual ? draw_floats(m->results, &random) : NULL;
    m->l.residual = (const char *)m->residual;
    m->gate = s->gate ? draw_floats(m->results, &random) : NULL;
    m->l.gate = (const char *)m->gate;
}

/* One thread takes all rows, as it does for a share of the transformer. */
static void run_by_share(const sa_linear *l) {
    FREES_AT_END;
    const sa_cut cut = sa_cut_product(l, 2, true);
    void *scratch = dirty_memory(sa_linear_scratch(l, 2, true, false));
    for (ptrdiff_t t = sa_linear_tasks(l, &cut) - 1; t >= 0; --t) {
        sa_linear_task(l, &cut, t, scratch);
    }
}

static void run_rows(const sa_linear *l, ptrdiff_t row, ptrdiff_t rows, int threads) {
    FREES_AT_END;
    sa_linear some = *l;
    some.rows = rows;
    some.dropout.first_row += row;
    some.x += row * l->in * (ptrdiff_t)sizeof(float);
    const ptrdiff_t at = row * l->out[0] * (ptrdiff_t)sizeof(float);
    some.residual = l->residual == NULL ? NULL : l->residual + at;
    some.gate = l->gate == NULL ? NULL : l->gate + at;
    some.active = l->active == NULL ? NULL : l->active + at;
    for (int which = 0; which < l->count; ++which) {
        some.y[which] += row * l->out[which] * (ptrdiff_t)sizeof(float);
    }
    void *scratch = dirty_memory((size_t)threads * sa_linear_scratch(&some, threads, false, false));
    sa_linear_forward(&some, threads, scratch);
}

/* Computes `piece` rows at a time; if piece is 0, run_by_share computes all rows. Returns the results for every weight. Checks
 * that nothing is written after them. */
static float *product_run(const product *m, ptrdiff_t piece, int threads) {
    static const unsigned char untouched[LINE] = {[0 ... LINE - 1] = 0xFF};
    const size_t bytes = (size_t)m->results * sizeof(float);
    char *results = dirty_memory(bytes + LINE), *apart = dirty_memory(bytes), *at = results;
    sa_linear l = m->l;
    for (int which = 0; which < l.count; ++which) {
        l.y[which] = at;
        at += l.rows * l.out[which] * (ptrdiff_t)sizeof(float);
    }
    if (l.activation != SA_ACT_NONE) {
        l.active = results;
        l.y[0] = m->shape.in_place ? results : apart;
    } else if (m->residual != NULL && m->shape.in_place) {
        memcpy(results, m->residual, bytes);
        l.residual = results;
    }
    if (piece == 0) {
        run_by_share(&l);
    }
    for (ptrdiff_t row = 0; piece > 0 && row < l.rows; row += piece) {
        run_rows(&l, row, sa_smaller(l.rows - row, piece), threads);
    }
    for (ptrdiff_t i = 0; i < m->results; ++i) {
        note_result(real_get(results, false, i));
    }
    CHECK(memcmp(results + bytes, untouched, LINE) == 0, "a product of %td x %td writes after its results", l.out[0], l.in);
    return (float *)(void *)results;
}

/* ---- the same in double -------------------------------------------------------------------------------------------------- */

static double active_of(sa_activation kind, double x) {
    switch (kind) {
    case SA_ACT_RELU: return x < 0 ? 0 : x;
    case SA_ACT_GELU: return 0.5 * x * (1 + erf(x / sqrt(2.0)));
    case SA_ACT_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case SA_ACT_SILU: return x / (1 + exp(-x));
    default: return x;
    }
}

static float weight_at(const product *m, int which, ptrdiff_t c, ptrdiff_t k) {
    const ptrdiff_t at = c * m->shape.in + k;
    const ptrdiff_t group = c * groups_of(m->shape.in) + k / SA_GROUP;
    return m->shape.kind == SA_WEIGHTS_INT8 ? m->scale[which][group] * (float)((const int8_t *)m->weight[which])[at]
                                            : of_bfloat16(((const uint16_t *)m->weight[which])[at]);
}

/* x·w of a rounded row plus `added`, and the error in roundings: for each group, of two products and two sums, each counted
 * twice where nothing is fused, and of its sum, its offset and the product of both scales. */
static double sum_at(const product *m, int which, ptrdiff_t r, ptrdiff_t c, const sa_rounded *row, const uint8_t *q,
                     double added, double *error) {
    const ptrdiff_t in = m->shape.in, groups = groups_of(in);
    const float *x = m->x + r * in;
    if (m->shape.kind == SA_WEIGHTS_INT8 && !isnan(row->scale)) {
        const int8_t *w = (const int8_t *)m->weight[which] + c * in;
        double y = 0, size = fabs(added);
        for (ptrdiff_t g = 0; g < groups; ++g) {
            int64_t sum = 0, weights = 0;
            for (ptrdiff_t k = g * SA_GROUP; k < sa_smaller(in, (g + 1) * SA_GROUP); ++k) {
                sum += q[k] * w[k];
                weights += w[k];
            }
            const double scale = (double)m->scale[which][c * groups + g], word = (double)row[g].scale * scale * (double)sum;
            const double offset = (double)row[g].least * scale * (double)weights;
            y += word + offset;
            size += fabs(word) + fabs(offset);
        }
        *error = (double)(4 * groups + 6) * size;
        return y;
    }
    double sum = 0, size = 0;
    for (ptrdiff_t k = 0; k < in; ++k) {
        const double t = m->shape.kind == SA_WEIGHTS_INT8 ? (double)x[k] : (double)of_bfloat16(to_bfloat16(x[k]));
        const double term = t * (double)weight_at(m, which, c, k);
        sum += term;
        size += fabs(term);
    }
    *error = (double)(in + 3) * (size + fabs(added));
    return sum;
}

/* True if a result is right; a number that is not finite in double must be the same in float32. */
static bool is_right(const product *m, int which, ptrdiff_t r, ptrdiff_t c, double got, const sa_rounded *row, const uint8_t *q,
                     double kept) {
    const product_shape *s = &m->shape;
    const ptrdiff_t at = r * s->out[which] + c;
    const double bias = m->bias[which] == NULL ? 0 : (double)m->bias[which][c];
    const double residual = m->residual == NULL ? 0 : (double)m->residual[at];
    double error, y = sum_at(m, which, r, c, row, q, fabs(bias) + fabs(residual), &error) + bias;
    error = error * U + 0x1p-126;
    if (s->activation != SA_ACT_NONE) {
        const double before = s->gate ? (double)m->gate[at] : y, factor = s->gate ? y : 1;
        const double active = active_of(s->activation, before);
        error = (s->gate ? fabs(active) : 1.2) * error + 16 * U * fabs(before) * fabs(factor);
        error += s->kind == SA_WEIGHTS_INT8 && s->activation == SA_ACT_GELU && !s->gate ? ROUGH_GELU : 0;
        y = active * factor;
    }
    y = kept == 0 ? residual : y * kept + residual;
    error = error * kept + 3 * U * (fabs(y) + fabs(residual));
    if (!isfinite(y)) {
        return isnan(y) ? isnan(got) : got == y;
    }
    return fabs(got - y) <= error;
}

static void compare(const product *m, const float *results) {
    FREES_AT_END;
    const product_shape *s = &m->shape;
    ptrdiff_t wrong = 0, first = -1;
    double kept_first = 0;
    uint8_t *q = dirty_memory((size_t)s->in + 1);
    for (int which = 0; which < s->count; ++which) {
        const ptrdiff_t out = s->out[which];
        float *kept = dirty_memory((size_t)(s->rows * out) * sizeof *kept);
        for (ptrdiff_t i = 0; i < s->rows * out; ++i) {
            kept[i] = 1;
        }
        if (s->dropout > 0) {
            sa_kernels_active()->f32.drop_rows(&m->l.dropout, kept, out, s->rows, out, NULL);
        }
        for (ptrdiff_t r = 0; r < s->rows; ++r) {
            sa_rounded row[MOST_GROUPS];
            round_row(m->x + r * s->in, s->in, q, row);
            for (ptrdiff_t c = 0; c < out; ++c) {
                const double got = (double)results[r * out + c];
                if (!is_right(m, which, r, c, got, row, q, (double)kept[r * out + c])) {
                    ++wrong;
                    first = first < 0 ? r * out + c : first;
                    kept_first = first == r * out + c ? got : kept_first;
                }
            }
        }
        results += s->rows * out;
    }
    CHECK(wrong == 0,
          "product of %d bits, %td rows of %td to %d weights of %td…, bias %d, activation %d, dropout %g: %td wrong, "
          "element %td is %g",
          s->kind == SA_WEIGHTS_INT8 ? 8 : 16, s->rows, s->in, s->count, s->out[0], s->bias, s->activation, s->dropout, wrong,
          first, kept_first);
}

/* Returns the results, which must have the same bits in any cut. */
static float *try_ways(const product *m) {
    static const struct {
        ptrdiff_t piece;
        int threads;
    } ways[] = {{PTRDIFF_MAX, 2}, {PTRDIFF_MAX, 3}, {PTRDIFF_MAX, 5}, {0, 1}, {1, 1}, {7, 2}};
    float *results = product_run(m, PTRDIFF_MAX, 1);
    compare(m, results);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; ++i) {
        float *others = product_run(m, ways[i].piece, ways[i].threads);
        CHECK(memcmp(results, others, (size_t)m->results * sizeof *results) == 0,
              "product of kind %d, %td rows of %td to %td…: way %zu differs", m->shape.kind, m->shape.rows, m->shape.in,
              m->shape.out[0], i);
    }
    return results;
}

static void try_shape(const product_shape *shape) {
    FREES_AT_END;
    product m;
    product_make(&m, shape);
    try_ways(&m);
}

static void try_product(sa_weights kind, ptrdiff_t in) {
    static const ptrdiff_t some_rows[] = {0, 1, 2, 4, 6, 13, 15, 29, 33, 64, 130, 200};
    random_source random = {(uint64_t)(in * 2 + (kind == SA_WEIGHTS_INT8))};
    product_shape s = {.kind = kind, .in = in, .count = 1 + (int)random_below(&random, SA_MOST_WEIGHTS)};
    s.rows = some_rows[random_below(&random, in > 70 ? 8 : 12)];
    for (int which = 0; which < s.count; ++which) {
        s.out[which] = random_below(&random, 101);
    }
    s.bias = random_chance(&random, 0.7);
    s.in_place = random_chance(&random, 0.5);
    if (s.count == 1) {
        s.activation = random_chance(&random, 0.5) ? 1 + (int)random_below(&random, SA_ACT_SILU) : SA_ACT_NONE;
        s.gate = s.activation != SA_ACT_NONE && random_chance(&random, 0.5);
        s.residual = s.activation == SA_ACT_NONE && random_chance(&random, 0.7);
        s.dropout = random_chance(&random, 0.3) ? 0.3 : 0;
        s.in_place = s.in_place && (s.residual ? s.dropout == 0 : true);
    }
    try_shape(&s);
}

/* Tries products without terms, without results, and with long sums. */
static void try_extremes(sa_weights kind) {
    for (int i = 0; i < 9; ++i) {
        const product_shape shape = {.kind = kind,
                                     .rows = i & 9 ? 3 : 0,
                                     .in = i == 8  ? 5000
                                           : i & 2 ? 5
                                                   : 0,
                                     .count = 1,
                                     .out = {i & 12 ? 33 : 0},
                                     .bias = true,
                                     .residual = true};
        try_shape(&shape);
    }
}

/* Tries GELU after int8 with numbers from −8 to 8 and far larger ones. They are the bias, as x is 0. */
static void try_gelu(void) {
    FREES_AT_END;
    const product_shape shape = {
        .kind = SA_WEIGHTS_INT8, .rows = 1, .in = 1, .count = 1, .out = {1602}, .bias = true, .activation = SA_ACT_GELU};
    product m;
    product_make(&m, &shape);
    m.x[0] = 0;
    for (ptrdiff_t i = 0; i < 1600; ++i) {
        m.bias[0][i] = (float)(i - 800) * 0.01f;
    }
    m.bias[0][1600] = 1e30f;
    m.bias[0][1601] = -1e30f;
    try_ways(&m);
}

/* Rows of all kinds. Special numbers must change no other row. */
static void try_odd_rows(const product_shape *shape) {
    FREES_AT_END;
    product m;
    random_source random = {3};
    product_make(&m, shape);
    const ptrdiff_t in = shape->in, out = shape->out[0];
    for (int kind = 0; kind < ALL_KINDS; ++kind) {
        draw_row(m.x + (1 + 2 * kind) * in, in, kind, &random);
    }
    float *results = try_ways(&m);
    for (int kind = 0; kind < ALL_KINDS; ++kind) {
        draw_row(m.x + (1 + 2 * kind) * in, in, PLAIN_ROW, &random);
    }
    float *others = product_run(&m, PTRDIFF_MAX, 1);
    for (ptrdiff_t r = 0; r < shape->rows; r += 2) {
        CHECK(memcmp(results + r * out, others + r * out, (size_t)out * sizeof *results) == 0,
              "product of kind %d, %td to %td: row %td changes with its neighbour", shape->kind, in, out, r);
    }
}

static void try_all_odd_rows(sa_weights kind) {
    for (int i = 0; i < 12; ++i) {
        const product_shape shape = {.kind = kind,
                                     .rows = 2 * ALL_KINDS + 1,
                                     .in = i % 3 == 0   ? 70
                                           : i % 3 == 1 ? 385
                                                        : 700,
                                     .count = 1,
                                     .out = {i % 4 < 2 ? 33 : 64},
                                     .bias = i % 3 == 0,
                                     .residual = i < 6,
                                     .in_place = i % 2 == 0,
                                     .activation = i < 8 ? SA_ACT_NONE : SA_ACT_RELU,
                                     .positive = i % 3 == 1};
        try_odd_rows(&shape);
    }
}

/* Bits must be the same wherever multiplications and sums are fused: on x86-64 and aarch64. */
static void try_bits(void) {
    FREES_AT_END;
    const char *isa = sa_isa_name();
    const product_shape shape = {
        .kind = SA_WEIGHTS_INT8, .rows = 2 * FINITE_KINDS, .in = 333, .count = 1, .out = {75}, .bias = true, .residual = true};
    product m;
    random_source random = {9};
    product_make(&m, &shape);
    for (int kind = 0; kind < FINITE_KINDS; ++kind) {
        draw_row(m.x + 2 * kind * shape.in, shape.in, kind, &random);
    }
    float *results = product_run(&m, PTRDIFF_MAX, 1);
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (ptrdiff_t i = 0; i < m.results; ++i) {
        uint32_t bits;
        memcpy(&bits, results + i, sizeof bits);
        hash = (hash ^ bits) * UINT64_C(0x100000001b3);
    }
    const bool fused = strcmp(isa, "generic") != 0 && strcmp(isa, "baseline") != 0 && strcmp(isa, "wasm") != 0;
    CHECK(hash == (fused ? UINT64_C(0xc1b1885814763ad8) : UINT64_C(0xde8f160a83bdd0ce)),
          "the bits of an int8 product are %#llx here", (unsigned long long)hash);
}

void test_compact(void) {
    try_leaves(true);
    try_leaves(false);
    static const ptrdiff_t more[] = {127, 128, 129, 255, 384, 385, 512, 513, 700, 1025};
    for (ptrdiff_t i = 0; i < 81; ++i) {
        const ptrdiff_t n = i <= 70 ? i : more[i - 71];
        try_rounding(n);
        for (int way = 0; n > 0 && way < 8; ++way) {
            try_table(n, way & 1, way & 2, way & 4);
        }
        for (int kind = SA_WEIGHTS_INT8; kind <= SA_WEIGHTS_BF16; ++kind) {
            if (sa_compact_active(kind) != NULL) {
                try_product(kind, n);
            }
        }
    }
    for (int kind = SA_WEIGHTS_INT8; kind <= SA_WEIGHTS_BF16; ++kind) {
        if (sa_compact_active(kind) != NULL) {
            try_extremes(kind);
            try_all_odd_rows(kind);
        }
    }
    try_gelu();
    try_bits();
    test_compact_models();
}
