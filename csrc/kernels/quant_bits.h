/* Reads the words of quants (quant_kinds.h): for one quant, or for one in each lane of a vector.
 * Before including this, define
 *     SA_Q(name)    the functions' names         SA_Q_WORDS    uint32_t, or a vector of these
 *     SA_Q_AT       the type of a place          SA_Q(gather)(at, from, v)    four words from byte `from` on
 *     SA_Q(look_up)(q)    a word of bytes with their values */
#include "kernels/quant_kinds.h"

/* The head's words: 16 bytes, then the word at tail. */
SA_VERB void SA_Q(head)(SA_Q_AT at, const sa_quant_kind *k, SA_Q_WORDS *head) {
    SA_Q(gather)(at, k->head, head);
    if (k->tail > 0) { /* no byte after the quant is read */
        SA_Q_WORDS last[4];
        SA_Q(gather)(at, k->tail - 12, last);
        head[4] = last[3];
    }
}

SA_VERB SA_Q_WORDS SA_Q(half_word)(const SA_Q_WORDS *head, int place) {
    return head[place / 2] >> (place % 2 * 16) & 0xffff;
}

/* The scale of group g, a piece or half a piece, and the factor of m: 1 or −least. Signed numbers are modulo 2^32. */
SA_VERB void SA_Q(scales)(const SA_Q_WORDS *head, const sa_quant_kind *k, int g, SA_Q_WORDS *scale,
                          SA_Q_WORDS *factor) {
    const int byte = g % 4 * 8;
    *scale = *factor = (head[0] & 0) + 1;
    switch (k->scales) {
    case SA_NO_SCALES: break;
    case SA_SIX_AND_LEASTS: /* groups 0 … 3 in 6 bits; the others' high bits are after these, the low ones in word 3 */
        *scale = g < 4 ? head[1] >> byte & 63 : (head[3] >> byte & 15) | (head[1] >> byte >> 6 & 3) << 4;
        *factor = 0 - (g < 4 ? head[2] >> byte & 63 : (head[3] >> byte >> 4 & 15) | (head[2] >> byte >> 6 & 3) << 4);
        break;
    case SA_SIX: *scale = ((head[1] >> 4 * g & 15) | (head[0] >> (16 + 2 * g) & 3) << 4) - 32; break;
    case SA_FOUR_AND_LEASTS:
        *scale = head[g / 4] >> byte & 15;
        *factor = 0 - (head[g / 4] >> byte >> 4 & 15);
        break;
    case SA_SIX_HALVES: { /* the head begins two bytes before the scales */
        const int word = g / 4 % 2, low = byte + g / 8 * 4, high = byte + g / 4 * 2;
        const SA_Q_WORDS lows = head[word] >> 16 | head[word + 1] << 16, highs = head[2] >> 16 | head[3] << 16;
        *scale = ((lows >> low & 15) | (highs >> high & 3) << 4) - 32;
        break;
    }
    case SA_EIGHT_HALVES: *scale = ((head[g / 4] >> byte & 255) ^ 128) - 128; break;
    }
}

/* q[i] = the numbers 4·i … 4·i + 3 of a piece, as bytes. */
SA_VERB void SA_Q(piece)(SA_Q_AT at, const SA_Q_WORDS *head, const sa_quant_kind *k, int piece, SA_Q_WORDS *q) {
    int shift, high_shift;
    const int from = sa_quant_place(k->low, piece, &shift);
    const uint32_t mask = 0x01010101u * ((1u << k->low.bits) - 1);
    SA_Q(gather)(at, from, q);
    if (k->low.order == SA_BITS_HALVES) {
        SA_UNROLL
        for (int i = 0; i < 4; ++i) {
            q[4 + i] = q[i] >> 4 & 0x0f0f0f0f;
            q[i] = q[i] & 0x0f0f0f0f;
        }
    } else {
        SA_Q(gather)(at, from + 16, q + 4);
        SA_UNROLL
        for (int i = 0; i < 8; ++i) {
            q[i] = k->low.bits == 8 ? q[i] ^ 0x80808080 : q[i] >> shift & mask; /* signed bytes become q + 128 */
        }
    }
    if (k->high.order == SA_BITS_OF_WORD && k->high.bits > 0) {
        const SA_Q_WORDS word = k->high.at % 4 == 0 ? head[1] : head[0] >> 16 | head[1] << 16;
        SA_UNROLL
        for (int i = 0; i < 8; ++i) { /* the factor moves bit n of four to bit 8·n, without carries */
            q[i] |= ((word >> 4 * i & 15) * 0x00204081 & 0x01010101) << 4;
        }
    } else if (k->high.bits > 0) {
        const int high = sa_quant_place(k->high, piece, &high_shift);
        const uint32_t bits = 0x01010101u * ((1u << k->high.bits) - 1);
        SA_Q_WORDS v[8];
        SA_Q(gather)(at, high, v);
        SA_Q(gather)(at, high + 16, v + 4);
        SA_UNROLL
        for (int i = 0; i < 8; ++i) {
            q[i] |= (v[i] >> high_shift & bits) << k->low.bits;
        }
    }
    if (k->values) {
        SA_UNROLL
        for (int i = 0; i < 8; ++i) {
            q[i] = SA_Q(look_up)(q[i]);
        }
    }
}

#undef SA_Q
#undef SA_Q_WORDS
#undef SA_Q_AT
