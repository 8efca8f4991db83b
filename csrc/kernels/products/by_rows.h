/* A tile of compact products has a leaf for each number of rows: accumulators are registers only if it is a literal. */

/* name(t) calls tile(t, t->rows), for as many rows as `each` lists. */
#define SA_BY_ROWS(name, tile, each)                                                                                           \
    each(SA_ROWS_LEAF, name, tile) static void name(const sa_compact_tile *t) {                                                \
        static sa_compact_leaf *const leaf[] = {each(SA_ROWS_ENTRY, name, tile)};                                              \
        leaf[t->rows](t);                                                                                                      \
    }
#define SA_ROWS_LEAF(n, name, tile)                                                                                            \
    SA_LEAF void name##n(const sa_compact_tile *t) { tile(t, n); }
#define SA_ROWS_ENTRY(n, name, tile) [n] = name##n,

#define SA_UP_TO_6(X, ...)                                                                                                     \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#define SA_UP_TO_8(X, ...) SA_UP_TO_6(X, __VA_ARGS__) X(7, __VA_ARGS__) X(8, __VA_ARGS__)
#define SA_UP_TO_14(X, ...)                                                                                                    \
    SA_UP_TO_8(X, __VA_ARGS__)                                                                                                 \
    X(9, __VA_ARGS__) X(10, __VA_ARGS__) X(11, __VA_ARGS__) X(12, __VA_ARGS__) X(13, __VA_ARGS__) X(14, __VA_ARGS__)
