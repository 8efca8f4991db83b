/* The interface of units other than multiply-adds: bf16dot.h (dot products of bfloat16 pairs) and amx_attention.h (a
 * matrix unit), both for float32 on AVX-512. On other instruction sets the unit is NULL: they need nothing here.
 *
 * A unit takes a call, a block and a tile, or leaves it to multiply-adds, as bfloat16 cannot represent all numbers. A
 * function that returns bool returns true if it has done its work; else nothing has changed. (1) to (6):
 * docs/theory/backward.md. */
#include "kernels/kernels.h"

/* Each row of Q and dO, in place or copied, and its factor, which for Q is the scale.
 * NULL means a row of zeros. */
typedef struct {
    const real *query[FN(backward_rows)], *grad_out[FN(backward_rows)];
    real query_factor[FN(backward_rows)], grad_factor[FN(backward_rows)];
} FN(factored);

struct FN(unit) {
    bool replace_rows; /* cells replace copied keys and values; whole cache lines are added to dK and dV */
    bool know_top;     /* scores() also finds the scores' maxima */
    int decode_rows;   /* the most rows of a decoded block */

    /* ---- wide blocks */
    bool (*take)(const sa_attention *a); /* true if the unit may compute the call's wide blocks */
    size_t (*lay_out)(const sa_attention *a, char *base, size_t used, FN(wide_state) * s);
    void (*start)(const sa_block *b, FN(wide_state) * s); /* sets s->terms if the unit takes the block */
    void (*end)(void);                                    /* called after a block that the unit took, wide or decoded */
    void (*copy_queries)(const sa_block *b, FN(scratch) * s, int nv);
    /* Writes products of keys and queries to s->P; times s->factor they are scores. */
    bool (*scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv);
    /* True if the running maximum may lag; or NULL. */
    bool (*may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first);
    /* Makes operands of the scores or weights in P; for scores, s->tile_sum gets the sums of the weights. */
    bool (*weights)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool scores);
    void (*values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv);
    void (*round_weights)(FN(scratch) * s, ptrdiff_t count); /* rounds weights of a tile of multiply-adds; or NULL */

    /* ---- gradients of wide blocks */
    size_t (*lay_out_gradients)(const sa_attention_gradients *g, char *base, size_t used, FN(gradient_state) * s);
    /* Forgets another block's cells, even if multiply-adds take this block. */
    void (*start_gradients)(const sa_block *b, FN(gradient_state) * g);
    void (*copy_gradients)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_state) * g, FN(factored) * x,
                           real *q_rows, real *do_rows, int nv);
    bool (*dweights)(const sa_block *b, FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first, ptrdiff_t n,
                     real *dS, int nv); /* writes dP, (2), to dS */
    /* The tile's keys, all finite, if the unit needs no rows of keys for its gradients; else NULL.
     * The function may be NULL. */
    const real *(*tile_keys)(const sa_block *b, const FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first);
    /* Computes (1), (3) and (6) from the tile's key `done` on. scores: P holds scores, dS holds dP; keeps: dS stays in
     * place. Returns the first key that is left to multiply-adds. */
    ptrdiff_t (*gradients)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_state) * g, real *P, real *dS,
                           const real *delta, real *dqT, ptrdiff_t first, ptrdiff_t done, ptrdiff_t n, int nv,
                           bool scores, bool keeps);

    /* ---- blocks of few rows; R is their number, rounded up */
    size_t (*lay_out_decode)(const sa_attention *a, char *base, size_t used, FN(decode_state) * s);
    void (*start_decode)(const sa_block *b, FN(scratch) * s);
    /* Returns the keys of a longer tile, or 0; decode_tile adds that tile to maximum, sum and output.
     * Both may be NULL. */
    ptrdiff_t (*decode_keys)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first);
    void (*decode_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int R);
    /* Compute the products of ordinary tiles while s->decode.use is true. These may be NULL. */
    bool (*decode_queries)(const sa_block *b, FN(scratch) * s);
    void (*decode_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R);
    void (*decode_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R);
    void (*decode_order)(real *O, ptrdiff_t count);
};

SA_INLINE bool FN(unit_replaces_rows)(const sa_attention *a, const FN(unit) * unit) {
    return unit && unit->replace_rows && unit->take(a);
}

/* ---- attention's entries of an instruction set's table (kernels/entries.h), with its unit ------------------------ */

/* forward.h and backward.h define them; isa/avx512bf16.c and isa/amx.c call AVX-512's. */
size_t FN(attention_partial)(const sa_attention *a, ptrdiff_t rows);
size_t FN(forward_bytes)(const sa_attention *a, const FN(unit) * unit);
void FN(forward_block)(const sa_block *b, void *scratch, const FN(unit) * unit);
void FN(merge_block)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch, const FN(unit) * unit);
size_t FN(gradient_bytes)(const sa_attention_gradients *g, const FN(unit) * unit);
void FN(delta_block)(const sa_backward_block *b, void *scratch, const FN(unit) * unit);
void FN(gradient_block)(const sa_backward_block *b, void *scratch, const FN(unit) * unit);

#define SA_ATTENTION_KERNELS(isa, unit)                                                                                \
    SA_KERNEL size_t SA_PASTE4(sa_, attention_scratch, SA_DTYPE, isa)(const sa_attention *a) {                         \
        return FN(forward_bytes)(a, unit);                                                                             \
    }                                                                                                                  \
    SA_KERNEL void SA_PASTE4(sa_, attention_forward, SA_DTYPE, isa)(const sa_block *b, void *scratch) {                \
        FN(forward_block)(b, scratch, unit);                                                                           \
    }                                                                                                                  \
    SA_KERNEL void SA_PASTE4(sa_, attention_merge, SA_DTYPE, isa)(const sa_block *b, const char *partial,              \
                                                                  ptrdiff_t chunks, void *scratch) {                   \
        FN(merge_block)(b, partial, chunks, scratch, unit);                                                            \
    }                                                                                                                  \
    SA_KERNEL size_t SA_PASTE4(sa_, backward_scratch, SA_DTYPE, isa)(const sa_attention_gradients *g) {                \
        return FN(gradient_bytes)(g, unit);                                                                            \
    }                                                                                                                  \
    SA_KERNEL bool SA_PASTE4(sa_, adds_by_lines, SA_DTYPE, isa)(const sa_attention *a) {                               \
        return FN(unit_replaces_rows)(a, unit);                                                                        \
    }                                                                                                                  \
    SA_KERNEL void SA_PASTE4(sa_, attention_delta, SA_DTYPE, isa)(const sa_backward_block *b, void *scratch) {         \
        FN(delta_block)(b, scratch, unit);                                                                             \
    }                                                                                                                  \
    SA_KERNEL void SA_PASTE4(sa_, attention_backward, SA_DTYPE, isa)(const sa_backward_block *b, void *scratch) {      \
        FN(gradient_block)(b, scratch, unit);                                                                          \
    }
