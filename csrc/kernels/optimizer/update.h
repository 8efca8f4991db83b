/* As in PyTorch each operation of a step rounds, and none is fused, so all instruction sets compute the same bits. NaN
 * and infinities spread. Arrays do not overlap.
 * Comes after simd/exp.h and kernels/attention/load.h. */
#include "kernels/kernels.h"

/* SGD with momentum (Sutskever et al. 2013, section 2):  g += decay·p,  v = momentum·v + (1 − dampening)·g (first step:
 * g),  p −= lr·v, or lr·(g + momentum·v) with Nesterov. */
SA_KERNEL void FN(sgd)(const sa_update_scalars *s, void *parameter, const void *gradient, void *mean, void *square,
                       void *peak, ptrdiff_t n) {
    (void)square, (void)peak;
    real *restrict p = parameter, *restrict m = mean;
    const real *restrict g = gradient;
    const vec decay = SA_C(s->added_decay), keep = SA_C(s->keep_mean), take = SA_C(s->take_mean), rate = SA_C(s->rate);
    for (ptrdiff_t i = 0; i < n; i += SA_LANES) {
        const vec p_i = FN(load_up_to)(p + i, n - i);
        vec g_i = FN(load_up_to)(g + i, n - i);
        if (s->added_decay != 0) {
            g_i = g_i + decay * p_i;
        }
        if (m != NULL) {
            vec m_i = g_i;
            if (!s->fresh) {
                m_i = keep * FN(load_up_to)(m + i, n - i) + take * g_i;
            }
            FN(store_up_to)(m + i, m_i, n - i);
            if (s->nesterov) {
                m_i = g_i + keep * m_i;
            }
            g_i = m_i;
        }
        FN(store_up_to)(p + i, p_i - rate * g_i, n - i);
    }
}

/* Adam (Kingma & Ba 2015, algorithm 1):  p −= rate·m/(root·√v + eps),  rate = lr/(1 − β1^t),  root = 1/√(1 − β2^t).
 * AMSGrad (Reddi et al. 2018, algorithm 2) has the largest v so far in place of v, which spreads its NaN. */
SA_KERNEL void FN(adam)(const sa_update_scalars *s, void *parameter, const void *gradient, void *mean, void *square,
                        void *peak, ptrdiff_t n) {
    real *restrict p = parameter, *restrict m = mean, *restrict v = square, *restrict most = peak;
    const real *restrict g = gradient;
    const vec decay = SA_C(s->added_decay), shrink = SA_C(s->shrink), rate = SA_C(s->rate), root = SA_C(s->root);
    const vec keep1 = SA_C(s->keep_mean), take1 = SA_C(s->take_mean), eps = SA_C(s->eps);
    const vec keep2 = SA_C(s->keep_square), take2 = SA_C(s->take_square);
    for (ptrdiff_t i = 0; i < n; i += SA_LANES) {
        const ptrdiff_t left = n - i;
        vec p_i = FN(load_up_to)(p + i, left), g_i = FN(load_up_to)(g + i, left);
        if (s->added_decay != 0) {
            g_i = g_i + decay * p_i;
        }
        p_i = p_i * shrink;
        const vec m_i = keep1 * FN(load_up_to)(m + i, left) + take1 * g_i;
        vec v_i = keep2 * FN(load_up_to)(v + i, left) + take2 * (g_i * g_i);
        FN(store_up_to)(m + i, m_i, left);
        FN(store_up_to)(v + i, v_i, left);
        if (most != NULL) {
            v_i = V(max)(FN(load_up_to)(most + i, left), v_i);
            FN(store_up_to)(most + i, v_i, left);
        }
        FN(store_up_to)(p + i, p_i - rate * (m_i / (V(sqrt)(v_i) * root + eps)), left);
    }
}
