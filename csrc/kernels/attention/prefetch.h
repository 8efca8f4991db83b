/* Fetches rows ahead: hardware prefetchers stop at page ends and miss rows that lie far apart. ahead.h and
 * decode/rows.h choose the rows. */

/* The lines of the bytes from `at` on, which may be nobody's. Into L1 if they come next, else L2: products fill the L1. */
SA_INLINE void sa_fetch(uintptr_t at, ptrdiff_t bytes, const bool next) {
    const uintptr_t end = at + (uintptr_t)(bytes > 0 ? bytes : 0);
    for (uintptr_t line = at / 64 * 64; line < end; line += 64) {
        if (next) {
            __builtin_prefetch((const char *)line, 0, 3);
        } else {
            __builtin_prefetch((const char *)line, 0, 2);
        }
    }
}

/* 0 where elements lie apart: each would take a line. */
SA_INLINE ptrdiff_t sa_bytes_together(const sa_matrix *m, ptrdiff_t n) {
    return m->col_stride > 0 && m->col_stride <= (ptrdiff_t)sizeof(double) ? n * m->col_stride : 0;
}

/* Row r begins at row[r] + offset, or at offset + r·stride if row is NULL. */
typedef struct {
    const char *const *row;
    uintptr_t offset;
    ptrdiff_t stride, done, count, bytes;
} sa_rows_ahead;

/* A product fetches a share between its rounds: the processor cannot keep all in flight at once. */
typedef struct {
    sa_rows_ahead rows[5];
    int now, count;
    ptrdiff_t bytes, share;
} sa_ahead;

SA_INLINE void sa_plan_ahead(sa_ahead *a, sa_rows_ahead rows) {
    if (rows.bytes > 0 && rows.count > 0) {
        a->rows[a->count++] = rows;
        a->bytes += rows.count * rows.bytes;
    }
}

/* r is a register: a store for each row would wait for the last one. */
SA_LEAF void sa_fetch_ahead(sa_ahead *a, ptrdiff_t bytes) {
    while (bytes > 0 && a->now < a->count) {
        sa_rows_ahead *rows = &a->rows[a->now];
        const ptrdiff_t count = rows->count, each = rows->bytes;
        ptrdiff_t r = rows->done;
        for (; r < count && bytes > 0; ++r, bytes -= each) {
            sa_fetch((rows->row ? (uintptr_t)rows->row[r] : (uintptr_t)(r * rows->stride)) + rows->offset, each, false);
        }
        rows->done = r;
        a->now += r == count;
    }
}

SA_INLINE void sa_look_ahead(sa_ahead *a) {
    if (a->now < a->count) {
        sa_fetch_ahead(a, a->share);
    }
}

SA_INLINE void sa_end_ahead(sa_ahead *a) {
    if (a->count > 0) {
        sa_fetch_ahead(a, a->bytes);
        a->now = a->count = 0;
        a->bytes = 0;
    }
}
