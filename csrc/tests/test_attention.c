/* Attention against the reference: every option alone, every size around the vectors and tiles, every layout. What happens
 * when all of it comes together is test_random.c's part. */
#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static const sa_dtype floats[4] = {SA_F32, SA_F64, SA_F16, SA_BF16};

/* Around the lanes of a vector (2 … 16), the rows of a block (6 … 64) and the keys of one tile and of two. */
static void sizes(void) {
    const ptrdiff_t queries[] = {0,  1,  2,  3,  4,  5,  7,  8,  9,  12, 13, 15,  16, 17,
                                 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 130, 200};
    const ptrdiff_t keys[] = {0,
                              1,
                              2,
                              3,
                              5,
                              6,
                              31,
                              32,
                              33,
                              63,
                              SA_KEYS_PER_TILE - 1,
                              SA_KEYS_PER_TILE,
                              SA_KEYS_PER_TILE + 1,
                              2 * SA_KEYS_PER_TILE - 1,
                              2 * SA_KEYS_PER_TILE,
                              2 * SA_KEYS_PER_TILE + 1,
                              200,
                              265};
    const ptrdiff_t widths[] = {0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 66, 80, 128, 130};
    const int NQ = sizeof queries / sizeof *queries, NK = sizeof keys / sizeof *keys, NW = sizeof widths / sizeof *widths;
    for (int d = 0; d < 2; ++d) {
        for (int i = 0; i < NQ; ++i) {
            for (int j = 0; j < NK; ++j) {
                const int n = 5 * i + 3 * j; /* a different width each time: together they cover all pairs of neighbours */
                if (quick && (n + d) % 7 != 0) {
                    continue;
                }
                test_case t = plain_case(floats[d], queries[i], keys[j], widths[n % NW], widths[(n / 2 + 1) % NW]);
                t.weights = n % 3 == 0;
                case_try(&t, (uint64_t)n, "sizes");
            }
        }
    }
    for (int e = 0; e < NW; ++e) {
        for (int v = 0; v < NW; ++v) {
            test_case t = plain_case(SA_F32, quick ? 3 : 17, 35, widths[e], widths[v]);
            case_try(&t, (uint64_t)e, "widths, wide kernels");
            t.L = 1 + (e + v) % 8;
            t.lead[0] = 1;
            for (int d = 0; d < 4; ++d) { /* 16 bits are read as they are */
                t.query = t.key = t.value = t.out = floats[d];
                case_try(&t, (uint64_t)e, "widths, kernels of few queries");
            }
        }
    }
}

/* Sets one option of a case; false when there are no more. */
static bool option(int n, test_case *t) {
    const ptrdiff_t S = t->S, L = t->L;
    switch (n) {
    case 0: return true;
    case 1: t->causal = true; return true;
    case 2:
        t->causal = true;
        t->diagonal = S - L;
        return true;
    case 3: t->window_left = 5; return true;
    case 4: t->window_right = 3; return true;
    case 5:
        t->window_left = 20;
        t->window_right = 0;
        t->diagonal = S - L;
        return true;
    case 6:
        t->window_left = 0;
        t->window_right = 0;
        return true;
    case 7:
        t->causal = true;
        t->window_left = 40;
        t->window_right = 7;
        return true;
    case 8: t->softcap = 1.5; return true;
    case 9: t->alibi = true; return true;
    case 10:
        t->alibi = true;
        t->diagonal = S - L;
        return true;
    case 11: t->sinks = true; return true;
    case 12: t->lengths = true; return true;
    case 13:
        t->dropout_p = 0.3;
        t->seed = UINT64_C(0x123456789abcdef0);
        return true;
    case 14: t->dropout_p = 1; return true;
    case 15:
        t->dropout_p = 0x1p-30;
        t->seed = 7;
        return true;
    case 16: t->mask = SA_BOOL; return true;
    case 17: t->mask = SA_F32; return true;
    case 18: t->mask = SA_F64; return true;
    case 19: t->mask = SA_F16; return true;
    case 20: t->mask = SA_BF16; return true;
    case 21:
        t->mask = SA_BOOL;
        t->closed = 1;
        return true;
    case 22:
        t->mask = t->out;
        t->closed = 0;
        return true;
    case 23: t->scale = -3; return true;
    case 24: t->magnitude = 60; return true; /* scores of some thousands */
    case 25: t->scale = 0; return true;
    case 26: t->block_masks = PREFIX; return true;
    case 27:
        t->block_masks = PREFIX;
        t->diagonal = S - L;
        return true;
    case 28: t->block_masks = ONE_RUN; return true;
    case 29: t->block_masks = RUNS; return true;
    case 30: t->block_masks = RUNS | MORE_RUNS; return true;
    case 31:
        t->block_masks = PREFIX | ONE_RUN | RUNS | MORE_RUNS;
        t->dropout_p = 0.4;
        return true;
    case 32:
        t->block_masks = RUNS;
        t->causal = true;
        t->softcap = 2;
        t->alibi = true;
        return true;
    case 33:
        t->block_masks = RUNS;
        t->mask = SA_F32;
        t->window_left = 60;
        t->sinks = true;
        t->lengths = true;
        return true;
    case 34:
        t->mask = SA_BOOL;
        t->causal = true;
        t->lengths = true;
        t->softcap = 2;
        t->alibi = true;
        t->sinks = true;
        t->dropout_p = 0.5;
        t->window_left = 100;
        return true;
    default: return false;
    }
}

static void options(void) {
    const ptrdiff_t sizes[][4] = {{1, 40, 16, 8}, {3, 200, 40, 24}, {70, 150, 20, 33}, {13, 7, 5, 3}};
    for (int d = 0; d < 4; ++d) {
        for (int size = 0; size < 4; ++size) {
            for (int n = 0;; ++n) {
                test_case t = plain_case(floats[d], sizes[size][0], sizes[size][1], sizes[size][2], sizes[size][3]);
                if (!option(n, &t)) {
                    break;
                }
                t.weights = n % 2 == 0;
                if (quick && (n + d + size) % 3 != 0) {
                    continue;
                }
                char title[40];
                snprintf(title, sizeof title, "option %d", n);
                case_try(&t, (uint64_t)(100 * n + size), title);
                t.weights = !t.weights;
                t.lse = false;
                t.threads = 2;
                case_try(&t, (uint64_t)(100 * n + size), title);
            }
        }
    }
}

/* Every layout of every array, alone. */
static void layouts(void) {
    for (int d = 0; d < 4; ++d) {
        for (int which = 0; which < 5; ++which) {
            for (unsigned layout = 1; layout < ALL_LAYOUTS; layout *= 2) {
                const bool out = which == 4;
                if ((out && layout == SWAPPED) || (quick && d > 1)) {
                    continue;
                }
                for (int few = 0; few < 2; ++few) {
                    test_case t = plain_case(floats[d], few ? 2 : 19, 40, 17, 6);
                    t.n_lead = 2;
                    t.lead[1] = 3;
                    t.weights = out;
                    t.mask = which == 3 ? (d % 2 ? SA_BOOL : floats[d]) : SA_DTYPES;
                    *(which == 0   ? &t.query_layout
                      : which == 1 ? &t.key_layout
                      : which == 2 ? &t.value_layout
                      : which == 3 ? &t.mask_layout
                                   : &t.out_layout) = layout;
                    char title[40];
                    snprintf(title, sizeof title, "layout %u of array %d", layout, which);
                    case_try(&t, layout, title);
                }
            }
        }
    }
}

/* Every way to broadcast a mask over two leading axes, rows and columns; the same for keys and values; grouped queries. */
static void broadcasts(void) {
    for (unsigned n = 0; n < 16; ++n) {
        const unsigned pattern = (n & 3) | (n & 4 ? BROADCAST_ROWS : 0) | (n & 8 ? BROADCAST_COLS : 0);
        for (int kind = 0; kind < 3; ++kind) {
            for (int few = 0; few < 2; ++few) {
                test_case t = plain_case(SA_F32, few ? 1 : 20, 150, 8, 8);
                t.n_lead = 2;
                t.lead[1] = 3;
                t.mask = kind == 0 ? SA_BOOL : kind == 1 ? SA_F32 : SA_F64;
                t.mask_broadcast = pattern;
                t.lengths = t.alibi = t.sinks = n % 2 == 0;
                t.scalar_broadcast = n & 3;
                case_try(&t, n, "broadcast mask");
                t.mask = SA_DTYPES;
                t.query_broadcast = pattern;
                case_try(&t, n, "broadcast query");
                t.query_broadcast = 0;
                t.key_broadcast = t.value_broadcast = pattern;
                case_try(&t, n, "broadcast key and value");
                t.key_broadcast = pattern & 1;
                t.mask = SA_BOOL;
                case_try(&t, n, "broadcast value, partly key");
            }
        }
    }
    for (int kv = 0; kv < 16; ++kv) {
        for (ptrdiff_t L = 1; L < 30; L += 7) {
            test_case t = plain_case(kv % 2 ? SA_F64 : SA_F32, L, 50, 12, 7);
            t.n_lead = 1 + kv % 3;
            t.gqa = 1 + kv / 4;
            t.lead[0] = t.lead[1] = t.lead[2] = 2;
            t.lead[t.n_lead - 1] = t.gqa * (1 + kv % 2);
            t.key_broadcast = t.value_broadcast = kv % 4 == 3 ? 1 : 0;
            t.causal = kv % 3 == 0;
            t.diagonal = t.causal ? 50 - L : 0;
            t.sinks = t.alibi = t.lengths = true;
            t.dropout_p = kv % 2 ? 0.2 : 0;
            t.weights = true;
            case_try(&t, (uint64_t)kv, "grouped queries");
        }
    }
    test_case none = plain_case(SA_F32, 9, 9, 4, 4);
    none.n_lead = 0;
    case_try(&none, 1, "no leading axis");
    none.n_lead = 2;
    none.lead[1] = 0;
    case_try(&none, 1, "an empty leading axis");
}

/* Block masks at more sizes, with heads that share keys, keys in chunks, and NaN in what is closed. */
static void block_masks(void) {
    for (int seed = 0; seed < (quick ? 24 : 240); ++seed) {
        random_source r = {(uint64_t)seed};
        const bool chunks = seed % 8 == 7;
        test_case t = plain_case(floats[seed % 4], 1 + random_below(&r, 150), 1 + random_below(&r, 400), 8, 5);
        if (chunks) {
            t.L = 1 + random_below(&r, 5);
            t.S = 2048 + random_below(&r, 300);
        }
        t.n_lead = 2;
        t.gqa = 1 + seed % 3;
        t.lead[1] = 2 * t.gqa;
        t.lead[0] = 1 + random_below(&r, 2);
        t.scalar_broadcast = (unsigned)random_below(&r, 4);
        t.block_masks = 1 + (int)random_below(&r, 15);
        t.causal = seed % 3 == 0;
        t.lengths = seed % 5 == 0;
        t.mask = seed % 7 == 0 ? SA_BOOL : SA_DTYPES;
        t.dropout_p = seed % 4 == 1 ? 0.3 : 0;
        t.key_layout = t.value_layout = seed % 3 == 1 ? LONG_ROWS : 0;
        t.weights = seed % 2 == 0;
        t.poison = seed % 3;
        t.threads = 1 + seed % 3;
        case_try(&t, (uint64_t)seed, "block masks");
    }
}

static void philox(void) {
    /* Known answers of Random123's own tests (kat_vectors): counter, key, rounds. */
    static const uint32_t in[3][6] = {{0, 0, 0, 0, 0, 0},
                                      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u},
                                      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0}};
    static const uint32_t answers[2][3][4] = {{{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48},
                                               {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662},
                                               {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
                                              {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (int n = 0; n < 3; ++n) {
        for (int k = 0; k < 2; ++k) {
            uint32_t words[4];
            reference_philox(k ? 10 : 7, in[n], in[n] + 4, words);
            CHECK(memcmp(words, answers[k][n], sizeof words) == 0, "the reference's Philox, %d rounds", k ? 10 : 7);
        }
    }
}

void test_attention(void) {
    philox();
    sizes();
    options();
    layouts();
    broadcasts();
    block_masks();
    const sa_dtype integers[] = {SA_I8, SA_U8, SA_I16, SA_U16, SA_I32, SA_U32, SA_I64, SA_U64};
    for (int n = 0; n < 8; ++n) {
        test_case t = plain_case(integers[n], 20, 40, 6, 5);
        case_try(&t, (uint64_t)n, "integers");
        t.query_layout = t.key_layout = t.value_layout = SWAPPED | UNALIGNED;
        case_try(&t, (uint64_t)n, "swapped integers");
    }
}
