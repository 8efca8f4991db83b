/* All kernels of one instruction set: every template once for float32 and once for float64, and the table of the results.
 * No include guards below here on purpose: the same text is compiled for both types. */
#include "simd/philox.h"
#include "kernels/transformer/checksum.h"
#include "kernels/rowops/narrow.h"
#include "kernels/attention/prefetch.h"

#define SA_REAL_IS_F64 0
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/pack.h"
#include "kernels/products/fma.h"
#include "kernels/attention/scores.h"
#include "kernels/attention/block.h"
#include "kernels/products/amx.h"
#include "kernels/products/bf16dot.h"
#include "kernels/decode/few_rows.h"
#include "kernels/attention/masks.h"
#include "kernels/attention/forward.h"
#include "kernels/products/backward_parts.h"
#include "kernels/attention/backward.h"
#include "kernels/attention/delta.h"
#include "kernels/rowops/forward.h"
#include "kernels/rowops/backward.h"
#include "kernels/optimizer/update.h"
#include "kernels/transformer/matmul.h"
#include "kernels/transformer/embedding.h"
#include "kernels/runtime/limits.h"
#include "simd/real_end.h"

#define SA_REAL_IS_F64 1
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/pack.h"
#include "kernels/products/fma.h"
#include "kernels/attention/scores.h"
#include "kernels/attention/block.h"
#include "kernels/products/amx.h"
#include "kernels/products/bf16dot.h"
#include "kernels/decode/few_rows.h"
#include "kernels/attention/masks.h"
#include "kernels/attention/forward.h"
#include "kernels/products/backward_parts.h"
#include "kernels/attention/backward.h"
#include "kernels/attention/delta.h"
#include "kernels/rowops/forward.h"
#include "kernels/rowops/backward.h"
#include "kernels/optimizer/update.h"
#include "kernels/transformer/matmul.h"
#include "kernels/transformer/embedding.h"
#include "kernels/runtime/limits.h"
#include "simd/real_end.h"

#define SA_ROW_TABLE(dtype)                                                                                                    \
    {                                                                                                                          \
        [SA_SOFTMAX] = SA_PASTE4(sa_, softmax_rows, dtype, SA_ISA),                                                            \
        [SA_LOG_SOFTMAX] = SA_PASTE4(sa_, log_softmax_rows, dtype, SA_ISA),                                                    \
        [SA_LAYER_NORM] = SA_PASTE4(sa_, layer_norm_rows, dtype, SA_ISA),                                                      \
        [SA_RMS_NORM] = SA_PASTE4(sa_, rms_norm_rows, dtype, SA_ISA),                                                          \
        [SA_GELU] = SA_PASTE4(sa_, gelu_rows, dtype, SA_ISA),                                                                  \
        [SA_GELU_TANH] = SA_PASTE4(sa_, gelu_tanh_rows, dtype, SA_ISA),                                                        \
        [SA_ROTARY] = SA_PASTE4(sa_, rotary_rows, dtype, SA_ISA),                                                              \
        [SA_ROTARY_INTERLEAVED] = SA_PASTE4(sa_, rotary_interleaved_rows, dtype, SA_ISA),                                      \
        [SA_SOFTMAX_BACKWARD] = SA_PASTE4(sa_, softmax_backward_rows, dtype, SA_ISA),                                          \
        [SA_LOG_SOFTMAX_BACKWARD] = SA_PASTE4(sa_, log_softmax_backward_rows, dtype, SA_ISA),                                  \
        [SA_LAYER_NORM_BACKWARD] = SA_PASTE4(sa_, layer_norm_backward_rows, dtype, SA_ISA),                                    \
        [SA_RMS_NORM_BACKWARD] = SA_PASTE4(sa_, rms_norm_backward_rows, dtype, SA_ISA),                                        \
        [SA_GELU_BACKWARD] = SA_PASTE4(sa_, gelu_backward_rows, dtype, SA_ISA),                                                \
        [SA_GELU_TANH_BACKWARD] = SA_PASTE4(sa_, gelu_tanh_backward_rows, dtype, SA_ISA),                                      \
    }
/* Attention and products may be other instruction sets' than the rest, and there may be more of them. */
#define SA_REAL_TABLE(dtype, attention_isa, matrix_isa)                                                                        \
    {.block_rows = SA_PASTE4(sa_, block_rows, dtype, attention_isa),                                                           \
     .backward_rows = SA_PASTE4(sa_, backward_rows, dtype, attention_isa),                                                     \
     .attention_scratch = SA_PASTE4(sa_, attention_scratch, dtype, attention_isa),                                             \
     .attention_partial = SA_PASTE4(sa_, attention_partial, dtype, attention_isa),                                             \
     .attention_forward = SA_PASTE4(sa_, attention_forward, dtype, attention_isa),                                             \
     .attention_merge = SA_PASTE4(sa_, attention_merge, dtype, attention_isa),                                                 \
     .backward_scratch = SA_PASTE4(sa_, attention_backward_scratch, dtype, attention_isa),                                     \
     .adds_by_lines = SA_PASTE4(sa_, adds_by_lines, dtype, attention_isa),                                                     \
     .attention_delta = SA_PASTE4(sa_, attention_delta, dtype, attention_isa),                                                 \
     .attention_backward = SA_PASTE4(sa_, attention_backward, dtype, attention_isa),                                           \
     .rows = SA_ROW_TABLE(dtype),                                                                                              \
     .softmax_columns = SA_PASTE4(sa_, softmax_columns, dtype, SA_ISA),                                                        \
     .softmax_columns_backward = SA_PASTE4(sa_, softmax_columns_backward, dtype, SA_ISA),                                      \
     .parameter_gradients = SA_PASTE4(sa_, parameter_gradients, dtype, SA_ISA),                                                \
     .gather = SA_PASTE4(sa_, gather, dtype, SA_ISA),                                                                          \
     .splits_from = SA_PASTE4(sa_, splits_from, dtype, matrix_isa),                                                            \
     .matmul_scratch = SA_PASTE4(sa_, matmul_scratch, dtype, matrix_isa),                                                      \
     .matmul_nt = SA_PASTE4(sa_, matmul_nt, dtype, matrix_isa),                                                                \
     .matmul_nn = SA_PASTE4(sa_, matmul_nn, dtype, matrix_isa),                                                                \
     .matmul_tn = SA_PASTE4(sa_, matmul_tn, dtype, matrix_isa),                                                                \
     .look_up = SA_PASTE4(sa_, look_up, dtype, SA_ISA),                                                                        \
     .add_norm = SA_PASTE4(sa_, add_norm, dtype, SA_ISA),                                                                      \
     .norm_backward = SA_PASTE4(sa_, norm_backward, dtype, SA_ISA),                                                            \
     .column_sums = SA_PASTE4(sa_, column_sums, dtype, SA_ISA),                                                                \
     .spread = SA_PASTE4(sa_, spread, dtype, SA_ISA),                                                                          \
     .add_row = SA_PASTE4(sa_, add_row, dtype, SA_ISA),                                                                        \
     .update = {[SA_SGD] = SA_PASTE4(sa_, sgd, dtype, SA_ISA), [SA_ADAM] = SA_PASTE4(sa_, adam, dtype, SA_ISA)},               \
     .exp2_array = SA_PASTE4(sa_, exp2_array, dtype, SA_ISA),                                                                  \
     .exp_array = SA_PASTE4(sa_, exp_array, dtype, SA_ISA),                                                                    \
     .tanh_array = SA_PASTE4(sa_, tanh_array, dtype, SA_ISA),                                                                  \
     .fma_loop = SA_PASTE4(sa_, fma_loop, dtype, SA_ISA)}
#define SA_STRING_(x) #x
#define SA_STRING(x) SA_STRING_(x)

const sa_kernels SA_PASTE(sa_kernels_, SA_ISA) = {
    .name = SA_STRING(SA_ISA),
    .f32 = SA_REAL_TABLE(f32, SA_ISA, SA_ISA),
    .f64 = SA_REAL_TABLE(f64, SA_ISA, SA_ISA),
    .checksum = SA_PASTE(sa_checksum_, SA_ISA),
    .narrow = SA_PASTE(sa_narrow_, SA_ISA),
    .read_loop = SA_PASTE(sa_read_loop_, SA_ISA),
};
