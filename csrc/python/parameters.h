/* Tables of parameters that a family of functions shares. */
#ifndef SA_PYTHON_PARAMETERS_H
#define SA_PYTHON_PARAMETERS_H

#define SA_MAX_PARAMETERS 32
#define SA_MAX_FUNCTIONS 16

typedef struct {
    const char *name;
    const char *otherwise; /* the default as documentation prints it ("=None"); "": required */
    uint32_t functions;    /* bit n: function n takes it */
    /* Reads a value into `to`, a field of the call. NULL: the call reads it. */
    int (*read)(void *call, PyObject *value, const char *name, void *to);
    size_t to; /* that field's offset */
} sa_parameter;

typedef struct {
    const sa_parameter *parameters; /* a name of NULL ends it */
    struct {
        const char *name;
        int positional;
    } functions[SA_MAX_FUNCTIONS];
} sa_family;

/* A family in the module's state: interned names, bits for parameters. */
typedef struct {
    const sa_family *family;
    int count;
    PyObject *names[SA_MAX_PARAMETERS];
    uint32_t optional; /* default None */
    uint32_t readable; /* have a reader */
    uint32_t takes[SA_MAX_FUNCTIONS], needs[SA_MAX_FUNCTIONS];
} sa_family_state;

int sa_family_start(sa_family_state *state, const sa_family *family);
void sa_family_clear(sa_family_state *state);

/* Sorts arguments into values[], borrowed, NULL where none was given or None is the default. Others get a bit in
 * *given. */
int sa_sort_arguments(const sa_family_state *state, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values, uint32_t *given);

/* In the table's order. */
int sa_read_arguments(const sa_family_state *state, void *call, PyObject *const *values, uint32_t given);

#endif
