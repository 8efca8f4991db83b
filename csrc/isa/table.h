/* All kernels of the instruction set SA_ISA, whose verbs come before, and its table with SA_COMPACT_UNITS.
 * Comes after simd/vec128.h. */
#include "kernels/entries.h"
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
