/* Products of compact weights in float32: rows are rounded before, sums are scaled after. Multiplications and sums are apart,
 * and fused where marked: the bits are the same wherever V(fma) fuses. */

/* The normal ranges of a row. From the least on 1/range is finite, and range/255 has all its digits; up to the most no part of
 * a sum overflows where the sum does not. */
#define SA_LEAST_RANGE 1e-30f
#define SA_MOST_RANGE 1e30f

SA_INLINE float FN(least_lane)(vec v) {
    SA_UNROLL
    for (int lanes = SA_LANES; lanes > 1; lanes /= 2) {
        v = V(min)(V(even)(v, v), V(odd)(v, v));
    }
    return v[0];
}

SA_INLINE float FN(most_lane)(vec v) {
    SA_UNROLL
    for (int lanes = SA_LANES; lanes > 1; lanes /= 2) {
        v = V(max)(V(even)(v, v), V(odd)(v, v));
    }
    return v[0];
}

SA_KERNEL void FN(quantize_rows)(const float *x, ptrdiff_t rows, ptrdiff_t n, uint8_t *to, ptrdiff_t stride,
                                 sa_rounded_row *row) {
    for (ptrdiff_t r = 0; r < rows; ++r, x += n, to += stride) {
        vec least = V(set1)(n > 0 ? x[0] : 0), most = least,
            spoiled = V(set1)(0); /* NaN in a lane that met NaN or an infinity */
        ptrdiff_t i = 0;
        for (; i + SA_LANES <= n; i += SA_LANES) {
            const vec t = V(load)(x + i);
            least = V(min)(least, t);
            most = V(max)(most, t);
            spoiled = V(fma)(t, V(set1)(0), spoiled);
        }
        float low = FN(least_lane)(least), high = FN(most_lane)(most), sum = FN(sum_lanes)(spoiled);
        for (; i < n; ++i) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            sum += x[i] * 0;
        }
        low = low + 0.0f; /* no −0: which of the two zeros is less depends on the order */
        const float range = high + 0.0f - low;
        const bool whole = sum == 0 && range <= SA_MOST_RANGE && (range == 0 || range >= SA_LEAST_RANGE);
        const float inverse = whole && range > 0 ? 255 / range : 0;
        row[r] = (sa_rounded_row){low, whole ? range / 255 : NAN};
        if (!whole) {
            memset(to, 0, (size_t)stride);
            continue;
        }
        for (i = 0; i + SA_LANES <= n; i += SA_LANES) {
            V(store_bytes)(to + i, (V(load)(x + i) - V(set1)(low)) * V(set1)(inverse));
        }
        for (; i < n; ++i) {
            to[i] = (uint8_t)rintf((x[i] - low) * inverse);
        }
        for (; i < stride; ++i) {
            to[i] = 0;
        }
    }
}
#undef SA_LEAST_RANGE
#undef SA_MOST_RANGE

SA_INLINE void FN(end_columns)(const sa_compact_ends *e, ptrdiff_t c, const int columns) {
    const vec bias = e->bias == NULL ? V(set1)(0) : FN(load_up_to)(e->bias + c, columns);
    if (e->row == NULL) {
        for (ptrdiff_t r = 0; r < e->rows; ++r) {
            const ptrdiff_t at = r * e->stride + c;
            vec y = V(load)((const float *)e->sums + r * SA_PANEL_COLUMNS + c) + bias;
            if (e->residual != NULL) {
                y = y + FN(load_up_to)(e->residual + at, columns);
            }
            FN(store_up_to)(e->y + at, y, columns);
        }
        return;
    }
    const vec scale = V(load)(e->scale + c), offset = V(load)(e->offset + c);
    for (ptrdiff_t r = 0; r < e->rows; ++r) {
        const ptrdiff_t at = r * e->stride + c;
        const vec sum = V(of_int32)((const int32_t *)e->sums + r * SA_PANEL_COLUMNS + c);
        vec y = V(fma)(sum, V(set1)(e->row[r].step) * scale, V(fma)(V(set1)(e->row[r].least), offset, bias));
        if (e->residual != NULL) {
            y = y + FN(load_up_to)(e->residual + at, columns);
        }
        FN(store_up_to)(e->y + at, y, columns);
    }
}

SA_KERNEL void FN(compact_ends)(const sa_compact_ends *e) {
    for (ptrdiff_t c = 0; c < e->width; c += SA_LANES) {
        if (e->width - c >= SA_LANES) {
            FN(end_columns)(e, c, SA_LANES);
        } else {
            FN(end_columns)(e, c, (int)(e->width - c));
        }
    }
}

SA_KERNEL void FN(look_up_compact)(const void *table, const float *scale, const float *always, const float *positions,
                                   const int64_t *ids, ptrdiff_t rows, ptrdiff_t d, float *x) {
    for (ptrdiff_t r = 0; r < rows; ++r, x += d) {
        if (scale != NULL) {
            const int8_t *e = (const int8_t *)table + ids[r] * d;
            const float factor = scale[ids[r]];
            for (ptrdiff_t i = 0; i < d; ++i) {
                x[i] = factor * (float)e[i];
            }
        } else {
            const uint16_t *e = (const uint16_t *)table + ids[r] * d;
            for (ptrdiff_t i = 0; i < d; ++i) {
                x[i] = sa_float_of_bf16(e[i]);
            }
        }
        for (ptrdiff_t i = 0; i < d && always != NULL; ++i) {
            x[i] += always[i];
        }
        for (ptrdiff_t i = 0; i < d && positions != NULL; ++i) {
            x[i] += positions[r * d + i];
        }
    }
}
