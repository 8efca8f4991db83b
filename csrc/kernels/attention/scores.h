/* Passes over a tile of scores P[n][nv·lanes], in log2 units. The order is softcap → ALiBi → mask → keys' bias → gaps
 * of block masks → bounds of rows (causal, windows, lengths) → maximum → exp → dropout. A call runs the passes that it
 * needs. The end of this file finds out what masks, bias, gaps and bounds do to a tile.
 * Comes after simd/exp.h, simd/philox.h and kernels/attention/block.h. */
#include "kernels/kernels.h"

SA_ONCE void FN(pass_scale)(real *P, ptrdiff_t n, int nv, real factor) {
    for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
        V(store)(P + i, V(load)(P + i) * V(set1)(factor));
    }
}

/* s = c'·tanh(s'/c') with c' = softcap·log2 e. gain, unless NULL, becomes tanh or the derivative 1 − (s/c')². */
SA_ONCE void FN(pass_softcap)(real *P, ptrdiff_t n, int nv, real cap, real *gain, bool wants_tanh) {
    const vec c = V(set1)(cap);
    for (ptrdiff_t i = 0; i < n * nv * SA_LANES; i += SA_LANES) {
        const vec t = FN(tanh)(V(load)(P + i) / c);
        V(store)(P + i, c * t);
        if (gain) {
            vec derivative = (V(set1)(1) - t) * (V(set1)(1) + t); /* exact where |t| is near 1 */
            if (wants_tanh) {
                derivative = t;
            }
            V(store)(gain + i, derivative);
        }
    }
}

/* s −= slope·|i + o − j|. Slopes come multiplied by log2 e, positions relative to the tile. */
SA_ONCE void FN(pass_alibi)(real *P, ptrdiff_t n, int nv, const real *slope, const real *position) {
    for (ptrdiff_t j = 0; j < n; ++j) {
        const vec j_tile = V(set1)((real)j);
        for (int v = 0; v < nv; ++v) {
            real *p = P + (j * nv + v) * SA_LANES;
            vec distance = V(abs)(V(load)(position + v * SA_LANES) - j_tile);
            V(store)(p, V(load)(p) - V(load)(slope + v * SA_LANES) * distance);
        }
    }
}

/* The largest mask that stays finite in log2 units. */
#define SA_MASK_MOST ((real)(SA_REAL_MAX * (1 - 4 * SA_REAL_EPSILON) / SA_LOG2E))

/* −inf closes a pair by select, as NaN + −inf is NaN. Finite numbers stay finite in log2 units: in a row of finfo.min
 * all keys have the same weight, and none is closed. +inf and NaN are added as usual. */
SA_INLINE vec FN(add_mask)(vec s, vec mask) {
    const vec closed = V(set1)(-(real)INFINITY), most = V(set1)(SA_MASK_MOST);
    vec finite = V(min)(most, V(max)(-most, mask)); /* min and max keep a NaN of their second operand */
    finite = V(select)(V(eq)(mask, -closed), mask, finite);
    return V(select)(V(eq)(mask, closed), closed, V(fma)(finite, V(set1)((real)SA_LOG2E), s));
}

/* True if add_mask is the same as a multiply-add for every element of this square. */
SA_INLINE bool FN(is_plain_mask)(const vec *mask) {
    vec low = V(set1)(0), high = V(set1)(0);
    SA_UNROLL
    for (int i = 0; i < SA_LANES; ++i) {
        low = V(min)(mask[i], low); /* never NaN */
        high = V(max)(mask[i], high);
    }
    return !V(any)(V(lt)(V(set1)(SA_MASK_MOST), V(max)(high, -low)));
}

/* The mask of lane i begins at row[i] + offset, and can be read in whole vectors. Lanes are processed vector by vector,
 * as rows 4 kB apart use the same sets of the L1. True if the mask may close a pair. */
SA_ONCE bool FN(pass_mask)(real *P, ptrdiff_t n, int nv, const char *const *row, ptrdiff_t offset) {
    const ptrdiff_t lanes = nv * SA_LANES;
    bool closes = false;
    for (int v = 0; v < nv; ++v) {
        for (ptrdiff_t j = 0; j < n; j += SA_LANES) {
            const int keys = n - j < SA_LANES ? (int)(n - j) : SA_LANES;
            vec mask[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                mask[i] = V(load)((const real *)(const void *)(row[v * SA_LANES + i] + offset) + j);
            }
            const bool plain = FN(is_plain_mask)(mask);
            closes |= !plain;
            FN(transpose)(mask);
            real *p = P + (j * nv + v) * SA_LANES;
            if (plain && keys == SA_LANES) {
                SA_UNROLL
                for (int i = 0; i < SA_LANES; ++i, p += lanes) {
                    V(store)(p, V(fma)(mask[i], V(set1)((real)SA_LOG2E), V(load)(p)));
                }
            } else {
                SA_UNROLL
                for (int i = 0; i < SA_LANES; ++i, p += lanes) {
                    if (i < keys) {
                        V(store)(p, FN(add_mask)(V(load)(p), mask[i]));
                    }
                }
            }
        }
    }
    return closes;
}

/* The same for a mask row[n] that all rows share. */
SA_ONCE bool FN(pass_shared_mask)(real *P, ptrdiff_t n, int nv, const real *row) {
    bool closes = false;
    for (ptrdiff_t j = 0; j < n; ++j) {
        if (row[j] == 0) {
            continue;
        }
        closes |= row[j] == -(real)INFINITY;
        for (int v = 0; v < nv; ++v) {
            real *p = P + (j * nv + v) * SA_LANES;
            V(store)(p, FN(add_mask)(V(load)(p), V(set1)(row[j])));
        }
    }
    return closes;
}

/* Bit j of bits[r] becomes 1 if the boolean mask row[r] leaves key first + j open (n ≤ 32). */
SA_ONCE void FN(open_bits)(const char *const *row, int rows, const sa_matrix *m, ptrdiff_t first, int n,
                           uint32_t *bits) {
    for (int r = 0; r < rows; ++r) {
        const char *p = row[r] + first * m->col_stride;
        if (n == 32 && m->col_stride == 1) {
            bits[r] = vu32_nonzero_bytes(p);
            continue;
        }
        bits[r] = 0;
        for (int j = 0; j < n; ++j) {
            bits[r] |= (uint32_t)(p[j * m->col_stride] != 0) << j;
        }
    }
}

/* Applies boolean masks. Making lanes of bits is faster than transposing elements. */
SA_ONCE void FN(pass_gates)(real *P, const char *const *row, int rows, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n,
                            int nv) {
    const vec closed = V(set1)(-(real)INFINITY);
    uint32_t bits[SA_BACKWARD_VECS * SA_LANES] = {0};
    for (ptrdiff_t from = 0; from < n; from += 32) {
        const int keys = n - from < 32 ? (int)(n - from) : 32;
        FN(open_bits)(row, rows, m, first + from, keys, bits);
        for (int v = 0; v < nv; ++v) {
            real *p = P + (from * nv + v) * SA_LANES;
            for (int j = 0; j < keys; ++j, p += nv * SA_LANES) {
                V(store)(p, V(select)(V(bit)(bits + v * SA_LANES, j), V(load)(p), closed));
            }
        }
    }
}

/* Closes keys from … to − 1 to all lanes of vector v. close_lanes closes keys j to the lanes where not lo ≤ j < hi. All
 * keys are relative to the tile. */
SA_INLINE void FN(close_keys)(real *P, ptrdiff_t from, ptrdiff_t to, int nv, int v) {
    const vec closed = V(set1)(-(real)INFINITY);
    for (ptrdiff_t j = from; j < to; ++j) {
        V(store)(P + (j * nv + v) * SA_LANES, closed);
    }
}

SA_INLINE void FN(close_lanes)(real *P, ptrdiff_t from, ptrdiff_t to, int nv, int v, vec lo, vec hi) {
    const vec closed = V(set1)(-(real)INFINITY);
    vec at = V(set1)((real)from);
    for (ptrdiff_t j = from; j < to; ++j, at = at + V(set1)(1)) {
        real *p = P + (j * nv + v) * SA_LANES;
        const lanemask open = V(both)(V(not_lt)(at, lo), V(lt)(at, hi));
        V(store)(p, V(select)(open, V(load)(p), closed));
    }
}

/* Adds bias[n], the same for all rows. A closed pair stays closed, and the sum of a finite mask and a finite bias stays
 * finite. With `again` nothing is added, but keys are closed. True if the bias closes a key. */
SA_ONCE bool FN(pass_key_bias)(real *P, ptrdiff_t n, int nv, const real *bias, bool again) {
    const vec beyond = V(set1)((real)INFINITY);
    bool closes = false;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const real x = bias[j];
        if (x == -(real)INFINITY) {
            closes = true;
            for (int v = 0; v < nv; ++v) {
                FN(close_keys)(P, j, j + 1, nv, v);
            }
        } else if (x != 0 && !again) {
            const vec most = V(set1)(x < (real)INFINITY ? SA_REAL_MAX : (real)INFINITY);
            for (int v = 0; v < nv; ++v) {
                real *p = P + (j * nv + v) * SA_LANES;
                const vec s = V(load)(p);
                const vec sum =
                    /* Both keep a NaN of their second operand. */
                    V(min)(most, V(max)(-most, FN(add_mask)(s, V(set1)(x))));
                V(store)(p, V(select)(V(eq)(V(abs)(s), beyond), s, sum));
            }
        }
    }
    return closes;
}

/* A tile's state from the bias of its keys alone. */
SA_ONCE int FN(inspect_bias)(const real *bias, ptrdiff_t n) {
    bool closed = true, zero = true;
    for (ptrdiff_t j = 0; j < n && (closed || zero); ++j) {
        closed &= bias[j] == -(real)INFINITY;
        zero &= bias[j] == 0;
    }
    return closed ? SA_TILE_CLOSED : zero ? SA_TILE_OPEN : SA_TILE_KEYS_BIASED;
}

/* Closes the keys between each row's runs. True if there are any. */
SA_ONCE bool FN(pass_gaps)(real *P, ptrdiff_t first, ptrdiff_t n, int nv, const sa_rows *rows) {
    bool any = false;
    for (int r = 0, to; r < rows->count; r = to) {
        to = sa_same_runs(rows, r);
        for (int m = 0; m < rows->gaps; ++m) {
            const sa_run *end = rows->runs_end[m][r], *run = sa_find_run(rows->runs[m][r], end, first);
            for (ptrdiff_t j = 0; j < n; ++run) {
                const ptrdiff_t open = run < end && run->lo - first < n ? (ptrdiff_t)run->lo - first : n;
                for (; j < open; ++j) {
                    any = true;
                    for (int lane = r; lane < to; ++lane) {
                        P[j * nv * SA_LANES + lane] = -(real)INFINITY;
                    }
                }
                if (open == n) {
                    break;
                }
                j = run->hi - first < n ? (ptrdiff_t)run->hi - first : n;
            }
        }
    }
    return any;
}

/* top = max(top, factor·P); factor > 0. */
SA_ONCE void FN(pass_max)(const real *P, ptrdiff_t n, int nv, real factor, real *top) {
    const vec least = V(set1)(-(real)INFINITY);
    const ptrdiff_t lanes = nv * SA_LANES;
    for (int v = 0; v < nv; ++v) {
        const real *p = P + v * SA_LANES;
        vec m[4] = {least, least, least, least};
        ptrdiff_t j = 0;
        for (; j + 4 <= n; j += 4, p += 4 * lanes) {
            SA_UNROLL
            for (int c = 0; c < 4; ++c) {
                m[c] = V(max)(m[c], V(load)(p + c * lanes));
            }
        }
        for (; j < n; ++j, p += lanes) {
            m[0] = V(max)(m[0], V(load)(p));
        }
        real *t = top + v * SA_LANES;
        const vec all = V(max)(V(max)(m[0], m[1]), V(max)(m[2], m[3]));
        V(store)(t, V(max)(V(load)(t), all * V(set1)(factor)));
    }
}

/* P = 2^(P − maximum) in rows of `lanes`; adds them to tile_sum. */
SA_INLINE void FN(exp_any)(real *P, ptrdiff_t n, ptrdiff_t lanes, const real *maximum, real *tile_sum, const int nv) {
    vec m[SA_VECS], sum[SA_VECS];
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        m[v] = V(load)(maximum + v * SA_LANES);
        sum[v] = V(load)(tile_sum + v * SA_LANES);
    }
    for (ptrdiff_t j = 0; j < n; ++j) {
        vec e[SA_VECS];
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            e[v] = V(load)(P + j * lanes + v * SA_LANES) - m[v];
        }
        FN(exp2_each)(e, nv);
        SA_UNROLL
        for (int v = 0; v < nv; ++v) {
            sum[v] = sum[v] + e[v];
            V(store)(P + j * lanes + v * SA_LANES, e[v]);
        }
    }
    SA_UNROLL
    for (int v = 0; v < nv; ++v) {
        V(store)(tile_sum + v * SA_LANES, sum[v]);
    }
}

#define SA_EXP_LEAF(nv)                                                                                                \
    SA_LEAF void FN(exp_wide##nv)(real * P, ptrdiff_t n, ptrdiff_t lanes, const real *maximum, real *tile_sum) {       \
        FN(exp_any)(P, n, lanes, maximum, tile_sum, nv);                                                               \
    }
SA_LEAVES(SA_EXP_LEAF)
#undef SA_EXP_LEAF

/* The same for a tile up to its ends (open_ends). Sums of one tile have few terms and so a small error. */
SA_INLINE void FN(pass_exp)(real *P, const ptrdiff_t *end, const real *maximum, real *tile_sum, int nv) {
    const ptrdiff_t lanes = nv * SA_LANES;
    FN(clear_rows)(tile_sum);
    ptrdiff_t j = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t n = end[v] - j;
        for (int at = v, now = SA_AT_ONCE(nv - v); n > 0 && at < nv; at += now, now = SA_SMALLER(nv - at, now)) {
            SA_CALL_LEAF(exp_wide, now, P + j * lanes + at * SA_LANES, n, lanes, maximum + at * SA_LANES,
                         tile_sum + at * SA_LANES)
        }
        j = n > 0 ? end[v] : j;
    }
}

/* The same without sums; closed pairs stay −inf. */
SA_ONCE void FN(pass_exp_marking)(real *P, ptrdiff_t n, int nv, const real *maximum) {
    const vec closed = V(set1)(-(real)INFINITY);
    for (int v = 0; v < nv; ++v) {
        const vec m = V(load)(maximum + v * SA_LANES);
        for (ptrdiff_t j = 0; j < n; ++j) {
            real *p = P + (j * nv + v) * SA_LANES;
            const vec s = V(load)(p);
            V(store)(p, V(select)(V(eq)(s, closed), s, FN(exp2)(s - m)));
        }
    }
}

/* O[Dv][nv·lanes] = alpha·O + P·V over open pairs, whose marks are not below 0; 0·NaN of a closed pair would be NaN.
 * Weights are their own marks. */
SA_ONCE void FN(values_careful)(const real *marks, const real *P, const real *v_j, ptrdiff_t v_stride, ptrdiff_t n,
                                ptrdiff_t Dv, real *O, const real *alpha, int nv) {
    for (ptrdiff_t d = 0; d < Dv; ++d) {
        for (int v = 0; v < nv; ++v) {
            vec sum = V(set1)(0);
            for (ptrdiff_t j = 0; j < n; ++j) {
                const ptrdiff_t at = (j * nv + v) * SA_LANES;
                vec more = V(fma)(V(set1)(v_j[j * v_stride + d]), V(load)(P + at), sum);
                sum = V(select)(V(lt)(V(load)(marks + at), V(set1)(0)), sum, more);
            }
            real *o = O + (d * nv + v) * SA_LANES;
            vec old = V(load)(o);
            /* before the first open key alpha and O are 0 */
            V(store)(o, V(fma)(V(load)(alpha + v * SA_LANES), old, sum));
        }
    }
}

/* Zeroes the weights that dropout takes; `first` is a multiple of 4. −inf (closed) stays, and so does NaN, as min keeps
 * a NaN of its second operand. */
SA_INLINE void FN(dropout_any)(real *P, ptrdiff_t first, ptrdiff_t n, const int nv, uint64_t seed, uint32_t least_kept,
                               const uint32_t *index, const uint32_t *head_lo, const uint32_t *head_hi,
                               uint32_t *words) {
    const int lanes = nv * SA_LANES;
    const int padded = SA_CEIL_DIV(lanes, SA_U32_LANES) * SA_U32_LANES;
    for (ptrdiff_t j = 0; j < n; j += 4) {
        sa_philox(seed, (uint32_t)((first + j) >> 2), index, head_lo, head_hi, padded, words);
        const int keys = n - j < 4 ? (int)(n - j) : 4;
        for (int w = 0; w < keys; ++w) {
            for (int v = 0; v < nv; ++v) {
                real *p = P + ((j + w) * nv + v) * SA_LANES;
                vec e = V(load)(p);
                vec kept =
                    V(select)(V(words_ge)(words + w * padded + v * SA_LANES, least_kept), e, V(min)(V(set1)(0), e));
                V(store)(p, kept);
            }
        }
    }
}

SA_ONCE void FN(pass_dropout)(real *P, ptrdiff_t first, ptrdiff_t n, int nv, uint64_t seed, uint32_t least_kept,
                              const uint32_t *index, const uint32_t *head_lo, const uint32_t *head_hi,
                              uint32_t *words) {
    if (nv == SA_VECS) { /* nv is a literal for most tiles */
        FN(dropout_any)(P, first, n, SA_VECS, seed, least_kept, index, head_lo, head_hi, words);
    } else {
        FN(dropout_any)(P, first, n, nv, seed, least_kept, index, head_lo, head_hi, words);
    }
}

/* A tile's state from its mask alone. Stops at the first element that decides the state. */
SA_ONCE int FN(inspect_mask)(const char *const *row, int rows, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n,
                             real *buffer) {
    if (m->dtype == SA_BOOL) {
        bool seen_open = false, seen_closed = false;
        for (int r = 0; r < rows; ++r) {
            if (r > 0 && row[r] == row[r - 1]) {
                continue;
            }
            const char *p = row[r] + first * m->col_stride;
            ptrdiff_t j = 0;
            if (m->col_stride == 1) {
                for (; j + 16 <= n; j += 16) {
                    uint64_t a, b;
                    memcpy(&a, p + j, 8);
                    memcpy(&b, p + j + 8, 8);
                    seen_open |= (a | b) != 0;
                    seen_closed |= (a & b) != UINT64_C(0x0101010101010101);
                    if (seen_open && seen_closed) {
                        return SA_TILE_GATED;
                    }
                }
            }
            for (; j < n; ++j) {
                bool open = p[j * m->col_stride] != 0;
                seen_open |= open;
                seen_closed |= !open;
            }
            if (seen_open && seen_closed) {
                return SA_TILE_GATED;
            }
        }
        return seen_open ? SA_TILE_OPEN : SA_TILE_CLOSED;
    }
    const bool direct = FN(is_direct)(m);
    for (int r = 0; r < rows; ++r) {
        if (r > 0 && row[r] == row[r - 1]) {
            continue;
        }
        const char *p = row[r] + first * m->col_stride;
        FN(load_row)(buffer, p, m->col_stride, 1, m->dtype, m->swapped);
        if (!(buffer[0] == -(real)INFINITY)) {
            return SA_TILE_ADDS;
        }
        const real *x = (const void *)p;
        if (!direct || (uintptr_t)p % sizeof(real) != 0) {
            FN(load_row)(buffer, p, m->col_stride, n, m->dtype, m->swapped);
            x = buffer;
        }
        int open = 0;
        for (ptrdiff_t j = 0; j < n; ++j) {
            open |= !(x[j] == -(real)INFINITY);
        }
        if (open) {
            return SA_TILE_ADDS;
        }
    }
    return SA_TILE_CLOSED;
}

/* ---- masks, bias, gaps and bounds of a tile ---------------------------------------------------------------------- */

/* A tile's state: closed, or its mask's state with other bits. */
SA_INLINE int FN(inspect_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n) {
    const sa_rows *rows = b->rows;
    const sa_matrix *mask = &b->a->mask.m;
    const sa_matrix *gate = &b->a->gate.m;
    int others = b->key_bias ? FN(inspect_bias)((const real *)b->key_bias + first, n) : SA_TILE_OPEN;
    if (others == SA_TILE_CLOSED) {
        return others;
    }
    if (mask->data && gate->data) {
        const int of_gate = FN(inspect_mask)(rows->gate, rows->count, gate, first, n, s->row);
        if (of_gate == SA_TILE_CLOSED) {
            return of_gate;
        }
        others |= of_gate == SA_TILE_OPEN ? 0 : SA_TILE_GATED_TOO;
    }
    others |= b->a->offset_bias.m.data ? SA_TILE_OFFSET : 0;
    if (mask->data == NULL) {
        return others;
    }
    const int state = FN(inspect_mask)(rows->mask, rows->count, mask, first, n, s->row);
    return state == SA_TILE_CLOSED ? state : state | others;
}

/* With `again`, all numbers but −inf become 0. */
SA_ONCE void FN(load_mask)(real *to, const char *row, const sa_matrix *mask, ptrdiff_t n, bool again) {
    FN(load_row)(to, row, mask->col_stride, n, mask->dtype, mask->swapped);
    for (ptrdiff_t j = 0; again && j < n; ++j) {
        to[j] = to[j] == -(real)INFINITY ? to[j] : 0;
    }
}

/* Applies a float mask of these rows. True if it may close a pair of the tile. */
SA_ONCE bool FN(apply_float_mask)(const sa_rows *rows, FN(scratch) * s, const char *const *mask_row,
                                  const sa_matrix *mask, ptrdiff_t first, ptrdiff_t n, int nv, bool again) {
    const ptrdiff_t offset = first * mask->col_stride;
    bool shared = true;
    uintptr_t bits = 0;
    for (int r = 0; r < rows->count; ++r) {
        shared &= mask_row[r] == mask_row[0];
        bits |= (uintptr_t)mask_row[r];
    }
    if (shared) {
        FN(load_mask)(s->mask_rows, mask_row[0] + offset, mask, n, again);
        return FN(pass_shared_mask)(s->P, n, nv, s->mask_rows);
    }
    if (!again && FN(is_direct)(mask) && bits % sizeof(real) == 0 && n % SA_LANES == 0 &&
        rows->count == nv * SA_LANES) {
        return FN(pass_mask)(s->P, n, nv, mask_row, offset);
    }
    const size_t stride = FN(round_up)(n);
    const char *row_of[FN(backward_rows)];
    for (int r = 0; r < nv * SA_LANES; ++r) {
        real *row = s->mask_rows + (size_t)(r < rows->count ? r : 0) * stride;
        if (r < rows->count) {
            FN(load_mask)(row, mask_row[r] + offset, mask, n, again);
            for (size_t j = (size_t)n; j < stride; ++j) {
                row[j] = 0;
            }
        }
        row_of[r] = (const char *)row;
    }
    return FN(pass_mask)(s->P, n, nv, row_of, 0);
}

/* Adds offset_bias where the block's rows follow one another in one head and all numbers are ordinary. A vector of rows
 * then takes neighbouring numbers, in reversed order. False if nothing was added. */
SA_ONCE bool FN(pass_offset_bias)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv) {
    const sa_rows *rows = b->rows;
    const sa_matrix *m = &b->a->offset_bias.m;
    const ptrdiff_t stride = m->col_stride, count = rows->count;
    bool follow = true;
    for (int r = 1; r < count; ++r) {
        follow &= rows->offset_bias[r] == rows->offset_bias[r - 1] - stride;
    }
    if (!follow) {
        return false;
    }
    /* Element r − j + n − 1 belongs to row r and the tile's key j. */
    real *reversed = s->mask_rows;
    const ptrdiff_t used = n + count - 1, lanes = nv * SA_LANES;
    vec low = V(set1)(0), high = V(set1)(0);
    memset(reversed, 0, (size_t)(n + lanes) * sizeof(real));
    FN(load_row)(reversed, rows->offset_bias[0] + (first + n - 1) * stride, -stride, used, m->dtype, m->swapped);
    for (ptrdiff_t i = 0; i < used; i += SA_LANES) {
        const vec x = FN(load_up_to)(reversed + i, used - i);
        low = V(min)(x, low); /* never NaN */
        high = V(max)(x, high);
    }
    if (V(any)(V(lt)(V(set1)(SA_MASK_MOST), V(max)(high, -low)))) {
        return false;
    }
    for (ptrdiff_t j = 0; j < n; ++j) {
        for (ptrdiff_t at = 0; at < lanes; at += SA_LANES) {
            real *p = s->P + j * lanes + at;
            V(store)(p, V(fma)(V(load)(reversed + n - 1 - j + at), V(set1)((real)SA_LOG2E), V(load)(p)));
        }
    }
    return true;
}

SA_ONCE void FN(bounds_in_tile)(const sa_rows *rows, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int at, int lanes) {
    for (int i = 0; i < lanes; ++i) {
        s->lo[at + i] = (real)FN(in_tile)(rows->lo[at + i], first, n);
        s->hi[at + i] = (real)FN(in_tile)(rows->hi[at + i], first, n);
    }
}

SA_ONCE void FN(close_vector)(const sa_rows *rows, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, int v) {
    const FN(open_bounds) *open = &s->open[v];
    const ptrdiff_t from = FN(in_tile)(open->any_from, first, n), to = FN(in_tile)(open->any_to, first, n);
    ptrdiff_t all_from = FN(in_tile)(open->all_from, first, n), all_to = FN(in_tile)(open->all_to, first, n);
    if (from >= to) {
        FN(close_keys)(s->P, 0, n, nv, v);
        return;
    }
    if (all_from >= all_to) {
        all_from = all_to = to; /* no key is open in every lane */
    }
    FN(close_keys)(s->P, 0, from, nv, v);
    FN(close_keys)(s->P, to, n, nv, v);
    if (from == all_from && all_to == to) {
        return;
    }
    const int at = v * SA_LANES, left = rows->count - at;
    if (left >= SA_LANES) { /* see open_vectors */
        FN(bounds_in_tile)(rows, s, first, n, at, SA_LANES);
    } else {
        FN(bounds_in_tile)(rows, s, first, n, at, left);
    }
    const vec lo = V(load)(s->lo + at), hi = V(load)(s->hi + at);
    FN(close_lanes)(s->P, from, all_from, nv, v, lo, hi);
    FN(close_lanes)(s->P, all_to, to, nv, v, lo, hi);
}

/* Closes pairs, and adds a float mask and the keys' bias to scores; with `again` P holds weights, and pairs are only
 * closed. Sets *closes if a pair may be closed. True if numbers were added or *closes is true. */
SA_ONCE bool FN(apply_some_masks)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                                  int mask_state, bool again, bool *closes) {
    const sa_rows *rows = b->rows;
    const sa_attention *a = b->a;
    const int of_mask = mask_state & SA_TILE_OF_MASK;
    bool added = false;
    if (of_mask == SA_TILE_GATED) {
        FN(pass_gates)(s->P, rows->mask, rows->count, &a->mask.m, first, n, nv);
        *closes = true;
    } else if (of_mask != SA_TILE_OPEN) {
        added = true;
        *closes |= FN(apply_float_mask)(rows, s, rows->mask, &a->mask.m, first, n, nv, again);
    }
    if (mask_state & SA_TILE_OFFSET) {
        const bool closed = *closes && !again;
        added = true;
        if (again || !FN(pass_offset_bias)(b, s, first, n, nv)) {
            *closes |= FN(apply_float_mask)(rows, s, rows->offset_bias, &a->offset_bias.m, first, n, nv, again);
        }
        if (closed && of_mask == SA_TILE_ADDS) { /* closed pairs stay closed: −inf + inf is NaN */
            FN(apply_float_mask)(rows, s, rows->mask, &a->mask.m, first, n, nv, SA_CLOSE_WEIGHTS);
        } else if (closed) {
            FN(pass_gates)(s->P, rows->mask, rows->count, &a->mask.m, first, n, nv);
        }
    }
    if (mask_state & SA_TILE_GATED_TOO) {
        FN(pass_gates)(s->P, rows->gate, rows->count, &a->gate.m, first, n, nv);
        *closes = true;
    }
    if (mask_state & SA_TILE_KEYS_BIASED) {
        added = true;
        *closes |= FN(pass_key_bias)(s->P, n, nv, (const real *)b->key_bias + first, again);
    }
    if (rows->gaps > 0 && FN(pass_gaps)(s->P, first, n, nv, rows)) {
        *closes = true;
    }
    if (rows->clipped && (first < rows->open_from || first + n > rows->open_to)) {
        *closes = true;
        for (int v = 0; v < nv; ++v) {
            FN(close_vector)(rows, s, first, n, nv, v);
        }
    }
    return added || *closes;
}

SA_INLINE bool FN(apply_masks)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, int mask_state,
                               bool again, bool *closes) {
    const sa_rows *rows = b->rows;
    if (mask_state == SA_TILE_OPEN && rows->gaps <= 0 &&
        !(rows->clipped && (first < rows->open_from || first + n > rows->open_to))) {
        return *closes;
    }
    return FN(apply_some_masks)(b, s, first, n, nv, mask_state, again, closes);
}
