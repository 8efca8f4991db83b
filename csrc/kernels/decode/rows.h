/* Products of decoding: R queries (rounded up to a power of two) times rows of a key head, read once and in place.
 * Lanes are features. decode.h has the loop over the keys.
 *
 * Rows are fetched ahead, `soon` into L1 and `later` into L2. Where a vector is a whole line, each load fetches a line.
 * With shorter vectors whole rows are fetched, and values are read some rows at a time
 * (docs/decisions/0006-decoding.md).
 * Comes after simd/exp.h and kernels/attention/block.h. */
#include "kernels/kernels.h"

/* The most rows: a vector must hold a number of each, and the loops for eight rows need 32 registers. */
#undef SA_DECODE_ROWS
#undef SA_DECODE_EACH
#undef SA_DECODE_BF16
#undef SA_DECODE_F16
#if SA_LANES >= 8 && SA_VECTOR_REGISTERS == 32
#define SA_DECODE_ROWS 8
#elif SA_LANES >= 4
#define SA_DECODE_ROWS 4
#else
#define SA_DECODE_ROWS SA_LANES
#endif

/* How keys and values are read. bfloat16 becomes a vector of even and a vector of odd elements; copy_decode_queries and
 * restore_order respect that order. */
#define SA_READS_REAL 0
#define SA_READS_BF16 1
#define SA_READS_F16 2
#define SA_READS_PAIRS 3 /* copied bfloat16, in the same order, for the same bits */
#define SA_READS_RAW 4   /* bfloat16 pairs for bf16dot.h, not converted */
#undef SA_SOME_BF16
#undef SA_SOME_F16
#if SA_REAL_IS_F64 || !SA_HAS_BF16_PAIRS
#define SA_SOME_BF16 0
#else
#define SA_SOME_BF16 1
#endif
#if SA_REAL_IS_F64 || !defined(SA_HAS_F16_LOADS)
#define SA_SOME_F16 0
#else
#define SA_SOME_F16 1
#endif

#define SA_BYTES_AHEAD(far) ((far) && SA_VECTOR_IS_LINE ? 8192 : 4096)
#define SA_BYTES_LATER(far) ((far) && SA_VECTOR_IS_LINE ? 32768 : 0)

#define SA_VECTOR_IS_LINE (sizeof(vec) == 64)
#define SA_NO_TAIL 0
#define SA_VALUES_TOGETHER 4096

/* Bytes from a row to the rows that are fetched; 0: nothing is fetched. */
typedef struct {
    ptrdiff_t soon, later;
} FN(decode_ahead);

typedef struct {
    const char *at;
    ptrdiff_t stride;
    FN(decode_ahead) ahead;
    int reads;
    bool together; /* there are no gaps between rows */
} FN(decode_rows);

SA_INLINE ptrdiff_t FN(decode_width)(ptrdiff_t n) { return SA_CEIL_DIV(n, 2 * SA_LANES) * (2 * SA_LANES); }

SA_INLINE int FN(decode_reads)(const sa_matrix *m) {
    const bool in_place = !m->swapped && m->col_stride == 2;
    if (SA_SOME_BF16 && m->dtype == SA_BF16) {
        return in_place ? SA_READS_BF16 : SA_READS_PAIRS;
    }
    return SA_SOME_F16 && m->dtype == SA_F16 && in_place ? SA_READS_F16 : SA_READS_REAL;
}

/* Returns how many bytes ahead to fetch: about `bytes`, but at least four rows;
 * 0 if that row is after the open keys. */
SA_INLINE ptrdiff_t FN(rows_ahead)(const sa_block *b, const sa_matrix *m, ptrdiff_t last, ptrdiff_t row_bytes,
                                   ptrdiff_t bytes) {
    const ptrdiff_t rows = row_bytes * 4 > bytes || row_bytes == 0 ? 4 : bytes / row_bytes;
    return bytes > 0 && last + rows <= b->open_end ? rows * m->row_stride : 0;
}

FN(decode_rows)
FN(decode_rows_of)(const sa_block *b, const sa_matrix *m, FN(copies) * copies, ptrdiff_t first, ptrdiff_t n,
                   ptrdiff_t width);

#define SA_DECODE_BYTES(reads) ((reads) == SA_READS_REAL || (reads) == SA_READS_PAIRS ? (ptrdiff_t)sizeof(real) : 2)
#define SA_DECODE_VECS(reads) ((reads) == SA_READS_BF16 || (reads) == SA_READS_PAIRS ? 2 : 1)
/* The length of a slice, in elements. */
#define SA_DECODE_SLICE(reads) ((reads) == SA_READS_RAW ? 2 * SA_LANES : SA_DECODE_VECS(reads) * SA_LANES)

SA_INLINE void FN(fetch_rows)(const FN(decode_rows) * rows, ptrdiff_t from, ptrdiff_t to, ptrdiff_t bytes) {
    for (ptrdiff_t r = from; !SA_VECTOR_IS_LINE && rows->ahead.soon != 0 && r < to; ++r) {
        sa_fetch((uintptr_t)rows->at + (uintptr_t)(r * rows->stride + rows->ahead.soon), bytes, SA_TO_L1);
    }
}

/* p is the line that is read, or the next line if rows are far and without gaps.
 * The fetched address need not be valid. */
SA_INLINE void FN(fetch_lines)(uintptr_t p, FN(decode_ahead) ahead, const bool far) {
    if (SA_VECTOR_IS_LINE) {
        __builtin_prefetch((const char *)(p + (uintptr_t)ahead.soon), 0, 3);
        if (far) {
            __builtin_prefetch((const char *)(p + (uintptr_t)ahead.later), 0, 2);
        }
    }
}

/* The loop for near rows has fewer instructions. */
#define SA_ARE_FAR(rows) (SA_VECTOR_IS_LINE && (rows)->ahead.later != 0)

/* Loads SA_DECODE_VECS vectors from p on. */
SA_INLINE void FN(decode_load)(const char *p, vec *x, const int reads) {
#if SA_SOME_BF16
    if (reads == SA_READS_BF16) {
        x[0] = V(even_bf16)(p);
        x[1] = V(odd_bf16)(p);
        return;
    }
#endif
#if SA_SOME_F16
    if (reads == SA_READS_F16) {
        x[0] = V(load_f16)(p);
        return;
    }
#endif
#if defined(SA_HAS_BF16_PRODUCTS)
    if (reads == SA_READS_RAW) {
        x[0] = V(load_pairs)(p, 2 * SA_LANES);
        return;
    }
#endif
    const real *from = (const void *)p;
    if (reads == SA_READS_PAIRS) {
        const vec low = V(load)(from), high = V(load)(from + SA_LANES);
        x[0] = V(even)(low, high);
        x[1] = V(odd)(low, high);
        return;
    }
    x[0] = V(load)(from);
}

/* Loads the last n elements of a row, and zeros. */
SA_INLINE void FN(decode_load_n)(const char *p, ptrdiff_t n, vec *x, const int reads) {
    if (reads == SA_READS_REAL) {
        x[0] = V(load_n)((const void *)p, (int)n);
        return;
    }
    real padded[2 * SA_LANES] = {0};
    memcpy(padded, p, (size_t)(n * SA_DECODE_BYTES(reads)));
    FN(decode_load)((const char *)padded, x, reads);
}

SA_INLINE vec FN(decode_product)(vec sum, vec x, vec q, const int reads) {
#if defined(SA_HAS_BF16_PRODUCTS)
    if (reads == SA_READS_RAW) {
        return V(add_products)(sum, x, q);
    }
#endif
    return (void)reads, V(fma)(x, q, sum);
}

/* sum[i·R + r] += k_i·q[r] over the slices at k[i] + at.
 * Fetches ahead of `next`, with `apart` bytes from key to key. */
SA_INLINE void FN(decode_scores_slice)(const real *q, ptrdiff_t q_stride, const char *const *k, ptrdiff_t at,
                                       uintptr_t next, ptrdiff_t apart, FN(decode_ahead) ahead, vec *sum, const int R,
                                       const int reads, const bool far) {
    const int U = SA_DECODE_VECS(reads), keys = SA_LANES / R;
    const int held = keys == 2 && SA_VECTOR_REGISTERS == 16 ? 1 : U; /* 8 sums leave registers for 4 queries */
    SA_UNROLL
    for (int from = 0; from < U; from += held) {
        vec q_r[SA_DECODE_ROWS][2];
        SA_UNROLL
        for (int r = 0; r < R; ++r) {
            SA_UNROLL
            for (int u = from; u < from + held; ++u) {
                q_r[r][u] = V(load)(q + r * q_stride + u * SA_LANES);
                if (keys == 2) { /* otherwise GCC would load it twice */
                    SA_HOLD(q_r[r][u]);
                }
            }
        }
        SA_UNROLL
        for (int i = 0; i < keys; ++i) {
            vec x[2];
            FN(decode_load)(k[i] + at, x, reads);
            if (from == 0) {
                FN(fetch_lines)(next + (uintptr_t)(i * apart), ahead, far);
            }
            SA_UNROLL
            for (int r = 0; r < R; ++r) {
                SA_UNROLL
                for (int u = from; u < from + held; ++u) {
                    sum[i * R + r] = FN(decode_product)(sum[i * R + r], x[u], q_r[r][u], reads);
                }
            }
        }
    }
}

/* Copies the last `bytes` of n rows, then zeros; rows from n on repeat row 0. */
SA_ONCE void FN(decode_pad)(real (*to)[2 * SA_LANES], int rows, const char *from, ptrdiff_t stride, int n,
                            ptrdiff_t bytes) {
    memset(to, 0, (size_t)rows * sizeof *to);
    for (int i = 0; i < rows; ++i) {
        memcpy(to[i], from + (i < n ? i : 0) * stride, (size_t)bytes);
    }
}

/* P[n][p_stride] = factor·k[j]·q[r] in columns 0 … R − 1. q[R][q_stride] is padded with zeros and, except for
 * SA_READS_RAW, already multiplied by the factor. p_stride is SA_LANES, or R with room for whole vectors. */
SA_INLINE void FN(decode_scores)(const real *restrict q, const FN(decode_rows) * rows, ptrdiff_t n, ptrdiff_t E,
                                 real *restrict P, ptrdiff_t p_stride, real factor, const int R, const int reads) {
    const int keys = SA_LANES / R; /* keys × R = lanes */
    const bool far = reads != SA_READS_PAIRS && SA_ARE_FAR(rows);
    const ptrdiff_t q_stride = FN(decode_width)(E), slice = SA_DECODE_SLICE(reads), whole = E - E % slice;
    const ptrdiff_t bytes = slice * SA_DECODE_BYTES(reads), k_stride = rows->stride;
    const bool together = far && rows->together && whole == E;
    const ptrdiff_t apart = together ? bytes : k_stride; /* between fetched lines */
    real padded[SA_LANES][2 * SA_LANES];
    for (ptrdiff_t j = 0; j < n; j += keys) {
        const int here = n - j < keys ? (int)(n - j) : keys;
        const char *k = rows->at + j * k_stride, *k_j[SA_LANES];
        SA_UNROLL
        for (int i = 0; i < keys; ++i) {
            k_j[i] = k + (i < here ? i : 0) * k_stride;
        }
        vec sum[SA_LANES];
        SA_UNROLL
        for (int i = 0; i < SA_LANES; ++i) {
            sum[i] = V(set1)(0);
        }
        FN(fetch_rows)(rows, j, j + here, E * SA_DECODE_BYTES(reads));
        const real *q_e = q;
        uintptr_t next = (uintptr_t)k;
        for (ptrdiff_t e = 0, at = 0, end = whole; e < E; end = E) { /* whole slices, then the last one */
            if (e == whole) {
                FN(decode_pad)(padded, keys, k + at, k_stride, here, (E - e) * SA_DECODE_BYTES(reads));
                at = 0;
                SA_UNROLL
                for (int i = 0; i < keys; ++i) {
                    k_j[i] = (const char *)padded[i];
                }
            }
            for (; e < end; e += slice, at += bytes, q_e += SA_DECODE_VECS(reads) * SA_LANES) {
                if (far) {
                    FN(decode_scores_slice)(q_e, q_stride, k_j, at, next, apart, rows->ahead, sum, R, reads, SA_FAR);
                } else {
                    FN(decode_scores_slice)(q_e, q_stride, k_j, at, next, apart, rows->ahead, sum, R, reads, SA_NEAR);
                }
                next += (uintptr_t)(together ? bytes * keys : bytes);
            }
        }
        vec each = FN(sum_each)(sum);
        if (reads == SA_READS_RAW) {
            each = each * V(set1)(factor);
        }
        if (p_stride == R) {
            V(store)(P + j * R, each);
            continue;
        }
        real products[SA_LANES];
        V(store)(products, each);
        for (int i = 0; i < here; ++i) {
            SA_KEEP_LOOP();
            SA_UNROLL
            for (int r = 0; r < R; ++r) {
                P[(j + i) * p_stride + r] = products[i * R + r];
            }
        }
    }
}

SA_INLINE void FN(decode_zero_sums)(vec sum[SA_DECODE_ROWS][8], const int R, const int C) {
    SA_UNROLL
    for (int r = 0; r < R; ++r) {
        SA_UNROLL
        for (int c = 0; c < C; ++c) {
            sum[r][c] = V(set1)(0);
        }
    }
}

/* O[R][o_stride] = alpha[r]·O + sum. */
SA_INLINE void FN(decode_add_sums)(vec sum[SA_DECODE_ROWS][8], real *restrict O, ptrdiff_t o_stride,
                                   const real *restrict alpha, const int R, const int C) {
    SA_UNROLL
    for (int r = 0; r < R; ++r) {
        SA_UNROLL
        for (int c = 0; c < C; ++c) {
            real *o = O + r * o_stride + c * SA_LANES;
            V(store)(o, V(fma)(V(set1)(alpha[r]), V(load)(o), sum[r][c]));
        }
    }
}

/* O[R][o_stride] = alpha[r]·O + Σ_j P[j][r]·v[j] in C vectors of columns from d on, or the last `tail` columns. */
SA_INLINE void FN(decode_values_columns)(const real *restrict P, ptrdiff_t p_stride, const FN(decode_rows) * rows,
                                         ptrdiff_t n, ptrdiff_t d, real *restrict O, ptrdiff_t o_stride,
                                         const real *restrict alpha, const int R, const int C, const int reads,
                                         ptrdiff_t tail, const bool far) {
    const int U = SA_DECODE_VECS(reads);
    const char *v = rows->at + d * SA_DECODE_BYTES(reads);
    const ptrdiff_t v_stride = rows->stride, line = SA_LANES * SA_DECODE_BYTES(reads);
    const bool in_order = far && rows->together;
    uintptr_t next = (uintptr_t)(in_order ? rows->at + n * d * SA_DECODE_BYTES(reads) : v);
    vec sum[SA_DECODE_ROWS][8];
    FN(decode_zero_sums)(sum, R, C);
    for (ptrdiff_t j = 0; j < n; ++j, next += (uintptr_t)(in_order ? C * line : v_stride)) {
        const char *v_j = v + j * v_stride;
        vec x[8];
        if (tail > 0) {
            FN(decode_load_n)(v_j, tail, x, reads);
        } else {
            SA_UNROLL
            for (int c = 0; c < C; c += U) {
                FN(decode_load)(v_j + c * line, x + c, reads);
                FN(fetch_lines)(next + (uintptr_t)(c * line), rows->ahead, far);
            }
        }
        SA_UNROLL
        for (int r = 0; r < R; ++r) {
            vec p = V(set1)(P[j * p_stride + r]);
            SA_UNROLL
            for (int c = 0; c < C; ++c) {
                sum[r][c] = V(fma)(p, x[c], sum[r][c]);
            }
        }
    }
    FN(decode_add_sums)(sum, O + d, o_stride, alpha, R, C);
}

SA_INLINE void FN(decode_values_far)(const real *restrict P, ptrdiff_t p_stride, const FN(decode_rows) * rows,
                                     ptrdiff_t n, ptrdiff_t d, real *restrict O, ptrdiff_t o_stride,
                                     const real *restrict alpha, const int R, const int C, const int reads, bool far) {
    if (reads != SA_READS_PAIRS && far) {
        FN(decode_values_columns)(P, p_stride, rows, n, d, O, o_stride, alpha, R, C, reads, SA_NO_TAIL, SA_FAR);
    } else {
        FN(decode_values_columns)(P, p_stride, rows, n, d, O, o_stride, alpha, R, C, reads, SA_NO_TAIL, SA_NEAR);
    }
}

/* The same for all columns, C vectors at a time, each of which fetches some of the rows ahead. */
SA_INLINE void FN(decode_values_rows)(const real *restrict P, ptrdiff_t p_stride, const FN(decode_rows) * v,
                                      ptrdiff_t first, ptrdiff_t n, ptrdiff_t Dv, real *restrict O,
                                      const real *restrict alpha, const int R, const int reads) {
    const bool far = SA_ARE_FAR(v);
    const int C = SA_VECTOR_REGISTERS == 32 ? (R == 8 ? 2 : R == 4 ? 4 : 8) : (R == 4 ? 2 : 4);
    const int U = SA_DECODE_VECS(reads);
    const ptrdiff_t o_stride = FN(decode_width)(Dv), bytes = Dv * SA_DECODE_BYTES(reads);
    const ptrdiff_t slices = Dv / (C * SA_LANES), each = slices > 0 ? SA_CEIL_DIV(n, slices) : 0;
    const FN(decode_rows) rows = {v->at + first * v->stride, v->stride, v->ahead, reads, v->together};
    const real *P_j = P + first * p_stride;
    ptrdiff_t d = 0;
    for (ptrdiff_t row = 0; d + C * SA_LANES <= Dv; d += C * SA_LANES, row += each) {
        FN(fetch_rows)(&rows, row, SA_SMALLER(row + each, n), bytes);
        FN(decode_values_far)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, C, reads, far);
    }
    if (slices == 0) {
        FN(fetch_rows)(&rows, 0, n, bytes);
    }
    if (C == 8 && d + 4 * SA_LANES <= Dv) {
        FN(decode_values_far)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, 4, reads, far);
        d += 4 * SA_LANES;
    }
    for (; C > U && d + U * SA_LANES <= Dv; d += U * SA_LANES) { /* the last columns are read like near ones */
        FN(decode_values_columns)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, U, reads, SA_NO_TAIL, SA_NEAR);
    }
    if (d < Dv) {
        FN(decode_values_columns)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, U, reads, Dv - d, SA_NEAR);
    }
}

/* Reads some rows at a time if whole rows are fetched.
 * How many depends on Dv alone, so copied rows yield the same bits. */
SA_INLINE void FN(decode_values)(const real *restrict P, ptrdiff_t p_stride, const FN(decode_rows) * v, ptrdiff_t n,
                                 ptrdiff_t Dv, real *restrict O, const real *restrict alpha, const int R,
                                 const int reads) {
    static const real ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (Dv == 0) { /* `rows` would divide by it */
        return;
    }
    const ptrdiff_t rows = SA_VALUES_TOGETHER / (ptrdiff_t)sizeof(real) / Dv;
    const ptrdiff_t at_once = SA_VECTOR_IS_LINE ? n : SA_LARGER(rows, 4);
    for (ptrdiff_t j = 0; j < n; j += at_once) {
        FN(decode_values_rows)(P, p_stride, v, j, SA_SMALLER(n - j, at_once), Dv, O, j == 0 ? alpha : ones, R, reads);
    }
}

/* Raises each row's maximum to that of its lanes of `top`, maxima of scores [n][R].
 * Returns the new maxima in these lanes. */
SA_INLINE vec FN(decode_raise_maximum)(FN(scratch) * s, vec top, const int R) {
    real each[SA_LANES];
    V(store)(each, top);
    for (int r = 0; r < R; ++r) {
        real now = s->maximum[r];
        for (int i = r; i < SA_LANES; i += R) {
            SA_KEEP_LOOP();
            now = SA_LARGER(each[i], now); /* a NaN is not lost: its exponential is NaN */
        }
        s->top[r] = now;
    }
    const vec old = V(load)(s->maximum), now = V(load)(s->top);
    V(store)(s->alpha, FN(exp2)(old - now));
    V(store)(s->maximum, now);
    for (int i = 0; i < SA_LANES; ++i) {
        each[i] = s->top[i & (R - 1)];
    }
    return V(load)(each);
}

/* Adds the lanes of `sum`, which are sums of weights [n][R], to each row's sum, in order. */
SA_INLINE void FN(decode_take_sum)(FN(scratch) * s, vec sum, const int R) {
    real each[SA_LANES];
    V(store)(each, sum);
    for (int r = 0; r < R; ++r) {
        s->tile_sum[r] = each[r];
        for (int i = r + R; i < SA_LANES; i += R) {
            SA_KEEP_LOOP();
            s->tile_sum[r] += each[i];
        }
    }
    V(store)(s->sum, V(fma)(V(load)(s->alpha), V(load)(s->sum), V(load)(s->tile_sum)));
}

/* ---- leaves ------------------------------------------------------------------------------------------------------ */

/* X(R, …) for every R that has leaves, and a call of a leaf. */
#if SA_DECODE_ROWS == 8
#define SA_DECODE_EACH(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(4, __VA_ARGS__) X(8, __VA_ARGS__)
#elif SA_DECODE_ROWS == 4
#define SA_DECODE_EACH(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(4, __VA_ARGS__)
#else
#define SA_DECODE_EACH(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#endif
#define SA_DECODE_CASE(rows, name, kind, ...)                                                                          \
    case rows: FN(name##rows##_##kind)(__VA_ARGS__); break;
#define SA_DECODE_CALL(R, name, kind, ...)                                                                             \
    switch (R) { SA_DECODE_EACH(SA_DECODE_CASE, name, kind, __VA_ARGS__) }

#define SA_DECODE_SCORES_LEAF(R, kind)                                                                                 \
    SA_LEAF void FN(decode_scores##R##_##kind)(const real *q, const FN(decode_rows) * k, ptrdiff_t n, ptrdiff_t E,     \
                                               real *P, ptrdiff_t p_stride, real factor) {                             \
        FN(decode_scores)(q, k, n, E, P, p_stride, factor, R, SA_READS_##kind);                                        \
    }

#if !defined(SA_PRODUCTS_ALONE)
#define SA_DECODE_LEAVES(R, kind)                                                                                      \
    SA_DECODE_SCORES_LEAF(R, kind)                                                                                     \
    SA_LEAF void FN(decode_values##R##_##kind)(const real *P, ptrdiff_t p_stride, const FN(decode_rows) * v,           \
                                               ptrdiff_t n, ptrdiff_t Dv, real *O, const real *alpha) {                \
        FN(decode_values)(P, p_stride, v, n, Dv, O, alpha, R, SA_READS_##kind);                                        \
    }
SA_DECODE_EACH(SA_DECODE_LEAVES, REAL)
#if SA_SOME_BF16
SA_DECODE_EACH(SA_DECODE_LEAVES, BF16)
SA_DECODE_EACH(SA_DECODE_LEAVES, PAIRS)
#define SA_DECODE_BF16(R, name, ...)                                                                                   \
    case SA_READS_BF16: SA_DECODE_CALL(R, name, BF16, __VA_ARGS__) break;                                              \
    case SA_READS_PAIRS: SA_DECODE_CALL(R, name, PAIRS, __VA_ARGS__) break;
#else
#define SA_DECODE_BF16(R, name, ...)
#endif
#if SA_SOME_F16
SA_DECODE_EACH(SA_DECODE_LEAVES, F16)
#define SA_DECODE_F16(R, name, ...)                                                                                    \
    case SA_READS_F16: SA_DECODE_CALL(R, name, F16, __VA_ARGS__) break;
#else
#define SA_DECODE_F16(R, name, ...)
#endif
#define SA_DECODE_BY_KIND(reads, R, name, ...)                                                                         \
    switch (reads) {                                                                                                   \
        SA_DECODE_BF16(R, name, __VA_ARGS__)                                                                           \
        SA_DECODE_F16(R, name, __VA_ARGS__)                                                                            \
    default: SA_DECODE_CALL(R, name, REAL, __VA_ARGS__) break;                                                         \
    }

SA_SHARED FN(decode_rows) FN(decode_rows_of)(const sa_block *b, const sa_matrix *m, FN(copies) * copies,
                                             ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    const int reads = FN(decode_reads)(m);
    if (reads == SA_READS_BF16 || reads == SA_READS_F16 || FN(is_direct)(m)) {
        const ptrdiff_t bytes = width * (ptrdiff_t)sa_itemsize(m->dtype), last = first + n;
        const FN(decode_ahead) ahead = {FN(rows_ahead)(b, m, last, bytes, SA_BYTES_AHEAD(b->far)),
                                        FN(rows_ahead)(b, m, last, bytes, SA_BYTES_LATER(b->far))};
        return (FN(decode_rows)){.at = m->data + first * m->row_stride,
                                 .stride = m->row_stride,
                                 .ahead = ahead,
                                 .reads = reads,
                                 .together = m->row_stride == bytes};
    }
    ptrdiff_t stride;
    const real *rows = FN(tile_rows)(b, m, copies, first, n, width, &stride);
    return (FN(decode_rows)){.at = (const char *)rows, .stride = stride * (ptrdiff_t)sizeof(real), .reads = reads};
}

SA_INLINE bool FN(decode_by_unit)(const FN(scratch) * s) { return s->decode.use && s->unit->decode_scores; }

/* s->P[n][p_stride] = the tile's scores; p_stride is R or SA_LANES. */
SA_ONCE void FN(scores_of_decode)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride,
                                  int R) {
    if (FN(decode_by_unit)(s)) {
        s->unit->decode_scores(b, s, first, n, p_stride, R);
        return;
    }
    const ptrdiff_t E = b->a->E;
    const FN(decode_rows) k = FN(decode_rows_of)(b, &b->key, &s->key, first, n, E);
    const real factor = 1; /* queries include it */
    SA_DECODE_BY_KIND(k.reads, R, decode_scores, s->q, &k, n, E, s->P, p_stride, factor)
}

/* O = alpha·O + s->P[n][p_stride] times the tile's values. */
SA_ONCE void FN(values_of_decode)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride,
                                  int R) {
    if (FN(decode_by_unit)(s)) {
        s->unit->decode_values(b, s, first, n, p_stride, R);
        return;
    }
    if (s->decode.rounds) { /* as the unit's products would have rounded them */
        s->unit->round_weights(s, n * p_stride);
    }
    const ptrdiff_t Dv = b->a->Dv;
    const FN(decode_rows) v = FN(decode_rows_of)(b, &b->value, &s->value, first, n, Dv);
    SA_DECODE_BY_KIND(v.reads, R, decode_values, s->P, p_stride, &v, n, Dv, s->O, s->alpha)
}
#endif
