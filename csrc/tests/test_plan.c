/* How calls are cut up: chunks of keys, threads, sizes, cancelling. */
#include <limits.h>
#include <string.h>

#include "drivers/attention.h"
#include "tests/test.h"

/* Plans for different numbers of threads differ only in `threads`. */
static void plans(void) {
    for (ptrdiff_t L = 1; L < 3000; L = L * 3 + 1) {
        for (ptrdiff_t S = 1; S < 100000; S = S * 7 + 1) {
            sa_attention a = {.L = L,
                              .S = S,
                              .E = 64,
                              .Dv = 64,
                              .n_lead = 2,
                              .lead = {2, 6},
                              .gqa = 3,
                              .window_left = SA_UNBOUNDED,
                              .window_right = SA_UNBOUNDED};
            a.key.lead_stride[0] = a.key.lead_stride[1] = a.query.lead_stride[0] = a.query.lead_stride[1] = 8;
            sa_attention_plan one = {0}, many = {0};
            CHECK(sa_attention_make_plan(&a, 1, &one) == SA_OK && sa_attention_make_plan(&a, 64, &many) == SA_OK,
                  "status");
            const int wanted = many.threads;
            many.threads = one.threads;
            CHECK(one.threads == 1 && wanted >= 1 && wanted <= 64 && wanted <= many.tasks, "threads %d", wanted);
            CHECK(memcmp(&one, &many, sizeof one) == 0, "the plan depends on the number of threads");
            CHECK(one.groups * one.group == 12 && one.group == 3, "groups %td of %td", one.groups, one.group);
            CHECK(one.tasks == one.groups * one.blocks * one.chunks && one.blocks * one.block_rows >= one.rows,
                  "tasks");
            CHECK(one.chunks * one.chunk_keys >= S && (one.chunks - 1) * one.chunk_keys < S,
                  "chunks do not cover the keys");
        }
    }
}

static void too_large(void) {
    enum { HUGE_AXES = 3 };
    const ptrdiff_t most = PTRDIFF_MAX / 2, eighth = PTRDIFF_MAX / 8, many = PTRDIFF_MAX >> 4;
    const struct {
        ptrdiff_t L, S, E, Dv, lead[HUGE_AXES];
    } sizes[] = {{most, 4, 4, 4, {1, 1, 1}},   {4, most, 4, 4, {1, 1, 1}},       {4, 4, eighth, 4, {1, 1, 1}},
                 {4, 4, 4, eighth, {1, 1, 1}}, {4, 4, 4, 4, {many, many, many}}, {many, 4, 4, 4, {many, 1, 1}}};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; ++n) {
        sa_attention a = {
            .L = sizes[n].L, .S = sizes[n].S, .E = sizes[n].E, .Dv = sizes[n].Dv, .n_lead = HUGE_AXES, .gqa = 1};
        memcpy(a.lead, sizes[n].lead, sizeof sizes[n].lead);
        sa_attention_plan plan;
        CHECK(sa_attention_make_plan(&a, 1, &plan) == SA_TOO_LARGE, "sizes %d are not too large", (int)n);
    }
    size_t product = 0;
    CHECK(sa_multiply(SIZE_MAX / 2, 2, &product) && product == SIZE_MAX - 1, "a product that just fits");
    CHECK(!sa_multiply(SIZE_MAX / 2 + 1, 2, &product), "a product that does not");
}

/* Many keys are cut into chunks. */
static void chunks(void) {
    static const ptrdiff_t keys[] = {2047, 2048, 3547};
    for (int n = 0; n < 3; ++n) {
        sa_attention a = {.L = 7, .S = keys[n], .E = 6, .Dv = 5, .n_lead = 1, .lead = {2}, .gqa = 1};
        a.query.lead_stride[0] = a.key.lead_stride[0] = a.value.lead_stride[0] = 8;
        sa_attention_plan plan = {0};
        CHECK(sa_attention_make_plan(&a, 2, &plan) == SA_OK && (plan.chunks > 1) == (keys[n] >= 2048),
              "%td keys in %td chunks", keys[n], plan.chunks);
    }
}

static int looks;
static void count_looks(sa_watch *watch) { looks += watch != NULL; }

static sa_tensor rows_of(void *data, ptrdiff_t stride) {
    return (sa_tensor){.m = {data, stride * (ptrdiff_t)sizeof(float), sizeof(float), SA_F32, false}};
}

/* Counts how often a backward call with few rows looks whether it is cancelled. */
static int looks_over(ptrdiff_t keys) {
    enum { WIDTH = 1024, ROWS = 3 };
    FREES_AT_END;
    sa_watch watch = {.poll = count_looks};
    void *row = zero_memory(WIDTH * sizeof(float)), *out = zero_memory(ROWS * WIDTH * sizeof(float));
    const size_t bytes = (size_t)keys * WIDTH * sizeof(float);
    const sa_tensor zeros = rows_of(row, 0), stats = rows_of(zero_memory(ROWS * 2 * sizeof(float)), 2);
    sa_attention a = {
        .L = ROWS, .S = keys, .E = WIDTH, .Dv = WIDTH, .gqa = 1, .scale = 1, .query = zeros, .key = zeros};
    a.window_left = a.window_right = SA_UNBOUNDED;
    a.value = zeros;
    a.out = rows_of(out, WIDTH);
    a.stats = stats;
    sa_attention_gradients g = {
        .a = &a, .grad_out = zeros, .dquery = rows_of(zero_memory(ROWS * WIDTH * sizeof(float)), WIDTH)};
    g.dkey = rows_of(zero_memory(bytes), WIDTH);
    g.dvalue = rows_of(zero_memory(bytes), WIDTH);
    sa_attention_plan plan = {0};
    sa_backward_plan back = {0};
    CHECK(sa_attention_make_plan(&a, 1, &plan) == SA_OK && sa_attention_plan_backward(&g, 1, &back) == SA_OK, "plans");
    CHECK(sa_attention_forward(&a, &plan, dirty_memory(plan.scratch_bytes), dirty_memory(plan.partial_bytes)) == SA_OK,
          "forward");
    a.watch = &watch;
    g.delta = dirty_memory((size_t)back.delta_count * sizeof(double));
    looks = 0;
    CHECK(sa_attention_backward(&g, &back, dirty_memory((size_t)back.threads * back.scratch_bytes)) == SA_OK,
          "backward");
    return looks;
}

/* Finds the first rows and keys of blocks, for tasks of `most` rows. Returns the number of blocks. */
static int find_blocks(const sa_attention *a, ptrdiff_t G, ptrdiff_t most, ptrdiff_t *first, ptrdiff_t *keys) {
    sa_stretches s = sa_find_stretches(a, G, 0);
    const ptrdiff_t rows = G * a->L;
    int count = 0;
    ptrdiff_t covered = 0;
    for (ptrdiff_t task = 0; task < rows; task += most) {
        for (ptrdiff_t from = task, key;
             (from = sa_block_begin(&s, from, most, rows, &key)) < task + most && from < rows;) {
            CHECK(from == covered, "the block from row %d on begins with row %d", (int)covered, (int)from);
            first[count] = from;
            keys[count++] = key;
            from = covered = sa_block_end(&s, from, from + most < rows ? from + most : rows);
            CHECK(from - first[count - 1] <= most, "a block of %d rows", (int)(from - first[count - 1]));
        }
    }
    CHECK(covered == rows, "%d rows of %d", (int)covered, (int)rows);
    sa_stretches known = s; /* what has been found before must not change anything */
    for (ptrdiff_t row = rows - 1; row >= 0; row -= row % 3 == 1 ? 4 : 1) {
        sa_stretches fresh = sa_find_stretches(a, G, 0);
        ptrdiff_t key, fresh_key;
        const ptrdiff_t begin = sa_block_begin(&known, row, most, rows, &key);
        CHECK(begin == sa_block_begin(&fresh, row, most, rows, &fresh_key) && key == fresh_key,
              "the block from row %d on is said to begin with row %d, key %d", (int)row, (int)begin, (int)key);
    }
    return count;
}

static void check_blocks(const char *name, const sa_attention *a, ptrdiff_t G, ptrdiff_t most, int count,
                         const ptrdiff_t *expected_first, const ptrdiff_t *expected_keys) {
    ptrdiff_t first[32], keys[32];
    const int found = find_blocks(a, G, most, first, keys);
    CHECK(found == count, "%s: %d blocks, not %d", name, found, count);
    for (int n = 0; n < found && n < count; ++n) {
        CHECK(first[n] == expected_first[n] && keys[n] == expected_keys[n], "%s: block %d is from row %d, key %d", name,
              n, (int)first[n], (int)keys[n]);
    }
}

/* Blocks must end where documents end. */
static void edges(void) {
    static const int64_t starts[] = {0, 0, 1, 2, 3}; /* class 0 sees no keys */
    static const sa_run apart[] = {{0, 3}, {3, 10}, {10, 12}}, overlapping[] = {{0, 4}, {3, 10}, {9, 12}};
    static int64_t rows[12] = {1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 3}, blocks[3] = {1, 2, 3};
    sa_block_mask mask = {.starts = starts, .runs = apart, .class_rows = 1};
    mask.classes.m = (sa_matrix){.data = (char *)rows, .row_stride = 8};
    sa_attention a = {.L = 12, .S = 12, .gqa = 1, .block_masks = &mask, .block_mask_count = 1};
    check_blocks("documents", &a, 1, 4, 5, (ptrdiff_t[]){0, 3, 7, 10, 11}, (ptrdiff_t[]){0, 3, 3, 0, 10});
    check_blocks("one block each", &a, 1, 64, 4, (ptrdiff_t[]){0, 3, 10, 11}, (ptrdiff_t[]){0, 3, 0, 10});
    check_blocks("of two heads", &a, 2, 4, 8, (ptrdiff_t[]){0, 4, 6, 10, 14, 18, 20, 22},
                 (ptrdiff_t[]){0, 0, 3, 3, 3, 3, 0, 10});
    mask.classes.m.data = (char *)blocks;
    mask.class_rows = 5;
    check_blocks("blocks of rows", &a, 1, 4, 5, (ptrdiff_t[]){0, 4, 5, 9, 10}, (ptrdiff_t[]){0, 0, 3, 3, 10});
    mask.class_rows = PTRDIFF_MAX >> 4;
    check_blocks("rows beyond the last", &a, 2, 16, 2, (ptrdiff_t[]){0, 16}, (ptrdiff_t[]){0, 0});
    mask.class_rows = 5;
    mask.runs = overlapping;
    check_blocks("keys in common", &a, 1, 4, 3, (ptrdiff_t[]){0, 4, 8}, (ptrdiff_t[]){0, 0, 0});
    mask.runs = apart;
    mask.gaps = true;
    check_blocks("gaps", &a, 1, 4, 3, (ptrdiff_t[]){0, 4, 8}, (ptrdiff_t[]){0, 0, 0});
    mask.gaps = false;
    a.n_lead = 1;
    a.lead[0] = 2;
    mask.classes.lead_stride[0] = 8;
    check_blocks("a mask of its own for each head", &a, 2, 8, 3, (ptrdiff_t[]){0, 8, 16}, (ptrdiff_t[]){0, 0, 0});
}

/* Large heads follow one another through the rows of a shared mask.
 * Small heads, or heads with key ranges, take turns. */
static void heads_that_share_a_mask(void) {
    static const struct {
        ptrdiff_t heads, L, S, width;
        bool only_turns, follow;
        ptrdiff_t row_ranges, turns;
    } t[] = {
        {8, 777, 777, 128, false, true, 1, 1},
        {8, 777, 777, 128, true, true, 8, 15},
        {3, 600, 2000, 128, false, false, 3, 3},
        /* 4 MB of keys, values and gradients */
        {8, 512, 512, 64, false, false, 8, 8},
        {8, 100, 4000, 128, false, false, 0, 0},
    };
    static char data;
    for (size_t n = 0; n < sizeof t / sizeof *t; ++n) {
        sa_attention a = {.L = t[n].L, .S = t[n].S, .E = t[n].width, .Dv = t[n].width, .n_lead = 1, .gqa = 1};
        sa_attention_gradients g = {.a = &a, .only_turns = t[n].only_turns};
        a.lead[0] = t[n].heads;
        a.query.lead_stride[0] = a.key.lead_stride[0] = a.value.lead_stride[0] = 8;
        a.mask.m = (sa_matrix){.data = &data, .dtype = SA_F32};
        g.dmask.m = (sa_matrix){.data = &data, .dtype = SA_F32, .row_stride = 4 * t[n].S, .col_stride = 4};
        sa_backward_plan plan = {.follow = !t[n].follow};
        CHECK(sa_attention_plan_backward(&g, 2, &plan) == SA_OK, "plan");
        CHECK(plan.follow == t[n].follow, "%td heads of %td×%td×%td follow: %d", t[n].heads, t[n].L, t[n].S, t[n].width,
              plan.follow);
        CHECK(t[n].turns == 0 || (plan.row_ranges == t[n].row_ranges && plan.turns == t[n].turns),
              "%td heads of %td×%td×%td: %td row ranges, %td turns", t[n].heads, t[n].L, t[n].S, t[n].width,
              plan.row_ranges, plan.turns);
    }
}

/* The call that csrc/README.md follows with numbers. */
static void worked_call(void) {
    enum { HEADS = 2, ROWS = 5, KEYS = 200, WIDTH = 64, THREADS = 2 };
    static float numbers[HEADS * KEYS * WIDTH];
    sa_attention a = {.L = ROWS, .S = KEYS, .E = WIDTH, .Dv = WIDTH, .n_lead = 1, .lead = {HEADS}, .gqa = 1};
    a.window_left = a.window_right = SA_UNBOUNDED;
    a.query = a.out = a.key = a.value = rows_of(numbers, WIDTH);
    a.query.lead_stride[0] = a.out.lead_stride[0] = ROWS * WIDTH * sizeof(float);
    a.key.lead_stride[0] = a.value.lead_stride[0] = KEYS * WIDTH * sizeof(float);
    sa_attention_plan plan = {0};
    CHECK(sa_attention_make_plan(&a, THREADS, &plan) == SA_OK, "plan");
    CHECK(plan.groups == 2 && plan.rows == 5 && plan.blocks == 1 && plan.chunks == 1 && plan.tasks == 2 &&
              plan.threads == 2,
          "%td groups of %td rows, %td blocks, %td chunks, %td tasks, %d threads", plan.groups, plan.rows, plan.blocks,
          plan.chunks, plan.tasks, plan.threads);
    const bool avx2 = strcmp(sa_isa_name(), "avx2") == 0;
    CHECK(!avx2 || (plan.block_rows == 24 && plan.scratch_bytes == 20544), "blocks of %td rows, %zu bytes of scratch",
          plan.block_rows, plan.scratch_bytes);
    a.S = 5; /* little work */
    CHECK(sa_attention_make_plan(&a, THREADS, &plan) == SA_OK && plan.tasks == 2 && plan.threads == 1, "%d threads",
          plan.threads);
    a.S = KEYS;
    a.gqa = HEADS;
    a.key.lead_stride[0] = a.value.lead_stride[0] = 0;
    CHECK(sa_attention_make_plan(&a, THREADS, &plan) == SA_OK && plan.groups == 1 && plan.rows == 10 && plan.tasks == 1,
          "%td groups of %td rows", plan.groups, plan.rows);
}

void test_plan(void) {
    worked_call();
    edges();
    heads_that_share_a_mask();
    plans();
    too_large();
    chunks();
    const int once = looks_over(2048), more = looks_over(2 * 2048 + 150);
    CHECK(more == once + 2, "%d looks over 4246 keys, %d over 2048", more, once);
}
