/* Split weights that are kept from call to call (sa_embedding_kept_bytes), for a few models at a time. */
#ifndef SA_PYTHON_KEPT_H
#define SA_PYTHON_KEPT_H

#include "python/module.h"

#include "drivers/transformer.h"

/* Memory for e->kept, to be given back after the call; NULL where nothing is to be kept, or there is no memory. */
char *sa_kept_take(PyObject *module, const sa_embedding *e);

/* NULL is ignored. */
void sa_kept_give(PyObject *module, char *kept);

/* For the end of the module. */
void sa_kept_clear(sa_state *state);

#endif
