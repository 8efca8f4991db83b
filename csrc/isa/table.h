/* The entries of an instruction set's table, declared and filled. Attention and products may come from another set. A file that
 * does not define SA_PRODUCTS_ALONE gets all kernels, and its table at the end. */

#define SA_ATTENTION_ENTRIES(X, dtype, isa)                                                                                    \
    X(attention_scratch, dtype, isa)                                                                                           \
    X(attention_forward, dtype, isa)                                                                                           \
    X(attention_merge, dtype, isa)                                                                                             \
    X(backward_scratch, dtype, isa)                                                                                            \
    X(adds_by_lines, dtype, isa)                                                                                               \
    X(attention_delta, dtype, isa)                                                                                             \
    X(attention_backward, dtype, isa)
#define SA_MATMUL_ENTRIES(X, dtype, isa)                                                                                       \
    X(matmul_scratch, dtype, isa) X(matmul_nt, dtype, isa) X(matmul_nn, dtype, isa) X(matmul_tn, dtype, isa)
#define SA_OTHER_ENTRIES(X, dtype, isa)                                                                                        \
    X(attention_partial, dtype, isa)                                                                                           \
    X(softmax_columns, dtype, isa)                                                                                             \
    X(softmax_columns_backward, dtype, isa)                                                                                    \
    X(parameter_gradients, dtype, isa)                                                                                         \
    X(gather, dtype, isa)                                                                                                      \
    X(look_up, dtype, isa)                                                                                                     \
    X(add_norm, dtype, isa)                                                                                                    \
    X(norm_backward, dtype, isa)                                                                                               \
    X(begin_rows, dtype, isa)                                                                                                  \
    X(activate, dtype, isa)                                                                                                    \
    X(activate_backward, dtype, isa)                                                                                           \
    X(rotate_heads, dtype, isa)                                                                                                \
    X(drop_rows, dtype, isa)                                                                                                   \
    X(column_sums, dtype, isa)                                                                                                 \
    X(spread, dtype, isa)                                                                                                      \
    X(add_row, dtype, isa)                                                                                                     \
    X(fma_loop, dtype, isa)
#if defined(SA_WITH_TESTS)
#define SA_TEST_ENTRIES(X, dtype, isa) X(exp2_array, dtype, isa) X(exp_array, dtype, isa) X(tanh_array, dtype, isa)
#else
#define SA_TEST_ENTRIES(X, dtype, isa)
#endif
#define SA_ROW_FORWARD_ENTRIES(X, dtype, isa)                                                                                  \
    X(SA_SOFTMAX, softmax, dtype, isa)                                                                                         \
    X(SA_LOG_SOFTMAX, log_softmax, dtype, isa)                                                                                 \
    X(SA_LAYER_NORM, layer_norm, dtype, isa)                                                                                   \
    X(SA_RMS_NORM, rms_norm, dtype, isa)                                                                                       \
    X(SA_GELU, gelu, dtype, isa)                                                                                               \
    X(SA_GELU_TANH, gelu_tanh, dtype, isa)                                                                                     \
    X(SA_ROTARY, rotary, dtype, isa)                                                                                           \
    X(SA_ROTARY_INTERLEAVED, rotary_interleaved, dtype, isa)
#define SA_ROW_BACKWARD_ENTRIES(X, dtype, isa)                                                                                 \
    X(SA_SOFTMAX_BACKWARD, softmax_backward, dtype, isa)                                                                       \
    X(SA_LOG_SOFTMAX_BACKWARD, log_softmax_backward, dtype, isa)                                                               \
    X(SA_LAYER_NORM_BACKWARD, layer_norm_backward, dtype, isa)                                                                 \
    X(SA_RMS_NORM_BACKWARD, rms_norm_backward, dtype, isa)                                                                     \
    X(SA_GELU_BACKWARD, gelu_backward, dtype, isa)                                                                             \
    X(SA_GELU_TANH_BACKWARD, gelu_tanh_backward, dtype, isa)
#define SA_ROW_ENTRIES(X, dtype, isa) SA_ROW_FORWARD_ENTRIES(X, dtype, isa) SA_ROW_BACKWARD_ENTRIES(X, dtype, isa)
#define SA_UPDATE_ENTRIES(X, dtype, isa) X(SA_SGD, sgd, dtype, isa) X(SA_ADAM, adam, dtype, isa)
/* The entries that have no element type, or only float32. */
#define SA_SINGLE_ENTRIES(X, isa)                                                                                              \
    X(checksum, f32, isa)                                                                                                      \
    X(narrow, f32, isa)                                                                                                        \
    X(read_loop, f32, isa)                                                                                                     \
    X(quantize_rows, f32, isa)                                                                                                 \
    X(compact_ends, f32, isa)                                                                                                  \
    X(look_up_compact, f32, isa)                                                                                               \
    X(expand_quants, f32, isa)                                                                                                 \
    X(split_digits, f32, isa)                                                                                                  \
    X(matmul_nt, f32, isa)                                                                                                     \
    X(fill_panel_transposed, f32, isa)                                                                                         \
    X(dot_bytes, f32, isa)

#define SA_DECLARE_ENTRY(name, dtype, isa) extern __typeof__(*((sa_real_kernels *)0)->name) SA_PASTE4(sa_, name, dtype, isa);
#define SA_DECLARE_ROWS(kind, name, dtype, isa)                                                                                \
    extern __typeof__(*((sa_real_kernels *)0)->rows[0]) SA_PASTE4(sa_, SA_PASTE(name, _rows), dtype, isa);
#define SA_DECLARE_UPDATE(kind, name, dtype, isa)                                                                              \
    extern __typeof__(*((sa_real_kernels *)0)->update[0]) SA_PASTE4(sa_, name, dtype, isa);
#define SA_DECLARE_SINGLE(name, dtype, isa) extern __typeof__(*((sa_kernels *)0)->name) SA_PASTE4(sa_, name, dtype, isa);
#define SA_FILL_ENTRY(name, dtype, isa) .name = SA_PASTE4(sa_, name, dtype, isa),
#define SA_FILL_ROWS(kind, name, dtype, isa) [kind] = SA_PASTE4(sa_, SA_PASTE(name, _rows), dtype, isa),
#define SA_FILL_UPDATE(kind, name, dtype, isa) [kind] = SA_PASTE4(sa_, name, dtype, isa),

#define SA_DECLARE_REAL(dtype, isa, attention_isa, matmul_isa)                                                                 \
    SA_ATTENTION_ENTRIES(SA_DECLARE_ENTRY, dtype, attention_isa)                                                               \
    SA_MATMUL_ENTRIES(SA_DECLARE_ENTRY, dtype, matmul_isa)                                                                     \
    SA_OTHER_ENTRIES(SA_DECLARE_ENTRY, dtype, isa)                                                                             \
    SA_TEST_ENTRIES(SA_DECLARE_ENTRY, dtype, isa)                                                                              \
    SA_ROW_ENTRIES(SA_DECLARE_ROWS, dtype, isa)                                                                                \
    SA_UPDATE_ENTRIES(SA_DECLARE_UPDATE, dtype, isa)
#define SA_DECLARE_TABLE(isa, attention_isa, matmul_isa)                                                                       \
    SA_DECLARE_REAL(f32, isa, attention_isa, matmul_isa)                                                                       \
    SA_DECLARE_REAL(f64, isa, isa, isa)                                                                                        \
    SA_SINGLE_ENTRIES(SA_DECLARE_SINGLE, isa)

#define SA_FILL_REAL(dtype, isa, attention_isa, matmul_isa, splits)                                                            \
    {.block_rows = SA_PASTE4(sa_, block_rows, dtype, isa),                                                                     \
     .backward_rows = SA_PASTE4(sa_, backward_rows, dtype, isa),                                                               \
     .splits_from = splits,                                                                                                    \
     .rows = {SA_ROW_ENTRIES(SA_FILL_ROWS, dtype, isa)},                                                                       \
     .update = {SA_UPDATE_ENTRIES(SA_FILL_UPDATE, dtype, isa)},                                                                \
     SA_ATTENTION_ENTRIES(SA_FILL_ENTRY, dtype, attention_isa) SA_MATMUL_ENTRIES(SA_FILL_ENTRY, dtype, matmul_isa)             \
         SA_OTHER_ENTRIES(SA_FILL_ENTRY, dtype, isa) SA_TEST_ENTRIES(SA_FILL_ENTRY, dtype, isa)}

#if !defined(SA_PRODUCTS_ALONE)
#include "simd/philox.h"
#include "kernels/attention/prefetch.h"

#define SA_REAL_IS_F64 0
#include "kernels/all.h"
#undef SA_REAL_IS_F64
#define SA_REAL_IS_F64 1
#include "kernels/all.h"

SA_DECLARE_TABLE(SA_ISA, SA_ISA, SA_ISA)
const sa_kernels SA_PASTE(sa_kernels_, SA_ISA) = {
    .name = SA_STRING(SA_ISA),
    .f32 = SA_FILL_REAL(f32, SA_ISA, SA_ISA, SA_ISA, INT_MAX),
    .f64 = SA_FILL_REAL(f64, SA_ISA, SA_ISA, SA_ISA, INT_MAX),
    SA_SINGLE_ENTRIES(SA_FILL_ENTRY, SA_ISA) SA_COMPACT_UNITS,
};
#endif
