/* Rows of the embedding model: look-up, residual and LayerNorm, means, and their gradients. */

/* x[r] = table[ids[r]] + positions[r] */
SA_KERNEL void FN(look_up)(const void *table, const void *positions, const int64_t *ids, ptrdiff_t rows, ptrdiff_t d, void *x) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        const real *e = (const real *)table + ids[r] * d, *p = (const real *)positions + r * d;
        real *to = (real *)x + r * d;
        ptrdiff_t i = 0;
        for (; i + SA_LANES <= d; i += SA_LANES) {
            V(store)(to + i, V(load)(e + i) + V(load)(p + i));
        }
        if (i < d) {
            const int k = (int)(d - i);
            V(store_n)(to + i, V(load_n)(e + i, k) + V(load_n)(p + i, k), k);
        }
    }
}

/* LayerNorm as in kernels/rowops/forward.h, scale = 1/√(variance(s) + eps). y may be x. */
SA_KERNEL void FN(add_norm)(const sa_norm_rows *n) {
    const ptrdiff_t d = n->d;
    const real *weight = n->weight, *bias = n->bias;
    for (ptrdiff_t r = 0; r < n->rows; ++r) {
        const real *x = (const real *)n->x + r * d, *attended = (const real *)n->attended + r * d;
        real *u = (real *)n->unit + r * d, *y = (real *)n->y + r * d;
        ptrdiff_t i = 0;
        for (; i + SA_LANES <= d; i += SA_LANES) {
            V(store)(u + i, V(load)(x + i) + V(load)(attended + i));
        }
        if (i < d) {
            const int k = (int)(d - i);
            V(store_n)(u + i, V(load_n)(x + i, k) + V(load_n)(attended + i, k), k);
        }
        const real hi = (real)(FN(reduce)(u, NULL, d, 0, FN(SUM)).sum / (double)d);
        const FN(sums) s = FN(reduce)(u, NULL, d, hi, FN(CENTRED));
        const double lo = s.sum / (double)d, variance = s.squares / (double)d - lo * lo;
        const real scale = (real)(1 / sqrt((variance < 0 ? 0 : variance) + n->eps));
        ((real *)n->scale)[r] = scale;
        for (i = 0; i < d; i += SA_LANES) {
            const int k = d - i < SA_LANES ? (int)(d - i) : SA_LANES;
            if (k == SA_LANES) {
                const vec t = ((V(load)(u + i) - V(set1)(hi)) - SA_C(lo)) * V(set1)(scale);
                V(store)(u + i, t);
                V(store)(y + i, V(fma)(t, V(load)(weight + i), V(load)(bias + i)));
            } else {
                const vec t = ((V(load_n)(u + i, k) - V(set1)(hi)) - SA_C(lo)) * V(set1)(scale);
                V(store_n)(u + i, t, k);
                V(store_n)(y + i, V(fma)(t, V(load_n)(weight + i, k), V(load_n)(bias + i, k)), k);
            }
        }
    }
}

/* With g = dy·weight:  ds = (g − mean(g) − unit·mean(g·unit))·scale. */
SA_KERNEL void FN(norm_backward)(const sa_norm_rows *n, const void *dy, void *ds) {
    const ptrdiff_t d = n->d;
    const real *weight = n->weight;
    for (ptrdiff_t r = 0; r < n->rows; ++r) {
        const real *dy_r = (const real *)dy + r * d, *u = (const real *)n->unit + r * d;
        real *ds_r = (real *)ds + r * d;
        vec sum = V(set1)(0), along = V(set1)(0);
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const int k = d - i < SA_LANES ? (int)(d - i) : SA_LANES;
            const bool whole = k == SA_LANES;
            const vec g = whole ? V(load)(dy_r + i) * V(load)(weight + i) : V(load_n)(dy_r + i, k) * V(load_n)(weight + i, k);
            sum = sum + g;
            along = V(fma)(g, whole ? V(load)(u + i) : V(load_n)(u + i, k), along);
        }
        const vec mean = V(set1)(FN(sum_lanes)(sum) / (real)d), slope = V(set1)(FN(sum_lanes)(along) / (real)d);
        const vec scale = V(set1)(((const real *)n->scale)[r]);
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const int k = d - i < SA_LANES ? (int)(d - i) : SA_LANES;
            if (k == SA_LANES) {
                const vec g = V(load)(dy_r + i) * V(load)(weight + i);
                V(store)(ds_r + i, ((g - mean) - V(load)(u + i) * slope) * scale);
            } else {
                const vec g = V(load_n)(dy_r + i, k) * V(load_n)(weight + i, k);
                V(store_n)(ds_r + i, ((g - mean) - V(load_n)(u + i, k) * slope) * scale, k);
            }
        }
    }
}

/* to[c] = factor·Σ_r x[r][c]·times[r][c]; NULL times are ones. Sums of 128 rows add up in float64. */
SA_KERNEL void FN(column_sums)(const void *x, const void *times, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width,
                               double factor, void *to) {
    for (ptrdiff_t c = 0; c < width; c += SA_LANES) {
        const int k = width - c < SA_LANES ? (int)(width - c) : SA_LANES;
        double total[SA_LANES] = {0};
        for (ptrdiff_t first = 0; first < rows; first += 128) {
            const ptrdiff_t end = rows - first < 128 ? rows : first + 128;
            vec sum = V(set1)(0);
            for (ptrdiff_t r = first; r < end; ++r) {
                const real *x_r = (const real *)x + r * stride + c;
                vec t = k == SA_LANES ? V(load)(x_r) : V(load_n)(x_r, k);
                if (times != NULL) {
                    const real *times_r = (const real *)times + r * stride + c;
                    t = t * (k == SA_LANES ? V(load)(times_r) : V(load_n)(times_r, k));
                }
                sum = sum + t;
            }
            real lanes[SA_LANES];
            V(store)(lanes, sum);
            for (int i = 0; i < SA_LANES; ++i) {
                total[i] += (double)lanes[i];
            }
        }
        for (int i = 0; i < k; ++i) {
            ((real *)to)[c + i] = (real)(factor * total[i]);
        }
    }
}

/* to[r] = factor·x */
SA_KERNEL void FN(spread)(const void *x, double factor, ptrdiff_t rows, ptrdiff_t d, void *to) {
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
