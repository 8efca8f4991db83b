/* For products with compact weights: rows are rounded before a product, and its sums are scaled to float32.
 * Multiplications and additions round separately and are fused only in V(fma), so the bits are the same wherever V(fma)
 * fuses.
 * Comes after simd/exp.h and kernels/attention/load.h. */
#include "kernels/kernels.h"

/* The normal ranges of a group. From the least range on, 1/range is finite and range/255 has all its digits. Up to the
 * largest range, no term of a sum overflows unless the sum does. */
#define SA_LEAST_RANGE 1e-30f
#define SA_MOST_RANGE 1e30f

/* Finds the least and the greatest number of a group; adds NaN to *check for NaN and infinities. */
SA_INLINE void FN(range_of)(const float *x, ptrdiff_t n, float *low, float *high, vec *check) {
    vec least = V(set1)(x[0]), most = V(set1)(0) - least; /* most is the greatest, negated */
    ptrdiff_t i = 0;
    for (; i + SA_LANES <= n; i += SA_LANES) {
        const vec t = V(load)(x + i);
        least = V(min)(least, t);
        most = V(min)(most, V(set1)(0) - t);
        *check = V(fma)(t, V(set1)(0), *check);
    }
    vec both = V(min)(V(even)(least, most), V(odd)(least, most));
    SA_UNROLL
    for (int lanes = SA_LANES / 2; lanes > 1; lanes /= 2) {
        both = V(min)(V(even)(both, both), V(odd)(both, both));
    }
    *low = both[0];
    *high = both[1];
    for (; i < n; ++i) {
        *low = SA_SMALLER(x[i], *low);
        *high = SA_SMALLER(0 - x[i], *high);
        *check = *check + V(set1)(x[i] * 0);
    }
    *low = *low + 0.0f; /* makes 0 of −0: which of the two is found depends on the order */
    *high = 0 - *high;
}

SA_INLINE void FN(round_group)(const float *x, ptrdiff_t n, float low, float inverse, uint8_t *to) {
    ptrdiff_t i = 0;
    for (; i + SA_LANES <= n; i += SA_LANES) {
        V(store_bytes)(to + i, (V(load)(x + i) - V(set1)(low)) * V(set1)(inverse));
    }
    for (; i < n; ++i) {
        to[i] = (uint8_t)rintf((x[i] - low) * inverse);
    }
}

SA_INLINE ptrdiff_t FN(group_size)(ptrdiff_t n, ptrdiff_t g) { return SA_SMALLER(n - g * SA_GROUP, SA_GROUP); }

SA_KERNEL void FN(quantize_rows)(const float *x, ptrdiff_t rows, ptrdiff_t n, uint8_t *to, ptrdiff_t stride,
                                 sa_rounded *row) {
    const ptrdiff_t groups = SA_CEIL_DIV(n, SA_GROUP);
    for (ptrdiff_t r = 0; r < rows; ++r, x += n, to += stride, row += groups) {
        vec check = V(set1)(0);
        bool whole = true;
        for (ptrdiff_t g = 0; g < groups; ++g) {
            float low, high;
            FN(range_of)(x + g * SA_GROUP, FN(group_size)(n, g), &low, &high, &check);
            const float range = high - low;
            whole = whole && range <= SA_MOST_RANGE && (range == 0 || range >= SA_LEAST_RANGE);
            row[g] = (sa_rounded){low, range}; /* range/255 will be the scale */
        }
        if (!whole || !FN(is_finite)(check)) { /* bytes can hold finite numbers only */
            memset(to, 0, (size_t)stride);
            row[0].scale = NAN;
            continue;
        }
        for (ptrdiff_t g = 0; g < groups; ++g) {
            const float range = row[g].scale, inverse = range > 0 ? 255 / range : 0;
            row[g].scale = range / 255;
            FN(round_group)(x + g * SA_GROUP, FN(group_size)(n, g), row[g].least, inverse, to + g * SA_GROUP);
        }
        memset(to + n, 0, (size_t)(stride - n));
    }
}
#undef SA_LEAST_RANGE
#undef SA_MOST_RANGE

/* sums[r] = Σ x[r]·y, which fits 32 bits. Compilers vectorize the loop as multiply-adds of pairs of 16 bits. */
SA_KERNEL void FN(dot_bytes)(const int8_t *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t n, const int16_t *y,
                             uint32_t *sums) {
    for (ptrdiff_t r = 0; r < rows; ++r, x += stride) {
        int32_t sum = 0;
        for (ptrdiff_t i = 0; i < n; ++i) {
            sum += (int16_t)x[i] * y[i];
        }
        sums[r] = (uint32_t)sum;
    }
}

/* x·Φ(x), Φ the standard normal distribution, for results that are then rounded to 8 bits. Φ(x) − 1/2 is x times a
 * minimax polynomial of degree 8 in a shifted x², so that Φ is exactly 0 or 1 from ±4.4 on. Absolute error 2.6e-5. */
SA_INLINE vec FN(rough_gelu)(vec x) {
    const vec a = V(min)(V(set1)(4.4f), V(max)(V(set1)(-4.4f), x)),
              u = V(fma)(a * a, V(set1)(0.103305785f), V(set1)(-1));
    static const double c[] = {2.764743986e-3,  -7.892259397e-3, 1.097206958e-2,  -1.596607454e-2, 2.680917270e-2,
                               -4.009327665e-2, 5.524960160e-2,  -7.861196250e-2, 1.604044437e-1};
    return x * V(min)(V(set1)(1), V(max)(V(set1)(0), V(fma)(a, SA_POLYNOMIAL(u, c), V(set1)(0.5f))));
}

/* Computes a vector of columns, or the last columns. groups is 0 for bfloat16. */
SA_INLINE void FN(end_columns)(const sa_compact_ends *e, ptrdiff_t c, ptrdiff_t columns, const int groups) {
    vec scale[SA_GROUPS_AT_ONCE], offset[SA_GROUPS_AT_ONCE], bias = V(set1)(0);
    if (e->bias != NULL) {
        bias = FN(load_up_to)(e->bias + c, columns);
    }
    SA_UNROLL
    for (int g = 0; g < groups; ++g) {
        scale[g] = V(load)(e->scale + g * SA_PANEL_COLUMNS + c);
        offset[g] = V(load)(e->offset + g * SA_PANEL_COLUMNS + c);
    }
    const float *y = e->y, *residual = e->residual;
    const sa_rounded *row = e->row;
    const char *sums = (const char *)e->sums + c * SA_WORD;
    float *to = e->to;
    const ptrdiff_t row_stride = e->row_stride, stride = e->stride, rows = e->rows;
    const bool adds = e->adds, gelu = e->gelu;
    for (ptrdiff_t r = 0, at = c; r < rows; ++r, at += stride, row += row_stride, sums += SA_PANEL_COLUMNS * SA_WORD) {
        vec t = adds ? FN(load_up_to)(y + at, columns) : bias;
        if (residual != NULL) { /* read before y is written, which may be the same array */
            t = t + FN(load_up_to)(residual + at, columns);
        }
        if (groups == 0) {
            t = t + V(load)((const void *)sums);
        }
        SA_UNROLL
        for (int g = 0; g < groups; ++g) {
            const char *of_group = sums + g * (SA_MOST_TILE_ROWS * SA_PANEL_COLUMNS * SA_WORD);
            t = V(fma)(V(set1)(row[g].least), offset[g], t);
            t = V(fma)(V(of_int32)((const void *)of_group), V(set1)(row[g].scale) * scale[g], t);
        }
        if (gelu) {
            t = FN(rough_gelu)(t);
        }
        FN(store_up_to)(to + at, t, columns);
    }
}

#define SA_END(groups)                                                                                                 \
    SA_LEAF void FN(end_tile##groups)(const sa_compact_ends *e) {                                                      \
        for (ptrdiff_t c = 0; c < e->width; c += SA_LANES) {                                                           \
            FN(end_columns)(e, c, e->width - c, groups);                                                               \
        }                                                                                                              \
    }
#define SA_END_CASE(groups)                                                                                            \
    case groups: FN(end_tile##groups)(e); break;
#define SA_ENDS(X) X(0) X(1) X(2) X(3) X(4)
SA_ENDS(SA_END)

SA_KERNEL void FN(compact_ends)(const sa_compact_ends *e) {
    switch (e->row == NULL ? 0 : e->groups) { SA_ENDS(SA_END_CASE) }
}

SA_KERNEL void FN(look_up_compact)(const void *table, const float *scale, const float *token_type_row,
                                   const float *positions, const int64_t *ids, ptrdiff_t rows, ptrdiff_t d, float *x) {
    for (ptrdiff_t r = 0; r < rows; ++r, x += d) {
        if (scale != NULL) {
            const int8_t *e = (const int8_t *)table + ids[r] * d;
            const float *own = scale + ids[r] * SA_CEIL_DIV(d, SA_GROUP);
            for (ptrdiff_t i = 0; i < d; ++i) {
                x[i] = own[i / SA_GROUP] * (float)e[i];
            }
        } else {
            const uint16_t *e = (const uint16_t *)table + ids[r] * d;
            for (ptrdiff_t i = 0; i < d; ++i) {
                x[i] = sa_float_of_bf16(e[i]);
            }
        }
        for (ptrdiff_t i = 0; i < d && token_type_row != NULL; ++i) {
            x[i] += token_type_row[i];
        }
        for (ptrdiff_t i = 0; i < d && positions != NULL; ++i) {
            x[i] += positions[r * d + i];
        }
    }
}
