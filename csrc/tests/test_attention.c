/* Attention and its gradients against the reference: sizes around vectors and tiles, and cases in which a plausible kernel
 * would be wrong. test_random.c combines options. */
#include <math.h>
#include <string.h>

#include "tests/test.h"

static const sa_dtype floats[4] = {SA_F32, SA_F64, SA_F16, SA_BF16};

/* Sizes around a vector (2 … 16), a block of rows (6 … 64), one tile and two tiles. */
static void sizes(void) {
    enum { T = SA_KEYS_PER_TILE };
    static const ptrdiff_t queries[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 130};
    static const ptrdiff_t keys[] = {0, 1, 2, 3, 6, 31, 32, 33, T - 1, T, T + 1, 2 * T - 1, 2 * T, 2 * T + 1, 265};
    static const ptrdiff_t widths[] = {0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 66, 80, 128, 130};
    const int NQ = sizeof queries / sizeof *queries, NK = sizeof keys / sizeof *keys, NW = sizeof widths / sizeof *widths;
    for (int i = 0; i < NQ; ++i) {
        for (int j = i % (quick ? 4 : 2); j < NK; j += quick ? 4 : 2) {
            const int n = 5 * i + 3 * j; /* in the end all pairs of neighbours occur */
            for (int d = 0; d < 4; d += d == 1 && n % 3 ? 3 : 1) {
                test_case t = plain_case(floats[d], queries[i], keys[j], widths[n % NW], widths[(n / 2 + 1) % NW]);
                t.weights = n % 3 == 0;
                t.causal = n % 4 == 1;
                t.backward = true;
                case_try(&t, (uint64_t)n, "sizes");
            }
        }
    }
    for (int e = 0; e < NW; ++e) {
        for (int v = e % (quick ? 5 : 1); v < NW; v += quick ? 5 : 1) {
            for (int d = 0; d < 4; ++d) { /* kernels for many rows and for few */
                test_case t = plain_case(floats[d], d % 2 ? 1 + (e + v) % 8 : 17 + d, 35, widths[e], widths[v]);
                t.lead[0] = 1;
                t.backward = (e + v) % 4 == d;
                case_try(&t, (uint64_t)e, "widths");
                t.L = d % 2 ? 20 : 1 + (e + 2 * v) % 8;
                case_try(&t, (uint64_t)e, "widths");
            }
        }
    }
}

static void close_some(test_case *t, int way) {
    t->causal = way == 0 || way == 7;
    t->diagonal = way == 7 ? t->S - t->L : 0;
    t->window_left = way == 1 ? 6 : SA_UNBOUNDED;
    t->lengths = way == 2;
    t->mask = way == 3 ? SA_BOOL : way == 4 ? SA_F32 : way == 5 || way == 6 ? SA_F64 : SA_DTYPES;
    t->mask_broadcast = way == 5 ? BROADCAST_ROWS : 0;
    t->dropout_p = way == 6 ? 0.4 : 0;
    t->closed = 0.5;
}

/* NaN and infinities may reach only rows that see them. */
static void poisoned(void) {
    static const ptrdiff_t queries[] = {1, 3, 4, 9, 40, 70};
    for (int n = 0; n < 6; ++n) {
        for (int way = 0; way < 8; ++way) {
            for (int kind = POISON_CLOSED; kind <= POISON_QUERIES; ++kind) {
                for (int d = quick ? (n + way + kind) % 4 : 0; d < 4; d += quick ? 4 : 1) {
                    test_case t = plain_case(floats[d], queries[n], n % 2 ? 36 : 150, 17, 7);
                    t.lead[0] = 1 + n % 2;
                    close_some(&t, way);
                    t.poison = kind;
                    t.weights = t.backward = true;
                    t.alibi = n % 3 == 1;
                    t.sinks = n % 3 == 2;
                    case_try(&t, (uint64_t)(10 * n + way), "NaN and infinities");
                }
            }
        }
    }
}

/* Keys with a bias, alone and with each kind of mask; few rows are computed otherwise if nothing is kept for a backward
 * pass. */
static void biased_keys(void) {
    static const ptrdiff_t queries[] = {1, 2, 7, 20, 70};
    for (int n = 0; n < 5; ++n) {
        for (int way = 0; way < 8; ++way) {
            for (int d = quick ? (n + way) % 4 : 0; d < 4; d += quick ? 4 : 1) {
                test_case t = plain_case(floats[d], queries[n], n % 2 ? 36 : 150, 17, 7);
                close_some(&t, way);
                t.key_bias = true;
                t.poison = way % 2 ? POISON_CLOSED : NOT_POISONED;
                for (int backward = 0; backward < 2; ++backward) {
                    t.weights = t.backward = backward;
                    case_try(&t, (uint64_t)(10 * n + way), "biased keys");
                }
            }
        }
    }
    test_case t = plain_case(SA_F32, 3, 150, 17, 7);
    t.key_bias = true;
    case_try(&t, 1, "biased keys alone");
}

/* Without a key to attend to, outputs are 0, lse is −inf or the sink. Masks of finfo.min are open. Scores are in the
 * millions. */
static void edges(void) {
    for (int way = 0; way < 11; ++way) {
        for (ptrdiff_t L = 1; L < 80; L += 26) {
            for (int d = 0; d < 4; ++d) {
                test_case t = plain_case(floats[d], L, way == 0 ? 0 : 90, 8, 8);
                t.lead[0] = 1;
                t.weights = t.backward = true;
                t.sinks = L % 2;
                t.causal = way == 1;
                t.diagonal = way == 1 ? -1000 : way == 2 ? 1000 : 0;
                t.window_left = way == 2 ? 30 : SA_UNBOUNDED;
                t.mask = way == 3 ? SA_BOOL : way > 3 && way < 8 ? floats[way - 4] : SA_DTYPES;
                t.closed = way == 3 || way == 4 ? 1.1 : 0.3;
                t.mask_finite = way > 4 ? (double)INFINITY : 1;
                t.magnitude = way < 8 ? 2 : pow(10, way - 6);
                t.scale = way == 10 ? 0 : t.scale;
                case_try(&t, (uint64_t)way, "edges");
            }
        }
    }
}

/* Scores rise so far that exp of the difference underflows. */
static void climbing(void) {
    for (int d = 0; d < 2; ++d) {
        for (ptrdiff_t L = 1; L < 70; L += 22) {
            test_case t = plain_case(floats[d], L, 300, 4, 3);
            t.weights = true;
            t.lead[0] = 1;
            FREES_AT_END;
            live_case c;
            case_make(&c, &t, 10);
            for (ptrdiff_t j = 0; j < t.S; ++j) {
                for (ptrdiff_t e = 0; e < 4; ++e) {
                    case_set(&c, KEY, 0, j, e, (double)(j / 50) * 100 - 250);
                    for (ptrdiff_t i = 0; i < L; ++i) {
                        case_set(&c, QUERY, 0, i, e, i % 2 ? -1.0 : 1.0);
                    }
                }
            }
            memcpy(c.arrays[KEY].before, c.arrays[KEY].memory, c.arrays[KEY].bytes);
            memcpy(c.arrays[QUERY].before, c.arrays[QUERY].memory, c.arrays[QUERY].bytes);
            CHECK(case_run(&c) == SA_OK, "status");
            case_verify(&c, "climbing scores");
        }
    }
}

/* With few rows, kernels check every 2048 keys whether the call is cancelled. */
static void long_keys(void) {
    int once = 0;
    for (int n = 0; n < 3; ++n) {
        test_case t = plain_case(SA_F32, 3, n == 0 ? 2048 : 2 * 2048 + 150, 1024, 1024);
        t.lead[0] = 1;
        t.mask = SA_F32;
        t.alibi = t.backward = true;
        t.causal = n == 2;
        t.diagonal = n == 2 ? t.S - t.L : 0;
        t.block_masks = n == 2 ? RUNS : 0;
        FREES_AT_END;
        live_case c;
        case_make(&c, &t, 11);
        CHECK(case_run(&c) == SA_OK, "status");
        if (n == 2) {
            case_verify(&c, "long keys");
        }
        once = n == 0 ? c.looks : once;
        CHECK(n != 1 || c.looks == once + 2, "%d looks over %td keys, %d over 2048", c.looks, t.S, once);
    }
}

void test_attention(void) {
    sizes();
    poisoned();
    biased_keys();
    edges();
    climbing();
    long_keys();
    for (sa_dtype dtype = SA_I8; dtype <= SA_U64; ++dtype) {
        test_case t = plain_case(dtype, 20, 90, 7, 6);
        t.weights = t.causal = t.backward = true;
        case_try(&t, 4, "integers");
        t.L = 2;
        case_try(&t, 4, "integers, few queries");
    }
}
