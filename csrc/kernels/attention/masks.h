/* What closes pairs or adds to scores: the mask, the keys' bias, the bounds of rows (causal, windows, lengths), the gaps of
 * block masks. scores.h has the passes. */

/* What mask and bias do to a tile: closed, or a state of the mask, with the bit SA_TILE_KEYS_BIASED where the bias is not 0. */
SA_INLINE int FN(open_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n) {
    const sa_rows *rows = b->rows;
    const sa_matrix *mask = &b->a->mask.m;
    const int biased = b->key_bias ? FN(inspect_bias)((const real *)b->key_bias + first, n) : SA_TILE_OPEN;
    if (biased == SA_TILE_CLOSED || mask->data == NULL) {
        return biased;
    }
    const int state = FN(inspect_mask)(rows->mask, rows->count, mask, first, n, s->row);
    return state == SA_TILE_CLOSED ? state : state | biased;
}

/* With `again`, 0 unless it is −inf. */
SA_ONCE void FN(load_mask)(real *to, const char *row, const sa_matrix *mask, ptrdiff_t n, bool again) {
    FN(load_row)(to, row, mask->col_stride, n, mask->dtype, mask->swapped);
    for (ptrdiff_t j = 0; again && j < n; ++j) {
        to[j] = to[j] == -(real)INFINITY ? to[j] : 0;
    }
}

/* Returns whether the mask may close a pair of the tile. */
SA_ONCE bool FN(apply_bias)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool again) {
    const sa_rows *rows = b->rows;
    const sa_matrix *mask = &b->a->mask.m;
    const ptrdiff_t offset = first * mask->col_stride;
    bool shared = true;
    uintptr_t bits = 0;
    for (int r = 0; r < rows->count; ++r) {
        shared &= rows->mask[r] == rows->mask[0];
        bits |= (uintptr_t)rows->mask[r];
    }
    if (shared) {
        FN(load_mask)(s->bias, rows->mask[0] + offset, mask, n, again);
        return FN(pass_shared_mask)(s->P, n, nv, s->bias);
    }
    if (!again && FN(is_direct)(mask) && bits % sizeof(real) == 0 && n % SA_LANES == 0 && rows->count == nv * SA_LANES) {
        return FN(pass_mask)(s->P, n, nv, rows->mask, offset);
    }
    const size_t stride = FN(round_up)(n);
    const char *row_of[FN(backward_rows)];
    for (int r = 0; r < nv * SA_LANES; ++r) {
        real *row = s->bias + (size_t)(r < rows->count ? r : 0) * stride;
        if (r < rows->count) {
            FN(load_mask)(row, rows->mask[r] + offset, mask, n, again);
            for (size_t j = (size_t)n; j < stride; ++j) {
                row[j] = 0;
            }
        }
        row_of[r] = (const char *)row;
    }
    return FN(pass_mask)(s->P, n, nv, row_of, 0);
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
    if (left >= SA_LANES) { /* as in open_vectors */
        FN(bounds_in_tile)(rows, s, first, n, at, SA_LANES);
    } else {
        FN(bounds_in_tile)(rows, s, first, n, at, left);
    }
    const vec lo = V(load)(s->lo + at), hi = V(load)(s->hi + at);
    FN(close_lanes)(s->P, from, all_from, nv, v, lo, hi);
    FN(close_lanes)(s->P, all_to, to, nv, v, lo, hi);
}

/* Closes pairs and adds a float mask and the keys' bias; with `again`, on weights, only closes. Returns whether the tile had
 * masks; sets *closes if a pair may be closed. */
SA_ONCE bool FN(apply_some_masks)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, int mask_state,
                                  bool again, bool *closes) {
    const sa_rows *rows = b->rows;
    const int of_mask = mask_state & ~SA_TILE_KEYS_BIASED;
    bool biased = false;
    if (of_mask == SA_TILE_GATED) {
        FN(pass_gates)(s->P, rows->mask, rows->count, &b->a->mask.m, first, n, nv);
        *closes = true;
    } else if (of_mask != SA_TILE_OPEN) {
        biased = true;
        *closes |= FN(apply_bias)(b, s, first, n, nv, again);
    }
    if (mask_state & SA_TILE_KEYS_BIASED) {
        biased = true;
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
    return biased || *closes;
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
