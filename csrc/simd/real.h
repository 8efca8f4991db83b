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
 * With 32 registers 6×4 (64 queries in float32) is 3 to 5 % faster than 4×4, 8×2, 12×2 and 14×2 where AVX-512 is bound by
 * power: it loads least per multiply-add, and 64 queries halve the traffic of K and V. Fewer vectors take more rows, to
 * keep both FMA units busy. */
#if SA_VECTOR_REGISTERS == 32
#define SA_VECS 4
#define SA_BACKWARD_VECS 4
#define SA_ROWS(nv) ((nv) == 4 ? 6 : 8)
#else
#define SA_VECS 3
#define SA_BACKWARD_VECS 6
#define SA_ROWS(nv) ((nv) == 1 ? 8 : 4)
#endif

/* A block of the backward pass has SA_BACKWARD_VECS, of which register tiles take this many at once: all, or the larger half. Its
 * sums over rows, dK and dV, are as long as a block and end in memory; K, V, dK and dV pass through the caches once a block. On
 * AVX2 48 rows for 24 save 3 to 5 % of one head of 192×1024×64 in one thread, and 2 to 12 % of eight heads in two. */
#define SA_AT_ONCE(nv) ((nv) > SA_VECS ? ((nv) + 1) / 2 : (nv))
