/* Softmax, norms, GELU and rotary embeddings, over the rows that drivers/rowops.c describes.
 *
 * A row is computed in the output if the output has the type that computes, else in scratch. Sums of SA_SUM_PIECE
 * elements are added in float64, so a sum of positive terms has an error of a few ulp at any length.
 *
 * Errors in ulp (tests/rowops/test_rows.py):
 *     softmax       4 + |x − max|/2, from rounding x − max; also log_softmax, where it is absolute near 0
 *     layer_norm    4 of the larger of |result| and |bias|, for any mean
 *     rms_norm      3
 * Norms of rows whose squares overflow or underflow have the same errors: tests/rowops/test_rows.py.
 *     gelu          6 in both tails, for results ≥ FLT_MIN; 'tanh': 4 + 3·|2u| for negative x
 * NaN makes its row NaN (GELU, rotary: its element). A softmax row with +inf, or with −inf alone, is NaN.
 * Comes after simd/exp.h and kernels/attention/load.h. */
#include "kernels/entries.h"

#define SA_SUM_PIECE (128 * SA_LANES)

SA_INLINE vec FN(pad_from)(vec v, ptrdiff_t k, real pad) {
    static const real index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return V(select)(V(lt)(V(load)(index), V(set1)((real)k)), v, V(set1)(pad));
}

/* The maximum; −inf if there are no elements. Skips NaN. */
SA_ONCE real FN(row_max)(const real *x, ptrdiff_t n) {
    vec top[4];
    SA_UNROLL
    for (int v = 0; v < 4; ++v) {
        top[v] = V(set1)(-(real)INFINITY);
    }
    ptrdiff_t i = 0;
    for (; i + 4 * SA_LANES <= n; i += 4 * SA_LANES) {
        SA_UNROLL
        for (int v = 0; v < 4; ++v) {
            top[v] = V(max)(V(load)(x + i + v * SA_LANES), top[v]); /* a NaN is the first operand, so it is skipped */
        }
    }
    for (; i + SA_LANES <= n; i += SA_LANES) {
        top[0] = V(max)(V(load)(x + i), top[0]);
    }
    if (i < n) {
        top[1] = V(max)(FN(pad_from)(V(load_n)(x + i, (int)(n - i)), n - i, -(real)INFINITY), top[1]);
    }
    vec all = V(max)(V(max)(top[0], top[1]), V(max)(top[2], top[3]));
    SA_UNROLL
    for (int lanes = SA_LANES; lanes > 1; lanes /= 2) {
        all = V(max)(V(even)(all, all), V(odd)(all, all));
    }
    return all[0];
}

enum { FN(SUM), FN(SQUARES), FN(CENTRED), FN(EXP), FN(EXP_STORED) };

/* SUM Σx; SQUARES Σx²; CENTRED Σ(x − a) and Σ(x − a)²; EXP Σe^(x − a); EXP_STORED also writes y = e^(x − a).
 * y may be x. */
typedef struct {
    int what;
    real a;
    real *y;
} FN(reduction);

typedef struct {
    double sum, squares;
} FN(sums);

/* Adds a vector of x at i, or the `left` elements there, to *sum and *squares, as reduce does. */
SA_INLINE void FN(reduce_vector)(const real *x, ptrdiff_t i, ptrdiff_t left, const FN(reduction) r, vec *sum,
                                 vec *squares) {
    const bool is_exp = r.what == FN(EXP) || r.what == FN(EXP_STORED);
    vec t = FN(load_up_to)(x + i, left);
    if (left < SA_LANES) {
        t = FN(pad_from)(t, left, is_exp ? -(real)INFINITY : r.what == FN(CENTRED) ? r.a : 0);
    }
    if (r.what == FN(CENTRED)) {
        t = t - V(set1)(r.a);
    } else if (is_exp) {
        t = FN(exp)(t - V(set1)(r.a));
    }
    if (r.what == FN(EXP_STORED)) {
        FN(store_up_to)(r.y + i, t, left);
    }
    if (r.what != FN(SQUARES)) {
        *sum = *sum + t;
    }
    if (r.what == FN(SQUARES) || r.what == FN(CENTRED)) {
        *squares = V(fma)(t, t, *squares);
    }
}

SA_INLINE FN(sums) FN(reduce)(const real *x, ptrdiff_t n, const FN(reduction) r) {
    FN(sums) total = {0, 0};
    for (ptrdiff_t i = 0; i < n;) {
        const ptrdiff_t end = n - i < SA_SUM_PIECE ? n : i + SA_SUM_PIECE;
        vec sum[4], squares[4];
        SA_UNROLL
        for (int v = 0; v < 4; ++v) {
            sum[v] = squares[v] = V(set1)(0);
        }
        for (; i + 4 * SA_LANES <= end; i += 4 * SA_LANES) {
            SA_UNROLL
            for (int v = 0; v < 4; ++v) {
                FN(reduce_vector)(x, i + v * SA_LANES, SA_LANES, r, &sum[v], &squares[v]);
            }
        }
        for (; i + SA_LANES <= end; i += SA_LANES) {
            FN(reduce_vector)(x, i, SA_LANES, r, &sum[0], &squares[0]);
        }
        if (i < end) {
            FN(reduce_vector)(x, i, end - i, r, &sum[1], &squares[1]);
            i = end;
        }
        total.sum += (double)FN(sum_lanes)((sum[0] + sum[1]) + (sum[2] + sum[3]));
        total.squares += (double)FN(sum_lanes)((squares[0] + squares[1]) + (squares[2] + squares[3]));
    }
    return total;
}

/* Return Σe^(x − top); the first function also writes the terms to y. */
SA_ONCE double FN(sum_exp_stored)(const real *x, real *y, ptrdiff_t n, real top) {
    return FN(reduce)(x, n, (FN(reduction)){.what = FN(EXP_STORED), .a = top, .y = y}).sum;
}
SA_ONCE double FN(sum_exp)(const real *x, ptrdiff_t n, real top) {
    return FN(reduce)(x, n, (FN(reduction)){.what = FN(EXP), .a = top}).sum;
}

/* The norm is ((x − hi) − lo)·scale, of the row times 2^exponent. */
typedef struct {
    real hi, lo, scale;
    bool extreme; /* squares or mean·scale overflow, or squares underflow and eps does not hide it; true for NaN */
    int exponent;
} FN(statistics);

/* From `least` on, squares lose less by underflow than their mean does by rounding. */
SA_INLINE FN(statistics) FN(statistics_of)(real hi, real lo, double variance, double eps) {
    const double square = variance + eps, least = SA_REAL_IS_F64 ? 0x1p-960 : 0x1p-100;
    const double scale = 1 / sqrt(square);
    const bool plain = square >= least && square < (double)INFINITY && fabs((double)hi) * scale < (double)SA_REAL_MAX;
    return (FN(statistics)){.hi = hi, .lo = lo, .scale = (real)scale, .extreme = !plain};
}

/* The mean is hi + lo. A second sum yields lo, and corrects the sum of squares (Chan, Golub & LeVeque 1983, equation
 * 1.7). */
SA_ONCE FN(statistics) FN(layer_statistics)(const real *x, ptrdiff_t n, double eps) {
    const real hi = (real)(FN(reduce)(x, n, (FN(reduction)){.what = FN(SUM)}).sum / (double)n);
    const FN(sums) s = FN(reduce)(x, n, (FN(reduction)){.what = FN(CENTRED), .a = hi});
    const double lo = s.sum / (double)n, variance = s.squares / (double)n - lo * lo;
    return FN(statistics_of)(hi, (real)lo, variance < 0 ? 0 : variance, eps);
}

SA_ONCE FN(statistics) FN(rms_statistics)(const real *x, ptrdiff_t n, double eps) {
    const real mean = 0;
    const double squares = FN(reduce)(x, n, (FN(reduction)){.what = FN(SQUARES)}).squares;
    return FN(statistics_of)(mean, mean, squares / (double)n, eps);
}

/* y = x·2^by; y may be x. */
SA_ONCE void FN(scale_row)(const real *x, real *y, ptrdiff_t n, int by) {
    const real half = (real)ldexp(1, by / 2), rest = (real)ldexp(1, by - by / 2); /* 2^by may overflow: two factors */
    for (ptrdiff_t i = 0; i < n; ++i) {
        y[i] = x[i] * half * rest;
    }
}

/* The exponent e of the largest |x| in [2^(e−1), 2^e); 0 if the row has NaN or an infinity, or only zeros. */
SA_ONCE int FN(row_exponent)(const real *x, ptrdiff_t n) {
    real top = 0;
    for (ptrdiff_t i = 0; i < n; ++i) {
        const real a = x[i] < 0 ? -x[i] : x[i];
        if (!(a < (real)INFINITY)) {
            return 0;
        }
        top = SA_LARGER(a, top);
    }
    int exponent = 0;
    (void)frexp((double)top, &exponent);
    return exponent;
}

/* Computes the statistics of a row and returns the row that they describe: x, or, if its squares overflow or underflow,
 * x·2^−e in y, with eps·2^−2e, which has the same norm. y may be x. */
SA_ONCE const real *FN(norm_statistics)(const real *x, real *y, ptrdiff_t n, double eps, bool is_rms,
                                        FN(statistics) * m) {
    *m = is_rms ? FN(rms_statistics)(x, n, eps) : FN(layer_statistics)(x, n, eps);
    if (!m->extreme) {
        return x;
    }
    const int e = FN(row_exponent)(x, n);
    const double scaled_eps = ldexp(eps, -2 * e);
    if (e == 0 || scaled_eps > DBL_MAX) {
        return x;
    }
    FN(scale_row)(x, y, n, -e);
    *m = is_rms ? FN(rms_statistics)(y, n, scaled_eps) : FN(layer_statistics)(y, n, scaled_eps);
    m->exponent = e;
    if (eps > 0 && !(m->scale < (real)INFINITY)) {
        /* With equal elements eps alone determines the scale, even for gradients. */
        m->scale = (real)(1 / sqrt(eps));
        m->exponent = 0;
    }
    return y;
}

/* Returns Φ(−a), a = |x|, Φ the standard normal distribution; *bell becomes e^(−a²/2).
 * With Φ(a) = 1 − Φ(−a) both tails keep their digits.
 *
 * Φ(−a) = e^(−a²/2)·R(a), R(a) = erfcx(a/√2)/2. (a + k)·R(a) is a minimax polynomial in q = (a − k)/(a + k):
 *   float32  degree 9, k = 4, relative error 7.7e-9 on [0, 13.5]
 *   float64  degree 22, k = 5, relative error 5.9e-18 on [0, 39]
 * For larger a, e^(−a²/2) is 0. a² is a sum of two numbers, as rounding it to one would cost a²/4 ulp. */
SA_INLINE vec FN(normal_tail)(vec x, vec *bell) {
    const vec a = V(min)(SA_C(SA_REAL_IS_F64 ? 40 : 14), V(abs)(x)); /* min keeps NaN */
    const real k = SA_REAL_IS_F64 ? 5 : 4;
    const vec w = SA_C(1) / (a + SA_C(k));
    const vec q = V(fma)(w, SA_C(-2 * k), SA_C(1));
    static const double c[] = {
#if SA_REAL_IS_F64
        -3.0288748794737520354e-10,  1.4320603141867522406e-9,  7.9422991732842827208e-9,   -8.2949927912680457605e-9,
        -6.6011930387055335403e-8,   4.0880618855127610655e-8,  4.3288463616446889658e-7,   -3.3553720189261257284e-7,
        -2.7689528662271061614e-6,   3.9803846631455221091e-6,  0.000016681041392883594278, -0.000049762654885996720326,
        -0.000059375674839236765625, 0.00054489903338376065074, -0.00079786940800181112314, -0.002993376766704651114,
        0.020795066800836897693,     -0.069118638706570073817,  0.16502036617033745796,     -0.31353315667129619294,
        0.49530561596997729822,      -0.66538250289005678122,   0.76919304975006295592,
#else
        -0.00012683962172648041563, 0.00019057536308962358552, 0.0015743132403836670852, -0.0035174716413538321709,
        -0.0075283963272897280518,  0.060404412992307352754,   -0.18652295021690300111,  0.38713688374722108217,
        -0.60789660646747496094,    0.75528513546699024524,
#endif
    };
    const vec high = a * a;
#if SA_FMA_IS_FUSED
    const vec low = V(fma)(a, a, -high);
#else
    /* Dekker's product: a = top + rest */
    const vec split = a * SA_C(SA_REAL_IS_F64 ? 134217729 : 4097);
    const vec top = split - (split - a), rest = a - top;
    const vec low = ((top * top - high) + SA_C(2) * top * rest) + rest * rest;
#endif
    const vec e = FN(exp)(SA_C(-0.5) * high);
    *bell = V(fma)(e, SA_C(-0.5) * low, e);
    return *bell * (SA_POLYNOMIAL(q, c) * w);
}

/* x·Φ(x). NaN for −inf (−inf·0), as in PyTorch. */
SA_INLINE vec FN(gelu)(vec x) {
    vec bell;
    const vec tail = FN(normal_tail)(x, &bell);
    return x * V(select)(V(lt)(x, SA_C(0)), tail, SA_C(1) - tail);
}

/* x/2·(1 + tanh u), u = √(2/π)·(x + 0.044715·x³), computed as x/(1 + e^(−2u)), where nothing cancels for negative x.
 * e^(−2|u|), which may underflow, is applied as two factors h = e^(−|u|). */
SA_INLINE vec FN(gelu_tanh)(vec x) {
    const vec a = V(abs)(x);
    const vec h = FN(exp)(a * V(fma)(a * a, SA_C(0.044715), SA_C(1)) * SA_C(-0.79788456080286535588));
    const vec right = SA_C(1) / (SA_C(1) + h * h);
    return V(select)(V(lt)(x, SA_C(0)), x * h * h, x) * right;
}

/* What a row is mapped by; each kind needs only some. */
typedef struct {
    real hi, lo, scale;
    const real *weight, *bias;
} FN(constants);

/* y = ((x − hi) − lo)·scale·weight + bias for a vector at i, or the `left` elements there. */
SA_INLINE void FN(map_vector)(const real *x, real *y, ptrdiff_t i, ptrdiff_t left, const int kind,
                              const FN(constants) c) {
    vec t = FN(load_up_to)(x + i, left);
    if (kind == SA_GELU) {
        t = FN(gelu)(t);
    } else if (kind == SA_GELU_TANH) {
        t = FN(gelu_tanh)(t);
    }
    if (kind == SA_LOG_SOFTMAX || kind == SA_LAYER_NORM) {
        t = (t - V(set1)(c.hi)) - V(set1)(c.lo);
    }
    if (kind == SA_SOFTMAX || kind == SA_LAYER_NORM || kind == SA_RMS_NORM) {
        t = t * V(set1)(c.scale);
    }
    if (c.weight != NULL && c.bias != NULL) {
        t = V(fma)(t, FN(load_up_to)(c.weight + i, left), FN(load_up_to)(c.bias + i, left));
    } else if (c.weight != NULL) {
        t = t * FN(load_up_to)(c.weight + i, left);
    } else if (c.bias != NULL) {
        t = t + FN(load_up_to)(c.bias + i, left);
    }
    FN(store_up_to)(y + i, t, left);
}

/* Calls map_vector for a whole row. y may be x. */
SA_INLINE void FN(map)(const real *x, real *y, ptrdiff_t n, const int kind, const FN(constants) c) {
    ptrdiff_t i = 0;
    for (; i + SA_LANES <= n; i += SA_LANES) {
        FN(map_vector)(x, y, i, SA_LANES, kind, c);
    }
    if (i < n) {
        FN(map_vector)(x, y, i, n - i, kind, c);
    }
}

/* Rotates pairs (x[i], x[half + i]), or (x[2i], x[2i + 1]), forwards or backwards. y may be x. */
SA_INLINE void FN(rotate)(const real *x, real *y, ptrdiff_t n, const real *cos, const real *sin, const int interleaved,
                          const bool back) {
    const ptrdiff_t half = n / 2;
    for (ptrdiff_t i = 0; i < half; i += SA_LANES) {
        const int k = half - i < SA_LANES ? (int)(half - i) : SA_LANES;
        const bool full = k == SA_LANES;
        const vec c = FN(load_up_to)(cos + i, k), angle_sin = FN(load_up_to)(sin + i, k);
        const vec s = back ? -angle_sin : angle_sin;
        real copy[2 * SA_LANES];
        const real *from = interleaved ? x + 2 * i : x + i;
        real *to = interleaved ? y + 2 * i : y + i;
        ptrdiff_t apart = interleaved ? SA_LANES : half;
        if (!full) {
            apart = SA_LANES;
            memset(copy, 0, sizeof copy);
            memcpy(copy, from, (size_t)(interleaved ? 2 * k : k) * sizeof(real));
            if (!interleaved) {
                memcpy(copy + apart, x + half + i, (size_t)k * sizeof(real));
            }
            from = to = copy;
        }
        const vec u = V(load)(from), v = V(load)(from + apart);
        const vec a = interleaved ? V(even)(u, v) : u, b = interleaved ? V(odd)(u, v) : v;
        const vec left = V(fma)(a, c, -(b * s)), right = V(fma)(a, s, b * c);
        V(store)(to, interleaved ? V(zip_lo)(left, right) : left);
        V(store)(to + apart, interleaved ? V(zip_hi)(left, right) : right);
        if (!full) {
            memcpy(interleaved ? y + 2 * i : y + i, copy, (size_t)(interleaved ? 2 * k : k) * sizeof(real));
            if (!interleaved) {
                memcpy(y + half + i, copy + apart, (size_t)k * sizeof(real));
            }
        }
    }
}

/* Gathers n elements along `axes` axes; with one axis n may be less than its length. */
SA_SHARED void FN(gather)(void *dst, const char *src, const sa_strided *array, int which, const sa_row_axis *axis,
                          int axes, ptrdiff_t n) {
    if (axes == 1) {
        FN(load_row)(dst, src, axis->stride[which], n, array->dtype, array->swapped);
        return;
    }
    const ptrdiff_t inner = n / axis->n;
    for (ptrdiff_t i = 0; i < axis->n; ++i) {
        FN(gather)((real *)dst + i * inner, src + i * axis->stride[which], array, which, axis + 1, axes - 1, inner);
    }
}

SA_INLINE void FN(each_row)(const sa_row_task *b, real *scratch, const sa_row_kind kind) {
    const sa_row_plan *p = b->plan;
    const sa_strided *array = b->call->array;
    const ptrdiff_t n = b->n;
    const real *weight = p->weight, *bias = p->bias;
    for (int r = 0; r < b->count; ++r) {
        char *out = b->out[r];
        real *y = p->direct[SA_ROW_OUT] ? (void *)out : scratch;
        const real *x = y;
        if (p->direct[SA_ROW_X]) {
            x = (const void *)b->x[r];
        } else {
            FN(gather)(y, b->x[r], &array[SA_ROW_X], SA_ROW_X, p->row, p->n_row, n);
        }
        if (kind == SA_SOFTMAX) {
            const double sum = FN(sum_exp_stored)(x, y, n, FN(row_max)(x, n));
            FN(map)(y, y, n, kind, (FN(constants)){.scale = (real)(1 / sum)});
        } else if (kind == SA_LOG_SOFTMAX) {
            const real top = FN(row_max)(x, n);
            const double sum = FN(sum_exp)(x, n, top);
            FN(map)(x, y, n, kind, (FN(constants)){.hi = top, .lo = (real)log(sum)});
        } else if (kind == SA_LAYER_NORM || kind == SA_RMS_NORM) {
            FN(statistics) m;
            x = FN(norm_statistics)(x, y, n, b->call->eps, kind == SA_RMS_NORM, &m);
            FN(map)(x, y, n, kind, (FN(constants)){m.hi, m.lo, m.scale, weight, kind == SA_LAYER_NORM ? bias : NULL});
        } else if (SA_IS_ELEMENTWISE(kind)) {
            FN(map)(x, y, n, kind, (FN(constants)){0});
        } else {
            const real *table[2];
            for (int t = 0; t < 2; ++t) {
                const int which = SA_ROW_COS + t;
                const char *from = t == 0 ? b->cos[r] : b->sin[r];
                table[t] = (const void *)from;
                if (!p->direct[which]) {
                    real *to = scratch + p->n + t * (n / 2);
                    FN(load_row)(to, from, p->row[0].stride[which], n / 2, array[which].dtype, array[which].swapped);
                    table[t] = to;
                }
            }
            FN(rotate)(x, y, n, table[0], table[1], kind == SA_ROTARY_INTERLEAVED, SA_FORWARDS);
        }
        if (!p->direct[SA_ROW_OUT]) {
            FN(store_row)(out, (ptrdiff_t)sa_itemsize(array[SA_ROW_OUT].dtype), array[SA_ROW_OUT].dtype, y, n);
        }
    }
}

#define SA_ROW_KERNEL(kind, name, dtype, isa)                                                                          \
    SA_KERNEL void FN(name##_rows)(const sa_row_task *b, void *scratch) { FN(each_row)(b, scratch, kind); }
SA_ROW_FORWARD_ENTRIES(SA_ROW_KERNEL, SA_DTYPE, SA_ISA)
#undef SA_ROW_KERNEL

/* Kahan's sum; *error is its rounding error. */
SA_INLINE void FN(add_carefully)(real *sum, real *error, vec t) {
    const vec old = V(load)(sum);
    t = t - V(load)(error);
    const vec more = old + t;
    V(store)(error, (more - old) - t);
    V(store)(sum, more);
}

/* Softmax down the columns of x[n][width], width ≤ SA_ROW_COLUMNS; a lane is a column. Three passes over the rows:
 * maximum, sum (Kahan's, as one lane sums a whole column), result. e^(x − max) is computed twice, as 16-bit outputs
 * cannot keep it. */
SA_KERNEL void FN(softmax_columns)(const sa_row_task *b, void *unused) {
    (void)unused;
    const sa_row_plan *p = b->plan;
    const sa_strided *in = &b->call->array[SA_ROW_X], *result = &b->call->array[SA_ROW_OUT];
    const bool is_log = b->call->kind == SA_LOG_SOFTMAX;
    const ptrdiff_t width = b->width;
    real top[SA_ROW_COLUMNS], sum[SA_ROW_COLUMNS], error[SA_ROW_COLUMNS], tile[SA_ROW_COLUMNS];
    for (int r = 0; r < b->count; ++r) {
        for (ptrdiff_t j = 0; j < width; j += SA_LANES) {
            V(store)(top + j, V(set1)(-(real)INFINITY));
            V(store)(sum + j, V(set1)(0));
            V(store)(error + j, V(set1)(0));
        }
        for (int pass = 0; pass < 3; ++pass) {
            for (ptrdiff_t i = 0; i < b->n; ++i) {
                const char *from = b->x[r] + i * p->row[0].stride[SA_ROW_X];
                char *out = b->out[r] + i * p->row[0].stride[SA_ROW_OUT];
                real *y = p->direct[SA_ROW_OUT] ? (void *)out : tile;
                const real *x = tile;
                if (p->direct[SA_ROW_X]) {
                    x = (const void *)from;
                } else {
                    FN(load_row)(tile, from, p->column.stride[SA_ROW_X], width, in->dtype, in->swapped);
                }
                for (ptrdiff_t j = 0; j < width; j += SA_LANES) {
                    const vec t = FN(load_up_to)(x + j, width - j);
                    const vec top_j = V(load)(top + j), sum_j = V(load)(sum + j);
                    if (pass == 0) {
                        V(store)(top + j, V(max)(t, top_j));
                    } else if (pass == 1) {
                        FN(add_carefully)(sum + j, error + j, FN(exp)(t - top_j));
                    } else {
                        FN(store_up_to)(y + j, is_log ? (t - top_j) - sum_j : FN(exp)(t - top_j) * sum_j, width - j);
                    }
                }
                if (pass == 2 && y == tile) {
                    FN(store_row)(out, (ptrdiff_t)sa_itemsize(result->dtype), result->dtype, tile, width);
                }
            }
            for (ptrdiff_t j = 0; j < width && pass == 1; ++j) {
                sum[j] = is_log ? (real)log((double)sum[j]) : 1 / sum[j];
            }
        }
    }
}

#if !SA_REAL_IS_F64
/* Rounds to the nearest float16 or bfloat16, ties to even. */
SA_KERNEL void FN(narrow)(const float *restrict from, ptrdiff_t n, sa_dtype dtype, uint16_t *restrict to) {
    if (dtype == SA_BF16) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            to[i] = sa_bf16_of_float(from[i]);
        }
    } else {
        for (ptrdiff_t i = 0; i < n; ++i) {
            to[i] = sa_f16_of_float(from[i]);
        }
    }
}
#endif
