/* An instruction set's kernels for both element types, and their table. Its file includes this after its verbs. */
#include "simd/philox.h"
#include "kernels/transformer/checksum.h"
#include "kernels/rowops/narrow.h"
#include "kernels/attention/prefetch.h"
#include "isa/table.h"

#define SA_REAL_IS_F64 0
#include "kernels/all.h"

#define SA_REAL_IS_F64 1
#include "kernels/all.h"

SA_DECLARE_TABLE(SA_ISA, SA_ISA, SA_ISA)
const sa_kernels SA_PASTE(sa_kernels_, SA_ISA) = {
    .name = SA_STRING(SA_ISA),
    .f32 = SA_FILL_REAL(f32, SA_ISA, SA_ISA, SA_ISA, INT_MAX),
    .f64 = SA_FILL_REAL(f64, SA_ISA, SA_ISA, SA_ISA, INT_MAX),
    SA_FILL_REST(SA_ISA),
    SA_COMPACT_UNITS,
};
