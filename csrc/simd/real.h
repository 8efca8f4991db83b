/* The element type that a template computes in, and its vectors: set up here, taken down in real_end.h. */
#if SA_REAL_IS_F64
#define real double
#define vec vf64
#define lanemask mf64
#define V(verb) vf64_##verb
#define SA_DTYPE f64
#define SA_LANES SA_F64_LANES
#define SA_REAL_MAX DBL_MAX
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
#define SA_REAL_EPSILON FLT_EPSILON
#define SA_REAL_DTYPE SA_F32
#endif
#if !defined(SA_HOLD)
#define SA_HOLD(vector) ((void)(vector))
#endif
#define FN(name) SA_PASTE4(sa_, name, SA_DTYPE, SA_ISA)

/* Registers hold SA_ROWS(nv) broadcast operands times nv vectors of lanes as accumulators; a full block has SA_VECS vectors.
 * Six by four loads least for a multiply-add, and more queries mean fewer passes over K and V. Fewer vectors take more rows, to
 * keep both units for multiply-adds busy.
 *
 * SA_LEAVES(X) is X(nv) for every number of vectors that leaves are made for, and SA_CALL_LEAF calls the leaf for nv of them. */
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

/* A block of the backward pass has SA_BACKWARD_VECS, of which register tiles take this many at once: all, or the larger half. Its
 * sums over rows, dK and dV, are as long as a block and end in memory; K, V, dK and dV pass through the caches once a block. */
#define SA_AT_ONCE(nv) ((nv) > SA_VECS ? ((nv) + 1) / 2 : (nv))

/* The rows of a block, forward and backward. */
enum { FN(block_rows) = SA_VECS * SA_LANES, FN(backward_rows) = SA_BACKWARD_VECS * SA_LANES };
_Static_assert(FN(block_rows) <= FN(backward_rows) && FN(backward_rows) <= SA_MAX_BLOCK_ROWS, "rows of a block");
