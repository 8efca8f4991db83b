/* All kernels of one element type on one instruction set: simd/real.h sets the type up, the same text is compiled for
 * both. No include guards in what follows, on purpose. */
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/load.h"
#include "kernels/attention/convert.h"
#include "kernels/attention/scratch.h"
#include "kernels/products/unit.h"
#include "kernels/products/tiles.h"
#include "kernels/products/fma.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/tile.h"
#include "kernels/attention/copies.h"
#include "kernels/attention/ahead.h"
#include "kernels/attention/scores.h"
#include "kernels/decode/rows.h"
#include "kernels/decode/leaves.h"
#include "kernels/attention/forward.h"
#include "kernels/decode/decode.h"
#include "kernels/attention/exports.h"
#include "kernels/attention/entry.h"
#include "kernels/attention/backward.h"
#include "kernels/attention/delta.h"
SA_ATTENTION_KERNELS(SA_ISA, NULL)
#include "kernels/rowops/forward.h"
#include "kernels/rowops/backward.h"
#include "kernels/optimizer/update.h"
#include "kernels/transformer/matmul.h"
#include "kernels/transformer/rows.h"
#if !SA_REAL_IS_F64
#include "kernels/transformer/compact_rows.h"
#include "kernels/transformer/quants.h"
#endif
#if defined(SA_WITH_TESTS)
#include "kernels/runtime/exp_arrays.h"
#endif
#include "kernels/runtime/limits.h"
#include "simd/real_end.h"
