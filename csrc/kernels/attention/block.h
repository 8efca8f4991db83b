/* What the forward and the backward pass over a block share: the scratch of a thread, the packing of queries, the rows of a
 * tile of keys or values, in place, packed or fetched ahead, and what causal leaves open of a tile. */

enum { FN(block_rows) = SA_VECS * SA_LANES, FN(backward_rows) = SA_BACKWARD_VECS * SA_LANES };
_Static_assert(FN(block_rows) <= FN(backward_rows) && FN(backward_rows) <= SA_MAX_BLOCK_ROWS, "rows of a block");

/* Which products go by `parts` (below): on a matrix unit all of them, from cells that replace rows of keys and values; by products
 * of bfloat16 all of tiles that are of that type, with scores that are complete and their maxima known; elsewhere none. */
#if defined(SA_HAS_TILES)
enum { FN(parts_replace_rows) = 1, FN(parts_know_top) = 0, FN(parts_take_scores) = 1 };
#elif defined(SA_HAS_BF16_PRODUCTS)
enum { FN(parts_replace_rows) = 0, FN(parts_know_top) = 1, FN(parts_take_scores) = 1 };
#else
enum { FN(parts_replace_rows) = 0, FN(parts_know_top) = 0, FN(parts_take_scores) = 0 };
#endif

/* A row's stride beyond this makes the tile worth packing: its lines fall on too few sets of the caches. */
#define SA_DIRECT_STRIDE 1024

/* Packed keys and values stay for the next block of the same head, up to this many bytes: rows of (B, L, H, D) 2 kB apart
 * then cost 4 % instead of 28, and 16 bits are converted once per head and thread. */
#define SA_CACHE_BYTES ((size_t)4 << 20)

/* Keys or values of a head that had to be packed: `room` rows of it, tile by tile as they are asked for, and behind those
 * the place for one tile that is not kept. */
typedef struct {
    real *rows;
    unsigned char *filled; /* [room / SA_KEYS_PER_TILE] */
    ptrdiff_t room;
} FN(cache);

/* What the matrix unit works on (attention_parts.h), or products of pairs (attention_pairs.h), where there are such. */
typedef struct {
    char *tiles; /* `room` cells, and behind them the place for one that is not kept */
    unsigned char *state;
    ptrdiff_t room;
    size_t bytes, part_bytes; /* of a cell, and of one part of it */
} FN(cells);

/* Cells for `count` tiles of keys, as many of them as may be kept. */
SA_INLINE void FN(lay_out_cells)(FN(cells) * cells, size_t part_bytes, int parts, ptrdiff_t count) {
    cells->part_bytes = part_bytes;
    cells->bytes = part_bytes * (size_t)parts;
    const ptrdiff_t most = (ptrdiff_t)(SA_CACHE_BYTES / cells->bytes);
    cells->room = count < most ? count : most;
}

typedef struct {
    int count; /* parts of an element of keys and values; 0: the block goes through multiply-adds */
    int of_queries, of_weights;
    bool of_16_bits; /* what is_of_16_bits says of the call */
    FN(cells) keys, values;
    char *queries, *weights;         /* right operands */
    char *rows;                      /* [lanes] rows of pairs */
    const char *values_now;          /* the tile's cell */
    real *product;                   /* [32][32] */
    int from[SA_KEYS_PER_TILE / 32]; /* the first vector with weights, for each 32 keys of the tile */
    bool queries_fit;
} FN(parts);

/* The same of a block of few queries (attention_few_parts.h, attention_few_pairs.h). */
typedef struct {
    bool use, open;
    bool lost;               /* a score left float32's range without its factor */
    bool rounds;             /* its weights are of bfloat16, whether or not it can be held */
    char *queries, *weights; /* right, left operands */
    real *product;
    char *rows; /* a tile of keys or values, where they cannot be read in place */
} FN(few_parts);

/* Keys any_from … any_to − 1 are open for some lane of a vector, all_from … all_to − 1 for all of its lanes. */
typedef struct {
    ptrdiff_t any_from, any_to, all_from, all_to;
} FN(open_bounds);

/* Scratch of one thread, carved out of one allocation. W = block rows, or the backward pass's. */
typedef struct {
    real *q; /* wide: qT[E][nv·lanes]; few: [rows][E rounded up to pairs of vectors] */
    real *O; /* wide: [Dv][nv·lanes]; few: [rows][Dv rounded up] */
    real *P; /* [keys][nv·lanes] */
    FN(cache) key, value;
    real *bias; /* mask rows [W][keys] */
    real *row;  /* one row of E, Dv or keys elements, rounded up */
    real *top, *maximum, *sum, *alpha, *tile_sum, *slope, *position, *lo, *hi, *ones; /* [W] */
    uint32_t *index, *head_lo, *head_hi;                                              /* [W rounded up to words' lanes] */
    uint32_t *words;                                                                  /* [4][the same] */
    real *gain;    /* [keys][nv·lanes], backward with softcap: its derivative; else NULL */
    const real *k; /* the tile's keys, as score_tile found them: [n][k_stride] */
    ptrdiff_t k_stride;
    real factor;                            /* what s->P is still to be multiplied with to be scores: 1 or scale·log2 e */
    bool empty;                             /* wide: O is still to be zeroed */
    FN(open_bounds) open[SA_BACKWARD_VECS]; /* where rows->clipped */
    bool scaled;                            /* wide: s->q holds the block's queries times scale·log2 e */
    sa_ahead ahead;
    FN(parts) parts;
    FN(few_parts) few;
} FN(scratch);

SA_INLINE bool FN(uses_parts)(const sa_attention *a);
SA_INLINE size_t FN(lay_out_parts)(const sa_attention *a, char *base, size_t used, FN(parts) * s);
SA_INLINE size_t FN(lay_out_few_parts)(const sa_attention *a, char *base, size_t used, FN(few_parts) * s);

/* A number in log2 units: what is finite stays finite. */
SA_INLINE real FN(in_log2)(double x) {
    const double y = x * SA_LOG2E;
    if (x - x != 0) {
        return (real)x;
    }
    return y > SA_REAL_MAX ? SA_REAL_MAX : y < -SA_REAL_MAX ? -SA_REAL_MAX : (real)y;
}

SA_INLINE real FN(factor_of)(const sa_attention *a) { return (real)(a->scale * SA_LOG2E); }

SA_INLINE size_t FN(round_up)(ptrdiff_t n) { return ((size_t)n + SA_LANES - 1) / SA_LANES * SA_LANES; }

/* Whether tile_rows has to pack the tiles of some head. */
SA_INLINE bool FN(some_tile_packs)(const sa_attention *a, const sa_tensor *t) {
    bool packs = !FN(is_direct)(&t->m) || t->m.row_stride > SA_DIRECT_STRIDE || t->m.row_stride < -SA_DIRECT_STRIDE;
    for (int axis = 0; axis < a->n_lead; ++axis) { /* a field of a packed record: the first head aligned, others not */
        packs |= t->lead_stride[axis] % (ptrdiff_t)sizeof(real) != 0;
    }
    return packs;
}

/* Lays the scratch out from base on and returns its size; with base NULL it only measures. Sizes are linear in E and Dv,
 * which the driver has bounded. by_parts: with cells, which on a matrix unit stand in for packed keys and values. */
SA_NOINLINE size_t FN(lay_out)(const sa_attention *a, char *base, FN(scratch) * s, size_t W, bool by_parts) {
    const size_t E = FN(round_up)(a->E), Dv = FN(round_up)(a->Dv);
    const size_t keys = a->S < SA_KEYS_PER_TILE && !by_parts ? FN(round_up)(a->S) : SA_KEYS_PER_TILE;
    const size_t longest = E > Dv ? (E > keys ? E : keys) : (Dv > keys ? Dv : keys);
    const size_t cells = ((size_t)a->S + SA_KEYS_PER_TILE - 1) / SA_KEYS_PER_TILE;
    const size_t words = (W + SA_U32_LANES - 1) / SA_U32_LANES * SA_U32_LANES;
    const bool key_packs = FN(some_tile_packs)(a, &a->key), value_packs = FN(some_tile_packs)(a, &a->value);
    const size_t key_width = key_packs ? (size_t)a->E : 0, value_width = value_packs ? (size_t)a->Dv : 0;
    const size_t width = key_width + value_width; /* 0, as in most small calls: a division less */
    const size_t most = width == 0 ? 0 : SA_CACHE_BYTES / (SA_KEYS_PER_TILE * sizeof(real) * (width + 1));
    const bool replaced = by_parts && FN(parts_replace_rows);
    const size_t kept = replaced ? 0 : cells < most ? cells : most, places = kept < cells ? kept + 1 : kept;
    size_t used = 0;
    s->key.room = key_packs ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->value.room = value_packs ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->gain = NULL;
    SA_TAKE(top, real, W);
    SA_TAKE(maximum, real, W);
    SA_TAKE(sum, real, W);
    SA_TAKE(alpha, real, W);
    SA_TAKE(tile_sum, real, W);
    SA_TAKE(lo, real, W);
    SA_TAKE(hi, real, W);
    SA_TAKE(slope, real, W);
    SA_TAKE(position, real, W);
    SA_TAKE(ones, real, W);
    SA_TAKE(q, real, E * W);
    SA_TAKE(O, real, Dv * W);
    SA_TAKE(P, real, keys * W);
    SA_TAKE(row, real, longest * SA_LANES);
    if (key_packs) {
        SA_TAKE(key.rows, real, places * SA_KEYS_PER_TILE * key_width);
        SA_TAKE(key.filled, unsigned char, kept);
    }
    if (value_packs) {
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
    s->parts.count = 0;
    s->parts.queries_fit = false;
    s->few.use = s->few.rounds = s->few.lost = false;
    used = FN(lay_out_few_parts)(a, base, used, &s->few);
    return by_parts ? FN(lay_out_parts)(a, base, used, &s->parts) : used;
}

static size_t FN(attention_scratch)(const sa_attention *a) {
    FN(scratch) s;
    return FN(lay_out)(a, NULL, &s, FN(block_rows), FN(uses_parts)(a));
}

/* A partial result: maximum[rows], sum[rows], output[rows][Dv], unnormalised. */
static size_t FN(attention_partial)(const sa_attention *a, ptrdiff_t rows) {
    return ((2 + (size_t)a->Dv) * (size_t)rows * sizeof(real) + 63) / 64 * 64;
}

/* ---- packing the queries ------------------------------------------------------------------------------------------- */

/* Whether rows can be read where they lie: aligned and without gaps. */
SA_INLINE bool FN(rows_in_place)(const char *const *rows, int count, const sa_matrix *m) {
    bool direct = m->dtype == SA_REAL_DTYPE && !m->swapped && m->col_stride == (ptrdiff_t)sizeof(real);
    for (int r = 0; r < count && direct; ++r) {
        direct = (uintptr_t)rows[r] % sizeof(real) == 0;
    }
    return direct;
}

/* The queries of vector v, in place or in s->row. Returns how many there are. */
SA_INLINE int FN(queries_of_vector)(const sa_block *b, FN(scratch) * s, bool direct, int v, const real **q) {
    const sa_matrix *m = &b->a->query.m;
    const int left = b->rows->count - v * SA_LANES, n = left < SA_LANES ? left : SA_LANES;
    const size_t stride = FN(round_up)(b->a->E);
    for (int i = 0; i < n; ++i) {
        const char *row = b->rows->query[v * SA_LANES + i];
        q[i] = direct ? (const real *)(const void *)row : s->row + (size_t)i * stride;
        if (!direct) {
            FN(load_row)(s->row + (size_t)i * stride, row, m->col_stride, b->a->E, m->dtype, m->swapped);
        }
    }
    return n;
}

/* The queries times scale·log2 e in s->q, with the rows as lanes. */
SA_NOINLINE void FN(pack_queries)(const sa_block *b, FN(scratch) * s, int nv) {
    const sa_rows *rows = b->rows;
    const ptrdiff_t E = b->a->E;
    const sa_matrix *q = &b->a->query.m;
    const real factor = FN(factor_of)(b->a);
    const bool direct = FN(rows_in_place)(rows->query, rows->count, q);
    s->scaled = true;
    if (E < SA_LANES) {
        memset(s->q, 0, (size_t)E * (size_t)nv * SA_LANES * sizeof(real));
        for (int r = 0; r < rows->count; ++r) {
            const real *q_r = (const real *)(const void *)rows->query[r];
            if (!direct) {
                FN(load_row)(s->row, rows->query[r], q->col_stride, E, q->dtype, q->swapped);
                q_r = s->row;
            }
            for (ptrdiff_t e = 0; e < E; ++e) {
                s->q[e * nv * SA_LANES + r] = q_r[e] * factor;
            }
        }
        return;
    }
    for (int v = 0; v < nv; ++v) {
        const real *q_i[SA_LANES];
        const int here = FN(queries_of_vector)(b, s, direct, v, q_i);
        for (ptrdiff_t e = 0; e < E; e += SA_LANES) {
            const int columns = E - e < SA_LANES ? (int)(E - e) : SA_LANES;
            vec x[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                x[i] = V(set1)(0);
                if (i < here) {
                    x[i] = columns == SA_LANES ? V(load)(q_i[i] + e) : V(load_n)(q_i[i] + e, columns);
                    x[i] = x[i] * V(set1)(factor);
                }
            }
            FN(transpose)(x);
            if (columns == SA_LANES) {
                SA_UNROLL
                for (int i = 0; i < SA_LANES; ++i) {
                    V(store)(s->q + ((e + i) * nv + v) * SA_LANES, x[i]);
                }
            } else {
                for (int i = 0; i < columns; ++i) {
                    V(store)(s->q + ((e + i) * nv + v) * SA_LANES, x[i]);
                }
            }
        }
    }
}

/* ---- rows of keys and values --------------------------------------------------------------------------------------- */

/* n rows of m from `first` on as real[n][width]. */
SA_NOINLINE void FN(pack_tile)(real *packed, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    if (!FN(is_direct)(m)) {
        FN(load_rows)(packed, m, first, n, width);
        return;
    }
    for (ptrdiff_t r = 0; r < n; ++r) {
        const real *from = (const real *)(const void *)(m->data + (first + r) * m->row_stride);
        real *to = packed + r * width;
        ptrdiff_t i = 0;
        for (; i + SA_LANES <= width; i += SA_LANES) {
            V(store)(to + i, V(load)(from + i));
        }
        if (i < width) {
            V(store_n)(to + i, V(load_n)(from + i, (int)(width - i)), (int)(width - i));
        }
    }
}

/* The tile's rows as real[n][*stride]: in place where that is possible and fast, else packed, unless they already are. */
SA_INLINE const real *FN(tile_rows)(const sa_block *b, const sa_matrix *m, FN(cache) * cache, ptrdiff_t first, ptrdiff_t n,
                                    ptrdiff_t width, ptrdiff_t *stride) {
    if (FN(is_direct)(m) && m->row_stride <= SA_DIRECT_STRIDE && m->row_stride >= -SA_DIRECT_STRIDE) {
        *stride = m->row_stride / (ptrdiff_t)sizeof(real);
        return (const real *)(const void *)(m->data + first * m->row_stride);
    }
    *stride = width;
    const ptrdiff_t at = first - b->cache_from, S = b->a->S;
    if (at + n > cache->room) {
        real *packed = cache->rows + cache->room * width;
        FN(pack_tile)(packed, m, first, n, width);
        return packed;
    }
    for (ptrdiff_t cell = at / SA_KEYS_PER_TILE; cell * SA_KEYS_PER_TILE < at + n; ++cell) {
        if (!cache->filled[cell]) {
            const ptrdiff_t row = cell * SA_KEYS_PER_TILE, from = b->cache_from + row;
            FN(pack_tile)(cache->rows + row * width, m, from, S - from < SA_KEYS_PER_TILE ? S - from : SA_KEYS_PER_TILE, width);
            cache->filled[cell] = 1;
        }
    }
    return cache->rows + at * width;
}

/* A memset of nothing is not free: it is a masked store in glibc. Two of them were 3 % of a call of 3×4. */
SA_INLINE void FN(open_cache)(FN(cache) * cache) {
    if (cache->room > 0) {
        memset(cache->filled, 0, (size_t)cache->room / SA_KEYS_PER_TILE);
    }
}

/* Forgets the packed tiles, unless they are this block's. */
SA_INLINE void FN(open_caches)(const sa_block *b, FN(scratch) * s) {
    if (!b->cache_holds) {
        FN(open_cache)(&s->key);
        FN(open_cache)(&s->value);
    }
}

/* What s->ahead holds is fetched by the product of so many rows that begins, or now where it has no steps to do so between. */
SA_INLINE void FN(share_ahead)(FN(scratch) * s, ptrdiff_t rows) {
    if (FN(parts_replace_rows) && s->parts.count) {
        sa_end_ahead(&s->ahead);
    }
    s->ahead.share = s->ahead.bytes / (rows / 8 + 1) + 1;
}

/* Keys and values that no near cache holds are fetched a tile ahead: those of a head that this thread begins with, in a large call
 * (a Zen 5 is then 2 to 4 % faster at 8×1024×128 and 32×512×64, 12 to 16 % at 256×128×64, gradients 0 to 3 %), and all of them from
 * so many bytes on: with an L3 of 32 MB, one head of 65,536 keys in two threads runs at 384 instead of 278 GFLOP/s, two of 32,768 at
 * 409 instead of 375; two of 16,384, of 8 MB each, at 422 instead of 435. */
#define SA_FAR_HEAD_BYTES ((ptrdiff_t)12 << 20)

SA_INLINE void FN(fetch_tile)(const sa_block *b, sa_ahead *ahead, const sa_matrix *m, ptrdiff_t width, ptrdiff_t first) {
    const ptrdiff_t bytes = sa_bytes_together(m, width),
                    to = b->end - first < SA_KEYS_PER_TILE ? b->end : first + SA_KEYS_PER_TILE;
    if (bytes == 0 || (!b->fetches && b->end - b->begin < SA_FAR_HEAD_BYTES / 2 / bytes)) {
        return;
    }
    sa_plan_ahead(ahead, (sa_rows_ahead){.offset = (uintptr_t)m->data + (uintptr_t)(first * m->row_stride),
                                         .stride = m->row_stride,
                                         .count = to - first,
                                         .bytes = bytes});
}

/* What causal, windows and lengths leave open of the n rows of one vector. Of a row without keys, 0 … −1, nothing is open to all. */
SA_INLINE FN(open_bounds) FN(open_rows)(const ptrdiff_t *lo, const ptrdiff_t *hi, int n) {
    FN(open_bounds) open = {.any_from = lo[0], .any_to = hi[0], .all_from = lo[0], .all_to = hi[0]};
    for (int r = 1; r < n; ++r) {
        open.any_from = lo[r] < open.any_from ? lo[r] : open.any_from;
        open.any_to = hi[r] > open.any_to ? hi[r] : open.any_to;
        open.all_from = lo[r] > open.all_from ? lo[r] : open.all_from;
        open.all_to = hi[r] < open.all_to ? hi[r] : open.all_to;
    }
    return open;
}

/* The same of each vector, in s->open; called when rows->clipped. Whole vectors apart: their loops become vector code. */
SA_INLINE void FN(open_vectors)(const sa_rows *rows, FN(scratch) * s, const int nv) {
    for (int v = 0; v < nv; ++v) {
        const int at = v * SA_LANES, left = rows->count - at;
        if (left >= SA_LANES) {
            s->open[v] = FN(open_rows)(rows->lo + at, rows->hi + at, SA_LANES);
        } else if (left > 0) {
            s->open[v] = FN(open_rows)(rows->lo + at, rows->hi + at, left);
        } else {
            s->open[v] = (FN(open_bounds)){.any_from = 0, .any_to = 0, .all_from = 0, .all_to = 0};
        }
    }
}

/* A key as counted from the tile's first one, and clamped to the tile. */
SA_INLINE ptrdiff_t FN(in_tile)(ptrdiff_t key, ptrdiff_t first, ptrdiff_t n) {
    return key < first ? 0 : key - first > n ? n : key - first;
}

/* Of n keys from `first` on: vector v of lanes is worked on for the first end[v], in whole tiles of 4 keys. Rows are sorted by
 * position, so what causal closes are whole vectors from the left: their work is skipped, not masked. */
SA_INLINE void FN(open_ends)(const sa_rows *rows, const FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, const int nv,
                             ptrdiff_t *end) {
    const bool all = nv == 1 || !rows->clipped || first + n <= rows->open_to;
    ptrdiff_t most = 0;
    for (int v = 0; v < nv; ++v) {
        if (!all) {
            const ptrdiff_t open = s->open[v].any_to - first;
            most = open > most ? open : most;
        }
        end[v] = all || most > n ? n : (most + 3) / 4 * 4 < n ? (most + 3) / 4 * 4 : n;
    }
}

/* The output of a wide block is zeroed late: the first product on the matrix unit is stored in its place. */
SA_INLINE void FN(open_output)(const sa_block *b, FN(scratch) * s, const int nv) {
    if (s->empty) {
        memset(s->O, 0, (size_t)b->a->Dv * (size_t)nv * SA_LANES * sizeof(real));
        s->empty = false;
    }
}
