/* Blocks of memory that are kept from call to call. Pages fresh from the system cost a training step more than its
 * arithmetic (docs/decisions/0003-fused-training.md), and the gradients of 8 heads of 512 x 64 a third more; malloc gives large
 * ones back each time. */
#ifndef SA_PYTHON_BLOCKS_H
#define SA_PYTHON_BLOCKS_H

#include "python/module.h"

/* A block of at least so many bytes, 64-byte aligned, or NULL with a MemoryError. It holds on to the module. */
void *sa_block_take(PyObject *module, size_t bytes);

/* Takes a block back, NULL too; a few are kept for the next calls. With the GIL. */
void sa_block_give(void *block);

/* Frees what is kept; when the module goes. */
void sa_blocks_clear(sa_state *state);

#endif
