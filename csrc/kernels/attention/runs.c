/* Finds the next tile of keys where block masks leave gaps. */
#include "kernels/kernels.h"

const sa_run *sa_find_run(const sa_run *runs, const sa_run *end, ptrdiff_t key) {
    while (runs < end) {
        const sa_run *middle = runs + (end - runs) / 2;
        if (middle->hi > key) {
            end = middle;
        } else {
            runs = middle + 1;
        }
    }
    return runs;
}

int sa_same_runs(const sa_rows *rows, int r) {
    int to = r + 1;
    for (; to < rows->count; ++to) {
        for (int m = 0; m < rows->gaps; ++m) {
            if (rows->runs[m][to] != rows->runs[m][r] || rows->runs_end[m][to] != rows->runs_end[m][r]) {
                return to;
            }
        }
    }
    return to;
}

/* The first key from `key` on that every list of row r has, or `none`. */
static ptrdiff_t next_open(const sa_rows *rows, int r, ptrdiff_t key, ptrdiff_t none) {
    for (int agreed = 0, m = 0; agreed < rows->gaps; m = (m + 1) % rows->gaps) {
        const sa_run *end = rows->runs_end[m][r], *run = sa_find_run(rows->runs[m][r], end, key);
        if (run == end || run->lo >= none) {
            return none;
        }
        agreed = run->lo > key ? 1 : agreed + 1;
        key = run->lo > key ? (ptrdiff_t)run->lo : key;
    }
    return key;
}

/* Returns a key from which on all keys of row r are closed, up to limit − 1. */
static ptrdiff_t last_open(const sa_rows *rows, int r, ptrdiff_t limit) {
    ptrdiff_t last = limit;
    for (int m = 0; m < rows->gaps; ++m) {
        const sa_run *first = rows->runs[m][r], *run = sa_find_run(first, rows->runs_end[m][r], limit - 1);
        if (run == rows->runs_end[m][r] || run->lo >= limit) { /* key limit − 1 is closed */
            const ptrdiff_t before = run > first ? (ptrdiff_t)run[-1].hi : 0;
            last = before < last ? before : last;
        }
    }
    return last;
}

ptrdiff_t sa_next_open_tile(const sa_block *b, ptrdiff_t from, ptrdiff_t *n) {
    const sa_rows *rows = b->rows;
    ptrdiff_t first = b->end, last = 0;
    for (int r = 0; r < rows->count && first > from; r = sa_same_runs(rows, r)) {
        const ptrdiff_t own = next_open(rows, r, from, first);
        first = own < first ? own : first;
    }
    if (first >= b->end) {
        return b->end;
    }
    first = first / 4 * 4;
    const ptrdiff_t limit = b->end - first < SA_KEYS_PER_TILE ? b->end : first + SA_KEYS_PER_TILE;
    for (int r = 0; r < rows->count && last < limit; r = sa_same_runs(rows, r)) {
        const ptrdiff_t own = last_open(rows, r, limit);
        last = own > last ? own : last;
    }
    *n = last < limit ? (last - first + 3) / 4 * 4 : limit - first;
    *n = *n < limit - first ? *n : limit - first;
    return first;
}
