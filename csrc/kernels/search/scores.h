/* Scores of search: dot products of the rows of a tile with a group of queries. Of float32 a score is a sum in the order of
 * matmul_nt, whatever the number of queries. Of int8 it is an exact integer sum, converted to float32 and multiplied by the
 * product of the two scales. NaN and infinities follow from the arithmetic; a NaN passes every `least`. */

/* Returns a bit for each row of a tile with a score that is not below its query's least. */
SA_ONCE uint64_t FN(passing)(const sa_search_tile *t) {
    const ptrdiff_t count = t->queries->count;
    uint64_t bits = 0;
    if (count <= SA_SEARCH_FEW) {
        for (ptrdiff_t q = 0; q < count; ++q) {
            for (ptrdiff_t r = 0; r < t->rows; ++r) {
                bits |= (uint64_t)!(t->scores[q * SA_SEARCH_ROWS + r] < t->least[q]) << r;
            }
        }
        return bits;
    }
    for (ptrdiff_t r = 0; r < t->rows; ++r) {
        for (ptrdiff_t q = 0; q < count && !(bits >> r & 1); q += SA_LANES) {
            const vec scores = FN(load_up_to)(t->scores + r * SA_SEARCH_QUERIES + q, count - q);
            bits |= (uint64_t)V(any)(V(not_lt)(scores, V(load)(t->least + q))) << r;
        }
    }
    return bits;
}

#define SA_ROWS_AT_ONCE 24
SA_KERNEL uint64_t FN(score_floats)(const sa_search_tile *t) {
    const sa_search_queries *q = t->queries;
    const ptrdiff_t d = q->d;
    const real *x = t->x;
    if (q->count <= SA_SEARCH_FEW) {
        memset(t->scores, 0, (size_t)q->count * SA_SEARCH_ROWS * sizeof(real));
        FN(matmul_nt)(&(sa_product){.m = q->count,
                                    .n = d,
                                    .width = t->rows,
                                    .a = q->rows,
                                    .b = x,
                                    .c = t->scores,
                                    .a_stride = d,
                                    .b_stride = d,
                                    .c_stride = SA_SEARCH_ROWS,
                                    .far = t->far},
                      NULL);
        return FN(passing)(t);
    }
    memset(t->scores, 0, (size_t)t->rows * SA_SEARCH_QUERIES * sizeof(real));
    for (ptrdiff_t k = 0; k < d; k += SA_PANEL_DEPTH) {
        const ptrdiff_t depth = d - k < SA_PANEL_DEPTH ? d - k : SA_PANEL_DEPTH;
        for (ptrdiff_t r = 0; r < t->rows; r += SA_ROWS_AT_ONCE) {
            const ptrdiff_t rows = t->rows - r < SA_ROWS_AT_ONCE ? t->rows - r : SA_ROWS_AT_ONCE;
            FN(outer)(x + r * d + k, d, q->columns + k * q->stride, q->stride, depth, rows, t->scores + r * SA_SEARCH_QUERIES,
                      SA_SEARCH_QUERIES, q->count);
        }
    }
    return FN(passing)(t);
}
#undef SA_ROWS_AT_ONCE

/* Σ x·y, n products modulo 2^32; zeros follow y. */
SA_INLINE int32_t FN(sum_of_bytes)(const int8_t *x, const int16_t *y, ptrdiff_t n) {
    enum { WIDTH = 2 * SA_U32_LANES };
    vu32 sum = vu32_set1(0);
    ptrdiff_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        sum = vu32_dot(sum, x + i, y + i);
    }
    if (i < n) { /* nothing after the last row may be read */
        int8_t last[WIDTH] = {0};
        memcpy(last, x + i, (size_t)(n - i));
        sum = vu32_dot(sum, last, y + i);
    }
    uint32_t each[SA_U32_LANES], all = 0;
    vu32_store(each, sum);
    for (int lane = 0; lane < SA_U32_LANES; ++lane) {
        all += each[lane];
    }
    return (int32_t)all;
}

/* Copies rows to work as unsigned numbers, larger by 128, that a unit takes; zeros fill each row. */
SA_ONCE void FN(copy_bytes)(const sa_search_tile *t) {
    const ptrdiff_t d = t->queries->d;
    const uint8_t *x = t->x;
    for (ptrdiff_t r = 0; r < t->rows; ++r, x += d) {
        char *to = t->work + r * t->work_stride;
        const ptrdiff_t bytes = t->queries->unit->widened ? 2 * d : d;
        if (t->queries->unit->widened) {
            int16_t *wide = (int16_t *)(void *)to;
            for (ptrdiff_t i = 0; i < d; ++i) {
                wide[i] = x[i] ^ 0x80;
            }
        } else {
            for (ptrdiff_t i = 0; i < d; ++i) {
                to[i] = (char)(x[i] ^ 0x80);
            }
        }
        memset(to + bytes, 0, (size_t)(t->work_stride - bytes));
    }
}

SA_KERNEL uint64_t FN(score_bytes)(const sa_search_tile *t) {
    const sa_search_queries *q = t->queries;
    const sa_compact_unit *unit = q->unit;
    const int8_t *x = t->x;
    if (q->count <= SA_SEARCH_FEW) {
        for (ptrdiff_t r = 0; r < t->rows; ++r) {
            for (ptrdiff_t i = 0; i < q->count; ++i) {
                const int32_t sum = FN(sum_of_bytes)(x + r * q->d, q->wide + i * q->stride, q->d);
                t->scores[i * SA_SEARCH_ROWS + r] = (real)sum * (q->scale[i] * t->scale[r]);
            }
        }
        return FN(passing)(t);
    }
    FN(copy_bytes)(t);
    const ptrdiff_t words = (q->d + SA_WORD - 1) / SA_WORD, tiles = (t->rows + unit->most_rows - 1) / unit->most_rows;
    if (unit->start != NULL) {
        unit->start();
    }
    for (ptrdiff_t tile = 0; tile < tiles; ++tile) {
        const ptrdiff_t first = t->rows * tile / tiles, end = t->rows * (tile + 1) / tiles;
        for (ptrdiff_t c = 0; c < q->count; c += SA_PANEL_COLUMNS) {
            uint32_t sums[SA_MOST_TILE_ROWS * SA_PANEL_COLUMNS] __attribute__((aligned(64)));
            unit->leaf(&(sa_compact_tile){.rows = end - first,
                                          .words = words,
                                          .x = t->work + first * t->work_stride,
                                          .stride = t->work_stride,
                                          .panel = q->panels + c * words * SA_WORD,
                                          .sums = sums});
            for (ptrdiff_t r = first; r < end; ++r) {
                float *to = t->scores + r * SA_SEARCH_QUERIES + c;
                const uint32_t *sum = sums + (r - first) * SA_PANEL_COLUMNS;
                for (int i = 0; i < SA_PANEL_COLUMNS; ++i) {
                    to[i] = (real)(int32_t)(sum[i] - q->offset[c + i]) * (q->scale[c + i] * t->scale[r]);
                }
            }
        }
    }
    if (unit->end != NULL) {
        unit->end();
    }
    return FN(passing)(t);
}
