/* The entries of an instruction set's table, declared and filled. Attention and products may come from another set. */
#ifndef SA_ENTRIES_H
#define SA_ENTRIES_H

#include "kernels/kernels.h"
#include "simd/macros.h"

#define SA_ATTENTION_ENTRIES(X, ...)                                                                                   \
    X(attention_scratch, __VA_ARGS__)                                                                                  \
    X(attention_forward, __VA_ARGS__)                                                                                  \
    X(attention_merge, __VA_ARGS__)                                                                                    \
    X(backward_scratch, __VA_ARGS__)                                                                                   \
    X(adds_by_lines, __VA_ARGS__)                                                                                      \
    X(attention_delta, __VA_ARGS__)                                                                                    \
    X(attention_backward, __VA_ARGS__)
#define SA_MATMUL_ENTRIES(X, ...)                                                                                      \
    X(matmul_scratch, __VA_ARGS__) X(matmul_nt, __VA_ARGS__) X(matmul_nn, __VA_ARGS__) X(matmul_tn, __VA_ARGS__)
#define SA_OTHER_ENTRIES(X, ...)                                                                                       \
    X(attention_partial, __VA_ARGS__)                                                                                  \
    X(jvp_scratch_bytes, __VA_ARGS__)                                                                                  \
    X(attention_jvp, __VA_ARGS__)                                                                                      \
    X(hvp_scratch_bytes, __VA_ARGS__)                                                                                  \
    X(attention_hvp_delta, __VA_ARGS__)                                                                                \
    X(attention_hvp, __VA_ARGS__)                                                                                      \
    X(softmax_columns, __VA_ARGS__)                                                                                    \
    X(softmax_columns_backward, __VA_ARGS__)                                                                           \
    X(parameter_gradients, __VA_ARGS__)                                                                                \
    X(gather, __VA_ARGS__)                                                                                             \
    X(look_up, __VA_ARGS__)                                                                                            \
    X(add_norm, __VA_ARGS__)                                                                                           \
    X(norm_backward, __VA_ARGS__)                                                                                      \
    X(begin_rows, __VA_ARGS__)                                                                                         \
    X(activate, __VA_ARGS__)                                                                                           \
    X(activate_backward, __VA_ARGS__)                                                                                  \
    X(rotate_heads, __VA_ARGS__)                                                                                       \
    X(drop_rows, __VA_ARGS__)                                                                                          \
    X(column_sums, __VA_ARGS__)                                                                                        \
    X(repeat_scaled, __VA_ARGS__)                                                                                      \
    X(add_row, __VA_ARGS__)                                                                                            \
    X(fma_loop, __VA_ARGS__)
#if defined(SA_WITH_TESTS)
#define SA_TEST_ENTRIES(X, ...) X(exp2_array, __VA_ARGS__) X(exp_array, __VA_ARGS__) X(tanh_array, __VA_ARGS__)
#else
#define SA_TEST_ENTRIES(X, ...)
#endif
#define SA_ROW_FORWARD_ENTRIES(X, ...)                                                                                 \
    X(SA_SOFTMAX, softmax, __VA_ARGS__)                                                                                \
    X(SA_LOG_SOFTMAX, log_softmax, __VA_ARGS__)                                                                        \
    X(SA_LAYER_NORM, layer_norm, __VA_ARGS__)                                                                          \
    X(SA_RMS_NORM, rms_norm, __VA_ARGS__)                                                                              \
    X(SA_GELU, gelu, __VA_ARGS__)                                                                                      \
    X(SA_GELU_TANH, gelu_tanh, __VA_ARGS__)                                                                            \
    X(SA_ROTARY, rotary, __VA_ARGS__)                                                                                  \
    X(SA_ROTARY_INTERLEAVED, rotary_interleaved, __VA_ARGS__)
#define SA_ROW_BACKWARD_ENTRIES(X, ...)                                                                                \
    X(SA_SOFTMAX_BACKWARD, softmax_backward, __VA_ARGS__)                                                              \
    X(SA_LOG_SOFTMAX_BACKWARD, log_softmax_backward, __VA_ARGS__)                                                      \
    X(SA_LAYER_NORM_BACKWARD, layer_norm_backward, __VA_ARGS__)                                                        \
    X(SA_RMS_NORM_BACKWARD, rms_norm_backward, __VA_ARGS__)                                                            \
    X(SA_GELU_BACKWARD, gelu_backward, __VA_ARGS__)                                                                    \
    X(SA_GELU_TANH_BACKWARD, gelu_tanh_backward, __VA_ARGS__)
#define SA_ROW_ENTRIES(X, ...) SA_ROW_FORWARD_ENTRIES(X, __VA_ARGS__) SA_ROW_BACKWARD_ENTRIES(X, __VA_ARGS__)
#define SA_UPDATE_ENTRIES(X, ...) X(SA_SGD, sgd, __VA_ARGS__) X(SA_ADAM, adam, __VA_ARGS__)
/* The entries that have no element type, or only float32. */
#define SA_SINGLE_ENTRIES(X, isa)                                                                                      \
    X(checksum, f32, isa)                                                                                              \
    X(narrow, f32, isa)                                                                                                \
    X(read_loop, f32, isa)                                                                                             \
    X(quantize_rows, f32, isa)                                                                                         \
    X(compact_ends, f32, isa)                                                                                          \
    X(look_up_compact, f32, isa)                                                                                       \
    X(expand_quants, f32, isa)                                                                                         \
    X(split_digits, f32, isa)                                                                                          \
    X(matmul_nt, f32, isa)                                                                                             \
    X(fill_panel_transposed, f32, isa)                                                                                 \
    X(dot_bytes, f32, isa)

#define SA_DECLARE_ENTRY(name, dtype, isa)                                                                             \
    extern __typeof__(*((sa_real_kernels *)0)->name) SA_PASTE4(sa_, name, dtype, isa);
#define SA_DECLARE_ROWS(kind, name, dtype, isa)                                                                        \
    extern __typeof__(*((sa_real_kernels *)0)->rows[0]) SA_PASTE4(sa_, SA_PASTE(name, _rows), dtype, isa);
#define SA_DECLARE_UPDATE(kind, name, dtype, isa)                                                                      \
    extern __typeof__(*((sa_real_kernels *)0)->update[0]) SA_PASTE4(sa_, name, dtype, isa);
#define SA_DECLARE_SINGLE(name, dtype, isa)                                                                            \
    extern __typeof__(*((sa_kernels *)0)->name) SA_PASTE4(sa_, name, dtype, isa);
#define SA_FILL_ENTRY(name, dtype, isa) .name = SA_PASTE4(sa_, name, dtype, isa),
#define SA_FILL_ROWS(kind, name, dtype, isa) [kind] = SA_PASTE4(sa_, SA_PASTE(name, _rows), dtype, isa),
#define SA_FILL_UPDATE(kind, name, dtype, isa) [kind] = SA_PASTE4(sa_, name, dtype, isa),

#define SA_DECLARE_REAL(dtype, isa, attention_isa, matmul_isa)                                                         \
    SA_ATTENTION_ENTRIES(SA_DECLARE_ENTRY, dtype, attention_isa)                                                       \
    SA_MATMUL_ENTRIES(SA_DECLARE_ENTRY, dtype, matmul_isa)                                                             \
    SA_OTHER_ENTRIES(SA_DECLARE_ENTRY, dtype, isa)                                                                     \
    SA_TEST_ENTRIES(SA_DECLARE_ENTRY, dtype, isa)                                                                      \
    SA_ROW_ENTRIES(SA_DECLARE_ROWS, dtype, isa)                                                                        \
    SA_UPDATE_ENTRIES(SA_DECLARE_UPDATE, dtype, isa)
#define SA_DECLARE_TABLE(isa, attention_isa, matmul_isa)                                                               \
    SA_DECLARE_REAL(f32, isa, attention_isa, matmul_isa)                                                               \
    SA_DECLARE_REAL(f64, isa, isa, isa)                                                                                \
    SA_SINGLE_ENTRIES(SA_DECLARE_SINGLE, isa)

#define SA_FILL_REAL(dtype, isa, attention_isa, matmul_isa, splits)                                                    \
    {.block_rows = SA_PASTE4(sa_, block_rows, dtype, isa),                                                             \
     .backward_rows = SA_PASTE4(sa_, backward_rows, dtype, isa),                                                       \
     .splits_from = splits,                                                                                            \
     .rows = {SA_ROW_ENTRIES(SA_FILL_ROWS, dtype, isa)},                                                               \
     .update = {SA_UPDATE_ENTRIES(SA_FILL_UPDATE, dtype, isa)},                                                        \
     SA_ATTENTION_ENTRIES(SA_FILL_ENTRY, dtype, attention_isa) SA_MATMUL_ENTRIES(SA_FILL_ENTRY, dtype, matmul_isa)     \
         SA_OTHER_ENTRIES(SA_FILL_ENTRY, dtype, isa) SA_TEST_ENTRIES(SA_FILL_ENTRY, dtype, isa)}

#endif
