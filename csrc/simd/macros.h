/* Every ISA file includes this first, before any target pragma: headers, macros, and, each time SA_REAL_IS_F64 is defined, the
 * names of an element type and its vectors. There are no functions: with -march=native GCC would not inline them, as their
 * target would exceed the file's. Intrinsics come after the pragma for the same reason. */
#ifndef SA_MACROS_H
#define SA_MACROS_H

#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* The target of all functions up to SA_END_TARGET: Clang uses the first string alone. Emulated files ignore it. */
#define SA_PRAGMA(x) _Pragma(#x)
#if defined(SA_EMULATED) /* csrc/tests/emulated */
#define SA_TARGET(instructions, ...)
#define SA_OPTIMIZE(how)
#define SA_END_TARGET
#elif defined(__clang__)
#define SA_TARGET(instructions, ...) SA_PRAGMA(clang attribute push(__attribute__((target(instructions))), apply_to = function))
#define SA_OPTIMIZE(how)
#define SA_END_TARGET SA_PRAGMA(clang attribute pop)
#else
#define SA_TARGET(...) SA_PRAGMA(GCC push_options) SA_PRAGMA(GCC target(__VA_ARGS__))
#define SA_OPTIMIZE(how) SA_PRAGMA(GCC optimize(how))
#define SA_END_TARGET SA_PRAGMA(GCC pop_options)
#endif
#define SA_BY_HAND "no-unswitch-loops,no-split-loops" /* for SA_OPTIMIZE, as loops that matter are unrolled by hand */

/* VERB and INLINE functions are inlined: they hold accumulators, pass vectors, or are a line or two. A LEAF calls them with
 * literal counts of rows and vectors. A ONCE function has run-time counts, and GCC must not clone it. A SHARED one is called
 * from files of several instruction sets, and the library does not export it. */
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

#define SA_PASTE2(a, b) a##b
#define SA_PASTE(a, b) SA_PASTE2(a, b)
#define SA_PASTE4_(a, b, c, d) a##b##_##c##_##d
#define SA_PASTE4(a, b, c, d) SA_PASTE4_(a, b, c, d)
#define SA_STRING_(x) #x
#define SA_STRING(x) SA_STRING_(x)

/* The name of a function for the element type and instruction set that are compiled. */
#define FN(name) SA_PASTE4(sa_, name, SA_DTYPE, SA_ISA)

/* Places one array of a scratch layout at `base`; if base is NULL, only counts its bytes in `used`. */
#define SA_TAKE(field, type, count)                                                                                            \
    do {                                                                                                                       \
        s->field = base ? (type *)(void *)(base + used) : NULL;                                                                \
        used += ((count) * sizeof(type) + 63) / 64 * 64;                                                                       \
    } while (0)

/* A leaf takes at most SA_LEAF_VECS vectors. The backward pass has longer blocks, so that K, V, dK and dV pass through the caches
 * less often; they go through leaves in halves, or in pairs where a leaf takes two. */
#define SA_AT_ONCE(nv) ((nv) <= SA_LEAF_VECS ? (nv) : SA_LEAF_VECS == 2 ? 2 : ((nv) + 1) / 2)

#endif

#if defined(SA_REAL_IS_F64)
#undef real
#undef vec
#undef lanemask
#undef V
#undef SA_DTYPE
#undef SA_LANES
#undef SA_REAL_MAX
#undef SA_REAL_LEAST
#undef SA_REAL_EPSILON
#undef SA_REAL_DTYPE
#if SA_REAL_IS_F64
#define real double
#define vec vf64
#define lanemask mf64
#define V(verb) vf64_##verb
#define SA_DTYPE f64
#define SA_LANES SA_F64_LANES
#define SA_REAL_MAX DBL_MAX
#define SA_REAL_LEAST DBL_TRUE_MIN
#define SA_REAL_EPSILON DBL_EPSILON
#define SA_REAL_DTYPE SA_F64
#else
#define real float
#define vec vf32
#define lanemask mf32
#define V(verb) vf32_##verb
#define SA_DTYPE f32
#define SA_LANES SA_F32_LANES
#define SA_REAL_MAX FLT_MAX
#define SA_REAL_LEAST FLT_TRUE_MIN
#define SA_REAL_EPSILON FLT_EPSILON
#define SA_REAL_DTYPE SA_F32
#endif

/* Accumulators are SA_ROWS(nv) rows by nv vectors, SA_VECS in a full block. Six rows by four vectors need the fewest loads for
 * each multiply-add, and more queries pass over K and V less often. Fewer vectors get more rows, to keep the units busy.
 * SA_LEAVES(X) expands to X(nv) for each nv that has kernels of its own (leaves). */
#if !defined(SA_VECS)
#if !defined(SA_HOLD)
#define SA_HOLD(vector) ((void)(vector))
#endif
#if SA_VECTOR_REGISTERS == 32
#define SA_VECS 4
#define SA_BACKWARD_VECS 4
#define SA_ROWS(nv) ((nv) == 4 ? 6 : 8)
#define SA_LEAVES(X) X(1) X(2) X(3) X(4)
#define SA_CALL_LEAF(name, nv, ...)                                                                                            \
    switch (nv) {                                                                                                              \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                                   \
    case 2: FN(name##2)(__VA_ARGS__); break;                                                                                   \
    case 3: FN(name##3)(__VA_ARGS__); break;                                                                                   \
    default: FN(name##4)(__VA_ARGS__); break;                                                                                  \
    }
#else
#define SA_VECS 3
#define SA_BACKWARD_VECS 6
#define SA_ROWS(nv) ((nv) == 1 ? 8 : 4)
#if defined(                                                                                                                   \
    SA_VEC128_WASM) /* a browser leaves fewer registers, and a tile that does not fit them is slower than a smaller one */
#define SA_LEAF_VECS 2
#define SA_LEAVES(X) X(1) X(2)
#define SA_CALL_LEAF(name, nv, ...)                                                                                            \
    switch (nv) {                                                                                                              \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                                   \
    default: FN(name##2)(__VA_ARGS__); break;                                                                                  \
    }
#else
#define SA_LEAVES(X) X(1) X(2) X(3)
#define SA_CALL_LEAF(name, nv, ...)                                                                                            \
    switch (nv) {                                                                                                              \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                                   \
    case 2: FN(name##2)(__VA_ARGS__); break;                                                                                   \
    default: FN(name##3)(__VA_ARGS__); break;                                                                                  \
    }
#endif
#endif
#if !defined(SA_LEAF_VECS)
#define SA_LEAF_VECS SA_VECS
#endif
#endif

enum { FN(block_rows) = SA_VECS * SA_LANES, FN(backward_rows) = SA_BACKWARD_VECS * SA_LANES };
_Static_assert(FN(block_rows) <= FN(backward_rows) && FN(backward_rows) <= SA_MAX_BLOCK_ROWS, "rows of a block");
#endif
