/* Fetches rows ahead, because hardware prefetchers stop at page ends and miss rows that are far apart. Attention's
 * passes plan their rows here; decode/rows.h plans its own. */
#include "kernels/kernels.h"
#include "simd/macros.h"

/* Fetches the lines of the bytes from `at` on, which need not be valid memory: into L1 if they are used next, else into
 * L2, because products fill the L1. */
enum { SA_TO_L2, SA_TO_L1 };
SA_INLINE void sa_fetch(uintptr_t at, ptrdiff_t bytes, const int level) {
    const uintptr_t end = at + (uintptr_t)SA_LARGER(bytes, 0);
    for (uintptr_t line = at / 64 * 64; line < end; line += 64) {
        if (level == SA_TO_L1) {
            __builtin_prefetch((const char *)line, 0, 3);
        } else {
            __builtin_prefetch((const char *)line, 0, 2);
        }
    }
}

/* The bytes of n elements of a row; 0 if there are gaps between them, as each would need a line. */
SA_INLINE ptrdiff_t sa_bytes_together(const sa_matrix *m, ptrdiff_t n) {
    return m->col_stride > 0 && m->col_stride <= (ptrdiff_t)sizeof(double) ? n * m->col_stride : 0;
}

/* Row r begins at row[r] + offset, or at offset + r·stride if row is NULL. */
typedef struct {
    const char *const *row;
    uintptr_t offset;
    ptrdiff_t stride, done, count, bytes;
} sa_rows_ahead;

/* A product fetches `each` bytes between two rounds, because the processor cannot fetch all rows at once. */
typedef struct {
    sa_rows_ahead rows[5];
    int now, count;
    ptrdiff_t bytes, each;
} sa_ahead;

SA_INLINE void sa_plan_ahead(sa_ahead *a, sa_rows_ahead rows) {
    if (rows.bytes > 0 && rows.count > 0) {
        a->rows[a->count++] = rows;
        a->bytes += rows.count * rows.bytes;
    }
}

/* r is in a register: storing it for each row would make each store wait for the last one. */
SA_LEAF void sa_fetch_ahead(sa_ahead *a, ptrdiff_t bytes) {
    while (bytes > 0 && a->now < a->count) {
        sa_rows_ahead *rows = &a->rows[a->now];
        const ptrdiff_t count = rows->count, each = rows->bytes;
        ptrdiff_t r = rows->done;
        for (; r < count && bytes > 0; ++r, bytes -= each) {
            sa_fetch((rows->row ? (uintptr_t)rows->row[r] : (uintptr_t)(r * rows->stride)) + rows->offset, each,
                     SA_TO_L2);
        }
        rows->done = r;
        a->now += r == count;
    }
}

SA_INLINE void sa_fetch_next(sa_ahead *a) {
    if (a->now < a->count) {
        sa_fetch_ahead(a, a->each);
    }
}

SA_INLINE void sa_fetch_rest(sa_ahead *a) {
    if (a->count > 0) {
        sa_fetch_ahead(a, a->bytes);
        a->now = a->count = 0;
        a->bytes = 0;
    }
}

/* ---- what is fetched --------------------------------------------------------------------------------------------- */

/* Keys and values of at least this many bytes are fetched a tile ahead; with b->fetches, all are. */
#define SA_FAR_HEAD_BYTES ((ptrdiff_t)12 << 20)

/* Plans the rows of m for the tile of keys from `first` on. */
SA_ONCE void sa_plan_tile(const sa_block *b, sa_ahead *ahead, const sa_matrix *m, ptrdiff_t width, ptrdiff_t first) {
    const ptrdiff_t bytes = sa_bytes_together(m, width),
                    to = b->end - first < SA_KEYS_PER_TILE ? b->end : first + SA_KEYS_PER_TILE;
    if (bytes == 0 || (!b->fetches && b->end - b->begin < SA_FAR_HEAD_BYTES / 2 / bytes)) {
        return;
    }
    sa_plan_ahead(ahead, (sa_rows_ahead){.offset = (uintptr_t)m->data + (uintptr_t)(first * m->row_stride),
                                         .stride = m->row_stride,
                                         .count = to - first,
                                         .bytes = bytes});
}

/* Plans n elements, `bytes` after the beginning of each row of a mask or of its gradient. */
SA_ONCE void sa_plan_mask_fetch(const char *const *row, int count, sa_ahead *ahead, const sa_matrix *m, ptrdiff_t bytes,
                                ptrdiff_t n) {
    sa_plan_ahead(ahead, (sa_rows_ahead){
                             .row = row, .offset = (uintptr_t)bytes, .count = count, .bytes = sa_bytes_together(m, n)});
}

/* Plans, evenly over the tiles, the rows to write, the next block's queries and the next head's first keys. */
SA_ONCE void sa_plan_next_block(const sa_block *b, sa_ahead *ahead, ptrdiff_t first) {
    if (b->ahead == 0) {
        return;
    }
    const sa_rows *rows = b->rows;
    const ptrdiff_t tiles = SA_CEIL_DIV(b->end - b->begin, SA_KEYS_PER_TILE);
    const ptrdiff_t tile = (first - b->begin) / SA_KEYS_PER_TILE, each = SA_CEIL_DIV(rows->count, tiles),
                    at = tile * each;
    if (at < rows->count) {
        const ptrdiff_t count = SA_SMALLER(rows->count - at, each);
        sa_plan_ahead(ahead, (sa_rows_ahead){.row = rows->query + at,
                                             .offset = (uintptr_t)b->ahead,
                                             .count = count,
                                             .bytes = sa_bytes_together(&b->a->query.m, b->a->E)});
        sa_plan_ahead(ahead, (sa_rows_ahead){.row = (const char *const *)rows->out + at,
                                             .count = count,
                                             .bytes = sa_bytes_together(&b->a->out.m, b->a->Dv)});
    }
    const ptrdiff_t keys = b->keys_ahead == 0 ? 0 : SA_SMALLER(b->a->S, SA_KEYS_PER_TILE);
    const ptrdiff_t keys_each = SA_CEIL_DIV(keys, tiles), key = tile * keys_each;
    sa_plan_ahead(
        ahead, (sa_rows_ahead){.offset = (uintptr_t)b->key.data + (uintptr_t)(b->keys_ahead + key * b->key.row_stride),
                               .stride = b->key.row_stride,
                               .count = SA_SMALLER(keys - key, keys_each),
                               .bytes = sa_bytes_together(&b->key, b->a->E)});
}
