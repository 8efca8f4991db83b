/* Every ISA file includes this first, before any target pragma: headers and macros. There are no functions: with
 * -march=native GCC would not inline them, as their target would exceed the file's. Intrinsics come after the pragma
 * for the same reason. */
#ifndef SA_MACROS_H
#define SA_MACROS_H

#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "selfattn.h"

/* The target of all functions up to SA_END_TARGET: Clang uses the first string alone. Emulated files ignore it. */
#define SA_PRAGMA(x) _Pragma(#x)
#if defined(SA_EMULATED) /* csrc/tests/emulated */
#define SA_TARGET(instructions, ...)
#define SA_OPTIMIZE(how)
#define SA_END_TARGET
#elif defined(__clang__)
#define SA_TARGET(instructions, ...)                                                                                   \
    SA_PRAGMA(clang attribute push(__attribute__((target(instructions))), apply_to = function))
#define SA_OPTIMIZE(how)
#define SA_END_TARGET SA_PRAGMA(clang attribute pop)
#else
#define SA_TARGET(...) SA_PRAGMA(GCC push_options) SA_PRAGMA(GCC target(__VA_ARGS__))
#define SA_OPTIMIZE(how) SA_PRAGMA(GCC optimize(how))
#define SA_END_TARGET SA_PRAGMA(GCC pop_options)
#endif
#define SA_BY_HAND "no-unswitch-loops,no-split-loops" /* for SA_OPTIMIZE, as loops that matter are unrolled by hand */

/* VERB and INLINE functions are inlined: they hold accumulators, pass vectors, or are a line or two. A LEAF calls them
 * with literal counts of rows and vectors. A ONCE function has run-time counts, and GCC must not clone it. A SHARED one
 * is called from files of several instruction sets, and the library does not export it. */
#define SA_VERB static inline __attribute__((always_inline, unused))
#if defined(SA_PARTS_APART)
#define SA_INLINE static __attribute__((unused)) /* sanitizers take minutes for large functions */
#else
#define SA_INLINE SA_VERB
#endif
#if defined(__clang__)
#define SA_APART noinline
#else
#define SA_APART noinline, noclone
#endif
#define SA_ONCE static __attribute__((SA_APART, unused))
#define SA_LEAF SA_ONCE
#if defined(_WIN32) /* exports nothing that is not marked */
#define SA_KERNEL
#else
#define SA_KERNEL __attribute__((visibility("hidden")))
#endif
#define SA_SHARED __attribute__((SA_APART)) SA_KERNEL

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SA_SHUFFLE
#error "selfattn needs GCC 12 or later, or Clang: __builtin_shufflevector is missing"
#endif

/* The verbs that change the order of lanes, for vectors of type vf32 or vf64 with 2, 4, 8 or 16 lanes. */
#define SA_ORDER_VERB(type, verb, ...)                                                                                 \
    SA_VERB type type##_##verb(type a, type b) { return SA_SHUFFLE(a, b, __VA_ARGS__); }
#define SA_ORDER_VERBS_2(type)                                                                                         \
    SA_ORDER_VERB(type, zip_lo, 0, 2)                                                                                  \
    SA_ORDER_VERB(type, zip_hi, 1, 3)                                                                                  \
    SA_ORDER_VERB(type, even, 0, 2)                                                                                    \
    SA_ORDER_VERB(type, odd, 1, 3)
#define SA_ORDER_VERBS_4(type)                                                                                         \
    SA_ORDER_VERB(type, zip_lo, 0, 4, 1, 5)                                                                            \
    SA_ORDER_VERB(type, zip_hi, 2, 6, 3, 7)                                                                            \
    SA_ORDER_VERB(type, even, 0, 2, 4, 6)                                                                              \
    SA_ORDER_VERB(type, odd, 1, 3, 5, 7)
#define SA_ORDER_VERBS_8(type)                                                                                         \
    SA_ORDER_VERB(type, zip_lo, 0, 8, 1, 9, 2, 10, 3, 11)                                                              \
    SA_ORDER_VERB(type, zip_hi, 4, 12, 5, 13, 6, 14, 7, 15)                                                            \
    SA_ORDER_VERB(type, even, 0, 2, 4, 6, 8, 10, 12, 14)                                                               \
    SA_ORDER_VERB(type, odd, 1, 3, 5, 7, 9, 11, 13, 15)
#define SA_ORDER_VERBS_16(type)                                                                                        \
    SA_ORDER_VERB(type, zip_lo, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)                                \
    SA_ORDER_VERB(type, zip_hi, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)                          \
    SA_ORDER_VERB(type, even, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)                               \
    SA_ORDER_VERB(type, odd, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

/* Loops over tile rows and vectors must be unrolled: only then are accumulators registers. */
#if defined(SA_PARTS_APART)
#define SA_UNROLL
#elif defined(__clang__)
#define SA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SA_UNROLL _Pragma("GCC unroll 64")
#endif

/* For a loop that must not become memcpy, memset or vector code: it has few rounds, and that code is large. */
#define SA_KEEP_LOOP() __asm__ volatile("")

/* drivers/common.h has these as functions. The first two are b where either is NaN. */
#define SA_SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define SA_LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SA_CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

#define SA_PASTE2(a, b) a##b
#define SA_PASTE(a, b) SA_PASTE2(a, b)
#define SA_PASTE4_(a, b, c, d) a##b##_##c##_##d
#define SA_PASTE4(a, b, c, d) SA_PASTE4_(a, b, c, d)
#define SA_STRING_(x) #x
#define SA_STRING(x) SA_STRING_(x)

/* The name of a function for the element type and instruction set that are compiled. */
#define FN(name) SA_PASTE4(sa_, name, SA_DTYPE, SA_ISA)

/* Places one array of a scratch layout at `base`; if that is SA_NOWHERE, only counts its bytes in `used`. */
#define SA_TAKE(field, type, count)                                                                                    \
    do {                                                                                                               \
        s->field = base ? (type *)(void *)(base + used) : NULL;                                                        \
        used += ((count) * sizeof(type) + 63) / 64 * 64;                                                               \
    } while (0)

/* A leaf takes at most SA_LEAF_VECS vectors. The backward pass has longer blocks, so that K, V, dK and dV pass through
 * the caches less often; they go through leaves in halves, or in pairs where a leaf takes two. */
#define SA_AT_ONCE(nv) ((nv) <= SA_LEAF_VECS ? (nv) : SA_LEAF_VECS == 2 ? 2 : ((nv) + 1) / 2)

#endif
