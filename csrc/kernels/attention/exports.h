/* The table's entries for attention. The files of other products call the functions declared here. */

size_t FN(attention_partial)(const sa_attention *a, ptrdiff_t rows);
size_t FN(forward_bytes)(const sa_attention *a, const FN(unit) * unit);
void FN(forward_block)(const sa_block *b, void *scratch, const FN(unit) * unit);
void FN(merge_block)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch, const FN(unit) * unit);
size_t FN(gradient_bytes)(const sa_attention_gradients *g, const FN(unit) * unit);
void FN(delta_block)(const sa_backward_block *b, void *scratch, const FN(unit) * unit);
void FN(gradient_block)(const sa_backward_block *b, void *scratch, const FN(unit) * unit);

#define SA_ATTENTION_KERNELS(isa, other)                                                                                       \
    SA_KERNEL size_t SA_PASTE4(sa_, attention_scratch, SA_DTYPE, isa)(const sa_attention *a) {                                 \
        return FN(forward_bytes)(a, other);                                                                                    \
    }                                                                                                                          \
    SA_KERNEL void SA_PASTE4(sa_, attention_forward, SA_DTYPE, isa)(const sa_block *b, void *scratch) {                        \
        FN(forward_block)(b, scratch, other);                                                                                  \
    }                                                                                                                          \
    SA_KERNEL void SA_PASTE4(sa_, attention_merge, SA_DTYPE, isa)(const sa_block *b, const char *partial, ptrdiff_t chunks,    \
                                                                  void *scratch) {                                             \
        FN(merge_block)(b, partial, chunks, scratch, other);                                                                   \
    }                                                                                                                          \
    SA_KERNEL size_t SA_PASTE4(sa_, backward_scratch, SA_DTYPE, isa)(const sa_attention_gradients *g) {                        \
        return FN(gradient_bytes)(g, other);                                                                                   \
    }                                                                                                                          \
    SA_KERNEL bool SA_PASTE4(sa_, adds_by_lines, SA_DTYPE, isa)(const sa_attention *a) {                                       \
        const FN(unit) *const of_call = other;                                                                                 \
        return of_call && of_call->replace_rows && of_call->take(a);                                                           \
    }                                                                                                                          \
    SA_KERNEL void SA_PASTE4(sa_, attention_delta, SA_DTYPE, isa)(const sa_backward_block *b, void *scratch) {                 \
        FN(delta_block)(b, scratch, other);                                                                                    \
    }                                                                                                                          \
    SA_KERNEL void SA_PASTE4(sa_, attention_backward, SA_DTYPE, isa)(const sa_backward_block *b, void *scratch) {              \
        FN(gradient_block)(b, scratch, other);                                                                                 \
    }
