/* Driver of search: groups of queries, tasks of rows, and each thread's best hits, which are merged. The order of hits is total,
 * so a result does not depend on which thread had which rows. */
#include "drivers/search.h"

#include <math.h>
#include <string.h>

#include "runtime/team.h"

#define SA_SEARCH_WORK_PER_THREAD 1000000.0

/* Rows of a task: large, since each filter of rows leaves few. */
#define SA_SEARCH_TASK_ROWS ((ptrdiff_t)4096)
#define SA_TASKS_PER_THREAD 16

/* A matrix unit reads this many bytes after the last panel. */
#define SA_AFTER_PANELS 2048

typedef struct {
    float score;
    ptrdiff_t position;
} hit;

/* A query's best hits of one thread, up to k: a heap whose root is the last of them. */
typedef struct {
    ptrdiff_t count;
    hit *hits;
} best;

/* A thread's scratch. */
typedef struct {
    best best[SA_SEARCH_QUERIES];
    float least[SA_SEARCH_QUERIES], scale[SA_SEARCH_ROWS];
    _Alignas(64) float scores[SA_SEARCH_ROWS * SA_SEARCH_QUERIES];
} state;

typedef struct {
    const sa_search *s;
    const sa_kernels *kernels;
    sa_search_queries group;
    ptrdiff_t first; /* the group's first query */
    ptrdiff_t task_rows;
    int threads;
    char *scratch;
    size_t scratch_bytes;
    state *own;
} search_call;

/* What all threads read of a group; columns, rounded queries or panels follow. */
typedef struct {
    float scale[SA_SEARCH_QUERIES];
    uint32_t offset[SA_SEARCH_QUERIES];
} group_state;

/* ---- memory -------------------------------------------------------------------------------------------------------------- */

static ptrdiff_t row_bytes(const sa_search *s) {
    return s->d * (ptrdiff_t)(s->scales == NULL ? sizeof(float) : sizeof(int8_t));
}

/* An odd number of cache lines, for rows that may be widened. */
static ptrdiff_t work_stride(const sa_search *s) { return (sa_ceil_div(2 * s->d, SA_CACHE_LINE) | 1) * SA_CACHE_LINE; }

/* Rows are gathered after the state, then come copied bytes, then hits. */
static size_t gathered_bytes(const sa_search *s) { return sa_whole_lines((size_t)(SA_SEARCH_ROWS * row_bytes(s))); }
static size_t work_bytes(const sa_search *s) {
    return s->scales == NULL ? 0 : (size_t)((SA_SEARCH_ROWS + SA_MOST_TILE_ROWS) * work_stride(s));
}

bool sa_search_memory(const sa_search *s, size_t *scratch, size_t *shared) {
    size_t hits;
    if (s->d > SA_MAX_WIDTH || !sa_multiply((size_t)s->k, SA_SEARCH_QUERIES * sizeof(hit), &hits) || hits > PTRDIFF_MAX / 4) {
        return false;
    }
    *scratch = sa_whole_lines(sizeof(state)) + gathered_bytes(s) + work_bytes(s) + sa_whole_lines(hits);
    *shared = sizeof(group_state) +
              (size_t)(SA_SEARCH_QUERIES * sa_ceil_div(s->d, SA_CACHE_LINE) * SA_CACHE_LINE) * sizeof(float) + SA_AFTER_PANELS;
    return true;
}

static state *state_of(const search_call *c, int thread) {
    return (state *)(void *)(c->scratch + (size_t)thread * c->scratch_bytes);
}

/* ---- the best hits --------------------------------------------------------------------------------------------------- */

/* True if a comes before b in a result. */
static bool is_before(hit a, hit b) {
    if (a.score > b.score || a.score < b.score) {
        return a.score > b.score;
    }
    const bool a_nan = isnan(a.score), b_nan = isnan(b.score);
    return a_nan != b_nan ? b_nan : a.position < b.position;
}

/* Moves h from the root down to its place among the first n. */
static void sift_down(hit *hits, ptrdiff_t n, hit h) {
    ptrdiff_t at = 0;
    for (ptrdiff_t child; (child = 2 * at + 1) < n; at = child) {
        child += child + 1 < n && is_before(hits[child], hits[child + 1]);
        if (!is_before(h, hits[child])) {
            break;
        }
        hits[at] = hits[child];
    }
    hits[at] = h;
}

static void add_hit(best *b, ptrdiff_t k, hit h) {
    hit *hits = b->hits;
    if (b->count == k) {
        if (is_before(h, hits[0])) {
            sift_down(hits, k, h);
        }
        return;
    }
    ptrdiff_t at = b->count++;
    for (; at > 0 && is_before(hits[(at - 1) / 2], h); at = (at - 1) / 2) {
        hits[at] = hits[(at - 1) / 2];
    }
    hits[at] = h;
}

/* ---- a task ---------------------------------------------------------------------------------------------------------- */

/* Scores the rows at n ascending positions, and adds what is good enough to the best hits. */
static void score_rows(const search_call *c, const ptrdiff_t *position, ptrdiff_t n) {
    const sa_search *s = c->s;
    const ptrdiff_t bytes = row_bytes(s), count = c->group.count;
    const bool whole = position[n - 1] - position[0] == n - 1, few = count <= SA_SEARCH_FEW;
    state *own = c->own;
    char *gathered = (char *)own + sa_whole_lines(sizeof *own);
    const char *vectors = s->vectors;
    for (ptrdiff_t r = 0; r < n && !whole; ++r) {
        memcpy(gathered + r * bytes, vectors + position[r] * bytes, (size_t)bytes);
    }
    for (ptrdiff_t r = 0; r < n && s->scales != NULL; ++r) {
        own->scale[r] = s->scales[position[r]];
    }
    const sa_search_tile tile = {.queries = &c->group,
                                 .rows = n,
                                 .x = whole ? vectors + position[0] * bytes : gathered,
                                 .scale = own->scale,
                                 .far = whole,
                                 .least = own->least,
                                 .scores = own->scores,
                                 .work = gathered + gathered_bytes(s),
                                 .work_stride = work_stride(s)};
    uint64_t passing = (s->scales == NULL ? c->kernels->score_floats : c->kernels->score_bytes)(&tile);
    for (; passing != 0; passing &= passing - 1) {
        const int r = __builtin_ctzll(passing);
        for (ptrdiff_t q = 0; q < count; ++q) {
            const float score = own->scores[few ? q * SA_SEARCH_ROWS + r : r * SA_SEARCH_QUERIES + q];
            if (!(score < own->least[q])) {
                best *b = &own->best[q];
                add_hit(b, s->k, (hit){score, position[r]});
                own->least[q] = b->count == s->k ? b->hits[0].score : NAN;
            }
        }
    }
}

/* Returns the first open row from i on, or end. */
static ptrdiff_t next_open(const uint8_t *keep, ptrdiff_t i, ptrdiff_t end) {
    uint64_t eight;
    for (; keep != NULL && i + 8 <= end && (memcpy(&eight, keep + i, sizeof eight), eight == 0); i += 8) {
    }
    for (; keep != NULL && i < end && keep[i] == 0; ++i) {
    }
    return i;
}

static void run_task(void *call, ptrdiff_t t) {
    const search_call *c = call;
    const sa_search *s = c->s;
    const ptrdiff_t end = sa_smaller(s->n, (t + 1) * c->task_rows);
    ptrdiff_t position[SA_SEARCH_ROWS], n = 0;
    if (sa_stops(s->watch)) {
        return;
    }
    for (ptrdiff_t i = t * c->task_rows; (i = next_open(s->keep, i, end)) < end; ++i) {
        position[n++] = i;
        if (n == SA_SEARCH_ROWS) {
            score_rows(c, position, n);
            n = 0;
        }
    }
    if (n > 0) {
        score_rows(c, position, n);
    }
}

/* Iterations are independent: a thread adds to its own hits. */
static void run_tasks(void *call, int thread, int team) {
    search_call own = *(const search_call *)call;
    own.own = state_of(&own, thread);
    sa_share_tasks(team, sa_ceil_div(own.s->n, own.task_rows), run_task, &own);
}

/* Merges the hits of all threads for a query, and writes them from the last to the first. Iterations are independent. */
static void merge(void *call, ptrdiff_t q) {
    const search_call *c = call;
    const ptrdiff_t k = c->s->k;
    best *all = &state_of(c, 0)->best[q];
    for (int thread = 1; thread < c->threads; ++thread) {
        const best *b = &state_of(c, thread)->best[q];
        for (ptrdiff_t i = 0; i < b->count; ++i) {
            add_hit(all, k, b->hits[i]);
        }
    }
    float *scores = c->s->scores + (c->first + q) * k;
    int64_t *positions = c->s->positions + (c->first + q) * k;
    for (ptrdiff_t i = k; i-- > 0;) {
        const bool filled = i < all->count;
        const hit h = filled ? all->hits[0] : (hit){NAN, -1};
        scores[i] = h.score;
        positions[i] = h.position;
        if (filled && i > 0) {
            sift_down(all->hits, i, all->hits[i]);
        }
    }
}

static void merge_all(void *call, int thread, int team) {
    (void)thread;
    sa_share_tasks(team, ((const search_call *)call)->group.count, merge, call);
}

/* ---- queries --------------------------------------------------------------------------------------------------------- */

/* Returns the scale by which a query is rounded to 8 bits: NaN if it is not finite. */
static float scale_of(const float *x, ptrdiff_t d) {
    float most = 0, check = 0;
    for (ptrdiff_t i = 0; i < d; ++i) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        check += x[i] * 0;
    }
    return check == 0 ? most / 127 : NAN;
}

/* Prepares query q of a group, from x, in memory that has zeros. */
static void take_query(sa_search_queries *group, ptrdiff_t q, const float *x, group_state *to) {
    const ptrdiff_t d = group->d, words = sa_ceil_div(d, SA_WORD);
    char *memory = (char *)(to + 1);
    if (group->unit == NULL) {
        for (ptrdiff_t i = 0; i < d; ++i) {
            ((float *)(void *)memory)[i * group->stride + q] = x[i];
        }
        return;
    }
    const float scale = to->scale[q] = scale_of(x, d);
    char *column = memory + q / SA_PANEL_COLUMNS * words * SA_PANEL_COLUMNS * SA_WORD + q % SA_PANEL_COLUMNS * SA_WORD;
    for (ptrdiff_t i = 0; i < d && scale > 0; ++i) {
        const long number = lrint(fmin(127, fmax(-127, (double)x[i] / scale))); /* a tiny scale has few digits */
        if (group->count <= SA_SEARCH_FEW) {
            ((int16_t *)(void *)memory)[q * group->stride + i] = (int16_t)number;
        } else {
            column[i / SA_WORD * SA_PANEL_COLUMNS * SA_WORD + i % SA_WORD] = (char)number;
            to->offset[q] += 128 * (uint32_t)number;
        }
    }
}

static void take_group(search_call *c, char *shared, size_t shared_bytes) {
    const sa_search *s = c->s;
    sa_search_queries *g = &c->group;
    const float *query = s->query + c->first * s->d;
    group_state *to = (group_state *)(void *)shared;
    *g = (sa_search_queries){.count = sa_smaller(s->queries - c->first, SA_SEARCH_QUERIES),
                             .d = s->d,
                             .rows = query,
                             .columns = (const float *)(const void *)(to + 1),
                             .wide = (const int16_t *)(const void *)(to + 1),
                             .panels = (const char *)(to + 1),
                             .scale = to->scale,
                             .offset = to->offset,
                             .unit = s->scales == NULL ? NULL : sa_compact_active(SA_WEIGHTS_INT8)};
    g->stride = g->unit == NULL ? sa_ceil_div(g->count, 16) * 16 : sa_ceil_div(s->d, SA_CACHE_LINE) * SA_CACHE_LINE;
    memset(shared, 0, shared_bytes);
    for (ptrdiff_t q = 0; q < g->count && (g->unit != NULL || g->count > SA_SEARCH_FEW); ++q) {
        take_query(g, q, query + q * s->d, to);
    }
}

/* ---- a call -------------------------------------------------------------------------------------------------------------- */

ptrdiff_t sa_search_count(const uint8_t *keep, ptrdiff_t n) {
    ptrdiff_t count = 0;
    for (ptrdiff_t i = 0; i < n; ++i) {
        count += keep[i] != 0;
    }
    return count;
}

int sa_search_threads(const sa_search *s, int max_threads) {
    /* hits of all threads need less memory than twice the rows */
    const double work = (double)s->queries * (double)s->n * (double)s->d, most = 2 * (double)s->n / (double)sa_larger(s->k, 1);
    return sa_threads_for(work, SA_SEARCH_WORK_PER_THREAD, most < 1 ? 1 : most, max_threads);
}

void sa_search_run(const sa_search *s, int threads, char *scratch, char *shared) {
    size_t shared_bytes;
    search_call c = {.s = s, .kernels = sa_kernels_active(), .threads = threads, .scratch = scratch};
    sa_search_memory(s, &c.scratch_bytes, &shared_bytes);
    const ptrdiff_t tiles = sa_ceil_div(s->n, (ptrdiff_t)threads * SA_TASKS_PER_THREAD * SA_SEARCH_ROWS);
    c.task_rows = sa_smaller(tiles * SA_SEARCH_ROWS, SA_SEARCH_TASK_ROWS);
    for (; c.first < s->queries && !sa_stops(s->watch); c.first += SA_SEARCH_QUERIES) {
        take_group(&c, shared, shared_bytes);
        for (int thread = 0; thread < threads; ++thread) {
            state *own = state_of(&c, thread);
            hit *hits = (hit *)(void *)((char *)own + sa_whole_lines(sizeof *own) + gathered_bytes(s) + work_bytes(s));
            for (ptrdiff_t q = 0; q < SA_SEARCH_QUERIES; ++q) {
                own->best[q] = (best){0, hits + q * s->k};
                own->least[q] = q < c.group.count ? NAN : INFINITY;
            }
        }
        sa_run_team(threads, run_tasks, &c);
        sa_run_team(threads, merge_all, &c);
    }
}
