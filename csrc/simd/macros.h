/* Included first by every ISA file, before any target pragma. Headers and macros only: with -march=native GCC would not
 * inline functions, as their target would exceed the file's. Intrinsics come after the pragma for the same reason. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* VERB and INLINE vanish into callers: they hold accumulators, pass vectors, or are a line or two. A LEAF calls them with
 * literal counts of rows and vectors. ONCE has run-time counts: GCC must not clone it. SHARED is called from several
 * instruction sets' files, and hidden in the library. */
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
#define SA_SHARED __attribute__((SA_APART, visibility("hidden")))

#define SA_KERNEL __attribute__((visibility("hidden")))

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SA_SHUFFLE
#error "selfattn needs GCC 12 or later, or Clang: __builtin_shufflevector is missing"
#endif

/* Loops over tile rows and vectors must disappear: accumulators are registers only then. */
#if defined(SA_PARTS_APART)
#define SA_UNROLL
#elif defined(__clang__)
#define SA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SA_UNROLL _Pragma("GCC unroll 64")
#endif

/* In a loop that must not become memcpy or memset. */
#define SA_KEEP_LOOP() __asm__ volatile("")

#define SA_PASTE2(a, b) a##b
#define SA_PASTE(a, b) SA_PASTE2(a, b)
#define SA_PASTE4_(a, b, c, d) a##b##_##c##_##d
#define SA_PASTE4(a, b, c, d) SA_PASTE4_(a, b, c, d)

/* One array of a scratch layout at `base`; NULL only counts bytes in `used`. */
#define SA_TAKE(field, type, count)                                                                                            \
    do {                                                                                                                       \
        s->field = base ? (type *)(void *)(base + used) : NULL;                                                                \
        used += ((count) * sizeof(type) + 63) / 64 * 64;                                                                       \
    } while (0)
