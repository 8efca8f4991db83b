/* An instruction set's table: entries, declared and filled. Attention and products may be another set's. */

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
#define SA_ROW_ENTRIES(X, dtype, isa)                                                                                          \
    X(SA_SOFTMAX, softmax, dtype, isa)                                                                                         \
    X(SA_LOG_SOFTMAX, log_softmax, dtype, isa)                                                                                 \
    X(SA_LAYER_NORM, layer_norm, dtype, isa)                                                                                   \
    X(SA_RMS_NORM, rms_norm, dtype, isa)                                                                                       \
    X(SA_GELU, gelu, dtype, isa)                                                                                               \
    X(SA_GELU_TANH, gelu_tanh, dtype, isa)                                                                                     \
    X(SA_ROTARY, rotary, dtype, isa)                                                                                           \
    X(SA_ROTARY_INTERLEAVED, rotary_interleaved, dtype, isa)                                                                   \
    X(SA_SOFTMAX_BACKWARD, softmax_backward, dtype, isa)                                                                       \
    X(SA_LOG_SOFTMAX_BACKWARD, log_softmax_backward, dtype, isa)                                                               \
    X(SA_LAYER_NORM_BACKWARD, layer_norm_backward, dtype, isa)                                                                 \
    X(SA_RMS_NORM_BACKWARD, rms_norm_backward, dtype, isa)                                                                     \
    X(SA_GELU_BACKWARD, gelu_backward, dtype, isa)                                                                             \
    X(SA_GELU_TANH_BACKWARD, gelu_tanh_backward, dtype, isa)

#define SA_DECLARE_ENTRY(name, dtype, isa) extern __typeof__(*((sa_real_kernels *)0)->name) SA_PASTE4(sa_, name, dtype, isa);
#define SA_DECLARE_ROWS(kind, name, dtype, isa)                                                                                \
    extern __typeof__(*((sa_real_kernels *)0)->rows[0]) SA_PASTE4(sa_, SA_PASTE(name, _rows), dtype, isa);
#define SA_FILL_ENTRY(name, dtype, isa) .name = SA_PASTE4(sa_, name, dtype, isa),
#define SA_FILL_ROWS(kind, name, dtype, isa) [kind] = SA_PASTE4(sa_, SA_PASTE(name, _rows), dtype, isa),

#define SA_DECLARE_TABLE(isa, attention_isa, matmul_isa)                                                                       \
    SA_ATTENTION_ENTRIES(SA_DECLARE_ENTRY, f32, attention_isa)                                                                 \
    SA_ATTENTION_ENTRIES(SA_DECLARE_ENTRY, f64, isa)                                                                           \
    SA_MATMUL_ENTRIES(SA_DECLARE_ENTRY, f32, matmul_isa)                                                                       \
    SA_MATMUL_ENTRIES(SA_DECLARE_ENTRY, f64, isa)                                                                              \
    SA_OTHER_ENTRIES(SA_DECLARE_ENTRY, f32, isa)                                                                               \
    SA_OTHER_ENTRIES(SA_DECLARE_ENTRY, f64, isa)                                                                               \
    SA_TEST_ENTRIES(SA_DECLARE_ENTRY, f32, isa)                                                                                \
    SA_TEST_ENTRIES(SA_DECLARE_ENTRY, f64, isa)                                                                                \
    SA_ROW_ENTRIES(SA_DECLARE_ROWS, f32, isa)                                                                                  \
    SA_ROW_ENTRIES(SA_DECLARE_ROWS, f64, isa)                                                                                  \
    extern __typeof__(*((sa_real_kernels *)0)->update[0]) SA_PASTE4(sa_, sgd, f32, isa), SA_PASTE4(sa_, sgd, f64, isa),        \
        SA_PASTE4(sa_, adam, f32, isa), SA_PASTE4(sa_, adam, f64, isa);                                                        \
    extern __typeof__(*((sa_kernels *)0)->checksum) SA_PASTE(sa_checksum_, isa);                                               \
    extern __typeof__(*((sa_kernels *)0)->narrow) SA_PASTE(sa_narrow_, isa);                                                   \
    extern __typeof__(*((sa_kernels *)0)->read_loop) SA_PASTE(sa_read_loop_, isa);                                             \
    extern __typeof__(*((sa_kernels *)0)->quantize_rows) SA_PASTE4(sa_, quantize_rows, f32, isa);                              \
    extern __typeof__(*((sa_kernels *)0)->compact_ends) SA_PASTE4(sa_, compact_ends, f32, isa);                                \
    extern __typeof__(*((sa_kernels *)0)->look_up_compact) SA_PASTE4(sa_, look_up_compact, f32, isa);                          \
    extern __typeof__(*((sa_kernels *)0)->expand_quants) SA_PASTE4(sa_, expand_quants, f32, isa);                              \
    extern __typeof__(*((sa_kernels *)0)->split_digits) SA_PASTE4(sa_, split_digits, f32, isa);

#define SA_FILL_REAL(dtype, isa, attention_isa, matmul_isa, splits)                                                            \
    {                                                                                                                          \
        SA_ATTENTION_ENTRIES(SA_FILL_ENTRY, dtype, attention_isa)                                                              \
        SA_MATMUL_ENTRIES(SA_FILL_ENTRY, dtype, matmul_isa)                                                                    \
        SA_OTHER_ENTRIES(SA_FILL_ENTRY, dtype, isa)                                                                            \
        SA_TEST_ENTRIES(SA_FILL_ENTRY, dtype, isa).block_rows = SA_PASTE4(sa_, block_rows, dtype, isa),                        \
                                              .backward_rows = SA_PASTE4(sa_, backward_rows, dtype, isa),                      \
                                              .splits_from = splits, .rows = {SA_ROW_ENTRIES(SA_FILL_ROWS, dtype, isa)},       \
                                              .update = {                                                                      \
                                                  [SA_SGD] = SA_PASTE4(sa_, sgd, dtype, isa),                                  \
                                                  [SA_ADAM] = SA_PASTE4(sa_, adam, dtype, isa)                                 \
                                              }                                                                                \
    }

#define SA_STRING_(x) #x
#define SA_STRING(x) SA_STRING_(x)

#define SA_FILL_REST(isa)                                                                                                      \
    .checksum = SA_PASTE(sa_checksum_, isa), .narrow = SA_PASTE(sa_narrow_, isa), .read_loop = SA_PASTE(sa_read_loop_, isa),   \
    .quantize_rows = SA_PASTE4(sa_, quantize_rows, f32, isa), .compact_ends = SA_PASTE4(sa_, compact_ends, f32, isa),          \
    .look_up_compact = SA_PASTE4(sa_, look_up_compact, f32, isa), .expand_quants = SA_PASTE4(sa_, expand_quants, f32, isa),    \
    .split_digits = SA_PASTE4(sa_, split_digits, f32, isa)

/* How compact weights are multiplied: kernels/kernels.h. */
extern const sa_compact_unit sa_int8_amx, sa_int8_avx512vnni, sa_int8_avxvnni, sa_int8_avx2, sa_int8_neondot, sa_int8_baseline,
    sa_int8_neon, sa_int8_generic, sa_bf16_amx, sa_bf16_avx512bf16;
extern const sa_gemv_unit sa_gemv_avx512vnni, sa_gemv_avx2;
