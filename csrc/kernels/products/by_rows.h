/* A tile of compact products has a leaf for each number of rows: accumulators are registers only if that is a
 * literal. */
#include "kernels/kernels.h"
#include "simd/macros.h"

/* name(t) calls tile(t, t->rows), with a literal for each number of rows that `each` lists. */
#define SA_BY_ROWS(name, tile, each)                                                                                   \
    each(SA_ROWS_LEAF, name, tile) static void name(const sa_compact_tile *t) {                                        \
        static sa_compact_leaf *const leaf[] = {each(SA_ROWS_ENTRY, name, tile)};                                      \
        leaf[t->rows](t);                                                                                              \
    }
#define SA_ROWS_LEAF(n, name, tile)                                                                                    \
    SA_LEAF void name##n(const sa_compact_tile *t) { tile(t, n); }
#define SA_ROWS_ENTRY(n, name, tile) [n] = name##n,

#define SA_UP_TO_6(X, ...)                                                                                             \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#define SA_UP_TO_8(X, ...) SA_UP_TO_6(X, __VA_ARGS__) X(7, __VA_ARGS__) X(8, __VA_ARGS__)
#define SA_UP_TO_14(X, ...)                                                                                            \
    SA_UP_TO_8(X, __VA_ARGS__)                                                                                         \
    X(9, __VA_ARGS__) X(10, __VA_ARGS__) X(11, __VA_ARGS__) X(12, __VA_ARGS__) X(13, __VA_ARGS__) X(14, __VA_ARGS__)

/* Defines name(t, c, rows), which adds up a word of a row times a word of each column: two vectors of sums for each
 * row, from column c of the panel on. `vector` has the verbs prefix_zero, prefix_load, prefix_store and prefix_word,
 * which copies a word to each lane; add(sum, word, columns) multiplies. The panel is fetched `ahead` bytes ahead; 0 if
 * it is in L1. */
#define SA_WORDS_TILE(name, vector, prefix, add, most_rows, ahead)                                                     \
    SA_INLINE void name(const sa_compact_tile *t, ptrdiff_t c, const int rows) {                                       \
        const char *x = t->x, *panel = t->panel + c * SA_WORD;                                                         \
        vector sum[most_rows][2];                                                                                      \
        SA_UNROLL                                                                                                      \
        for (int r = 0; r < rows; ++r) {                                                                               \
            sum[r][0] = sum[r][1] = prefix##_zero();                                                                   \
        }                                                                                                              \
        for (ptrdiff_t k = 0; k < t->words; ++k, x += SA_WORD, panel += SA_PANEL_COLUMNS * SA_WORD) {                  \
            const vector left = prefix##_load(panel), right = prefix##_load(panel + sizeof(vector));                   \
            if (ahead > 0) {                                                                                           \
                __builtin_prefetch(panel + ahead);                                                                     \
                __builtin_prefetch(panel + ahead + sizeof(vector));                                                    \
            }                                                                                                          \
            SA_UNROLL                                                                                                  \
            for (int r = 0; r < rows; ++r) {                                                                           \
                int32_t word;                                                                                          \
                memcpy(&word, x + r * t->stride, sizeof word);                                                         \
                const vector in_all = prefix##_word(word);                                                             \
                add(sum[r][0], in_all, left);                                                                          \
                add(sum[r][1], in_all, right);                                                                         \
            }                                                                                                          \
        }                                                                                                              \
        SA_UNROLL                                                                                                      \
        for (int r = 0; r < rows; ++r) {                                                                               \
            char *to = (char *)t->sums + (r * SA_PANEL_COLUMNS + c) * SA_WORD;                                         \
            prefix##_store(to, sum[r][0]);                                                                             \
            prefix##_store(to + sizeof(vector), sum[r][1]);                                                            \
        }                                                                                                              \
    }
