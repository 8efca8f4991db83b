/* All kernels of one element type, for isa/table.h. The files below have no include guards,
 * because both types compile the same text. */
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/load.h"
#include "kernels/products/tiles.h"
#include "kernels/attention/block.h"
#include "kernels/attention/scores.h"
#include "kernels/decode/rows.h"
#include "kernels/attention/forward.h"
#include "kernels/decode/decode.h"
#include "kernels/attention/backward.h"
#include "kernels/attention/jvp.h"
#include "kernels/attention/hvp.h"
SA_ATTENTION_KERNELS(SA_ISA, NULL) /* there is no unit but multiply-adds */
#include "kernels/rowops/forward.h"
#include "kernels/rowops/backward.h"
#include "kernels/optimizer/update.h"
#include "kernels/transformer/rows.h"
#include "kernels/transformer/matmul.h"
#if !SA_REAL_IS_F64
#include "kernels/transformer/checksum.h"
#include "kernels/transformer/compact_rows.h"
#include "kernels/transformer/quants.h"
#endif
#include "kernels/loops.h"
