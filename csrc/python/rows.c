#include "rows.h"
PyMethodDef sa_rows_methods[] = {{NULL, NULL, 0, NULL}};
