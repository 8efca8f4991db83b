/* Gradients of softmax, norms and GELU, over the rows that drivers/rowops.c describes. Maximum, mean and norm are
 * computed again from the inputs, while a row is in L1, so 16-bit gradients have the error of float32 and one rounding.
 * NaN in x or dy makes its row NaN (GELU: its element).
 * Comes after kernels/rowops/forward.h. */
#include "kernels/entries.h"

/* g = Σg and gt = Σg·t over a row:
 *     norms     t = ((x − hi) − lo)·scale, g = dy·weight; and dweight += dy·t, dbias += dy unless NULL
 *     softmax   t = x, already e^(x − max); g = dy */
typedef struct {
    double g, gt;
} FN(row_sums);

/* A norm's constants, and its parameters' gradients, or NULL. Softmax has none of these. */
typedef struct {
    bool is_norm;
    real hi, lo, scale;
    const real *weight;
    real *dweight, *dbias;
} FN(sum_terms);

/* Adds a vector at i, or the `left` elements there, to the sums. */
SA_INLINE void FN(sum_vector)(const real *x, const real *dy, ptrdiff_t i, ptrdiff_t left, const FN(sum_terms) c,
                              vec *sum_g, vec *sum_gt) {
    vec t = FN(load_up_to)(x + i, left), g = FN(load_up_to)(dy + i, left); /* the lanes after them add 0 */
    if (c.is_norm) {
        t = ((t - V(set1)(c.hi)) - V(set1)(c.lo)) * V(set1)(c.scale);
    }
    if (c.dweight != NULL) {
        FN(store_up_to)(c.dweight + i, V(fma)(g, t, FN(load_up_to)(c.dweight + i, left)), left);
    }
    if (c.dbias != NULL) {
        FN(store_up_to)(c.dbias + i, g + FN(load_up_to)(c.dbias + i, left), left);
    }
    if (c.weight != NULL) {
        g = g * FN(load_up_to)(c.weight + i, left);
    }
    *sum_g = *sum_g + g;
    *sum_gt = V(fma)(g, t, *sum_gt);
}

SA_INLINE FN(row_sums) FN(sum_row)(const real *x, const real *dy, ptrdiff_t n, const FN(sum_terms) c) {
    FN(row_sums) total = {0, 0};
    for (ptrdiff_t i = 0; i < n;) {
        const ptrdiff_t end = n - i < SA_SUM_PIECE ? n : i + SA_SUM_PIECE;
        vec g[2], gt[2];
        g[0] = g[1] = gt[0] = gt[1] = V(set1)(0);
        for (; i + 2 * SA_LANES <= end; i += 2 * SA_LANES) {
            FN(sum_vector)(x, dy, i, SA_LANES, c, &g[0], &gt[0]);
            FN(sum_vector)(x, dy, i + SA_LANES, SA_LANES, c, &g[1], &gt[1]);
        }
        if (i + SA_LANES <= end) {
            FN(sum_vector)(x, dy, i, SA_LANES, c, &g[0], &gt[0]);
            i += SA_LANES;
        }
        if (i < end) {
            FN(sum_vector)(x, dy, i, end - i, c, &g[1], &gt[1]);
            i = end;
        }
        total.g += (double)FN(sum_lanes)(g[0] + g[1]);
        total.gt += (double)FN(sum_lanes)(gt[0] + gt[1]);
    }
    return total;
}

SA_ONCE FN(row_sums) FN(sum_softmax)(const real *x, const real *dy, ptrdiff_t n) {
    return FN(sum_row)(x, dy, n, (FN(sum_terms)){.is_norm = false});
}
SA_ONCE FN(row_sums) FN(sum_norm)(const real *x, const real *dy, ptrdiff_t n, real hi, real lo, real scale,
                                  const real *weight, real *dweight, real *dbias) {
    return FN(sum_row)(x, dy, n, (FN(sum_terms)){true, hi, lo, scale, weight, dweight, dbias});
}

/* dy/dx = Φ(x) + x·φ(x), φ(x) = e^(−x²/2)/√(2π). NaN for ±inf (inf·0), as in PyTorch. */
SA_INLINE vec FN(gelu_slope)(vec x) {
    vec bell;
    const vec tail = FN(normal_tail)(x, &bell);
    const vec phi = V(select)(V(lt)(x, SA_C(0)), tail, SA_C(1) - tail);
    return V(fma)(x * SA_C(0.39894228040143267794), bell, phi);
}

/* y = x·s(z), s(z) = 1/(1 + e^(−z)), z = 2√(2/π)·(x + 0.044715·x³):  dy/dx = s·(1 + x·(1 − s)·dz/dx). With
 * h² = e^(−|z|), s is 1/(1 + h²), or h²/(1 + h²) for negative x. From |x| = 100 on h² is 0, and dz/dx is limited so
 * that it does not overflow. NaN for ±inf. */
SA_INLINE vec FN(gelu_tanh_slope)(vec x) {
    const vec a = V(abs)(x), near = V(min)(SA_C(100), a);
    const vec h = FN(exp)(a * V(fma)(a * a, SA_C(0.044715), SA_C(1)) * SA_C(-0.79788456080286535588));
    const vec dz = V(fma)(near * near, SA_C(3 * 0.044715 * 1.5957691216057307118), SA_C(1.5957691216057307118));
    const vec right = SA_C(1) / (SA_C(1) + h * h);
    const vec bend = (x * right) * (dz * h); /* x·(1 − s)·dz/dx without one factor h */
    const lanemask negative = V(lt)(x, SA_C(0));
    return V(select)(negative, (h + bend) * h, V(fma)(bend, h, SA_C(1))) * right;
}

/* Computes dx from the row's constants a and b. dx may be x.
 *     softmax       y = t·scale, t = e^(x − max)       dx = y·(dy − a)
 *     log_softmax   e^y = t·scale                      dx = dy − e^y·a
 *     norms         y = t·weight, t = (x − mean)·scale dx = scale·((dy·weight − a) − t·b)
 *     gelu                                             dx = dy·slope(x) */
typedef struct {
    real hi, lo, scale;
    const real *weight;
    real a, b;
} FN(gradient_constants);

SA_INLINE void FN(map_backward_vector)(const real *x, const real *dy, real *dx, ptrdiff_t i, ptrdiff_t left,
                                       const int kind, const FN(gradient_constants) c) {
    vec t = FN(load_up_to)(x + i, left), g = FN(load_up_to)(dy + i, left);
    if (kind == SA_GELU_BACKWARD) {
        t = g * FN(gelu_slope)(t);
    } else if (kind == SA_GELU_TANH_BACKWARD) {
        t = g * FN(gelu_tanh_slope)(t);
    } else if (kind == SA_SOFTMAX_BACKWARD) {
        t = (t * V(set1)(c.scale)) * (g - V(set1)(c.a));
    } else if (kind == SA_LOG_SOFTMAX_BACKWARD) {
        t = V(fma)(t * V(set1)(c.scale), V(set1)(-c.a), g);
    } else {
        if (kind == SA_LAYER_NORM_BACKWARD) {
            t = (t - V(set1)(c.hi)) - V(set1)(c.lo);
        }
        if (c.weight != NULL) {
            g = g * FN(load_up_to)(c.weight + i, left);
        }
        if (kind == SA_LAYER_NORM_BACKWARD) {
            g = g - V(set1)(c.a);
        }
        t = V(set1)(c.scale) * V(fma)(t * V(set1)(c.scale), V(set1)(-c.b), g);
    }
    FN(store_up_to)(dx + i, t, left);
}

SA_INLINE void FN(map_backward)(const real *x, const real *dy, real *dx, ptrdiff_t n, const int kind,
                                const FN(gradient_constants) c) {
    ptrdiff_t i = 0;
    for (; i + SA_LANES <= n; i += SA_LANES) {
        FN(map_backward_vector)(x, dy, dx, i, SA_LANES, kind, c);
    }
    if (i < n) {
        FN(map_backward_vector)(x, dy, dx, i, n - i, kind, c);
    }
}

/* If sums of a row overflow, writes dy·2^−e, whose sums do not, to `room`, and returns e. Else returns 0. */
SA_ONCE int FN(scale_gradient)(FN(row_sums) s, const real *dy, real *room, ptrdiff_t n) {
    /* Below this, differences with dy do not overflow either. */
    const double most = (SA_REAL_IS_F64 ? DBL_MAX : (double)FLT_MAX) / 8;
    if (s.g > -most && s.g < most && s.gt > -most && s.gt < most) {
        return 0;
    }
    const int e = FN(row_exponent)(dy, n);
    if (e != 0) {
        FN(scale_row)(dy, room, n, -e);
    }
    return e;
}

/* A row of a softmax or norm. dx may be x, and room may be dy.
 * Adds to dweight[n] and dbias[n], unless they are NULL. */
SA_INLINE void FN(row_backward)(const real *x, const real *dy, real *dx, real *room, ptrdiff_t n, const int kind,
                                double eps, const real *weight, real *dweight, real *dbias) {
    int e;
    if (kind == SA_SOFTMAX_BACKWARD || kind == SA_LOG_SOFTMAX_BACKWARD) {
        const double sum = FN(sum_exp_stored)(x, dx, n, FN(row_max)(x, n));
        FN(row_sums) s = FN(sum_softmax)(dx, dy, n);
        e = FN(scale_gradient)(s, dy, room, n);
        if (e != 0) {
            dy = room;
            s = FN(sum_softmax)(dx, dy, n);
        }
        const double a = kind == SA_SOFTMAX_BACKWARD ? s.gt / sum : s.g;
        FN(map_backward)(dx, dy, dx, n, kind, (FN(gradient_constants)){.scale = (real)(1 / sum), .a = (real)a});
    } else {
        const bool is_rms = kind == SA_RMS_NORM_BACKWARD;
        FN(statistics) m;
        x = FN(norm_statistics)(x, dx, n, eps, is_rms, &m);
        FN(row_sums) s = FN(sum_norm)(x, dy, n, m.hi, m.lo, m.scale, weight, dweight, dbias);
        e = FN(scale_gradient)(s, dy, room, n);
        if (e != 0) {
            dy = room;
            dweight = dbias = NULL; /* they have their terms already */
            s = FN(sum_norm)(x, dy, n, m.hi, m.lo, m.scale, weight, dweight, dbias);
        }
        const double a = is_rms ? 0 : s.g / (double)n;
        FN(map_backward)(x, dy, dx, n, kind,
                         (FN(gradient_constants)){m.hi, m.lo, m.scale, weight, (real)a, (real)(s.gt / (double)n)});
        e -= m.exponent;
    }
    if (e != 0) {
        FN(scale_row)(dx, dx, n, e);
    }
}

/* scratch has rows for dx and dy, and the block's dweight and dbias, which are then added to the chunk's in float64. */
SA_INLINE void FN(each_row_backward)(const sa_row_task *b, real *scratch, const sa_row_kind kind) {
    const sa_row_plan *p = b->plan;
    const sa_row_call *c = b->call;
    const ptrdiff_t n = b->n;
    real *dweight = b->partial != NULL ? scratch + 2 * n : NULL;
    real *dbias = b->partial != NULL && kind == SA_LAYER_NORM_BACKWARD ? scratch + 3 * n : NULL;
    if (b->partial != NULL) {
        memset(scratch + 2 * n, 0, 2 * (size_t)n * sizeof(real));
    }
    for (int r = 0; r < b->count; ++r) {
        char *out = b->out[r];
        real *dx = p->direct[SA_ROW_OUT] ? (void *)out : scratch;
        const real *x = dx, *dy = scratch + n;
        if (p->direct[SA_ROW_X]) {
            x = (const void *)b->x[r];
        } else {
            FN(gather)(dx, b->x[r], &c->array[SA_ROW_X], SA_ROW_X, p->row, p->n_row, n);
        }
        if (p->direct[SA_ROW_DY]) {
            dy = (const void *)b->dy[r];
        } else {
            FN(gather)(scratch + n, b->dy[r], &c->array[SA_ROW_DY], SA_ROW_DY, p->row, p->n_row, n);
        }
        if (SA_IS_ELEMENTWISE(kind)) {
            FN(map_backward)(x, dy, dx, n, kind, (FN(gradient_constants)){0});
        } else {
            FN(row_backward)(x, dy, dx, scratch + n, n, kind, c->eps, p->weight, dweight, dbias);
        }
        if (!p->direct[SA_ROW_OUT]) {
            FN(store_row)(out, (ptrdiff_t)sa_itemsize(c->array[SA_ROW_OUT].dtype), c->array[SA_ROW_OUT].dtype, dx, n);
        }
    }
    for (ptrdiff_t i = 0; i < 2 * n && b->partial != NULL; ++i) {
        b->partial[i] += (double)scratch[2 * n + i];
    }
}

#define SA_ROW_KERNEL(kind, name, dtype, isa)                                                                          \
    SA_KERNEL void FN(name##_rows)(const sa_row_task *b, void *scratch) { FN(each_row_backward)(b, scratch, kind); }
SA_ROW_BACKWARD_ENTRIES(SA_ROW_KERNEL, SA_DTYPE, SA_ISA)
#undef SA_ROW_KERNEL

/* row is n elements of scratch. */
SA_KERNEL void FN(parameter_gradients)(const sa_row_call *c, const sa_row_plan *p, void *row) {
    const ptrdiff_t n = p->n;
    for (int which = 0; which < 2; ++which) {
        const sa_row_gradient *to = which == 0 ? &c->dweight : &c->dbias;
        if (to->data == NULL) {
            continue;
        }
        double *sum = p->partial + which * n;
        for (ptrdiff_t chunk = 1; chunk < p->chunks; ++chunk) {
            for (ptrdiff_t i = 0; i < n; ++i) {
                sum[i] += sum[2 * n * chunk + i];
            }
        }
        for (ptrdiff_t i = 0; i < n; ++i) {
            ((real *)row)[i] = (real)sum[i];
        }
        FN(store_row)(to->data, (ptrdiff_t)sa_itemsize(to->dtype), to->dtype, row, n);
    }
}

/* True if a sum of dy is NaN, or so large that a difference with dy may overflow. */
SA_ONCE bool FN(any_too_large)(const real *sum, ptrdiff_t n) {
    bool any = false;
    for (ptrdiff_t i = 0; i < n; ++i) {
        any |= !(sum[i] > -SA_REAL_MAX / 8 && sum[i] < SA_REAL_MAX / 8);
    }
    return any;
}

/* Like softmax_columns: dx = y·(dy − Σy·dy), or dx = dy − e^y·Σdy for log_softmax. Where sums would overflow, dy is
 * multiplied by a power of two, and dx divided by it. */
SA_KERNEL void FN(softmax_columns_backward)(const sa_row_task *b, void *unused) {
    (void)unused;
    const sa_row_plan *p = b->plan;
    const sa_strided *array = b->call->array, *result = &array[SA_ROW_OUT];
    const bool is_log = b->call->kind == SA_LOG_SOFTMAX_BACKWARD;
    const ptrdiff_t width = b->width;
    real top[SA_ROW_COLUMNS], sum[2][SA_ROW_COLUMNS], error[2][SA_ROW_COLUMNS];
    real x_tile[SA_ROW_COLUMNS], dy_tile[SA_ROW_COLUMNS], dx_tile[SA_ROW_COLUMNS];
    for (int r = 0; r < b->count; ++r) {
        real factor = 1;
        for (ptrdiff_t j = 0; j < width; j += SA_LANES) {
            V(store)(top + j, V(set1)(-(real)INFINITY));
        }
        for (int pass = 0; pass < 3; ++pass) {
            for (ptrdiff_t j = 0; j < width && pass == 1; j += SA_LANES) {
                for (int s = 0; s < 2; ++s) {
                    V(store)(sum[s] + j, V(set1)(0));
                    V(store)(error[s] + j, V(set1)(0));
                }
            }
            for (ptrdiff_t i = 0; i < b->n; ++i) {
                char *out = b->out[r] + i * p->row[0].stride[SA_ROW_OUT];
                real *dx = p->direct[SA_ROW_OUT] ? (void *)out : dx_tile;
                const char *from[2] = {b->x[r] + i * p->row[0].stride[SA_ROW_X],
                                       b->dy[r] + i * p->row[0].stride[SA_ROW_DY]};
                const real *in[2] = {x_tile, dy_tile};
                for (int s = 0; s < (pass == 0 ? 1 : 2); ++s) {
                    const int which = s == 0 ? SA_ROW_X : SA_ROW_DY;
                    if (p->direct[which]) {
                        in[s] = (const void *)from[s];
                    } else {
                        FN(load_row)(s == 0 ? x_tile : dy_tile, from[s], p->column.stride[which], width,
                                     array[which].dtype, array[which].swapped);
                    }
                }
                for (ptrdiff_t j = 0; j < width; j += SA_LANES) {
                    const vec t = FN(load_up_to)(in[0] + j, width - j), top_j = V(load)(top + j);
                    if (pass == 0) {
                        V(store)(top + j, V(max)(t, top_j));
                        continue;
                    }
                    const vec e = FN(exp)(t - top_j), g = FN(load_up_to)(in[1] + j, width - j) * V(set1)(factor);
                    if (pass == 1) {
                        FN(add_carefully)(sum[0] + j, error[0] + j, e);
                        vec term = g;
                        if (!is_log) {
                            term = e * g;
                        }
                        FN(add_carefully)(sum[1] + j, error[1] + j, term);
                        continue;
                    }
                    const vec y = e * V(load)(sum[0] + j), total = V(load)(sum[1] + j);
                    vec d = y * (g - total);
                    if (is_log) {
                        d = V(fma)(y, -total, g);
                    }
                    FN(store_up_to)(dx + j, d * V(set1)(1 / factor), width - j);
                }
                if (pass == 2 && dx == dx_tile) {
                    FN(store_row)(out, (ptrdiff_t)sa_itemsize(result->dtype), result->dtype, dx, width);
                }
            }
            if (pass == 1 && factor == 1 && FN(any_too_large)(sum[1], width)) {
                int exponent = 0;
                (void)frexp((double)b->n, &exponent);
                factor = (real)ldexp(1, -exponent - 3);
                pass = 0;
                continue;
            }
            for (ptrdiff_t j = 0; j < width && pass == 1; ++j) {
                sum[0][j] = 1 / sum[0][j];
                sum[1][j] *= is_log ? 1 : sum[0][j];
            }
        }
    }
}
#undef SA_SUM_PIECE
