/* Rows that will be needed soon: fetched into the L2 while other work goes on. Hardware prefetchers stop at page ends and do
 * not see rows that lie far apart. */
typedef struct {
    const char *row;
    ptrdiff_t stride, count, bytes;
} sa_ahead;

/* bytes from `at` on; it need not be anybody's memory. */
SA_INLINE void sa_fetch(uintptr_t at, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch((const char *)at + i, 0, 2);
    }
}

/* The bytes of n elements of a row, or none where they lie apart: there would be a line for each. */
SA_INLINE ptrdiff_t sa_bytes_together(const sa_matrix *m, ptrdiff_t n) {
    return m->col_stride > 0 && m->col_stride <= (ptrdiff_t)sizeof(double) ? n * m->col_stride : 0;
}

SA_INLINE void sa_look_ahead(sa_ahead a, ptrdiff_t from, ptrdiff_t to) {
    for (ptrdiff_t r = from; r < to && r < a.count; ++r) {
        sa_fetch((uintptr_t)a.row + (uintptr_t)(r * a.stride), a.bytes);
    }
}
