/* All options, dtypes, layouts and sizes at random. The title of a failure has the seed. */
#include <math.h>
#include <stdio.h>

#include "tests/test.h"

static ptrdiff_t random_size(random_source *r) {
    enum { T = SA_KEYS_PER_TILE };
    static const ptrdiff_t sizes[] = {0, 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 130, T, T + 1, 200, 265};
    return random_chance(r, 0.5) ? random_below(r, 40) : sizes[random_below(r, sizeof sizes / sizeof *sizes)];
}

static unsigned random_layout(random_source *r, unsigned allowed) {
    unsigned layout = 0;
    for (unsigned flag = 1; flag < ALL_LAYOUTS && random_chance(r, 0.8); flag *= 2) {
        layout |= random_chance(r, flag == LONG_ROWS ? 0.05 : 0.15) ? flag : 0;
    }
    return layout & allowed;
}

static unsigned random_broadcast(random_source *r, double p) {
    unsigned bits = 0;
    for (int axis = 0; axis < 10; ++axis) {
        bits |= random_chance(r, axis < 8 ? p : p / 4) ? 1u << axis : 0;
    }
    return bits;
}

static test_case random_case(random_source *r) {
    static const sa_dtype floats[] = {SA_F32, SA_F32, SA_F64, SA_F16, SA_BF16};
    sa_dtype dtype = floats[random_below(r, 5)];
    if (random_chance(r, 0.08)) {
        dtype = (sa_dtype)(SA_I8 + random_below(r, 8));
    }
    ptrdiff_t L = random_size(r), S = random_size(r), E = random_size(r), Dv = random_size(r);
    const bool long_keys = random_chance(r, 0.07); /* they are split into chunks */
    if (long_keys) {
        L = 1 + random_below(r, 20);
        S = 2000 + random_below(r, 600);
        E = random_below(r, 9);
        Dv = 1 + random_below(r, 5);
    }
    test_case t = plain_case(dtype, L, S, E, Dv);
    t.n_lead = long_keys ? 1 : (int)random_below(r, 4);
    t.lead[0] = 1;
    for (int axis = 0; axis < t.n_lead; ++axis) {
        t.lead[axis] = 1 + random_below(r, 3);
    }
    if (t.n_lead > 0 && random_chance(r, 0.3)) {
        t.gqa = 1 + random_below(r, 4);
        t.lead[t.n_lead - 1] *= t.gqa;
    }
    t.backward = random_chance(r, 0.6);
    t.grad_lse = t.backward && random_chance(r, 0.4);
    t.out = sa_itemsize(dtype) == 2 && dtype <= SA_F64 && t.backward && random_chance(r, 0.5) ? SA_F32 : t.out;
    const unsigned any = ALL_LAYOUTS - 1;
    t.query_layout = random_layout(r, any);
    t.key_layout = random_layout(r, any);
    t.value_layout = random_layout(r, any);
    t.mask_layout = random_layout(r, any);
    t.out_layout = random_layout(r, any);
    t.query_broadcast = random_broadcast(r, 0.1);
    t.key_broadcast = random_broadcast(r, 0.2);
    t.value_broadcast = random_chance(r, 0.5) ? t.key_broadcast : random_broadcast(r, 0.2);
    t.mask_broadcast = random_broadcast(r, 0.4);
    t.scalar_broadcast = random_broadcast(r, 0.3);
    if (random_chance(r, 0.4)) {
        static const sa_dtype masks[] = {SA_BOOL, SA_BOOL, SA_F32, SA_F64, SA_F16, SA_BF16};
        t.mask = masks[random_below(r, 6)];
        t.closed = random_between(r, -0.2, 1.1);
    }
    t.key_bias = random_chance(r, 0.2);
    t.alibi = random_chance(r, 0.2);
    t.sinks = random_chance(r, 0.2);
    t.lengths = random_chance(r, 0.2);
    t.lse = random_chance(r, 0.7);
    t.weights = random_chance(r, 0.3);
    t.causal = random_chance(r, 0.3);
    t.diagonal = random_chance(r, 0.5) ? 0 : random_chance(r, 0.5) ? S - L : random_below(r, 100) - 50;
    t.window_left = random_chance(r, 0.2) ? random_below(r, 50) : SA_UNBOUNDED;
    t.window_right = random_chance(r, 0.2) ? random_below(r, 50) : SA_UNBOUNDED;
    t.block_masks = random_chance(r, 0.25) ? (int)random_below(r, 16) : 0;
    t.softcap = random_chance(r, 0.15) ? random_between(r, 0.1, 20) : 0;
    t.dropout_p = random_chance(r, 0.2) ? random_between(r, 0, 1) : 0;
    t.seed = random_bits(r);
    t.scale = random_chance(r, 0.7) ? t.scale : random_between(r, -2, 2);
    t.magnitude = random_chance(r, 0.8) ? t.magnitude : dtype <= SA_F64 ? exp(random_between(r, -5, 5)) : 5;
    t.poison = random_chance(r, 0.2) ? POISON_CLOSED : random_chance(r, 0.1) ? POISON_SOME : NOT_POISONED;
    t.unsplit = random_chance(r, 0.2);
    t.threads = (int)random_below(r, 4);
    return t;
}

static double work_of(const test_case *t) {
    double work = (double)t->L * (double)t->S * (double)(t->E + t->Dv + 10);
    for (int axis = 0; axis < t->n_lead; ++axis) {
        work *= (double)t->lead[axis];
    }
    return work;
}

void test_random(void) {
    double left = quick ? 1.5e7 : 1e8; /* pairs × widths that the reference may compute */
    for (uint64_t seed = 1; left > 0; ++seed) {
        random_source r = {seed * 7919};
        const test_case t = random_case(&r);
        const double work = work_of(&t);
        if (work > (quick ? 8e5 : 1e7)) {
            continue;
        }
        char title[40];
        snprintf(title, sizeof title, "random case %llu", (unsigned long long)seed);
        case_try(&t, seed, title);
        left -= work + 2000;
    }
}
