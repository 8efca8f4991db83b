/* Records: Python's named tuples that the core reads by the names of their fields. Here a table says for each field its
 * name, what reads it, and its place in a struct. A class gives its fields once, with `_core._record`; from then on a
 * field is read by its place in the tuple. No reader of this file runs Python code. */
#ifndef SA_PYTHON_RECORD_H
#define SA_PYTHON_RECORD_H

#include "python/binding.h"

typedef struct sa_field {
    const char *name;
    /* Reads a value into `to`, the field's place in the struct. */
    int (*read)(void *call, PyObject *value, const struct sa_field *field, void *to);
    size_t to;
    /* Of an array: a letter for each axis of its weight, which the call knows. Of a choice: its names, from 0 on. */
    const char *of;
} sa_field;

typedef struct sa_record {
    const char *name; /* of the class */
    const sa_field *fields;
    int count;
} sa_record;

#define SA_RECORD(name, fields) {name, fields, sizeof fields / sizeof *fields}

/* Reads all fields of a record into a struct. `what` is its name in messages. */
int sa_record_read(const sa_state *state, sa_record_kind kind, PyObject *value, const char *what, void *call, void *to);

/* Borrows the value of field n of the table. `value` must be such a record. */
PyObject *sa_record_field(const sa_state *state, sa_record_kind kind, PyObject *value, int n);

bool sa_is_record(const sa_state *state, sa_record_kind kind, PyObject *value);

/* Readers: a borrowed object; an int from 0 on; a float or int; a bool; one of the names in `of`, of which None is
 * Python's None. */
int sa_field_object(void *call, PyObject *value, const sa_field *field, void *to);
int sa_field_size(void *call, PyObject *value, const sa_field *field, void *to);
int sa_field_real(void *call, PyObject *value, const sa_field *field, void *to);
int sa_field_flag(void *call, PyObject *value, const sa_field *field, void *to);
int sa_field_choice(void *call, PyObject *value, const sa_field *field, void *to);

#endif
