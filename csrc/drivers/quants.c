/* Driver of weights in quants. For rows of float32 it expands some numbers of a few columns to float32, in the thread's
 * scratch, and multiplies these. Rows that are split into digits it multiplies by quants as they are
 * (kernels/products/gemv.h). */
#include "drivers/quants.h"

#include <string.h>

#include "runtime/team.h"

/* Numbers of a row that are expanded at once: a multiple of every quant's size and of matmul_nt's depth, so that bits
 * are the same as with whole rows. If operands are split, whole rows are expanded, because A stays split between
 * calls. */
#define SA_EXPANDED 512

static ptrdiff_t bytes_of(const sa_compact *w, ptrdiff_t numbers) {
    return numbers / sa_quant_kinds[w->type].numbers * sa_quant_kinds[w->type].bytes;
}

sa_compact sa_quants_at(sa_quant_type type, ptrdiff_t out, ptrdiff_t in, const void *rows) {
    sa_compact w = {.kind = SA_WEIGHTS_QUANTS, .out = out, .in = in, .type = type, .panels = rows};
    w.row_bytes = bytes_of(&w, in);
    return w;
}

void sa_quants_row(const sa_compact *w, ptrdiff_t row, float *to) {
    sa_kernels_active()->expand_quants(w->type, w->panels + row * w->row_bytes, w->in, to);
}

void sa_quants_look_up(const sa_compact *w, const float *token_type_row, const float *positions, const int64_t *ids,
                       ptrdiff_t rows, float *x) {
    const sa_real_kernels *kernels = &sa_kernels_active()->f32;
    for (ptrdiff_t r = 0; r < rows; ++r, x += w->in) {
        sa_quants_row(w, (ptrdiff_t)ids[r], x);
        if (token_type_row != NULL) {
            kernels->add_row(token_type_row, w->in, x);
        }
        if (positions != NULL) {
            kernels->add_row(positions + r * w->in, w->in, x);
        }
    }
}

static ptrdiff_t depth_of(ptrdiff_t in) {
    return in >= sa_kernels_active()->f32.splits_from ? in : sa_smaller(in, SA_EXPANDED);
}

size_t sa_quants_scratch(ptrdiff_t columns, ptrdiff_t in) {
    return sa_whole_lines((size_t)(columns * depth_of(in)) * sizeof(float));
}

void sa_quants_multiply(const sa_compact *w, ptrdiff_t column, sa_product *p, void *matmul_scratch, float *scratch) {
    const sa_real_kernels *kernels = &sa_kernels_active()->f32;
    const float *a = p->a;
    const ptrdiff_t most = depth_of(w->in);
    p->b = scratch;
    for (ptrdiff_t k = 0; k < w->in; k += most) {
        p->n = sa_smaller(w->in - k, most);
        p->a = a + k;
        p->b_stride = p->n;
        for (ptrdiff_t c = 0; c < p->width; ++c) {
            const char *from = w->panels + (column + c) * w->row_bytes + bytes_of(w, k);
            sa_kernels_active()->expand_quants(w->type, from, p->n, scratch + c * p->n);
        }
        kernels->matmul_nt(p, matmul_scratch);
    }
}

/* ---- rows as digits ---------------------------------------------------------------------------------------------- */

bool sa_quants_have_gemv(const sa_compact *w) {
    return sa_quant_kinds[w->type].numbers % SA_PIECE == 0 && sa_gemv_active() != NULL;
}

/* Transposes 4 × 4 words of two bytes: rows are numbers, from the lowest word on. */
static void transpose_words(const uint64_t rows[4], uint64_t *to, ptrdiff_t stride) {
    const uint64_t even = 0x0000ffff0000ffff, low = 0xffffffff;
    const uint64_t a = (rows[0] & even) | (rows[1] & even) << 16, b = (rows[0] >> 16 & even) | (rows[1] & ~even);
    const uint64_t c = (rows[2] & even) | (rows[3] & even) << 16, d = (rows[2] >> 16 & even) | (rows[3] & ~even);
    to[0] = (a & low) | c << 32;
    to[stride] = (b & low) | d << 32;
    to[2 * stride] = a >> 32 | (c & ~low);
    to[3 * stride] = b >> 32 | (d & ~low);
}

/* Makes the strip of a tile; missing rows are zeros. */
static void make_strip(const sa_compact *w, ptrdiff_t column, ptrdiff_t columns, char *to) {
    const char *from = w->panels + column * w->row_bytes;
    uint64_t eight[SA_GEMV_COLUMNS] = {0}; /* bytes of each row */
    for (ptrdiff_t at = 0; at < w->row_bytes; at += 8) {
        const ptrdiff_t bytes = sa_smaller(w->row_bytes - at, 8);
        for (ptrdiff_t c = 0; c < columns; ++c) {
            if (bytes == 8) {
                memcpy(&eight[c], from + c * w->row_bytes + at, 8);
            } else {
                memcpy(&eight[c], from + c * w->row_bytes + at, (size_t)bytes);
            }
        }
        uint64_t words[SA_GEMV_COLUMNS];
        for (int c = 0; c < SA_GEMV_COLUMNS; c += 4) {
            transpose_words(eight + c, words + c / 4, SA_GEMV_COLUMNS / 4);
        }
        memcpy(to, words, (size_t)(bytes * SA_GEMV_COLUMNS));
        to += bytes * SA_GEMV_COLUMNS;
    }
}

/* Tasks of a copy: threads on a CPU that Python uses too take fewer. */
#define SA_COPY_TASKS 16

typedef struct {
    const sa_copied_quants *of;
    ptrdiff_t count;
} filling;

/* Tasks write strips of their own. */
static void fill_portion(void *call, ptrdiff_t t) {
    const sa_copied_quants *of = (const sa_copied_quants *)call + t / SA_COPY_TASKS;
    const sa_portion portion = sa_portion_of(of->w->out / SA_GEMV_COLUMNS, (int)(t % SA_COPY_TASKS), SA_COPY_TASKS);
    for (ptrdiff_t c = portion.from * SA_GEMV_COLUMNS; c < portion.end * SA_GEMV_COLUMNS; c += SA_GEMV_COLUMNS) {
        make_strip(of->w, c, SA_GEMV_COLUMNS, of->strips + c * of->w->row_bytes);
    }
}

static void fill_portions(void *call, int thread, int team) {
    (void)thread;
    const filling *f = call;
    sa_take_tasks(team, f->count * SA_COPY_TASKS, fill_portion, (void *)f->of);
}

void sa_quants_fill(const sa_copied_quants *of, ptrdiff_t count, int threads) {
    sa_run_team(threads, fill_portions, &(filling){of, count});
    for (ptrdiff_t i = 0; i < count; ++i) {
        of[i].w->strips = of[i].strips;
    }
}

static size_t rows_bytes(ptrdiff_t rows, ptrdiff_t in, int digits) {
    return sa_whole_lines((size_t)(rows * (in / SA_PIECE) * sa_digits_bytes(digits)));
}

static size_t sums_bytes(ptrdiff_t rows) { return (size_t)(rows * SA_GEMV_COLUMNS) * sizeof(float); }

size_t sa_gemv_scratch(ptrdiff_t rows, ptrdiff_t in, int digits, ptrdiff_t row_bytes) {
    return rows_bytes(rows, in, digits) + SA_PANEL_BYTES + sums_bytes(rows) +
           sa_whole_lines((size_t)(SA_GEMV_COLUMNS * row_bytes));
}

sa_gemv_rows sa_gemv_split(const float *x, ptrdiff_t rows, ptrdiff_t in, int digits, bool again, void *scratch) {
    sa_gemv_rows r = {.rows = rows, .digits = digits, .x = scratch};
    r.panel = (char *)scratch + rows_bytes(rows, in, digits);
    r.sums = (void *)(r.panel + SA_PANEL_BYTES);
    r.weights = (char *)r.sums + sums_bytes(rows);
    if (!again) {
        sa_kernels_active()->split_digits(x, rows, in, digits, r.x);
    }
    r.whole = true;
    for (ptrdiff_t row = 0; row < rows; ++row) {
        r.whole = r.whole && !sa_gemv_is_unsplit(&r, row, in);
    }
    return r;
}

void sa_multiply_quants(const sa_compact *w, ptrdiff_t column, const sa_gemv_rows *r, const float *residual,
                        const sa_product *p) {
    sa_gemv_tile t = {.type = w->type,
                      .digits = r->digits,
                      .rows = r->rows,
                      .pieces = w->in / SA_PIECE,
                      .x = r->x,
                      .row_bytes = w->row_bytes,
                      .panel = r->panel,
                      .sums = r->sums};
    for (ptrdiff_t c = 0; c < p->width; c += SA_GEMV_COLUMNS) {
        const ptrdiff_t columns = sa_smaller(p->width - c, SA_GEMV_COLUMNS);
        t.weights = r->weights;
        if (w->strips != NULL && columns == SA_GEMV_COLUMNS) {
            t.weights = w->strips + (column + c) * w->row_bytes;
        } else {
            make_strip(w, column + c, columns, r->weights);
        }
        for (ptrdiff_t row = 0; row < r->rows; ++row) { /* fetches what is written, and read, after the leaf */
            __builtin_prefetch((float *)p->c + row * p->c_stride + c, 1, 2);
            if (residual != NULL) {
                __builtin_prefetch(residual + row * p->c_stride + c, 0, 2);
            }
        }
        sa_gemv_active()->leaf(&t);
        const ptrdiff_t at_once = r->whole ? r->rows : 1;
        for (ptrdiff_t row = 0; row < r->rows; row += at_once) {
            const ptrdiff_t at = row * p->c_stride + c;
            if (r->whole || !sa_gemv_is_unsplit(r, row, w->in)) {
                sa_kernels_active()->f32.begin_rows((float *)p->c + at, p->c_stride, at_once, columns,
                                                    p->bias == NULL ? NULL : (const float *)p->bias + c,
                                                    residual == NULL ? NULL : residual + at,
                                                    r->sums + row * SA_GEMV_COLUMNS);
            }
        }
    }
}
