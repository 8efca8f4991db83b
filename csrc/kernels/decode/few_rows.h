/* A block of up to four queries, or eight with AVX-512, against a key head (decoding). Lanes are features; bound by the reading of
 * K and V, so those are read once, where they lie: rows of any stride, and float16 and bfloat16 as they are where there is a verb for it. */

/* The most rows that are "few": a power of two, all of them in one vector. Eight need 16 sums and their operands in registers. */
#if SA_LANES >= 8 && SA_VECTOR_REGISTERS == 32 && !(defined(SA_HAS_TILES) && !SA_REAL_IS_F64)
#define SA_FEW_ROWS 8
#elif SA_LANES >= 4
#define SA_FEW_ROWS 4
#else
#define SA_FEW_ROWS SA_LANES
#endif

/* How elements of keys and values lie in memory. bfloat16 comes as pairs: a vector of the even elements and one of the odd
 * ones, a shift and an and for twice the lanes. What meets them is put in that order (pack_few_queries, restore_order). */
#define SA_READS_REAL 0
#define SA_READS_BF16 1
#define SA_READS_F16 2
#define SA_READS_PAIRS 3 /* bfloat16 that had to be packed: in the same order, and so to the same bits */
#define SA_READS_RAW 4   /* bfloat16 for products of pairs (attention_few_pairs.h): nothing is converted */
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

/* Rows are fetched this far ahead: the hardware does not look beyond the end of a page. From memory, by vectors of a whole line, twice as
 * far, and before that into the L2, where more can be on its way: a Zen 4 then decodes 8192 to 131,072 keys in bfloat16 at 30 to 49
 * instead of 16 to 23 GB/s, in float32 at 35 instead of 17. A Zen 5 gets 75 instead of 64 GB/s by the first of both, which from its L3
 * would be 3 to 5 % slower. */
#define SA_BYTES_AHEAD(far) ((far) && SA_VECTOR_IS_LINE ? 8192 : 4096)
#define SA_BYTES_LATER(far) ((far) && SA_VECTOR_IS_LINE ? 32768 : 0)

/* A vector of a whole cache line fetches the one that will stand in its place, into the L1. Shorter ones would ask for each line
 * several times, and for those of values in an order that is slow to read from memory: there whole rows are fetched
 * (docs/decisions/0006-decoding.md), and values are added up by so many bytes of rows. */
#define SA_VECTOR_IS_LINE (sizeof(vec) == 64)
#define SA_VALUES_TOGETHER 4096

/* Bytes from a row to those that are fetched meanwhile, the one of `later` into the L2 alone; 0: none. */
typedef struct {
    ptrdiff_t soon, later;
} FN(few_ahead);

/* Rows of keys or values, `stride` bytes apart. */
typedef struct {
    const char *at;
    ptrdiff_t stride;
    FN(few_ahead) ahead;
    int reads;
    bool together; /* without gaps between them */
} FN(few_rows);

/* Rows of queries and of the output, rounded up to whole pairs of vectors. */
SA_INLINE ptrdiff_t FN(few_width)(ptrdiff_t n) { return (n + 2 * SA_LANES - 1) / (2 * SA_LANES) * (2 * SA_LANES); }

SA_INLINE int FN(few_reads)(const sa_matrix *m) {
    const bool in_place = !m->swapped && m->col_stride == 2;
    if (SA_SOME_BF16 && m->dtype == SA_BF16) {
        return in_place ? SA_READS_BF16 : SA_READS_PAIRS;
    }
    return SA_SOME_F16 && m->dtype == SA_F16 && in_place ? SA_READS_F16 : SA_READS_REAL;
}

/* From a row to the one that many bytes of rows further, or four rows; 0 where it would be behind the keys that are open. */
SA_INLINE ptrdiff_t FN(rows_ahead)(const sa_block *b, const sa_matrix *m, ptrdiff_t last, ptrdiff_t row_bytes,
                                   ptrdiff_t bytes) {
    const ptrdiff_t rows = row_bytes * 4 > bytes || row_bytes == 0 ? 4 : bytes / row_bytes;
    return bytes > 0 && last + rows <= b->open_end ? rows * m->row_stride : 0;
}

SA_INLINE FN(few_rows)
    FN(few_rows_of)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    const int reads = FN(few_reads)(m);
    if (reads == SA_READS_BF16 || reads == SA_READS_F16 || FN(is_direct)(m)) {
        const ptrdiff_t bytes = width * (ptrdiff_t)sa_itemsize(m->dtype), last = first + n;
        const FN(few_ahead) ahead = {FN(rows_ahead)(b, m, last, bytes, SA_BYTES_AHEAD(b->far)),
                                     FN(rows_ahead)(b, m, last, bytes, SA_BYTES_LATER(b->far))};
        return (FN(few_rows)){m->data + first * m->row_stride, m->row_stride, ahead, reads, m->row_stride == bytes};
    }
    ptrdiff_t stride;
    const real *rows = FN(tile_rows)(b, m, cache, first, n, width, &stride);
    return (FN(few_rows)){(const char *)rows, stride * (ptrdiff_t)sizeof(real), {0, 0}, reads, false};
}

/* ---- vectors of a row ---------------------------------------------------------------------------------------------- */

#define SA_FEW_BYTES(reads) ((reads) == SA_READS_REAL || (reads) == SA_READS_PAIRS ? (ptrdiff_t)sizeof(real) : 2)
#define SA_FEW_VECS(reads) ((reads) == SA_READS_BF16 || (reads) == SA_READS_PAIRS ? 2 : 1)
#define SA_FEW_STEP(reads) ((reads) == SA_READS_RAW ? 2 * SA_LANES : SA_FEW_VECS(reads) * SA_LANES) /* elements of those */

/* Fetches what will stand in place of the rows from … to − 1, where vectors do not do so themselves. */
SA_INLINE void FN(fetch_rows)(const FN(few_rows) * rows, ptrdiff_t from, ptrdiff_t to, ptrdiff_t bytes) {
    for (ptrdiff_t r = from; !SA_VECTOR_IS_LINE && rows->ahead.soon != 0 && r < to; ++r) {
        sa_fetch((uintptr_t)rows->at + (uintptr_t)(r * rows->stride + rows->ahead.soon), bytes, true);
    }
}

/* Fetches the lines ahead of the one at p, where vectors are lines: both of them if `far`. An address: it may be nobody's. It is that
 * of the line which is read, but where rows are far and together: as many lines as a tile has are then fetched one after the other,
 * whatever the order in which the tile's own are read (by some keys, by groups of columns). From memory that is 4 to 19 % faster, from
 * the L3 up to 5 % slower. */
SA_INLINE void FN(fetch_lines)(uintptr_t p, FN(few_ahead) ahead, const bool far) {
    if (SA_VECTOR_IS_LINE) {
        __builtin_prefetch((const char *)(p + (uintptr_t)ahead.soon), 0, 3);
        if (far) {
            __builtin_prefetch((const char *)(p + (uintptr_t)ahead.later), 0, 2);
        }
    }
}

/* Whether rows are far; a loop of its own for those that are not has a tenth fewer instructions. */
#define SA_FAR(rows) (SA_VECTOR_IS_LINE && (rows)->ahead.later != 0)

/* SA_FEW_VECS vectors of elements from p on. */
SA_INLINE void FN(load_few)(const char *p, vec *x, const int reads) {
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
    const real *from = (const real *)(const void *)p;
    if (reads == SA_READS_PAIRS) {
        const vec low = V(load)(from), high = V(load)(from + SA_LANES);
        x[0] = V(even)(low, high);
        x[1] = V(odd)(low, high);
        return;
    }
    x[0] = V(load)(from);
}

/* The same of the last n elements of a row, fewer than the vectors hold; the rest is 0. */
SA_INLINE void FN(load_few_n)(const char *p, ptrdiff_t n, vec *x, const int reads) {
    if (reads == SA_READS_REAL) {
        x[0] = V(load_n)((const real *)(const void *)p, (int)n);
        return;
    }
    real padded[2 * SA_LANES] = {0};
    memcpy(padded, p, (size_t)(n * SA_FEW_BYTES(reads)));
    FN(load_few)((const char *)padded, x, reads);
}

/* sum + x·q, lane by lane. */
SA_INLINE vec FN(few_product)(vec sum, vec x, vec q, const int reads) {
#if defined(SA_HAS_BF16_PRODUCTS)
    if (reads == SA_READS_RAW) {
        return V(add_products)(sum, x, q);
    }
#endif
    return (void)reads, V(fma)(x, q, sum);
}

SA_INLINE bool FN(few_queries_in_pairs)(const sa_block *b, FN(scratch) * s);
SA_INLINE bool FN(few_in_pairs)(const FN(scratch) * s);
SA_INLINE void FN(few_order_pairs)(vec *x, vec *y);

/* q[few][width] times the factor, in the order in which keys are read. For products of pairs as they are, and without the factor. */
SA_INLINE void FN(pack_few_queries)(const sa_block *b, FN(scratch) * s, const int few) {
    const sa_matrix *m = &b->a->query.m;
    const vec factor = V(set1)((real)(b->a->scale * SA_LOG2E));
    const ptrdiff_t E = b->a->E, width = FN(few_width)(E);
    const bool in_pairs = SA_FEW_VECS(FN(few_reads)(&b->key)) == 2;
    memset(s->q, 0, (size_t)(few * width) * sizeof(real));
    if (FN(few_queries_in_pairs)(b, s)) {
        return;
    }
    for (int r = 0; r < few && r < b->rows->count; ++r) {
        real *q_r = s->q + r * width;
        FN(load_row)(q_r, b->rows->query[r], m->col_stride, E, m->dtype, m->swapped);
        for (ptrdiff_t e = 0; e < width; e += 2 * SA_LANES) {
            const vec x = V(load)(q_r + e) * factor, y = V(load)(q_r + e + SA_LANES) * factor;
            V(store)(q_r + e, in_pairs ? V(even)(x, y) : x);
            V(store)(q_r + e + SA_LANES, in_pairs ? V(odd)(x, y) : y);
        }
    }
}

/* Two vectors of columns from the order in which values are read to their own: even and odd ones, or as products of pairs took them. */
SA_INLINE void FN(few_order)(const FN(scratch) * s, vec *x, vec *y) {
    if (FN(few_in_pairs)(s)) {
        FN(few_order_pairs)(x, y);
        return;
    }
    const vec even = *x, odd = *y;
    *x = V(zip_lo)(even, odd);
    *y = V(zip_hi)(even, odd);
}

/* The output's columns in their own order. */
SA_INLINE void FN(restore_order)(const sa_block *b, FN(scratch) * s, const int few) {
    if (SA_FEW_VECS(FN(few_reads)(&b->value)) == 2) {
        real *O = s->O;
        for (ptrdiff_t i = 0; i < few * FN(few_width)(b->a->Dv); i += 2 * SA_LANES) {
            vec x = V(load)(O + i), y = V(load)(O + i + SA_LANES);
            FN(few_order)(s, &x, &y);
            V(store)(O + i, x);
            V(store)(O + i + SA_LANES, y);
        }
    }
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* sum[i·R + r] += k_i·q[r] over a step from element e on, where q is; the last of a row when left > 0. Lines ahead of those from
 * `next` on are fetched, or, when it is 0, of each key's. */
SA_INLINE void FN(scores_few_step)(const real *q, ptrdiff_t q_stride, const char *const *k, uintptr_t next, FN(few_ahead) ahead,
                                   ptrdiff_t e, ptrdiff_t left, vec *sum, const int R, const int reads, const bool far) {
    const int U = SA_FEW_VECS(reads), keys = SA_LANES / R;
    const int held =
        keys == 2 && SA_VECTOR_REGISTERS == 16 ? 1 : U; /* beside 8 sums there is room for 4 queries, not for 4×2 */
    SA_UNROLL
    for (int from = 0; from < U; from += held) {
        vec q_r[SA_FEW_ROWS][2];
        SA_UNROLL
        for (int r = 0; r < R; ++r) {
            SA_UNROLL
            for (int u = from; u < from + held; ++u) {
                q_r[r][u] = V(load)(q + r * q_stride + u * SA_LANES);
                if (keys == 2) { /* calls are 4 to 10 % faster */
                    SA_HOLD(q_r[r][u]);
                }
            }
        }
        SA_UNROLL
        for (int i = 0; i < keys; ++i) {
            const char *k_i = k[i] + e * SA_FEW_BYTES(reads);
            vec x[2];
            if (left != 0) {
                FN(load_few_n)(k_i, left, x, reads);
            } else {
                FN(load_few)(k_i, x, reads);
            }
            if (left == 0 && from == 0) {
                FN(fetch_lines)(next != 0 ? next + (uintptr_t)(i * SA_FEW_STEP(reads) * SA_FEW_BYTES(reads)) : (uintptr_t)k_i,
                                ahead, far);
            }
            SA_UNROLL
            for (int r = 0; r < R; ++r) {
                SA_UNROLL
                for (int u = from; u < from + held; ++u) {
                    sum[i * R + r] = FN(few_product)(sum[i * R + r], x[u], q_r[r][u], reads);
                }
            }
        }
    }
}

/* P[n][p_stride], columns 0 … R − 1, = factor·k[j]·q[r]; the factor is of SA_READS_RAW alone, other queries hold it. q[R][q_stride] is
 * padded with zeros. p_stride is R, and P then has room for whole vectors (what is behind n keys is any product), or it is SA_LANES. */
SA_INLINE void FN(scores_few)(const real *restrict q, const FN(few_rows) * rows, ptrdiff_t n, ptrdiff_t E, real *restrict P,
                              ptrdiff_t p_stride, real factor, const int R, const int reads, const bool tail, const bool far,
                              const bool together) {
    const int keys = SA_LANES / R; /* products of one pass: keys × R = lanes */
    const ptrdiff_t q_stride = FN(few_width)(E), step = SA_FEW_STEP(reads), whole = tail ? E - E % step : E;
    const char *k = rows->at;
    const ptrdiff_t k_stride = rows->stride;
    for (ptrdiff_t j = 0; j < n; j += keys) {
        const int here = n - j < keys ? (int)(n - j) : keys;
        const char *k_j[SA_LANES];
        SA_UNROLL
        for (int i = 0; i < keys; ++i) {
            k_j[i] = k + (j + (i < here ? i : 0)) * k_stride;
        }
        vec sum[SA_LANES];
        SA_UNROLL
        for (int i = 0; i < SA_LANES; ++i) {
            sum[i] = V(set1)(0);
        }
        FN(fetch_rows)(rows, j, j + here, E * SA_FEW_BYTES(reads));
        const real *q_e = q;
        for (ptrdiff_t e = 0; e < whole; e += step, q_e += SA_FEW_VECS(reads) * SA_LANES) {
            const uintptr_t next = together ? (uintptr_t)k_j[0] + (uintptr_t)(e * keys * SA_FEW_BYTES(reads)) : 0;
            FN(scores_few_step)(q_e, q_stride, k_j, next, rows->ahead, e, 0, sum, R, reads, far);
        }
        if (tail) {
            FN(scores_few_step)(q_e, q_stride, k_j, 0, rows->ahead, whole, E - whole, sum, R, reads, far);
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
            SA_UNROLL
            for (int r = 0; r < R; ++r) {
                P[(j + i) * p_stride + r] = products[i * R + r];
            }
        }
    }
}

/* O[R][o_stride], C vectors of columns from d on, = alpha[r]·O + Σ_j P[j][r]·v[j]; the last `tail` columns of a row, or 0. */
SA_INLINE void FN(values_few_columns)(const real *restrict P, ptrdiff_t p_stride, const FN(few_rows) * rows, ptrdiff_t n,
                                      ptrdiff_t d, real *restrict O, ptrdiff_t o_stride, const real *restrict alpha,
                                      const int R, const int C, const int reads, ptrdiff_t tail, const bool far) {
    const int U = SA_FEW_VECS(reads);
    const char *v = rows->at + d * SA_FEW_BYTES(reads);
    const ptrdiff_t v_stride = rows->stride, line = SA_LANES * SA_FEW_BYTES(reads);
    const bool in_order = far && rows->together;
    uintptr_t next = (uintptr_t)(in_order ? rows->at + n * d * SA_FEW_BYTES(reads) : v);
    vec sum[SA_FEW_ROWS][8];
    SA_UNROLL
    for (int r = 0; r < R; ++r) {
        SA_UNROLL
        for (int c = 0; c < C; ++c) {
            sum[r][c] = V(set1)(0);
        }
    }
    for (ptrdiff_t j = 0; j < n; ++j, next += (uintptr_t)(in_order ? C * line : v_stride)) {
        const char *v_j = v + j * v_stride;
        vec x[8];
        if (tail > 0) {
            FN(load_few_n)(v_j, tail, x, reads);
        } else {
            SA_UNROLL
            for (int c = 0; c < C; c += U) {
                FN(load_few)(v_j + c * line, x + c, reads);
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
    SA_UNROLL
    for (int r = 0; r < R; ++r) {
        SA_UNROLL
        for (int c = 0; c < C; ++c) {
            real *o = O + r * o_stride + d + c * SA_LANES;
            V(store)(o, V(fma)(V(set1)(alpha[r]), V(load)(o), sum[r][c]));
        }
    }
}

/* O[R][Dv] = alpha[r]·O + Σ_j P[j][r]·v[j] over n rows from `first` on. With every C vectors of columns a share of the rows ahead is
 * fetched. */
SA_INLINE void FN(values_few_rows)(const real *restrict P, ptrdiff_t p_stride, const FN(few_rows) * v, ptrdiff_t first,
                                   ptrdiff_t n, ptrdiff_t Dv, real *restrict O, const real *restrict alpha, const int R,
                                   const int reads, const bool far) {
    const int C = SA_VECTOR_REGISTERS == 32 ? (R == 8 ? 2 : R == 4 ? 4 : 8) : (R == 4 ? 2 : 4), U = SA_FEW_VECS(reads);
    const ptrdiff_t o_stride = FN(few_width)(Dv), bytes = Dv * SA_FEW_BYTES(reads);
    const ptrdiff_t steps = Dv / (C * SA_LANES), share = steps > 0 ? (n + steps - 1) / steps : 0;
    const FN(few_rows) rows = {v->at + first * v->stride, v->stride, v->ahead, reads, v->together};
    const real *P_j = P + first * p_stride;
    ptrdiff_t d = 0;
    for (ptrdiff_t row = 0; d + C * SA_LANES <= Dv; d += C * SA_LANES, row += share) {
        FN(fetch_rows)(&rows, row, row + share < n ? row + share : n, bytes);
        FN(values_few_columns)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, C, reads, 0, far);
    }
    if (steps == 0) {
        FN(fetch_rows)(&rows, 0, n, bytes);
    }
    if (C == 8 && d + 4 * SA_LANES <= Dv) { /* fewer sums would wait for one another */
        FN(values_few_columns)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, 4, reads, 0, far);
        d += 4 * SA_LANES;
    }
    for (; d + U * SA_LANES <= Dv; d += U * SA_LANES) {
        FN(values_few_columns)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, U, reads, 0, far);
    }
    if (d < Dv) {
        FN(values_few_columns)(P_j, p_stride, &rows, n, d, O, o_stride, alpha, R, U, reads, Dv - d, far);
    }
}

/* The same over all n rows, in groups where rows are fetched as a whole. How many make one follows from Dv alone and not from the
 * bytes that 16 bits take: packed or in place, their results have the same bits. */
SA_INLINE void FN(values_few)(const real *restrict P, ptrdiff_t p_stride, const FN(few_rows) * v, ptrdiff_t n, ptrdiff_t Dv,
                              real *restrict O, const real *restrict alpha, const int R, const int reads, const bool far) {
    static const real ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (Dv == 0) { /* no columns, and nothing to divide by */
        return;
    }
    const ptrdiff_t rows = SA_VALUES_TOGETHER / (ptrdiff_t)sizeof(real) / Dv;
    const ptrdiff_t group = SA_VECTOR_IS_LINE ? n : rows > 4 ? rows : 4;
    for (ptrdiff_t j = 0; j < n; j += group) {
        FN(values_few_rows)(P, p_stride, v, j, n - j < group ? n - j : group, Dv, O, j == 0 ? alpha : ones, R, reads, far);
    }
}

#define SA_FEW_SCORES(R, kind)                                                                                                 \
    SA_NOINLINE void FN(scores_few##R##_##kind)(const real *q, const FN(few_rows) * k, ptrdiff_t n, ptrdiff_t E, real *P,      \
                                                ptrdiff_t p_stride, real factor) {                                             \
        if (E % SA_FEW_STEP(SA_READS_##kind) != 0) {                                                                           \
            FN(scores_few)(q, k, n, E, P, p_stride, factor, R, SA_READS_##kind, true, true, false);                            \
        } else if (!SA_FAR(k)) {                                                                                               \
            FN(scores_few)(q, k, n, E, P, p_stride, factor, R, SA_READS_##kind, false, false, false);                          \
        } else if (k->together) {                                                                                              \
            FN(scores_few)(q, k, n, E, P, p_stride, factor, R, SA_READS_##kind, false, true, true);                            \
        } else {                                                                                                               \
            FN(scores_few)(q, k, n, E, P, p_stride, factor, R, SA_READS_##kind, false, true, false);                           \
        }                                                                                                                      \
    }
#define SA_FEW(R, kind)                                                                                                        \
    SA_FEW_SCORES(R, kind)                                                                                                     \
    SA_NOINLINE void FN(values_few##R##_##kind)(const real *P, ptrdiff_t p_stride, const FN(few_rows) * v, ptrdiff_t n,        \
                                                ptrdiff_t Dv, real *O, const real *alpha) {                                    \
        if (SA_FAR(v)) {                                                                                                       \
            FN(values_few)(P, p_stride, v, n, Dv, O, alpha, R, SA_READS_##kind, true);                                         \
        } else {                                                                                                               \
            FN(values_few)(P, p_stride, v, n, Dv, O, alpha, R, SA_READS_##kind, false);                                        \
        }                                                                                                                      \
    }
#if SA_FEW_ROWS == 8
#define SA_FEWS(kind) SA_FEW(1, kind) SA_FEW(2, kind) SA_FEW(4, kind) SA_FEW(8, kind)
#define SA_BY_ROWS(name, kind)                                                                                                 \
    (few == 1 ? FN(name##1_##kind) : few == 2 ? FN(name##2_##kind) : few == 4 ? FN(name##4_##kind) : FN(name##8_##kind))
#elif SA_FEW_ROWS == 4
#define SA_FEWS(kind) SA_FEW(1, kind) SA_FEW(2, kind) SA_FEW(4, kind)
#define SA_BY_ROWS(name, kind) (few == 1 ? FN(name##1_##kind) : few == 2 ? FN(name##2_##kind) : FN(name##4_##kind))
#else
#define SA_FEWS(kind) SA_FEW(1, kind) SA_FEW(2, kind)
#define SA_BY_ROWS(name, kind) (few == 1 ? FN(name##1_##kind) : FN(name##2_##kind))
#endif
SA_FEWS(REAL)
#if SA_SOME_BF16
SA_FEWS(BF16)
SA_FEWS(PAIRS)
#endif
#if SA_SOME_F16
SA_FEWS(F16)
#endif

#if defined(SA_HAS_BF16_PRODUCTS)
#include "kernels/decode/bf16dot.h"
#else
SA_INLINE bool FN(few_in_pairs)(const FN(scratch) * s) { return (void)s, false; }
SA_INLINE void FN(few_order_pairs)(vec *x, vec *y) { (void)x, (void)y; }
SA_INLINE bool FN(few_queries_in_pairs)(const sa_block *b, FN(scratch) * s) { return (void)b, (void)s, false; }
SA_INLINE void FN(scores_few_by_pairs)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride,
                                       int few) {
    (void)b, (void)s, (void)first, (void)n, (void)p_stride, (void)few;
}
SA_INLINE void FN(values_few_by_pairs)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride,
                                       int few) {
    (void)b, (void)s, (void)first, (void)n, (void)p_stride, (void)few;
}
#endif

SA_INLINE void FN(scores_of_few)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride,
                                 const int few) {
    if (FN(few_in_pairs)(s)) {
        FN(scores_few_by_pairs)(b, s, first, n, p_stride, few);
        return;
    }
    const ptrdiff_t E = b->a->E;
    const real factor = 1; /* queries hold it */
    const FN(few_rows) k = FN(few_rows_of)(b, &b->key, &s->key, first, n, E);
    switch (k.reads) {
#if SA_SOME_BF16
    case SA_READS_BF16: SA_BY_ROWS(scores_few, BF16)(s->q, &k, n, E, s->P, p_stride, factor); break;
    case SA_READS_PAIRS: SA_BY_ROWS(scores_few, PAIRS)(s->q, &k, n, E, s->P, p_stride, factor); break;
#endif
#if SA_SOME_F16
    case SA_READS_F16: SA_BY_ROWS(scores_few, F16)(s->q, &k, n, E, s->P, p_stride, factor); break;
#endif
    default: SA_BY_ROWS(scores_few, REAL)(s->q, &k, n, E, s->P, p_stride, factor); break;
    }
}

SA_INLINE void FN(values_of_few)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride,
                                 const int few) {
    if (FN(few_in_pairs)(s)) {
        FN(values_few_by_pairs)(b, s, first, n, p_stride, few);
        return;
    }
    FN(round_weights)(s, n * p_stride); /* where pairs did not hold this block */
    const ptrdiff_t Dv = b->a->Dv;
    const FN(few_rows) v = FN(few_rows_of)(b, &b->value, &s->value, first, n, Dv);
    switch (v.reads) {
#if SA_SOME_BF16
    case SA_READS_BF16: SA_BY_ROWS(values_few, BF16)(s->P, p_stride, &v, n, Dv, s->O, s->alpha); break;
    case SA_READS_PAIRS: SA_BY_ROWS(values_few, PAIRS)(s->P, p_stride, &v, n, Dv, s->O, s->alpha); break;
#endif
#if SA_SOME_F16
    case SA_READS_F16: SA_BY_ROWS(values_few, F16)(s->P, p_stride, &v, n, Dv, s->O, s->alpha); break;
#endif
    default: SA_BY_ROWS(values_few, REAL)(s->P, p_stride, &v, n, Dv, s->O, s->alpha); break;
    }
}
#undef SA_FEW
#undef SA_FEW_SCORES
#undef SA_FEWS
#undef SA_BY_ROWS
#undef SA_SOME_BF16
#undef SA_SOME_F16
#undef SA_FAR

/* ---- a tile with nothing but scores --------------------------------------------------------------------------------- */

/* Whether the tile needs none of the passes of scores.h: its scores may then lie together, [n][few], and maximum and
 * exponentials work on full vectors. */
SA_INLINE bool FN(few_plain)(const sa_block *b, ptrdiff_t first, ptrdiff_t n) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    bool plain = a->softcap == 0 && a->alibi.m.data == NULL && a->mask.m.data == NULL && a->dropout_p == 0 && rows->gaps == 0;
    for (int r = 0; r < rows->count && plain; ++r) {
        plain = rows->lo[r] <= first && rows->hi[r] >= first + n;
    }
    return plain;
}

/* pass_exp for scores a vector apart. The sums are those of few_plain_exp to the bit: what a mask that closes nothing or
 * dropout make of a tile must not change lse (but where pairs do not hold the output, attention_few_pairs.h). */
SA_INLINE void FN(few_pass_exp)(real *P, ptrdiff_t n, const real *maximum, real *tile_sum, const int few) {
    const int keys = SA_LANES / few;
    const vec m = V(load)(maximum);
    vec sum[SA_LANES];
    for (int i = 0; i < keys; ++i) {
        sum[i] = V(set1)(0);
    }
    for (ptrdiff_t j = 0; j < n; j += keys) {
        for (int i = 0; i < keys && j + i < n; ++i) {
            real *p = P + (j + i) * SA_LANES;
            const vec e = FN(exp2)(V(load)(p) - m);
            sum[i] = sum[i] + e;
            V(store)(p, e);
        }
    }
    for (int i = 1; i < keys; ++i) {
        sum[0] = sum[0] + sum[i];
    }
    V(store)(tile_sum, sum[0]);
}

/* The running maximum with that of scores [n][few], the lanes of `top`, and s->alpha. Returns the maximum as those lanes need it. */
SA_INLINE vec FN(few_raise_maximum)(FN(scratch) * s, vec top, const int few) {
    real each[SA_LANES];
    V(store)(each, top);
    for (int r = 0; r < few; ++r) {
        real now = s->maximum[r];
        for (int i = r; i < SA_LANES; i += few) {
            now = each[i] > now ? each[i] : now; /* a NaN is not lost: its exponential is one */
        }
        s->top[r] = now;
    }
    const vec old = V(load)(s->maximum), now = V(load)(s->top);
    V(store)(s->alpha, FN(exp2)(old - now));
    V(store)(s->maximum, now);
    for (int i = 0; i < SA_LANES; ++i) {
        each[i] = s->top[i % few];
    }
    return V(load)(each);
}

/* The running sum with that of weights [n][few], the lanes of `sum`: those of a row in order. */
SA_INLINE void FN(few_take_sum)(FN(scratch) * s, vec sum, const int few) {
    real each[SA_LANES];
    V(store)(each, sum);
    for (int r = 0; r < few; ++r) {
        s->tile_sum[r] = each[r];
        for (int i = r + few; i < SA_LANES; i += few) {
            s->tile_sum[r] += each[i];
        }
    }
    V(store)(s->sum, V(fma)(V(load)(s->alpha), V(load)(s->sum), V(load)(s->tile_sum)));
}

/* The scores P[n][few] in the running maximum and sum; P becomes weights. */
SA_INLINE void FN(few_plain_exp)(FN(scratch) * s, ptrdiff_t n, const int few) {
    const ptrdiff_t count = n * few, padded = (ptrdiff_t)FN(round_up)(count);
    for (ptrdiff_t i = count; i < padded; ++i) {
        s->P[i] = -(real)INFINITY;
    }
    vec top = V(load)(s->P), sum = V(set1)(0);
    for (ptrdiff_t i = SA_LANES; i < padded; i += SA_LANES) {
        top = V(max)(top, V(load)(s->P + i));
    }
    const vec m = FN(few_raise_maximum)(s, top, few);
    for (ptrdiff_t i = 0; i < padded; i += SA_LANES) {
        const vec e = FN(exp2)(V(load)(s->P + i) - m);
        sum = sum + e;
        V(store)(s->P + i, e);
    }
    FN(few_take_sum)(s, sum, few);
}

#if !SA_REAL_IS_F64 && defined(SA_HAS_TILES)
#include "kernels/decode/amx.h"
#else
#if !defined(SA_HAS_BF16_PRODUCTS)
SA_INLINE size_t FN(lay_out_few_parts)(const sa_attention *a, char *base, size_t used, FN(few_parts) * s) {
    return (void)a, (void)base, (void)s, used;
}
SA_INLINE void FN(few_parts_open)(const sa_block *b, FN(scratch) * s) { (void)b, (void)s; }
#endif
SA_INLINE void FN(few_parts_close)(const FN(few_parts) * s) { (void)s; }
SA_INLINE ptrdiff_t FN(few_keys_by_parts)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first) {
    return (void)b, (void)s, (void)first, 0;
}
SA_INLINE void FN(few_tile_by_parts)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int few) {
    (void)b, (void)s, (void)first, (void)n, (void)few;
}
#endif

/* Outputs below this, or 0, may have lost something where subnormal numbers are taken for 0. */
#define SA_FEW_LEAST_OUTPUT ((real)0x1p-100)

/* Whether the sums so far are what multiply-adds would have given: finite, and far from subnormal. */
SA_INLINE bool FN(few_sums_hold)(const sa_block *b, const FN(scratch) * s) {
    const sa_rows *rows = b->rows;
    const vec least = V(set1)(SA_FEW_LEAST_OUTPUT), beyond = V(set1)((real)INFINITY);
    int lost = s->few.use && s->few.lost;
    for (int r = 0; r < rows->count && s->few.use; ++r) {
        const real *O_r = s->O + r * FN(few_width)(b->a->Dv);
        const ptrdiff_t Dv = rows->lo[r] < rows->hi[r] ? b->a->Dv : 0;
        ptrdiff_t d = 0;
        for (; d + SA_LANES <= Dv; d += SA_LANES) {
            const vec x = V(abs)(V(load)(O_r + d));
            lost |= V(any)(V(lt)(x, least)) | V(any)(V(not_lt)(x, beyond));
        }
        for (; d < Dv; ++d) {
            const real x = O_r[d] < 0 ? -O_r[d] : O_r[d];
            lost |= !(x >= SA_FEW_LEAST_OUTPUT && x <= SA_REAL_MAX);
        }
    }
    return !lost;
}

/* The tile of n keys, or a longer one, in the running maximum, sum and output. Returns its keys. */
SA_INLINE ptrdiff_t FN(few_plain_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int few) {
    const ptrdiff_t longer = FN(few_keys_by_parts)(b, s, first);
    if (longer > 0 && FN(few_plain)(b, first, longer)) {
        FN(few_tile_by_parts)(b, s, first, longer, few);
        return longer;
    }
    FN(scores_of_few)(b, s, first, n, few, few);
    FN(few_plain_exp)(s, n, few);
    FN(values_of_few)(b, s, first, n, few, few);
    return n;
}
