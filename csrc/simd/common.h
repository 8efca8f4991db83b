/* Included first by every ISA file, before any target pragma: the headers, and the few macros that the verbs and templates
 * are written with. No functions: they would be compiled for the command line's target, and where that has more than the
 * file's own (-march=native), GCC does not inline them. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* Templates are written in parts that vanish into a few large functions. Sanitizers take minutes for one of those, so their builds
 * leave the parts apart: 30 s instead of 517 for AVX-512. */
#define SA_VERB static inline __attribute__((always_inline, unused))
#if defined(SA_PARTS_APART)
#define SA_INLINE static __attribute__((unused))
#else
#define SA_INLINE SA_VERB
#endif
#define SA_NOINLINE static __attribute__((noinline, unused))

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SA_SHUFFLE
#error "selfattn needs GCC 12 or later, or Clang: __builtin_shufflevector is missing"
#endif

/* Loops over tile rows and vectors must disappear: the accumulators are registers only then (measured: 154 against
 * 409 GFLOP/s at -O2). */
#if defined(SA_PARTS_APART)
#define SA_UNROLL
#elif defined(__clang__)
#define SA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SA_UNROLL _Pragma("GCC unroll 64")
#endif

#define SA_PASTE2(a, b) a##b
#define SA_PASTE(a, b) SA_PASTE2(a, b)
#define SA_PASTE4_(a, b, c, d) a##b##_##c##_##d
#define SA_PASTE4(a, b, c, d) SA_PASTE4_(a, b, c, d)

/* One array of a scratch layout: `base` is where the layout begins, or NULL when it is only measured; `used` counts bytes. */
#define SA_TAKE(field, type, count)                                                                                            \
    do {                                                                                                                       \
        s->field = base ? (type *)(void *)(base + used) : NULL;                                                                \
        used += ((count) * sizeof(type) + 63) / 64 * 64;                                                                       \
    } while (0)
