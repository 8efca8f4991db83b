/* Driver of rounding to 16 bits. Plain C that compilers make vectors of: memory bounds it before long. */
#if defined(_OPENMP)
#include <omp.h>
#endif
#include "narrow.h"

#include "kernels/common.h"

#include "kernels/bits.h"
#include "threads.h"

/* Some 10 µs. */
#define SA_NARROW_PIECE 32768

static void narrow_piece(const float *restrict from, ptrdiff_t n, sa_dtype dtype, uint16_t *restrict to) {
    if (dtype == SA_BF16) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            to[i] = sa_bf16_of_float(from[i]);
        }
    } else {
        for (ptrdiff_t i = 0; i < n; ++i) {
            to[i] = sa_f16_of_float(from[i]);
        }
    }
}

void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads) {
    const ptrdiff_t pieces = n / SA_NARROW_PIECE + (n % SA_NARROW_PIECE != 0);
#if defined(_OPENMP)
    const int threads = pieces / 2 < max_threads ? (int)(pieces / 2) : max_threads;
    if (threads > 1) {
        sa_region_enter();
        /* Independent: a piece writes its own elements. */
#pragma omp parallel for num_threads(threads) schedule(static)
        for (ptrdiff_t p = 0; p < pieces; ++p) {
            const ptrdiff_t at = p * SA_NARROW_PIECE, left = n - at;
            narrow_piece(from + at, left < SA_NARROW_PIECE ? left : SA_NARROW_PIECE, dtype, to + at);
        }
        sa_region_leave();
        return;
    }
#else
    (void)pieces, (void)max_threads;
#endif
    narrow_piece(from, n, dtype, to);
}
