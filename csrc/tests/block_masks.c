/* Block masks for test cases: random classes of rows, random runs of keys. The reference reads plain arrays of open keys. */
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

/* Opens stretches of keys, some of them whole tiles. single: at most one stretch is open. */
static void fill_open(char *open, ptrdiff_t S, bool single, random_source *r) {
    const ptrdiff_t step = random_chance(r, 0.3) ? SA_KEYS_PER_TILE : 1;
    bool now = random_chance(r, 0.5);
    memset(open, 0, (size_t)S);
    for (ptrdiff_t j = 0; j < S && !random_chance(r, 0.02); now = !now) {
        const ptrdiff_t length = (1 + random_below(r, step > 1 ? 3 : 50)) * step, end = j + length < S ? j + length : S;
        memset(open + j, now, (size_t)(end - j));
        if (now && single) {
            return;
        }
        j = end;
    }
}

/* The last run may end beyond S, as a block that is cut off does. */
static void find_runs(test_block_mask *m, sa_block_mask *mask, ptrdiff_t S, random_source *r) {
    ptrdiff_t count = 0;
    int64_t *starts = zero_memory((size_t)(m->classes + 1) * sizeof *starts);
    sa_run *runs = zero_memory((size_t)(m->classes * S) * sizeof *runs);
    for (ptrdiff_t c = 0; c < m->classes; ++c) {
        const char *open = m->open + c * S;
        for (ptrdiff_t j = 0; j < S; ++j) {
            if (open[j] && (j == 0 || !open[j - 1])) {
                runs[count++].lo = j;
            }
            if (open[j] && (j + 1 == S || !open[j + 1])) {
                runs[count - 1].hi = j + 1 + (j + 1 == S ? random_below(r, 70) : 0);
            }
        }
        starts[c + 1] = count;
        mask->gaps |= count - starts[c] > 1;
    }
    const size_t bytes = (size_t)count * sizeof *runs;
    mask->starts = starts;
    mask->runs = memcpy(zero_memory(bytes), runs, bytes); /* allocated to the byte */
}

static void make_runs(live_case *c, test_block_mask *m, sa_block_mask *mask, bool single, random_source *r) {
    static const ptrdiff_t rows[] = {1, 1, 3, 16, 64, 70, PTRDIFF_MAX >> 4};
    array_shape shape = {.n_lead = c->call.n_lead, .cols = 1};
    memcpy(shape.lead, c->call.lead, sizeof shape.lead);
    mask->class_rows = rows[random_below(r, 7)];
    shape.rows = c->call.L / mask->class_rows + (c->call.L % mask->class_rows != 0);
    array_make(&m->array, &shape, SA_I64, 0, c->spec.scalar_broadcast, false);
    m->classes = 1 + random_below(r, 6);
    for (ptrdiff_t head = 0; head < c->heads; ++head) {
        int64_t class = random_below(r, m->classes);
        for (ptrdiff_t n = 0; n < shape.rows; ++n) {
            class = random_chance(r, 0.2) ? random_below(r, m->classes) : class;
            memcpy(array_at(&m->array, head, 1, n, 0), &class, sizeof class);
        }
    }
    m->open = zero_memory((size_t)(m->classes * c->call.S));
    for (ptrdiff_t n = 0; n < m->classes; ++n) {
        fill_open(m->open + n * c->call.S, c->call.S, single, r);
    }
    find_runs(m, mask, c->call.S, r);
    mask->classes = m->array.tensor;
}

static void make_prefix(live_case *c, test_block_mask *m, sa_block_mask *mask, random_source *r) {
    array_shape shape = {.n_lead = c->call.n_lead, .rows = 1, .cols = 1};
    memcpy(shape.lead, c->call.lead, sizeof shape.lead);
    array_make(&m->array, &shape, SA_I64, 0, c->spec.scalar_broadcast, false);
    for (ptrdiff_t head = 0; head < c->heads; ++head) {
        const int64_t prefix = random_below(r, c->call.S + 1);
        memcpy(array_at(&m->array, head, 1, 0, 0), &prefix, sizeof prefix);
    }
    mask->prefix = m->array.tensor;
    mask->diagonal = c->spec.diagonal;
}

void block_masks_make(live_case *c, random_source *r) {
    for (int kinds = c->spec.block_masks; kinds != 0; kinds &= kinds - 1) {
        const int kind = kinds & -kinds, n = c->call.block_mask_count++;
        c->block_masks[n].open_fraction = random_between(r, 0, 1); /* results must not depend on it */
        if (kind == PREFIX) {
            make_prefix(c, &c->block_tables[n], &c->block_masks[n], r);
        } else {
            make_runs(c, &c->block_tables[n], &c->block_masks[n], kind == ONE_RUN, r);
        }
    }
    c->call.block_masks = c->block_masks;
}

bool block_masks_allow(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j) {
    bool open = true;
    for (int n = 0; n < c->call.block_mask_count; ++n) {
        const test_block_mask *m = &c->block_tables[n];
        const sa_block_mask *mask = &c->block_masks[n];
        if (mask->prefix.m.data) {
            open &= j < (ptrdiff_t)array_get(&m->array, head, 1, 0, 0) || j <= i + mask->diagonal;
        } else {
            const ptrdiff_t class = (ptrdiff_t)array_get(&m->array, head, 1, i / mask->class_rows, 0);
            open &= m->open[class * c->call.S + j] != 0;
        }
    }
    return open;
}
