/* The names of an element type and its vectors: of double if SA_REAL_IS_F64 is 1, of float if it is 0. A header that
 * uses them has no include guard, as it is compiled for either type. Its first comment says which headers of this kind
 * come before it, where it does not include them. Comes after the verbs of an instruction set. */
#include "simd/macros.h"

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

/* Accumulators are SA_ROWS(nv) rows by nv vectors, SA_VECS in a full block. Six rows by four vectors need the fewest
 * loads for each multiply-add, and more queries pass over K and V less often. Fewer vectors get more rows, to keep the
 * units busy. SA_LEAVES(X) expands to X(nv) for each nv that has kernels of its own (leaves). */
#if !defined(SA_VECS)
#if !defined(SA_HOLD)
#define SA_HOLD(vector) ((void)(vector))
#endif
#if SA_VECTOR_REGISTERS == 32
#define SA_VECS 4
#define SA_BACKWARD_VECS 4
#define SA_ROWS(nv) ((nv) == 4 ? 6 : 8)
#define SA_LEAVES(X) X(1) X(2) X(3) X(4)
#define SA_CALL_LEAF(name, nv, ...)                                                                                    \
    switch (nv) {                                                                                                      \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                           \
    case 2: FN(name##2)(__VA_ARGS__); break;                                                                           \
    case 3: FN(name##3)(__VA_ARGS__); break;                                                                           \
    default: FN(name##4)(__VA_ARGS__); break;                                                                          \
    }
#else
#define SA_VECS 3
#define SA_BACKWARD_VECS 6
#define SA_ROWS(nv) ((nv) == 1 ? 8 : 4)
/* A browser leaves fewer registers, and a tile that does not fit them is slower than a smaller one. */
#if defined(SA_VEC128_WASM)
#define SA_LEAF_VECS 2
#define SA_LEAVES(X) X(1) X(2)
#define SA_CALL_LEAF(name, nv, ...)                                                                                    \
    switch (nv) {                                                                                                      \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                           \
    default: FN(name##2)(__VA_ARGS__); break;                                                                          \
    }
#else
#define SA_LEAVES(X) X(1) X(2) X(3)
#define SA_CALL_LEAF(name, nv, ...)                                                                                    \
    switch (nv) {                                                                                                      \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                           \
    case 2: FN(name##2)(__VA_ARGS__); break;                                                                           \
    default: FN(name##3)(__VA_ARGS__); break;                                                                          \
    }
#endif
#endif
#if !defined(SA_LEAF_VECS)
#define SA_LEAF_VECS SA_VECS
#endif
#endif

enum { FN(block_rows) = SA_VECS * SA_LANES, FN(backward_rows) = SA_BACKWARD_VECS * SA_LANES };
