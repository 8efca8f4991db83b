/* Rows that will be needed soon: fetched into the L2 while other work goes on. Hardware prefetchers stop at page ends and do
 * not see rows that lie far apart. */
typedef struct {
    const char *row;
    ptrdiff_t stride, count, bytes;
} sa_ahead;

SA_INLINE void sa_look_ahead(sa_ahead a, ptrdiff_t from, ptrdiff_t to) {
    for (ptrdiff_t r = from; r < to && r < a.count; ++r) {
        for (ptrdiff_t i = 0; i < a.bytes; i += 64) {
            __builtin_prefetch(a.row + r * a.stride + i, 0, 2);
        }
    }
}
