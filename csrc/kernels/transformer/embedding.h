/* Rows of the embedding model: look-up, residual and LayerNorm, means, and their gradients. */

/* x[r] = table[ids[r]] + positions[r] */
SA_KERNEL void FN(look_up)(const void *table, const void *positions, const int64_t *ids, ptrdiff_t rows, ptrdiff_t d, void *x) {
    for (ptrdiff_t r = 0; r < rows; ++r) {
        const real *e = (const real *)table + ids[r] * d, *p = (const real *)positions + r * d;
        real *to = (real *)x + r * d;
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            FN(store_up_to)(to + i, FN(load_up_to)(e + i, d - i) + FN(load_up_to)(p + i, d - i), d - i);
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
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            FN(store_up_to)(u + i, FN(load_up_to)(x + i, d - i) + FN(load_up_to)(attended + i, d - i), d - i);
        }
        const FN(statistics) m = FN(layer_statistics)(u, d, n->eps);
        ((real *)n->scale)[r] = m.scale;
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const ptrdiff_t k = d - i;
            const vec t = ((FN(load_up_to)(u + i, k) - V(set1)(m.hi)) - V(set1)(m.lo)) * V(set1)(m.scale);
            FN(store_up_to)(u + i, t, k);
            FN(store_up_to)(y + i, V(fma)(t, FN(load_up_to)(weight + i, k), FN(load_up_to)(bias + i, k)), k);
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
            const vec g = FN(load_up_to)(dy_r + i, d - i) * FN(load_up_to)(weight + i, d - i);
            sum = sum + g;
            along = V(fma)(g, FN(load_up_to)(u + i, d - i), along);
        }
        const vec mean = V(set1)(FN(sum_lanes)(sum) / (real)d), slope = V(set1)(FN(sum_lanes)(along) / (real)d);
        const vec scale = V(set1)(((const real *)n->scale)[r]);
        for (ptrdiff_t i = 0; i < d; i += SA_LANES) {
            const vec g = FN(load_up_to)(dy_r + i, d - i) * FN(load_up_to)(weight + i, d - i);
            FN(store_up_to)(ds_r + i, ((g - mean) - FN(load_up_to)(u + i, d - i) * slope) * scale, d - i);
        }
    }
}

/* to[c] = factor·Σ_r x[r][c]·times[r][c]; NULL times are ones. Sums of 128 rows add up in float64. */
SA_KERNEL void FN(column_sums)(const void *x, const void *times, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width,
                               double factor, void *to) {
    for (ptrdiff_t c = 0; c < width; c += SA_LANES) {
        double total[SA_LANES] = {0};
        for (ptrdiff_t first = 0; first < rows; first += 128) {
            const ptrdiff_t end = rows - first < 128 ? rows : first + 128;
            vec sum = V(set1)(0);
            for (ptrdiff_t r = first; r < end; ++r) {
                vec t = FN(load_up_to)((const real *)x + r * stride + c, width - c);
                if (times != NULL) {
                    t = t * FN(load_up_to)((const real *)times + r * stride + c, width - c);
                }
                sum = sum + t;
            }
            real lanes[SA_LANES];
            V(store)(lanes, sum);
            for (int i = 0; i < SA_LANES; ++i) {
                total[i] += (double)lanes[i];
            }
        }
        for (int i = 0; i < SA_LANES && c + i < width; ++i) {
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
