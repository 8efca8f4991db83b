/* Driver of search: groups of queries, tasks of rows, and each thread's best hits, which are merged. Hits have a total
 * order, so a result does not depend on which thread had which rows. */
#include "drivers/search.h"

#include <math.h>
#include <string.h>

#include "runtime/team.h"

#define SA_QUERIES_AT_ONCE 64 /* queries that meet a tile of rows while it is in a cache */
#define SA_TILE 64            /* the most rows of a tile */
#define SA_TASK_ROWS 2048
#define SA_FEW 2 /* up to this many queries of int8 are multiplied row by row, in the order of memory */
#define SA_WORDS_AT_ONCE 16
#define SA_AFTER_PANEL 2048 /* bytes after a panel that a matrix unit reads */

typedef struct {
    float score;
    size_t position;
} hit;

/* A thread's arrays. A query's hits are a heap whose root is the last of them. Few queries of int8 have 16 bits; more
 * are larger by 128 for a unit, and followed by a row of ones; zeros follow each row. */
typedef struct {
    float *scores, *scale, *query_scale; /* (SA_QUERIES_AT_ONCE, SA_TILE), (SA_TILE,), (SA_QUERIES_AT_ONCE,) */
    char *gathered, *work, *queries;     /* rows of a tile; what products need; int8 */
    uint32_t *sums; /* int8: (queries + 1, SA_PANEL_COLUMNS), and what a unit may write after them */
    hit *hits;      /* (SA_QUERIES_AT_ONCE, k) */
} arrays;

typedef struct {
    const sa_search *s;
    ptrdiff_t first, count, tile_rows; /* the queries of the group; rows of a tile */
    char *scratch;
    arrays own;
} search_call;

/* Bytes of a gathered row: whole words. */
static ptrdiff_t row_bytes(const sa_search *s) {
    return s->scales == NULL ? s->d * (ptrdiff_t)sizeof(float) : sa_ceil_div(s->d, SA_WORD) * SA_WORD;
}

/* A rounded query, which may be widened, has an odd number of cache lines. */
static ptrdiff_t query_bytes(const sa_search *s) { return (sa_ceil_div(2 * s->d, SA_CACHE_LINE) | 1) * SA_CACHE_LINE; }

/* Places a thread's arrays at base, unless it is SA_NOWHERE, and returns their bytes. */
static size_t lay_out(const sa_search *s, char *base, arrays *to) {
    const size_t rows = s->scales == NULL ? 0 : SA_QUERIES_AT_ONCE + 1 + SA_MOST_TILE_ROWS;
    const size_t panel = (size_t)row_bytes(s) * SA_PANEL_COLUMNS + SA_AFTER_PANEL;
    size_t used = 0;
#define PLACE(field, bytes)                                                                                            \
    (to->field = base == SA_NOWHERE ? NULL : (void *)(base + used), used += sa_whole_lines(bytes))
    PLACE(scores, SA_QUERIES_AT_ONCE * SA_TILE * sizeof(float));
    PLACE(scale, SA_TILE * sizeof(float));
    PLACE(gathered, (size_t)row_bytes(s) * SA_TILE);
    PLACE(work, rows > 0 ? panel : sa_kernels_active()->f32.matmul_scratch(SA_QUERIES_AT_ONCE, s->d));
    PLACE(queries, rows * (size_t)query_bytes(s));
    PLACE(query_scale, SA_QUERIES_AT_ONCE * sizeof(float));
    PLACE(sums, rows * SA_PANEL_COLUMNS * sizeof(uint32_t));
    PLACE(hits, (size_t)s->k * SA_QUERIES_AT_ONCE * sizeof(hit));
    return used;
}

size_t sa_search_scratch(const sa_search *s) {
    return s->d <= SA_MAX_WIDTH / 64 && s->k <= SA_MAX_LENGTH / 1024 ? lay_out(s, SA_NOWHERE, &(arrays){0}) : SIZE_MAX;
}

/* True if a comes before b in a result. */
static bool is_before(hit a, hit b) {
    const bool a_nan = isnan(a.score), b_nan = isnan(b.score);
    return a.score > b.score || (!(a.score < b.score) && (a_nan != b_nan ? b_nan : a.position < b.position));
}

/* Replaces the root of a heap of n by h, if h is before it; h then moves down to its place. */
static void add_hit(hit *hits, ptrdiff_t n, hit h) {
    ptrdiff_t at = 0, child;
    if (!is_before(h, hits[0])) {
        return;
    }
    for (; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && is_before(hits[child], hits[child + 1]);
        if (!is_before(h, hits[child])) {
            break;
        }
        hits[at] = hits[child];
    }
    hits[at] = h;
}

/* Adds a query's n scores of a tile, unless all are below its last hit. NaN are not below. */
static void add_scores(const float *scores, const ptrdiff_t *position, ptrdiff_t n, hit *hits, ptrdiff_t k) {
    const float least = hits[0].score;
    int some = 0;
    for (ptrdiff_t r = 0; r < n; ++r) {
        some |= !(scores[r] < least);
    }
    for (ptrdiff_t r = 0; r < n && some; ++r) {
        add_hit(hits, k, (hit){scores[r], (size_t)position[r]});
    }
}

/* Multiplies n rows of int8, (n, words of four), by queries and by ones. Words move as float32 do. */
static void multiply_panel(const search_call *c, const char *x, ptrdiff_t n, bool far) {
    const sa_compact_unit *unit = sa_compact_active(SA_WEIGHTS_INT8);
    const ptrdiff_t all = c->count + 1, words = row_bytes(c->s) / SA_WORD, stride = query_bytes(c->s);
    for (ptrdiff_t k = 0; k < words; k += SA_WORDS_AT_ONCE) { /* fetches some of the next rows, and copies some words */
        for (ptrdiff_t i = k * n; i < (k + SA_WORDS_AT_ONCE) * n && far; i += SA_CACHE_LINE / SA_WORD) {
            __builtin_prefetch(x + (n * words + i) * SA_WORD, 0, 2);
        }
        float *panel = (float *)(void *)c->own.work + k * SA_PANEL_COLUMNS;
        const ptrdiff_t depth = sa_smaller(words - k, SA_WORDS_AT_ONCE);
        sa_kernels_active()->fill_panel_transposed((const float *)(const void *)x + k, words, depth, n, panel,
                                                   SA_PANEL_COLUMNS);
    }
    if (unit->start != NULL) {
        unit->start();
    }
    for (ptrdiff_t q = 0; q < all; q += unit->most_rows) {
        unit->leaf(&(sa_compact_tile){sa_smaller(all - q, unit->most_rows), words, c->own.queries + q * stride, stride,
                                      c->own.work, c->own.sums + q * SA_PANEL_COLUMNS});
    }
    if (unit->end != NULL) {
        unit->end();
    }
}

/* Scores n rows of int8: exact sums modulo 2^32, as float32 times the product of both scales. */
static void score_bytes(const search_call *c, const char *x, ptrdiff_t n, bool far) {
    const ptrdiff_t words = row_bytes(c->s) / SA_WORD, stride = query_bytes(c->s);
    uint32_t *ones = c->own.sums + c->count * SA_PANEL_COLUMNS;
    if (c->count > SA_FEW) {
        multiply_panel(c, x, n, far);
    } else {
        memset(ones, 0, (size_t)n * sizeof *ones);
    }
    for (ptrdiff_t q = 0; q < c->count && c->count <= SA_FEW; ++q) {
        sa_kernels_active()->dot_bytes((const int8_t *)x, words * SA_WORD, n, c->s->d,
                                       (const int16_t *)(const void *)(c->own.queries + q * stride),
                                       c->own.sums + q * SA_PANEL_COLUMNS);
    }
    for (ptrdiff_t q = 0; q < c->count; ++q) {
        for (ptrdiff_t r = 0; r < n; ++r) {
            const float sum = (float)(int32_t)(c->own.sums[q * SA_PANEL_COLUMNS + r] - 128 * ones[r]);
            c->own.scores[q * SA_TILE + r] = sum * (c->own.query_scale[q] * c->own.scale[r]);
        }
    }
}

/* Scores the rows at n ascending positions. */
static void score_rows(const search_call *c, const ptrdiff_t *position, ptrdiff_t n) {
    const sa_search *s = c->s;
    const ptrdiff_t whole_words = row_bytes(s), bytes = s->scales == NULL ? whole_words : s->d;
    const char *x = s->vectors + position[0] * bytes;
    const bool in_place = position[n - 1] - position[0] == n - 1 && bytes == whole_words && (uintptr_t)x % SA_WORD == 0;
    for (ptrdiff_t r = 0; r < n && !in_place; ++r) {
        memcpy(c->own.gathered + r * whole_words, s->vectors + position[r] * bytes, (size_t)bytes);
    }
    x = in_place ? x : c->own.gathered;
    if (s->scales == NULL) {
        const float *query = s->query + c->first * s->d;
        sa_kernels_active()->matmul_nt(
            &(sa_product){c->count, s->d, n, query, x, c->own.scores, s->d, s->d, SA_TILE, .far = in_place},
            c->own.work);
    } else {
        for (ptrdiff_t r = 0; r < n; ++r) {
            c->own.scale[r] = s->scales[position[r]];
        }
        score_bytes(c, x, n, in_place);
    }
    for (ptrdiff_t q = 0; q < c->count; ++q) {
        add_scores(c->own.scores + q * SA_TILE, position, n, c->own.hits + q * s->k, s->k);
    }
}

static void run_task(void *call, ptrdiff_t t) {
    const search_call *c = call;
    const uint8_t *keep = c->s->keep;
    const ptrdiff_t end = sa_stops(c->s->watch) ? 0 : sa_smaller(c->s->n, (t + 1) * SA_TASK_ROWS);
    const ptrdiff_t bytes = c->s->scales == NULL ? row_bytes(c->s) : c->s->d, fetched = keep == NULL ? 0 : bytes;
    ptrdiff_t position[SA_TILE], n = 0;
    for (ptrdiff_t i = t * SA_TASK_ROWS; i < end; ++i) {
        uint64_t eight = 1;
        if (keep != NULL && end - i >= (ptrdiff_t)sizeof eight) {
            memcpy(&eight, keep + i, sizeof eight);
        }
        if (eight == 0) {
            i += 7; /* no row of eight is open */
        } else if (keep == NULL || keep[i] != 0) {
            for (ptrdiff_t line = 0; line < fetched; line += SA_CACHE_LINE) {
                __builtin_prefetch(c->s->vectors + i * bytes + line);
            }
            position[n++] = i;
        }
        if (n == c->tile_rows || (n > 0 && i == end - 1)) {
            score_rows(c, position, n);
            n = 0;
        }
    }
}

/* Rounds a group's queries to int8. The scale of one that is not finite is NaN. */
static void round_queries(const search_call *c) {
    const bool few = c->count <= SA_FEW;
    const ptrdiff_t d = c->s->d, size = few || sa_compact_active(SA_WEIGHTS_INT8)->widened ? 2 : 1;
    char *row = memset(c->own.queries, 0, (size_t)((c->count + 1) * query_bytes(c->s)));
    for (ptrdiff_t q = 0; q < c->count; ++q, row += query_bytes(c->s)) {
        const float *x = c->s->query + (c->first + q) * d;
        float most = 0, check = 0;
        for (ptrdiff_t i = 0; i < d; ++i) {
            most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
            check += x[i] * 0;
        }
        const float scale = c->own.query_scale[q] = check == 0 ? most / 127 : NAN;
        for (ptrdiff_t i = 0; i < d; ++i) { /* a tiny scale has few digits */
            const double exact = scale > 0 ? fmin(127, fmax(-127, (double)x[i] / scale)) : 0;
            const int16_t number = (int16_t)(lrint(exact) + (few ? 0 : 128));
            memcpy(row + size * i, &number, (size_t)size); /* the lower byte comes first */
        }
    }
    for (ptrdiff_t i = 0; i < d && !few; ++i) {
        row[size * i] = 1;
    }
}

/* Iterations are independent: a thread adds to its own hits. */
static void run_tasks(void *call, int thread, int team) {
    search_call c = *(const search_call *)call;
    lay_out(c.s, c.scratch + (size_t)thread * sa_search_scratch(c.s), &c.own);
    if (c.s->scales != NULL) {
        round_queries(&c);
    }
    sa_take_tasks(team, sa_ceil_div(c.s->n, SA_TASK_ROWS), run_task, &c);
}

void sa_search_run(const sa_search *s, char *scratch) {
    const ptrdiff_t k = s->k;
    search_call c = {.s = s, .scratch = scratch};
    arrays all, other;
    c.tile_rows = s->scales == NULL ? sa_kernels_active()->f32.block_rows : SA_PANEL_COLUMNS;
    for (; c.first < s->queries && !sa_stops(s->watch); c.first += SA_QUERIES_AT_ONCE) {
        c.count = sa_smaller(s->queries - c.first, SA_QUERIES_AT_ONCE);
        for (int thread = 0; thread < s->threads; ++thread) {
            lay_out(s, scratch + (size_t)thread * sa_search_scratch(s), &other);
            /* NaN of the largest position: after all others. */
            memset(other.hits, 0xff, (size_t)(c.count * k) * sizeof(hit));
        }
        sa_run_team(s->threads, run_tasks, &c);
        lay_out(s, scratch, &all);
        for (int thread = 1; thread < s->threads; ++thread) {
            lay_out(s, scratch + (size_t)thread * sa_search_scratch(s), &other);
            for (ptrdiff_t i = 0; i < c.count * k; ++i) {
                add_hit(all.hits + i / k * k, k, other.hits[i]);
            }
        }
        for (ptrdiff_t i = c.count * k; i-- > 0;) { /* the last hit of each query comes first */
            hit *hits = all.hits + i / k * k;
            s->scores[c.first * k + i] = hits[0].score;
            s->positions[c.first * k + i] = (int64_t)hits[0].position;
            add_hit(hits, i % k, hits[i % k]);
        }
    }
}
