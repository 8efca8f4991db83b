/* The entries of the forward pass: which way a block goes, and the merging of partial results. forward.h and
 * decode/decode.h are the ways. */

SA_SHARED size_t FN(forward_bytes)(const sa_attention *a, const FN(unit) * unit) {
    FN(scratch) s;
    return FN(lay_out)(a, NULL, &s, FN(block_rows), unit);
}

/* Rows, keys, and whether statistics are kept decide the way, and nothing of their values. */
SA_SHARED void FN(forward_block)(const sa_block *given, void *scratch, const FN(unit) * unit) {
    FN(scratch) s;
    sa_block aligned;
    FN(lay_out)(given->a, scratch, &s, FN(block_rows), unit);
    FN(open_caches)(given, &s);
    if (unit) {
        unit->open(given, &s.wide);
    }
    const sa_block *b = FN(on_cells)(given, &s.wide, &aligned);
    const int count = b->rows->count, decode_rows = unit ? unit->decode_rows : SA_DECODE_ROWS;
    /* Decoding sums across lanes, which pays from 32 keys on. Not for the last rows of a longer call. Not with
     * statistics: the backward pass must sum scores in the same order. */
    if (count <= decode_rows && b->whole && b->a->S >= 32 && b->a->stats.m.data == NULL) {
        if (unit) {
            unit->open_decode(b, &s);
        }
        FN(run_decode)(b, &s);
    } else if (count <= SA_LANES) {
        FN(run_vector)(b, &s);
    } else {
        FN(run_wide)(b, &s, (count + SA_LANES - 1) / SA_LANES);
    }
    if (unit && (s.wide.terms || s.decode.open)) {
        unit->close();
    }
}

/* O[n] = alpha·x, plus O unless it is the first. */
SA_ONCE void FN(merge_row)(real *O, const real *x, real alpha, ptrdiff_t n, bool first) {
    const vec f = V(set1)(alpha), zero = V(set1)(0);
    for (ptrdiff_t d = 0; d < n; d += SA_LANES) {
        FN(store_up_to)(O + d, (first ? zero : FN(load_up_to)(O + d, n - d)) + f * FN(load_up_to)(x + d, n - d), n - d);
    }
}

/* With M = max_c m_c over the chunks c: l = Σ_c 2^(m_c − M)·l_c and O likewise, in the order of the chunks. */
SA_SHARED void FN(merge_block)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch, const FN(unit) * unit) {
    const sa_attention *a = b->a;
    const sa_rows *rows = b->rows;
    const ptrdiff_t Dv = a->Dv;
    const size_t bytes = FN(attention_partial)(a, b->partial_rows);
    const int nv = (rows->count + SA_LANES - 1) / SA_LANES;
    FN(scratch) layout, *s = &layout;
    FN(lay_out)(a, scratch, s, FN(block_rows), unit);
    FN(open_caches)(b, s);
    FN(start_rows)(b, s, SA_VECS);
    for (ptrdiff_t c = 0; c < chunks; ++c) {
        const real *maximum_c = (const real *)(const void *)(partial + (size_t)c * bytes);
        for (int r = 0; r < rows->count; ++r) {
            s->maximum[r] =
                c == 0 || maximum_c[r] > s->maximum[r] || maximum_c[r] != maximum_c[r] ? maximum_c[r] : s->maximum[r];
            s->sum[r] = 0;
        }
    }
    for (ptrdiff_t c = 0; c < chunks; ++c) {
        const real *maximum_c = (const real *)(const void *)(partial + (size_t)c * bytes);
        const real *sum_c = maximum_c + b->partial_rows, *O_c = sum_c + b->partial_rows;
        for (int r = 0; r < nv * SA_LANES; ++r) {
            s->tile_sum[r] = r < rows->count ? maximum_c[r] - s->maximum[r] : 0;
        }
        for (int v = 0; v < nv; ++v) {
            V(store)(s->alpha + v * SA_LANES, FN(exp2)(V(load)(s->tile_sum + v * SA_LANES)));
        }
        for (int r = 0; r < rows->count; ++r) {
            s->sum[r] += s->alpha[r] * sum_c[r];
            FN(merge_row)(s->O + r * Dv, O_c + r * Dv, s->alpha[r], Dv, c == 0);
        }
    }
    FN(close_rows)(b, s, nv);
    const vec zero = V(set1)(0);
    vec check = zero;
    for (int r = 0; r < rows->count; ++r) {
        const vec f = V(set1)(s->alpha[r]);
        for (ptrdiff_t d = 0; d < Dv; d += SA_LANES) {
            const vec x = FN(load_up_to)(s->O + r * Dv + d, Dv - d) * f;
            V(store)(s->row + d, x);
            check = check + (x - x);
        }
        FN(store_row)(rows->out[r], a->out.m.col_stride, a->out.m.dtype, s->row, Dv);
    }
    if (!FN(is_finite)(check) && (rows->clipped || a->mask.m.data || b->key_bias)) {
        FN(run_careful)(b, s);
    } else if (a->weights.m.data) {
        FN(write_weights)(b, s, SA_VECS, 0);
    }
}
