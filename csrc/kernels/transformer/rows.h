/* What the transformer does to rows between products, and the gradients: look-up, sums and norms, activations, rotary
 * positions, means.
 * Comes after simd/philox.h and kernels/rowops/backward.h. */
#include "kernels/kernels.h"

/* x[r] = (table[ids[r]] + token_type_row) + positions[r]; NULL means zeros. */
SA_KERNEL void FN(look_up)(const void *table, const void *token_type_row, const void *positions, const int64_t *ids,
                           ptrdiff_t rows, ptrdiff_t d, void *x) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        const real *e = (const real *)table + ids[r] * d;
        real *to = (real *)x + r * d;
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            vec t = FN(load_up_to)(e + i, d - i);
            if (token_type_row != NULL) {
                t = t + FN(load_up_to)((const real *)token_type_row + i, d - i);
            }
            if (positions != NULL) {
                t = t + FN(load_up_to)((const real *)positions + r * d + i, d - i);
            }
            FN(store_up_to)(to + i, t, d - i);
        }
    }
}

/* Prepares rows to which a product is added, or writes them with the sums of one of SA_GEMV_COLUMNS columns:
 * to[r] = (bias + residual[r]) + sums[r]; NULL means zeros. to and residual have `stride`. */
SA_KERNEL void FN(begin_rows)(void *to, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t width, const void *bias,
                              const void *residual, const void *sums) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        for (ptrdiff_t i = 0; i < width; i += SA_LANES) {
            const ptrdiff_t at = r * stride + i, left = width - i;
            vec t = V(set1)(0);
            if (bias != NULL) {
                t = FN(load_up_to)((const real *)bias + i, left);
            }
            if (residual != NULL) {
                t = t + FN(load_up_to)((const real *)residual + at, left);
            }
            if (sums != NULL) {
                t = t + FN(load_up_to)((const real *)sums + r * SA_GEMV_COLUMNS + i, left);
            }
            FN(store_up_to)((real *)to + at, t, left);
        }
    }
}

/* LayerNorm and RMSNorm as in kernels/rowops/forward.h, scale = 1/√(variance(s) + eps).
 * y may be x or residual; scaled may be x, added or y. */
SA_KERNEL void FN(add_norm)(const sa_norm_rows *n) {
    const ptrdiff_t d = n->d;
    const real *weight = n->weight, *bias = n->bias, *residual = n->residual;
    for (ptrdiff_t r = 0; r < n->rows; ++r) {
        const real *x = (const real *)n->x + r * d;
        real *u = (real *)n->scaled + r * d, *y = (real *)n->y + r * d;
        if (n->added != NULL) {
            const real *added = (const real *)n->added + r * d;
            for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
                FN(store_up_to)(u + i, FN(load_up_to)(x + i, d - i) + FN(load_up_to)(added + i, d - i), d - i);
            }
            x = u;
        }
        FN(statistics) m;
        x = FN(norm_statistics)(x, u, d, n->eps, n->rms, &m);
        ((real *)n->scale)[r] = m.exponent == 0 ? m.scale : (real)ldexp((double)m.scale, -m.exponent);
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const ptrdiff_t k = d - i;
            const vec t = ((FN(load_up_to)(x + i, k) - V(set1)(m.hi)) - V(set1)(m.lo)) * V(set1)(m.scale);
            FN(store_up_to)(u + i, t, k);
            vec b = V(set1)(0);
            if (bias != NULL) {
                b = FN(load_up_to)(bias + i, k);
            }
            b = V(fma)(t, FN(load_up_to)(weight + i, k), b);
            if (residual != NULL) {
                b = FN(load_up_to)(residual + r * d + i, k) + b;
            }
            FN(store_up_to)(y + i, b, k);
        }
    }
}

/* With g = dy·weight:  ds = (g − mean(g) − scaled·mean(g·scaled))·scale, or ds += that; RMSNorm has no mean(g). */
SA_KERNEL void FN(norm_backward)(const sa_norm_rows *n, const void *dy, void *ds, bool adds) {
    const ptrdiff_t d = n->d;
    const real *weight = n->weight;
    for (ptrdiff_t r = 0; r < n->rows; ++r) {
        const real *dy_r = (const real *)dy + r * d, *u = (const real *)n->scaled + r * d;
        real *ds_r = (real *)ds + r * d;
        vec sum = V(set1)(0), along = V(set1)(0);
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const vec g = FN(load_up_to)(dy_r + i, d - i) * FN(load_up_to)(weight + i, d - i);
            sum = sum + g;
            along = V(fma)(g, FN(load_up_to)(u + i, d - i), along);
        }
        const vec mean = V(set1)(n->rms ? 0 : FN(sum_lanes)(sum) / (real)d),
                  slope = V(set1)(FN(sum_lanes)(along) / (real)d);
        const vec scale = V(set1)(((const real *)n->scale)[r]);
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const vec g = FN(load_up_to)(dy_r + i, d - i) * FN(load_up_to)(weight + i, d - i);
            vec t = ((g - mean) - FN(load_up_to)(u + i, d - i) * slope) * scale;
            if (adds) {
                t = FN(load_up_to)(ds_r + i, d - i) + t;
            }
            FN(store_up_to)(ds_r + i, t, d - i);
        }
    }
}

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* 1/(1 + e^(−x)), from e^(−|x|), which does not overflow. */
SA_INLINE vec FN(sigmoid)(vec x) {
    const vec e = FN(exp)(SA_C(0) - V(abs)(x)), right = SA_C(1) / (SA_C(1) + e);
    return V(select)(V(lt)(x, SA_C(0)), e * right, right);
}

SA_INLINE vec FN(activation)(vec x, const int kind) {
    if (kind == SA_ACT_RELU) {
        return V(max)(SA_C(0), x); /* NaN stays */
    }
    if (kind == SA_ACT_SILU) {
        return x * FN(sigmoid)(x);
    }
    if (kind == SA_ACT_GELU) {
        return FN(gelu)(x);
    }
    return FN(gelu_tanh)(x);
}

/* relu: 0 for x ≤ 0, and 1 for NaN. silu: s·(1 + x·(1 − s)), s the sigmoid. */
SA_INLINE vec FN(activation_slope)(vec x, const int kind) {
    if (kind == SA_ACT_RELU) {
        return V(zero_unless)(V(not_lt)(x, SA_C(SA_REAL_LEAST)), SA_C(1));
    }
    if (kind == SA_ACT_SILU) {
        const vec s = FN(sigmoid)(x);
        return s * V(fma)(x, SA_C(1) - s, SA_C(1));
    }
    if (kind == SA_ACT_GELU) {
        return FN(gelu_slope)(x);
    }
    return FN(gelu_tanh_slope)(x);
}

SA_INLINE void FN(activate_as)(const sa_active *a, real *to, const int kind) {
    for (ptrdiff_t r = 0; r < a->rows; ++r) {
        for (ptrdiff_t i = 0; i < a->width; i += SA_LANES) {
            const ptrdiff_t at = r * a->stride + i, left = a->width - i;
            vec x = FN(load_up_to)((const real *)a->pre + at, left);
            if (a->gate == NULL) {
                x = FN(activation)(x, kind);
            } else {
                x = x * FN(activation)(FN(load_up_to)((const real *)a->gate + at, left), kind);
            }
            FN(store_up_to)(to + at, x, left);
        }
    }
}

/* d is the gradient of the activated rows and becomes the gradient of pre; dgate becomes the gradient of the gate. */
SA_INLINE void FN(activate_backward_as)(const sa_active *a, real *d, real *dgate, const int kind) {
    for (ptrdiff_t r = 0; r < a->rows; ++r) {
        for (ptrdiff_t i = 0; i < a->width; i += SA_LANES) {
            const ptrdiff_t at = r * a->stride + i, left = a->width - i;
            const vec x = FN(load_up_to)((const real *)a->pre + at, left), dy = FN(load_up_to)(d + at, left);
            if (a->gate == NULL) {
                FN(store_up_to)(d + at, dy * FN(activation_slope)(x, kind), left);
                continue;
            }
            const vec g = FN(load_up_to)((const real *)a->gate + at, left);
            FN(store_up_to)(dgate + at, (dy * x) * FN(activation_slope)(g, kind), left);
            FN(store_up_to)(d + at, dy * FN(activation)(g, kind), left);
        }
    }
}

#define SA_EACH_ACTIVATION(X)                                                                                          \
    X(relu, SA_ACT_RELU) X(gelu, SA_ACT_GELU) X(gelu_tanh, SA_ACT_GELU_TANH) X(silu, SA_ACT_SILU)
#define SA_ACTIVATION(name, kind)                                                                                      \
    SA_ONCE void FN(activate_##name)(const sa_active *a, real *to) { FN(activate_as)(a, to, kind); }                   \
    SA_ONCE void FN(activate_##name##_backward)(const sa_active *a, real *d, real *dgate) {                            \
        FN(activate_backward_as)(a, d, dgate, kind);                                                                   \
    }
SA_EACH_ACTIVATION(SA_ACTIVATION)

/* to = activation(pre), or activation(gate)·pre. to may be pre. */
SA_KERNEL void FN(activate)(const sa_active *a, void *to) {
#define SA_CASE(name, kind)                                                                                            \
    case kind: FN(activate_##name)(a, to); break;
    switch ((int)a->kind) { SA_EACH_ACTIVATION(SA_CASE) }
#undef SA_CASE
}

SA_KERNEL void FN(activate_backward)(const sa_active *a, void *d, void *dgate) {
#define SA_CASE(name, kind)                                                                                            \
    case kind: FN(activate_##name##_backward)(a, d, dgate); break;
    switch ((int)a->kind) { SA_EACH_ACTIVATION(SA_CASE) }
#undef SA_CASE
}
#undef SA_ACTIVATION
#undef SA_EACH_ACTIVATION

/* ---- dropout, rotary positions, sums over rows ------------------------------------------------------------------- */

/* x becomes 0 or x/(1 − p), plus the residual unless that is NULL. A dropped x may be NaN. */
SA_KERNEL void FN(drop_rows)(const sa_dropout *t, void *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t width,
                             const void *residual) {
    const double least = rint(t->p * 4294967296.0);
    const bool all = least >= 4294967296.0;
    const vec factor = V(set1)(all ? 0 : (real)(1 / (1 - t->p)));
    /* A whole vector may be read from any word on. */
    uint32_t index[16], low[16] = {0}, high[16], words[4 * 16 + 16] = {0};
    for (ptrdiff_t r = 0; r < rows; ++r) {
        const uint64_t row = (uint64_t)(t->first_row + r);
        for (ptrdiff_t c = 0; c < width;) {
            const ptrdiff_t column = t->first_column + c, from = column % 64, n = SA_SMALLER(64 - from, width - c);
            for (int i = 0; i < 16; ++i) {
                index[i] = (uint32_t)(column / 64 * 16 + i);
                high[i] = (uint32_t)(row >> 32);
            }
            sa_philox(t->seed, (uint32_t)row, index, high, low, 16, words);
            for (ptrdiff_t j = 0; j < n; j += SA_LANES) {
                const ptrdiff_t at = r * stride + c + j;
                const lanemask kept = V(words_ge)(words + from + j, all ? UINT32_MAX : (uint32_t)least);
                vec y = V(zero_unless)(kept, FN(load_up_to)((real *)x + at, n - j) * factor);
                if (all) {
                    y = V(set1)(0);
                }
                if (residual != NULL) {
                    y = y + FN(load_up_to)((const real *)residual + at, n - j);
                }
                FN(store_up_to)((real *)x + at, y, n - j);
            }
            c += n;
        }
    }
}

/* Rotates the first `rotated` elements of each head of rows 0, 1, … of a sequence, forwards or backwards. */
SA_KERNEL void FN(rotate_heads)(const sa_rotary *t, void *x, ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t width,
                                bool back) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        const real *cos = (const real *)t->cos + r * (t->rotated / 2),
                   *sin = (const real *)t->sin + r * (t->rotated / 2);
        for (ptrdiff_t h = 0; h < heads; ++h) {
            real *head = (real *)x + (r * heads + h) * width;
            if (back) {
                FN(rotate)(head, head, t->rotated, cos, sin, t->interleaved, SA_BACKWARDS);
            } else {
                FN(rotate)(head, head, t->rotated, cos, sin, t->interleaved, SA_FORWARDS);
            }
        }
    }
}

/* to[c] = factor·Σ_r x[r][c]·times[r][c]; NULL times means ones. Sums of 128 rows are added in float64. */
SA_INLINE void FN(sum_columns)(const real *x, const real *times, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width,
                               double factor, real *to, const int nv) {
    double total[4 * SA_LANES] = {0};
    for (ptrdiff_t first = 0; first < rows; first += 128) {
        const ptrdiff_t end = rows - first < 128 ? rows : first + 128;
        vec sum[4];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            sum[v] = V(set1)(0);
        }
        for (ptrdiff_t r = first; r < end; ++r) {
            SA_UNROLL
            for (int v = 0; v < nv; ++v) {
                const ptrdiff_t at = r * stride + v * SA_LANES, left = width - v * SA_LANES;
                vec t = FN(load_up_to)(x + at, left);
                if (times != NULL) {
                    t = t * FN(load_up_to)(times + at, left);
                }
                sum[v] = sum[v] + t;
            }
        }
        real lanes[4 * SA_LANES];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            V(store)(lanes + v * SA_LANES, sum[v]);
        }
        for (int i = 0; i < nv * SA_LANES; ++i) {
            total[i] += (double)lanes[i];
        }
    }
    for (int i = 0; i < nv * SA_LANES && i < width; ++i) {
        to[i] = (real)(factor * total[i]);
    }
}

SA_KERNEL void FN(column_sums)(const void *x, const void *times, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width,
                               double factor, void *to) {
    const real *from = x, *by = times;
    real *sums = to;
    /* Whole cache lines. */
    for (; width >= 4 * SA_LANES; width -= 4 * SA_LANES, from += 4 * SA_LANES, sums += 4 * SA_LANES) {
        FN(sum_columns)(from, by, rows, stride, 4 * SA_LANES, factor, sums, 4);
        by = by == NULL ? NULL : by + 4 * SA_LANES;
    }
    for (; width > 0; width -= SA_LANES, from += SA_LANES, sums += SA_LANES) {
        FN(sum_columns)(from, by, rows, stride, width, factor, sums, 1);
        by = by == NULL ? NULL : by + SA_LANES;
    }
}

/* to[r] = factor·x */
SA_KERNEL void FN(repeat_scaled)(const void *x, double factor, ptrdiff_t rows, ptrdiff_t d, void *to) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        for (ptrdiff_t i = 0; i < d; ++i) {
            ((real *)to)[r * d + i] = ((const real *)x)[i] * (real)factor;
        }
    }
}

SA_KERNEL void FN(add_row)(const void *x, ptrdiff_t d, void *to) {
    for (ptrdiff_t i = 0; i < d; ++i) {
        ((real *)to)[i] += ((const real *)x)[i];
    }
}
