/* Attention's entries of an instruction set's table (kernels/entries.h): its functions with the set's unit, which is
 * NULL except in isa/avx512bf16.c and isa/amx.c (kernels/products/unit.h).
 * forward.h and backward.h define the functions; those two files call AVX-512's.
 * Comes after kernels/attention/block.h. */
#include "kernels/kernels.h"

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
