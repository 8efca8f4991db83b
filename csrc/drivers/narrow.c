/* Driver of rounding to 16 bits (kernels/narrow.h). */
#if defined(_OPENMP)
#include <omp.h>
#endif
#include "drivers/narrow.h"

#include "kernels/kernels.h"
#include "runtime/threads.h"

/* Some 10 µs. */
#define SA_NARROW_PIECE 32768

void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads) {
    void (*const narrow)(const float *, ptrdiff_t, sa_dtype, uint16_t *) = sa_kernels_active()->narrow;
    const ptrdiff_t pieces = n / SA_NARROW_PIECE + (n % SA_NARROW_PIECE != 0);
#if defined(_OPENMP)
    const int threads = pieces / 2 < max_threads ? (int)(pieces / 2) : max_threads;
    if (threads > 1) {
        sa_region_enter();
        /* Independent: a piece writes its own elements. */
#pragma omp parallel for num_threads(threads) schedule(static)
        for (ptrdiff_t p = 0; p < pieces; ++p) {
            const ptrdiff_t at = p * SA_NARROW_PIECE, left = n - at;
            narrow(from + at, left < SA_NARROW_PIECE ? left : SA_NARROW_PIECE, dtype, to + at);
        }
        sa_region_leave();
        return;
    }
#else
    (void)pieces, (void)max_threads;
#endif
    narrow(from, n, dtype, to);
}
