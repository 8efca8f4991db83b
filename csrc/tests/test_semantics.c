/* The points where a plausible kernel goes wrong: masked NaN, attended NaN, dead rows, masks of huge finite values. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static const sa_dtype floats[4] = {SA_F32, SA_F64, SA_F16, SA_BF16};

/* Each way of closing a pair, with NaN and infinities in what nobody sees, or in what some see and others don't. */
static void poisoned(void) {
    const ptrdiff_t queries[] = {1, 2, 3, 4, 9, 40, 70};
    for (int n = 0; n < 7; ++n) {
        for (int way = 0; way < 9; ++way) {
            for (int kind = POISON_CLOSED; kind <= POISON_SOME; ++kind) {
                for (int d = 0; d < 4; ++d) {
                    test_case t = plain_case(floats[d], queries[n], n % 2 ? 36 : 290, 10, 7);
                    t.poison = kind;
                    t.weights = true;
                    t.causal = way == 0 || way == 8;
                    t.diagonal = way == 8 ? t.S - t.L : 0;
                    t.window_left = way == 1 ? 6 : SA_UNBOUNDED;
                    t.lengths = way == 2 || way == 7;
                    t.mask = way == 3 ? SA_BOOL : way == 4 ? SA_F32 : way >= 5 && way <= 7 ? SA_F64 : SA_DTYPES;
                    t.mask_broadcast = way == 3 || way == 6 ? BROADCAST_ROWS : 0;
                    t.closed = 0.6;
                    t.softcap = way == 5 ? 3 : 0;
                    t.alibi = way == 6;
                    t.dropout_p = way == 7 ? 0.4 : 0;
                    if (quick && (n + way + kind + d) % 5 != 0) {
                        continue;
                    }
                    case_try(&t, (uint64_t)(10 * n + way), kind == POISON_CLOSED ? "NaN in closed keys" : "NaN in some keys");
                }
            }
        }
    }
}

/* A query of NaN spoils its own row and no other, and not even that when the row attends to nothing. */
static void poisoned_queries(void) {
    for (int few = 0; few < 2; ++few) {
        test_case t = plain_case(SA_F32, few ? 4 : 70, 50, 9, 5);
        t.causal = true;
        t.diagonal = -2; /* rows 0 and 1 attend to nothing */
        t.weights = true;
        live_case c;
        case_make(&c, &t, 3);
        for (ptrdiff_t i = 0; i < t.L; i += 3) {
            element_set(array_at(&c.query, 0, 1, i, 4), SA_F32, false, (double)NAN);
        }
        array_remember(&c.query);
        memcpy(c.query.before, c.query.memory, c.query.bytes);
        CHECK(case_run(&c) == SA_OK, "status");
        case_verify(&c, "NaN in queries");
        CHECK(array_get(&c.out, 0, 1, 0, 0) == 0 && isnan(array_get(&c.out, 0, 1, 3, 0)), "NaN in a dead and in a live row");
        case_free(&c);
    }
}

/* A key that scores −inf is attended to all the same: its weight is 0, and 0·NaN is NaN. Each way of closing other pairs, and of some
 * rows this one. */
static void infinite_scores(void) {
    const ptrdiff_t queries[] = {1, 3, 9, 40, 70};
    for (int n = 0; n < 5; ++n) {
        for (int way = 0; way < 8; ++way) {
            for (int d = 0; d < 4; ++d) {
                const ptrdiff_t S = n % 2 ? 36 : 290;
                test_case t = plain_case(floats[d], queries[n], S, 10, 7);
                t.weights = true;
                t.causal = way == 0 || way == 7;
                t.diagonal = way == 7 ? t.S - t.L : 0;
                t.window_left = way == 1 ? 6 : SA_UNBOUNDED;
                t.lengths = way == 2;
                t.mask = way == 3 ? SA_BOOL : way == 4 ? SA_F32 : way == 5 ? SA_F64 : SA_DTYPES;
                t.mask_broadcast = way == 5 ? BROADCAST_ROWS : 0;
                t.closed = 0.4;
                t.dropout_p = way == 6 ? 0.4 : 0;
                live_case c;
                case_make(&c, &t, (uint64_t)(8 * n + way));
                for (ptrdiff_t head = 0; head < c.heads; ++head) {
                    for (ptrdiff_t i = 0; i < t.L; ++i) {
                        element_set(array_at(&c.query, head, 1, i, 0), t.query, false, 1);
                    }
                    for (ptrdiff_t j = 1; j < S; j += S / 3) {
                        element_set(array_at(&c.key, head, t.gqa, j, 0), t.key, false, (double)-INFINITY);
                        element_set(array_at(&c.value, head, t.gqa, j, j % 7), t.value, false, (double)NAN);
                    }
                }
                memcpy(c.query.before, c.query.memory, c.query.bytes);
                memcpy(c.key.before, c.key.memory, c.key.bytes);
                memcpy(c.value.before, c.value.memory, c.value.bytes);
                CHECK(case_run(&c) == SA_OK, "status");
                case_verify(&c, "scores of -inf");
                case_free(&c);
            }
        }
    }
}

/* Nothing to attend to: zeros and lse −inf, or the sink's logit when there is one. */
static void dead_rows(void) {
    for (int way = 0; way < 5; ++way) {
        for (int sinks = 0; sinks < 2; ++sinks) {
            for (ptrdiff_t L = 1; L < 80; L += 26) {
                for (int d = 0; d < 4; ++d) {
                    test_case t = plain_case(floats[d], L, way == 4 ? 0 : 60, 8, 8);
                    t.sinks = sinks;
                    t.weights = true;
                    t.mask = way == 0 ? SA_BOOL : way == 1 ? SA_F64 : SA_DTYPES;
                    t.closed = 1.1;
                    t.causal = way == 2;
                    t.diagonal = way == 2 ? -1000 : way == 3 ? 1000 : 0;
                    t.window_left = way == 3 ? 30 : SA_UNBOUNDED;
                    live_case c;
                    case_make(&c, &t, 5);
                    for (ptrdiff_t i = 0; i < L && t.mask != SA_DTYPES; ++i) {
                        for (ptrdiff_t j = 0; j < t.S; ++j) {
                            const double closed = t.mask == SA_BOOL ? 0 : (double)-INFINITY;
                            element_set(array_at(&c.mask, 0, 1, i, j), t.mask, false, closed);
                        }
                    }
                    memcpy(c.mask.before ? c.mask.before : c.query.before, c.mask.memory ? c.mask.memory : c.query.memory,
                           c.mask.memory ? c.mask.bytes : c.query.bytes);
                    bool good = case_run(&c) == SA_OK;
                    for (ptrdiff_t i = 0; i < L; ++i) {
                        const double lse = array_get(&c.lse, 0, 1, i, 0);
                        const double sink = sinks ? array_get(&c.sinks, 0, 1, 0, 0) : (double)-INFINITY;
                        good &= sinks ? fabs(lse - sink) < 1e-6 : lse == sink;
                        for (ptrdiff_t k = 0; k < 8; ++k) {
                            good &= array_get(&c.out, 0, 1, i, k) == 0;
                        }
                    }
                    CHECK(good, "dead rows, way %d, L %td, dtype %d, sinks %d", way, L, t.out, sinks);
                    case_verify(&c, "dead rows");
                    case_free(&c);
                }
            }
        }
    }
}

/* A row of finfo.min, of whatever float dtype, is uniform; beside an open key it is nothing. +inf and NaN do as in
 * arithmetic. */
static void huge_masks(void) {
    const double least[4] = {-(double)FLT_MAX, -DBL_MAX, -65504, -0x1.fep127};
    for (int m = 0; m < 4; ++m) {
        for (int d = 0; d < 2; ++d) {
            for (ptrdiff_t L = 1; L < 60; L += 19) {
                test_case t = plain_case(floats[d], L, 40, 8, 8);
                t.mask = floats[m];
                t.weights = true;
                live_case c;
                case_make(&c, &t, 8);
                for (ptrdiff_t head = 0; head < 2; ++head) {
                    for (ptrdiff_t i = 0; i < L; ++i) {
                        for (ptrdiff_t j = 0; j < 40; ++j) { /* head 1: some finite, some closed */
                            const double other = j % 3 == 0 ? 0.5 : j % 3 == 1 ? least[m] : (double)-INFINITY;
                            const double x = head == 0 ? least[m] : other;
                            element_set(array_at(&c.mask, head, 1, i, j), t.mask, false, x);
                        }
                    }
                }
                memcpy(c.mask.before, c.mask.memory, c.mask.bytes);
                CHECK(case_run(&c) == SA_OK, "status");
                if (m != 2) { /* −65504 leaves the scores their differences in no precision but float32's */
                    const double w = array_get(&c.weights, 0, 1, 0, 7);
                    CHECK(fabs(w - 1.0 / 40) < 1e-6, "a row of finfo.min is not uniform: dtypes %d, %d, %g", d, m, w);
                }
                case_verify(&c, "masks of finfo.min");
                element_set(array_at(&c.mask, 0, 1, 0, 3), t.mask, false, (double)NAN);
                element_set(array_at(&c.mask, 1, 1, L - 1, 3), t.mask, false, (double)INFINITY);
                memcpy(c.mask.before, c.mask.memory, c.mask.bytes);
                CHECK(case_run(&c) == SA_OK, "status");
                case_verify(&c, "masks with NaN and inf");
                case_free(&c);
            }
        }
    }
}

/* Scores up to ±1e4 and beyond the range of float16; a first tile far below the next ones. */
static void large_scores(void) {
    for (int d = 0; d < 2; ++d) {
        for (ptrdiff_t L = 1; L < 70; L += 22) {
            test_case t = plain_case(floats[d], L, 300, 4, 3);
            t.weights = true;
            for (double magnitude = 1; magnitude < 1e6; magnitude *= 10) {
                t.magnitude = magnitude;
                case_try(&t, 9, "large scores");
                t.sinks = !t.sinks;
            }
            live_case c;
            t.magnitude = 0.5;
            t.causal = t.sinks = false;
            case_make(&c, &t, 10);
            for (ptrdiff_t j = 0; j < t.S; ++j) { /* scores climb by tiles, by more than exp can bridge */
                for (ptrdiff_t e = 0; e < 4; ++e) {
                    element_set(array_at(&c.key, 0, 1, j, e), t.key, false, (double)(j / 50) * 100 - 250);
                    for (ptrdiff_t i = 0; i < L; ++i) {
                        element_set(array_at(&c.query, 0, 1, i, e), t.query, false, i % 2 ? -1.0 : 1.0);
                    }
                }
            }
            memcpy(c.key.before, c.key.memory, c.key.bytes);
            memcpy(c.query.before, c.query.memory, c.query.bytes);
            CHECK(case_run(&c) == SA_OK, "status");
            case_verify(&c, "climbing scores");
            case_free(&c);
        }
    }
}

void test_semantics(void) {
    poisoned();
    poisoned_queries();
    infinite_scores();
    dead_rows();
    huge_masks();
    large_scores();
}
