/* Products on a matrix unit that multiplies bfloat16 and adds in float32 (docs/decisions/0004-matrix-unit.md).
 *
 * A float32 is the exact sum of three bfloat16 terms, a float16 of two: x₀ is the nearest to x, x₁ the nearest to
 * x − x₀, x₂ the rest. A product has the terms x_a·y_b with a + b below the larger number of terms; the others are
 * below 2^−25 of x·y with three terms, 2^−18 with two. Terms rounded to nearest have either sign, so errors do not add
 * up. Weights, P and dS are cut off instead, which is faster. Terms can represent 0 and magnitudes from 2^−100 to 2^126
 * (bfloat16: 2^−80 to 2^50), so no term is subnormal or infinite. Multiply-adds compute all other tiles.
 *
 * Left operand: tiles [term][row tile][slice] of 16 rows × 32 bfloat16. Right operand: tiles [term][slice][lane tile]
 * of 16 pairs along the sum × 16 lanes. */

enum { SA_TILE_BYTES = 1024, SA_TILE_ROWS = 16, SA_TILE_SLICE = 32 };

/* The bounds of terms, as exponents of 2. Queries of bfloat16 lack the scale;
 * their products must stay within float32. */
#define SA_LEAST(terms) ((terms) == 1 ? -80 : -100)
#define SA_MOST(terms) ((terms) == 1 ? 50 : 126)

/* Terms of the left operand, keys or values. The right one has three,
 * or fewer if all is of 16 bits (amx_attention.h). */
SA_INLINE int FN(left_terms)(sa_dtype dtype) { return dtype == SA_BF16 ? 1 : dtype == SA_F16 ? 2 : 3; }
enum { SA_RIGHT_TERMS = 3 };

/* How a term is made of what is left of a number, unless it is the last. */
enum { SA_TOWARDS_ZERO, SA_NEAREST };

/* Stores the terms of pairs (a[i], b[i]), term_bytes apart. With fewer than three terms the last is the nearest to the
 * rest. Returns 0, or NaN where one of three rounded terms was infinite. */
SA_INLINE vec FN(split_pairs)(vec a, vec b, char *to, size_t term_bytes, const int terms, const bool nearest) {
    SA_UNROLL
    for (int p = 0; p < terms; ++p) {
        const bool rounds = p + 1 < terms ? nearest : terms < 3;
        V(store_bf16_pairs)(to + (size_t)p * term_bytes, rounds ? V(bf16_half_up)(a) : a,
                            rounds ? V(bf16_half_up)(b) : b);
        if (p + 1 < terms) {
            a = a - (nearest ? V(bf16_nearest)(a) : V(bf16_towards_zero)(a));
            b = b - (nearest ? V(bf16_nearest)(b) : V(bf16_towards_zero)(b));
        }
    }
    return V(fma)(a, V(set1)(0), b * V(set1)(0));
}

/* Splits x[n][width] as the left operand, padded with zeros; sums run along the width.
 * False if some element does not fit. */
SA_INLINE bool FN(split_rows_any)(const real *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t row_tiles,
                                  ptrdiff_t slices, char *to, const int terms) {
    const size_t term_bytes = (size_t)(row_tiles * slices) * SA_TILE_BYTES;
    lanemask beyond = V(lt)(V(set1)(0), V(set1)(0));
    for (ptrdiff_t r = 0; r < row_tiles * SA_TILE_ROWS; ++r) {
        for (ptrdiff_t slice = 0; slice < slices; ++slice) {
            vec half[2];
            SA_UNROLL
            for (int h = 0; h < 2; ++h) {
                const ptrdiff_t e = slice * SA_TILE_SLICE + h * SA_LANES, left = r < n ? width - e : 0;
                half[h] = left > 0 ? FN(load_up_to)(x + r * stride + e, left) : V(set1)(0);
                beyond = V(either)(beyond, V(beyond)(half[h], SA_LEAST(terms), SA_MOST(terms)));
            }
            const ptrdiff_t tile = r / SA_TILE_ROWS * slices + slice;
            FN(split_pairs)(V(even)(half[0], half[1]), V(odd)(half[0], half[1]),
                            to + tile * SA_TILE_BYTES + r % SA_TILE_ROWS * 64, term_bytes, terms, SA_NEAREST);
        }
    }
    return !V(any)(beyond);
}

/* The same, transposed: sums run along the n rows. */
SA_INLINE bool FN(split_columns_any)(const real *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t row_tiles,
                                     ptrdiff_t slices, char *to, const int terms) {
    const size_t term_bytes = (size_t)(row_tiles * slices) * SA_TILE_BYTES;
    lanemask beyond = V(lt)(V(set1)(0), V(set1)(0));
    for (ptrdiff_t tile = 0; tile < row_tiles; ++tile) {
        const ptrdiff_t d = tile * SA_TILE_ROWS;
        const int columns = width - d < SA_LANES ? width > d ? (int)(width - d) : 0 : SA_LANES;
        for (ptrdiff_t slice = 0; slice < slices; ++slice) {
            vec half[2][SA_LANES]; /* even and odd rows */
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                SA_UNROLL
                for (int h = 0; h < 2; ++h) {
                    const ptrdiff_t j = slice * SA_TILE_SLICE + 2 * i + h;
                    half[h][i] = V(set1)(0);
                    if (j < n) {
                        half[h][i] = FN(load_up_to)(x + j * stride + d, columns);
                    }
                    beyond = V(either)(beyond, V(beyond)(half[h][i], SA_LEAST(terms), SA_MOST(terms)));
                }
            }
            FN(transpose)(half[0]);
            FN(transpose)(half[1]);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                FN(split_pairs)(half[0][i], half[1][i], to + (tile * slices + slice) * SA_TILE_BYTES + i * 64,
                                term_bytes, terms, SA_NEAREST);
            }
        }
    }
    return !V(any)(beyond);
}

/* Splits rows, times their factors, as lanes of one of `lane_tiles` tiles of the right operand; sums run along the
 * width. Rows of NULL and the lanes after the rows are 0. */
SA_INLINE bool FN(split_lanes_any)(const real *const *x, const real *factor, int n, ptrdiff_t width,
                                   ptrdiff_t lane_tiles, char *to, const int terms) {
    const ptrdiff_t slices = SA_CEIL_DIV(width, SA_TILE_SLICE);
    const size_t term_bytes = (size_t)(slices * lane_tiles) * SA_TILE_BYTES;
    lanemask beyond = V(lt)(V(set1)(0), V(set1)(0));
    for (ptrdiff_t e = 0; e < slices * SA_TILE_SLICE; e += SA_LANES) {
        const int columns = width - e >= SA_LANES ? SA_LANES : width > e ? (int)(width - e) : 0;
        vec t[SA_LANES];
        SA_UNROLL
        for (int i = 0; i < SA_LANES; ++i) {
            t[i] = V(set1)(0);
            if (i < n && x[i]) {
                t[i] = FN(load_up_to)(x[i] + e, columns) * V(set1)(factor[i]);
            }
            beyond = V(either)(beyond, V(beyond)(t[i], SA_LEAST(terms), SA_MOST(terms)));
        }
        FN(transpose)(t);
        char *rows = to + e / SA_TILE_SLICE * lane_tiles * SA_TILE_BYTES + e % SA_TILE_SLICE * 32;
        SA_UNROLL
        for (int i = 0; i < SA_LANES; i += 2) {
            FN(split_pairs)(t[i], t[i + 1], rows + i * 32, term_bytes, terms, SA_NEAREST);
        }
    }
    return !V(any)(beyond);
}

/* The same, but sums run along the rows, and a pair is rows i and i + 16. */
SA_INLINE bool FN(split_summands_any)(const real *const *x, const real *factor, ptrdiff_t n, ptrdiff_t width, char *to,
                                      const int terms) {
    const ptrdiff_t slices = SA_CEIL_DIV(n, SA_TILE_SLICE), lane_tiles = SA_CEIL_DIV(width, SA_LANES);
    const size_t term_bytes = (size_t)(slices * lane_tiles) * SA_TILE_BYTES;
    lanemask beyond = V(lt)(V(set1)(0), V(set1)(0));
    for (ptrdiff_t pair = 0; pair < slices * SA_TILE_ROWS; ++pair) {
        const ptrdiff_t slice = pair / SA_TILE_ROWS, i = pair % SA_TILE_ROWS;
        for (ptrdiff_t v = 0; v < lane_tiles; ++v) {
            const ptrdiff_t left = width - v * SA_LANES;
            vec row[2];
            SA_UNROLL
            for (int h = 0; h < 2; ++h) {
                const ptrdiff_t r = slice * SA_TILE_SLICE + i + h * SA_TILE_ROWS;
                row[h] = V(set1)(0);
                if (r < n && x[r]) {
                    row[h] = FN(load_up_to)(x[r] + v * SA_LANES, left) * V(set1)(factor[r]);
                }
                beyond = V(either)(beyond, V(beyond)(row[h], SA_LEAST(terms), SA_MOST(terms)));
            }
            FN(split_pairs)(row[0], row[1], to + (slice * lane_tiles + v) * SA_TILE_BYTES + i * 64, term_bytes, terms,
                            SA_NEAREST);
        }
    }
    return !V(any)(beyond);
}

SA_LEAF bool FN(split_lanes)(const real *const *x, const real *factor, int n, ptrdiff_t width, ptrdiff_t lane_tiles,
                             char *to, int terms) {
    switch (terms) {
    case 1: return FN(split_lanes_any)(x, factor, n, width, lane_tiles, to, 1);
    case 2: return FN(split_lanes_any)(x, factor, n, width, lane_tiles, to, 2);
    default: return FN(split_lanes_any)(x, factor, n, width, lane_tiles, to, 3);
    }
}

SA_LEAF bool FN(split_summands)(const real *const *x, const real *factor, ptrdiff_t n, ptrdiff_t width, char *to,
                                int terms) {
    return terms == 2 ? FN(split_summands_any)(x, factor, n, width, to, 2)
                      : FN(split_summands_any)(x, factor, n, width, to, 3);
}

/* ---- the same for rows of 16 bits without gaps: bfloat16 has one term, float16 two ------------------------------- */

/* Returns nonzero if a number is out of range. */
SA_INLINE int FN(take_pairs)(vec pairs, char *to, size_t term_bytes, const int terms) {
    if (terms == 1) {
        V(store)((void *)to, pairs);
        return V(bf16_beyond)(pairs, SA_LEAST(1), SA_MOST(1));
    }
    FN(split_pairs)(V(low_f16)(pairs), V(high_f16)(pairs), to, term_bytes, 2, SA_NEAREST);
    return V(f16_not_finite)(pairs);
}

/* pairs[i] is column i. */
SA_INLINE int FN(take_transposed)(vec *pairs, char *to, size_t term_bytes, const int terms) {
    int beyond = 0;
    FN(transpose)(pairs);
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        beyond |= FN(take_pairs)(pairs[i], to + i * 64, term_bytes, terms);
    }
    return beyond;
}

SA_INLINE bool FN(take_rows_any)(const char *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t row_tiles,
                                 ptrdiff_t slices, char *to, const int terms) {
    const size_t term_bytes = (size_t)(row_tiles * slices) * SA_TILE_BYTES;
    int beyond = 0;
    for (ptrdiff_t r = 0; r < row_tiles * SA_TILE_ROWS; ++r) {
        char *row = to + r / SA_TILE_ROWS * slices * SA_TILE_BYTES + r % SA_TILE_ROWS * 64;
        for (ptrdiff_t slice = 0; slice < slices; ++slice) {
            const ptrdiff_t e = slice * SA_TILE_SLICE;
            const vec pairs = r < n ? V(load_pairs)(x + r * stride + 2 * e, width - e) : V(set1)(0);
            beyond |= FN(take_pairs)(pairs, row + slice * SA_TILE_BYTES, term_bytes, terms);
        }
    }
    return !beyond;
}

SA_INLINE bool FN(take_columns_any)(const char *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t row_tiles,
                                    ptrdiff_t slices, char *to, const int terms) {
    const size_t term_bytes = (size_t)(row_tiles * slices) * SA_TILE_BYTES;
    int beyond = 0;
    for (ptrdiff_t tile = 0; tile < row_tiles; ++tile) {
        const ptrdiff_t d = tile * SA_TILE_ROWS, columns = width > d ? width - d : 0;
        for (ptrdiff_t slice = 0; slice < slices; ++slice) {
            vec pairs[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                const ptrdiff_t j = slice * SA_TILE_SLICE + 2 * i;
                const ptrdiff_t even = j < n ? j : 0, odd = j + 1 < n ? j + 1 : 0;
                pairs[i] = V(zip_pairs)(x + even * stride + 2 * d, j < n ? columns : 0, x + odd * stride + 2 * d,
                                        j + 1 < n ? columns : 0);
            }
            beyond |= FN(take_transposed)(pairs, to + (tile * slices + slice) * SA_TILE_BYTES, term_bytes, terms);
        }
    }
    return !beyond;
}

/* x[i] is lane i's row; other lanes are 0. */
SA_INLINE bool FN(take_lanes_any)(const char *const *x, ptrdiff_t n, ptrdiff_t width, ptrdiff_t lane_tiles, char *to,
                                  const int terms) {
    const ptrdiff_t slices = SA_CEIL_DIV(width, SA_TILE_SLICE);
    const size_t term_bytes = (size_t)(slices * lane_tiles) * SA_TILE_BYTES;
    int beyond = 0;
    for (ptrdiff_t slice = 0; slice < slices; ++slice) {
        const ptrdiff_t e = slice * SA_TILE_SLICE;
        for (ptrdiff_t v = 0; v < lane_tiles; ++v) {
            vec pairs[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                const ptrdiff_t r = v * SA_LANES + i;
                pairs[i] = r < n ? V(load_pairs)(x[r] + 2 * e, width - e) : V(set1)(0);
            }
            beyond |= FN(take_transposed)(pairs, to + (slice * lane_tiles + v) * SA_TILE_BYTES, term_bytes, terms);
        }
    }
    return !beyond;
}

SA_LEAF bool FN(take_lanes)(const char *const *x, ptrdiff_t n, ptrdiff_t width, ptrdiff_t lane_tiles, char *to,
                            int terms) {
    return terms == 1 ? FN(take_lanes_any)(x, n, width, lane_tiles, to, 1)
                      : FN(take_lanes_any)(x, n, width, lane_tiles, to, 2);
}

#define SA_TAKE_LEFT(name)                                                                                             \
    SA_LEAF bool FN(name)(const char *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t row_tiles,          \
                          ptrdiff_t slices, char *to, int terms) {                                                     \
        return terms == 1 ? FN(name##_any)(x, stride, n, width, row_tiles, slices, to, 1)                              \
                          : FN(name##_any)(x, stride, n, width, row_tiles, slices, to, 2);                             \
    }
SA_TAKE_LEFT(take_rows)
SA_TAKE_LEFT(take_columns)
#undef SA_TAKE_LEFT

#define SA_SPLIT_LEFT(name)                                                                                            \
    SA_LEAF bool FN(name)(const real *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t row_tiles,          \
                          ptrdiff_t slices, char *to, int terms) {                                                     \
        switch (terms) {                                                                                               \
        case 1: return FN(name##_any)(x, stride, n, width, row_tiles, slices, to, 1);                                  \
        case 2: return FN(name##_any)(x, stride, n, width, row_tiles, slices, to, 2);                                  \
        default: return FN(name##_any)(x, stride, n, width, row_tiles, slices, to, 3);                                 \
        }                                                                                                              \
    }
SA_SPLIT_LEFT(split_rows)
SA_SPLIT_LEFT(split_columns)
#undef SA_SPLIT_LEFT

/* Which products of terms are added: the large ones, or all. */
enum { SA_LARGE_TERMS, SA_ALL_TERMS };

/* Strides are in bytes, from term to term and from tile to tile. */
typedef struct {
    const char *left, *right;
    size_t left_term, left_row, right_term, right_slice;
    ptrdiff_t slices;
    bool adds;
    bool exact; /* SA_ALL_TERMS */
} FN(operands);

/* X(left terms, right terms, orders): the products of terms a and b with a + b < orders are added. */
#define SA_TERMS_OF_PRODUCTS(X) X(1, 1, 1) X(1, 2, 2) X(2, 2, 2) X(2, 2, 3) X(2, 3, 3) X(3, 3, 3)

/* Loads the two tiles, unless they are in registers, and adds their product. */
#define SA_TERM(a, b)                                                                                                  \
    if ((a) < left_terms && (b) < right_terms && (a) + (b) < orders) {                                                 \
        const bool new_left = left_now != (a), new_right = right_now != (b);                                           \
        if (new_left) {                                                                                                \
            SA_TILE_LOAD(4, left + (a) * o->left_term, 64);                                                            \
        }                                                                                                              \
        if (new_right) {                                                                                               \
            SA_TILE_LOAD(6, right + (b) * o->right_term, 64);                                                          \
        }                                                                                                              \
        SA_TILE_DOT(0, 4, 6);                                                                                          \
        if (lane_tiles == 2) {                                                                                         \
            if (new_right) {                                                                                           \
                SA_TILE_LOAD(7, right + (b) * o->right_term + SA_TILE_BYTES, 64);                                      \
            }                                                                                                          \
            SA_TILE_DOT(1, 4, 7);                                                                                      \
        }                                                                                                              \
        if (row_tiles == 2) {                                                                                          \
            if (new_left) {                                                                                            \
                SA_TILE_LOAD(5, left + (a) * o->left_term + o->left_row, 64);                                          \
            }                                                                                                          \
            SA_TILE_DOT(2, 5, 6);                                                                                      \
        }                                                                                                              \
        if (row_tiles == 2 && lane_tiles == 2) {                                                                       \
            SA_TILE_DOT(3, 5, 7);                                                                                      \
        }                                                                                                              \
        left_now = (a);                                                                                                \
        right_now = (b);                                                                                               \
    }

/* Loads or stores the tiles that hold C. */
#define SA_EACH_RESULT(move)                                                                                           \
    move(0, c, c_bytes);                                                                                               \
    if (lane_tiles == 2) {                                                                                             \
        move(1, c + SA_LANES, c_bytes);                                                                                \
    }                                                                                                                  \
    if (row_tiles == 2) {                                                                                              \
        move(2, c_low, c_bytes);                                                                                       \
    }                                                                                                                  \
    if (row_tiles == 2 && lane_tiles == 2) {                                                                           \
        move(3, c_low + SA_LANES, c_bytes);                                                                            \
    }

/* c[row_tiles·16][lane_tiles·16], rows c_bytes apart, = left·right, or += left·right. Small terms are added first. */
SA_INLINE void FN(product_any)(const FN(operands) * o, real *c, size_t c_bytes, const int left_terms,
                               const int right_terms, const int orders, const int row_tiles, const int lane_tiles) {
    real *c_low = (void *)((char *)c + SA_TILE_ROWS * c_bytes);
    SA_TILE_FENCE();
    if (o->adds) {
        SA_EACH_RESULT(SA_TILE_LOAD)
    } else {
        SA_TILE_ZERO(0);
        SA_TILE_ZERO(1);
        SA_TILE_ZERO(2);
        SA_TILE_ZERO(3);
    }
    const char *left = o->left, *right = o->right;
    for (ptrdiff_t slice = 0; slice < o->slices; ++slice, left += SA_TILE_BYTES, right += o->right_slice) {
        int left_now = -1, right_now = -1;
        SA_TERM(0, 2)
        SA_TERM(0, 1)
        SA_TERM(1, 1)
        SA_TERM(1, 0)
        SA_TERM(2, 0)
        SA_TERM(0, 0)
    }
    SA_EACH_RESULT(SA_TILE_STORE)
    SA_TILE_FENCE();
}
#undef SA_TERM
#undef SA_EACH_RESULT

#define SA_PRODUCT(left, right, orders)                                                                                \
    SA_LEAF void FN(product_##left##right##orders##1)(const FN(operands) * o, real * c, size_t c_bytes) {              \
        FN(product_any)(o, c, c_bytes, left, right, orders, 2, 1);                                                     \
    }                                                                                                                  \
    SA_LEAF void FN(product_##left##right##orders##2)(const FN(operands) * o, real * c, size_t c_bytes) {              \
        FN(product_any)(o, c, c_bytes, left, right, orders, 2, 2);                                                     \
    }
SA_TERMS_OF_PRODUCTS(SA_PRODUCT)
#undef SA_PRODUCT

SA_INLINE void FN(product)(const FN(operands) * o, real *c, size_t c_bytes, int left_terms, int right_terms,
                           int lane_tiles) {
    const int most = SA_LARGER(left_terms, right_terms);
    const int wanted = o->exact ? left_terms + right_terms - 1 : most;
#define SA_PRODUCT(left, right, orders)                                                                                \
    case left * 100 + right * 10 + orders:                                                                             \
        if (lane_tiles == 2) {                                                                                         \
            FN(product_##left##right##orders##2)(o, c, c_bytes);                                                       \
        } else {                                                                                                       \
            FN(product_##left##right##orders##1)(o, c, c_bytes);                                                       \
        }                                                                                                              \
        break;
    switch (left_terms * 100 + right_terms * 10 + wanted) {
        SA_TERMS_OF_PRODUCTS(SA_PRODUCT)
    default: break;
    }
#undef SA_PRODUCT
}
#undef SA_TERMS_OF_PRODUCTS
