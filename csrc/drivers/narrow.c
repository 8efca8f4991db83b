/* Driver of rounding to 16 bits (kernels/rowops/narrow.h). */
#include "drivers/narrow.h"

#include "kernels/kernels.h"
#include "runtime/threads.h"

#define SA_NARROWED_PER_THREAD 65536

typedef struct {
    const float *from;
    ptrdiff_t n;
    sa_dtype dtype;
    uint16_t *to;
} narrow_call;

/* Independent: a thread writes its own elements. */
static void run_share(void *call, int thread, int team) {
    const narrow_call *c = call;
    const sa_share share = sa_share_of(c->n, thread, team);
    sa_kernels_active()->narrow(c->from + share.from, share.end - share.from, c->dtype, c->to + share.from);
}

void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads) {
    narrow_call c = {from, n, dtype, to};
    sa_run_team(sa_threads_for((double)n, SA_NARROWED_PER_THREAD, (double)n, max_threads), run_share, &c);
}
