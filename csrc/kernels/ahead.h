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

SA_INLINE void sa_look_ahead(sa_ahead a, ptrdiff_t from, ptrdiff_t to) {
    for (ptrdiff_t r = from; r < to && r < a.count; ++r) {
        for (ptrdiff_t i = 0; i < a.bytes; i += 64) {
            __builtin_prefetch(a.row + r * a.stride + i, 0, 2);
        }
    }
}
