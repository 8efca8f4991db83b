/* A template's element type and vectors; real_end.h takes them down. */
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
#if !defined(SA_HOLD)
#define SA_HOLD(vector) ((void)(vector))
#endif
#define FN(name) SA_PASTE4(sa_, name, SA_DTYPE, SA_ISA)

/* Accumulators: SA_ROWS(nv) broadcast operands times nv vectors, SA_VECS in a full block. Six by four loads least per
 * multiply-add, and more queries pass over K and V less often. Fewer vectors take more rows, to keep the units busy.
 * SA_LEAVES(X) is X(nv) for every nv with leaves. */
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
#define SA_LEAVES(X) X(1) X(2) X(3)
#define SA_CALL_LEAF(name, nv, ...)                                                                                            \
    switch (nv) {                                                                                                              \
    case 1: FN(name##1)(__VA_ARGS__); break;                                                                                   \
    case 2: FN(name##2)(__VA_ARGS__); break;                                                                                   \
    default: FN(name##3)(__VA_ARGS__); break;                                                                                  \
    }
#endif

/* A leaf takes SA_VECS vectors at most: the backward pass's longer blocks, for which K, V, dK and dV pass through the
 * caches less often, go by halves. */
#define SA_AT_ONCE(nv) ((nv) > SA_VECS ? ((nv) + 1) / 2 : (nv))

enum { FN(block_rows) = SA_VECS * SA_LANES, FN(backward_rows) = SA_BACKWARD_VECS * SA_LANES };
_Static_assert(FN(block_rows) <= FN(backward_rows) && FN(backward_rows) <= SA_MAX_BLOCK_ROWS, "rows of a block");
