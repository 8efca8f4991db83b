/* Names for literals among the arguments of kernels and drivers. */
#ifndef SA_MODES_H
#define SA_MODES_H

#include <stddef.h>

/* In place of the memory of a layout: only its bytes are counted. */
#define SA_NOWHERE NULL

/* In place of arrays that are added to a product, and of factors of a sum. */
#define SA_NO_RESIDUAL NULL
#define SA_NO_SUMS NULL
#define SA_NO_FACTORS NULL

/* In place of the number of decoded rows: the block is not decoded. */
enum { SA_NOT_DECODED = 0 };

/* A tile's scores are wanted alone, or with their maxima. */
enum { SA_SCORES_ALONE, SA_WITH_MAXIMA };

/* Masks change scores, or only close pairs of which P already holds weights. */
enum { SA_MASK_SCORES, SA_CLOSE_WEIGHTS };

/* What P holds, the tile that a unit makes operands of. With scores, dS holds dP. */
enum { SA_HOLDS_WEIGHTS, SA_HOLDS_SCORES };

/* What becomes of the tile dS. */
enum { SA_MAY_LOSE_DS, SA_KEEPS_DS };

/* Where rows come from: only far ones are fetched two distances ahead. */
enum { SA_NEAR, SA_FAR };

/* What is multiplied: numbers, or pairs of bfloat16. */
enum { SA_OF_NUMBERS, SA_OF_PAIRS };

/* A matrix as it is, or its transpose. */
enum { SA_AS_IS, SA_TRANSPOSED };

/* When C gets what it begins with: in the first sum, or before it. */
enum { SA_STORED_WITH_SUMS, SA_STORED_BEFORE };

/* A product's sums replace numbers, or are added to them. */
enum { SA_REPLACES, SA_ADDS };

/* The sign of the angle by which heads are rotated. */
enum { SA_FORWARDS, SA_BACKWARDS };

#endif
