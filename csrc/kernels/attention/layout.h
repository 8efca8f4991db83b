/* Sizes and places of what scratch.h declares. */

SA_INLINE bool FN(some_tile_is_copied)(const sa_attention *a, const sa_tensor *t) {
    bool copies = !FN(is_direct)(&t->m) || t->m.row_stride > SA_DIRECT_STRIDE || t->m.row_stride < -SA_DIRECT_STRIDE;
    for (int axis = 0; axis < a->n_lead; ++axis) { /* in a packed record the first head may be aligned and others not */
        copies |= t->lead_stride[axis] % (ptrdiff_t)sizeof(real) != 0;
    }
    return copies;
}

/* Returns the scratch's size, linear in E and Dv, and lays it out from base on, unless that is NULL. */
SA_ONCE size_t FN(lay_out)(const sa_attention *a, char *base, FN(scratch) * s, size_t W, const FN(unit) * unit) {
    const bool in_cells = unit && unit->take(a);
    const size_t E = FN(round_up)(a->E), Dv = FN(round_up)(a->Dv);
    const size_t keys = a->S < SA_KEYS_PER_TILE && !in_cells ? FN(round_up)(a->S) : SA_KEYS_PER_TILE;
    const size_t longest = E > Dv ? (E > keys ? E : keys) : (Dv > keys ? Dv : keys);
    const size_t cells = ((size_t)a->S + SA_KEYS_PER_TILE - 1) / SA_KEYS_PER_TILE;
    const size_t words = (W + SA_U32_LANES - 1) / SA_U32_LANES * SA_U32_LANES;
    const bool copies_keys = FN(some_tile_is_copied)(a, &a->key), copies_values = FN(some_tile_is_copied)(a, &a->value);
    const size_t key_width = copies_keys ? (size_t)a->E : 0, value_width = copies_values ? (size_t)a->Dv : 0;
    const size_t width = key_width + value_width;
    const size_t most = width == 0 ? 0 : SA_CACHE_BYTES / (SA_KEYS_PER_TILE * sizeof(real) * (width + 1));
    const size_t kept = in_cells && unit->replace_rows ? 0
                        : cells < most                 ? cells
                                                       : most,
                 places = kept < cells ? kept + 1 : kept;
    size_t used = 0;
    s->key.room = copies_keys ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->value.room = copies_values ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->unit = unit;
    s->gain = NULL;
    SA_TAKE(q, real, E * W);
    SA_TAKE(O, real, Dv * W);
    SA_TAKE(P, real, keys * W);
    SA_TAKE(row, real, longest * SA_LANES);
    if (copies_keys) {
        SA_TAKE(key.rows, real, places * SA_KEYS_PER_TILE * key_width);
        SA_TAKE(key.filled, unsigned char, kept);
    }
    if (copies_values) {
        SA_TAKE(value.rows, real, places * SA_KEYS_PER_TILE * value_width);
        SA_TAKE(value.filled, unsigned char, kept);
    }
    if (a->mask.m.data) {
        SA_TAKE(bias, real, keys * W);
    }
    if (a->dropout_p > 0) {
        SA_TAKE(index, uint32_t, words);
        SA_TAKE(head_lo, uint32_t, words);
        SA_TAKE(head_hi, uint32_t, words);
        SA_TAKE(words, uint32_t, 4 * words);
    }
    s->factor = 1;
    s->scaled = false;
    s->ahead.now = s->ahead.count = 0;
    s->ahead.bytes = 0;
    s->wide.terms = 0;
    s->wide.queries_fit = false;
    s->decode.use = s->decode.open = s->decode.rounds = s->decode.lost = false;
    if (unit) {
        used = unit->lay_out_decode(a, base, used, &s->decode);
        used = in_cells ? unit->lay_out(a, base, used, &s->wide) : used;
    }
    return used;
}

/* A partial result: maximum[rows], sum[rows], unnormalised output[rows][Dv]. */
SA_KERNEL size_t FN(attention_partial)(const sa_attention *a, ptrdiff_t rows) {
    return ((2 + (size_t)a->Dv) * (size_t)rows * sizeof(real) + 63) / 64 * 64;
}
