/* The kinds of weights in a GGUF file: where a quant's bits and scales are, and what they mean.
 * quant_bits.h reads them.
 *
 * Number i of a quant is d·scale·(q − zero) − m·least, or d·scale·value[q]. The bits of q are in one or two arrays, the
 * low ones and the high ones. All is little-endian; d and m are float16. A piece is 32 numbers. */
#ifndef SA_QUANT_KINDS_H
#define SA_QUANT_KINDS_H

#include <stdint.h>

typedef enum {
    SA_QUANT_F32,
    SA_QUANT_F16,
    SA_QUANT_BF16,
    SA_QUANT_Q4_0,
    SA_QUANT_Q4_1,
    SA_QUANT_Q5_0,
    SA_QUANT_Q5_1,
    SA_QUANT_Q8_0,
    SA_QUANT_IQ4_NL,
    SA_QUANT_Q2_K,
    SA_QUANT_Q3_K,
    SA_QUANT_Q4_K,
    SA_QUANT_Q5_K,
    SA_QUANT_Q6_K,
    SA_QUANT_IQ4_XS,
    SA_QUANT_TYPES
} sa_quant_type;

/* Those that have pieces. */
#define SA_QUANTS(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(IQ4_NL) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)

/* The order of numbers in an array of bits. */
typedef enum {
    SA_BITS_HALVES,  /* 16 bytes have a piece: its first 16 numbers are the low halves of the bytes */
    SA_BITS_SPANS,   /* 32 bytes have a number of 8 / bits pieces each, the first in the lowest bits */
    SA_BITS_SPANS_2, /* the same with 64 bytes: pieces 0 and 1 are low */
    SA_BITS_OF_WORD  /* bit i of a word of 32 bits */
} sa_bit_order;

typedef struct {
    int bits; /* 0: there are none */
    sa_bit_order order;
    int at; /* offset in the quant */
} sa_quant_bits;

/* How a quant has scales in addition to d: none; for pieces, of 6 bits with leasts (Q4_K, Q5_K) or alone (IQ4_XS); for
 * each half of a piece, of 4 bits with leasts (Q2_K), 6 bits (Q3_K) or 8 bits (Q6_K). */
typedef enum {
    SA_NO_SCALES,
    SA_SIX_AND_LEASTS,
    SA_SIX,
    SA_FOUR_AND_LEASTS,
    SA_SIX_HALVES,
    SA_EIGHT_HALVES
} sa_quant_scales;

/* The head is five words: 16 bytes from `head` on, and the 4 bytes at `tail`. d and m are halves of these words. */
typedef struct {
    const char *name; /* the name in GGUF */
    int numbers, bytes;
    sa_quant_bits low, high;
    int zero;             /* log2 of the q that means zero; −1: 0 does */
    int head, tail, d, m; /* d, m: 2·word, + 1 for the upper half; m −1: there is none */
    sa_quant_scales scales;
    int values; /* q is a place in sa_quant_values */
} sa_quant_kind;

/* The values of IQ4_NL and IQ4_XS, plus 128. */
static const uint8_t sa_quant_values[16]
    __attribute__((aligned(16), unused)) = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

static const sa_quant_kind sa_quant_kinds[SA_QUANT_TYPES] __attribute__((unused)) = {
    [SA_QUANT_F32] = {.name = "F32", .numbers = 1, .bytes = 4, .m = -1},
    [SA_QUANT_F16] = {.name = "F16", .numbers = 1, .bytes = 2, .m = -1},
    [SA_QUANT_BF16] = {.name = "BF16", .numbers = 1, .bytes = 2, .m = -1},
    [SA_QUANT_Q4_0] = {.name = "Q4_0", .numbers = 32, .bytes = 18, .low = {4, SA_BITS_HALVES, 2}, .zero = 3, .m = -1},
    [SA_QUANT_Q4_1] = {.name = "Q4_1", .numbers = 32, .bytes = 20, .low = {4, SA_BITS_HALVES, 4}, .zero = -1, .m = 1},
    [SA_QUANT_Q5_0] = {.name = "Q5_0",
                       .numbers = 32,
                       .bytes = 22,
                       .low = {4, SA_BITS_HALVES, 6},
                       .high = {1, SA_BITS_OF_WORD, 2},
                       .zero = 4,
                       .m = -1},
    [SA_QUANT_Q5_1] = {.name = "Q5_1",
                       .numbers = 32,
                       .bytes = 24,
                       .low = {4, SA_BITS_HALVES, 8},
                       .high = {1, SA_BITS_OF_WORD, 4},
                       .zero = -1,
                       .m = 1},
    [SA_QUANT_Q8_0] = {.name = "Q8_0", .numbers = 32, .bytes = 34, .low = {8, SA_BITS_SPANS, 2}, .zero = 7, .m = -1},
    [SA_QUANT_IQ4_NL] =
        {.name = "IQ4_NL", .numbers = 32, .bytes = 18, .low = {4, SA_BITS_HALVES, 2}, .values = 1, .zero = 7, .m = -1},
    [SA_QUANT_Q2_K] = {.name = "Q2_K",
                       .numbers = 256,
                       .bytes = 84,
                       .low = {2, SA_BITS_SPANS, 16},
                       .zero = -1,
                       .tail = 80,
                       .d = 8,
                       .m = 9,
                       .scales = SA_FOUR_AND_LEASTS},
    [SA_QUANT_Q3_K] = {.name = "Q3_K",
                       .numbers = 256,
                       .bytes = 110,
                       .low = {2, SA_BITS_SPANS, 32},
                       .high = {1, SA_BITS_SPANS, 0},
                       .zero = 2,
                       .head = 94,
                       .d = 7,
                       .m = -1,
                       .scales = SA_SIX_HALVES},
    [SA_QUANT_Q4_K] = {.name = "Q4_K",
                       .numbers = 256,
                       .bytes = 144,
                       .low = {4, SA_BITS_SPANS, 16},
                       .zero = -1,
                       .m = 1,
                       .scales = SA_SIX_AND_LEASTS},
    [SA_QUANT_Q5_K] = {.name = "Q5_K",
                       .numbers = 256,
                       .bytes = 176,
                       .low = {4, SA_BITS_SPANS, 48},
                       .high = {1, SA_BITS_SPANS, 16},
                       .zero = -1,
                       .m = 1,
                       .scales = SA_SIX_AND_LEASTS},
    [SA_QUANT_Q6_K] = {.name = "Q6_K",
                       .numbers = 256,
                       .bytes = 210,
                       .low = {4, SA_BITS_SPANS_2, 0},
                       .high = {2, SA_BITS_SPANS, 128},
                       .zero = 5,
                       .head = 192,
                       .tail = 206,
                       .d = 9,
                       .m = -1,
                       .scales = SA_EIGHT_HALVES},
    [SA_QUANT_IQ4_XS] = {.name = "IQ4_XS",
                         .numbers = 256,
                         .bytes = 136,
                         .low = {4, SA_BITS_HALVES, 8},
                         .values = 1,
                         .zero = 7,
                         .m = -1,
                         .scales = SA_SIX},
};

/* The byte of a piece in an array of bits, and how far to shift the byte. */
static inline __attribute__((always_inline)) int sa_quant_place(sa_quant_bits b, int piece, int *shift) {
    const int spans = b.order == SA_BITS_SPANS_2 ? 2 : 1, within = piece / spans % (8 / b.bits);
    *shift = within * b.bits;
    return b.order == SA_BITS_HALVES ? b.at + piece * 16
                                     : b.at + (piece / spans / (8 / b.bits) * spans + piece % spans) * 32;
}

/* True if a piece has a scale for each half. */
static inline __attribute__((always_inline)) int sa_quant_by_halves(const sa_quant_kind *k) {
    return k->scales >= SA_FOUR_AND_LEASTS;
}

#endif
