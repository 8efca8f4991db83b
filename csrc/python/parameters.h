/* Tables of parameters, each shared by a family of functions, and the reading of arguments by them. */
#ifndef SA_PYTHON_PARAMETERS_H
#define SA_PYTHON_PARAMETERS_H

#define SA_MAX_PARAMETERS 32
#define SA_MAX_FUNCTIONS 16

typedef struct {
    const char *name;
    const char *otherwise; /* its default as documentation prints it ("=None"); "": required */
    uint32_t functions;    /* bit n: function n of the family takes it */
    /* Reads a given value into the field `to` of the call; −1 with an exception. NULL: the call reads it. */
    int (*read)(void *call, PyObject *value, const char *name, void *to);
    size_t to; /* the field's offset */
} sa_parameter;

typedef struct {
    const sa_parameter *parameters; /* as in the signatures; an empty name ends it */
    struct {
        const char *name;
        int positional; /* how many may be given by position */
    } functions[SA_MAX_FUNCTIONS];
} sa_family;

/* A family in the module's state: interned names, and a bit for each parameter. */
typedef struct {
    const sa_family *family;
    int count;
    PyObject *names[SA_MAX_PARAMETERS];
    uint32_t optional; /* their default is None */
    uint32_t readable; /* have a reader */
    uint32_t takes[SA_MAX_FUNCTIONS],
        requires[
            SA_MAX_FUNCTIONS];
} sa_family_state;

int sa_family_start(sa_family_state *state, const sa_family *family);
void sa_family_clear(sa_family_state *state);

/* Sorts the arguments into values[], borrowed. NULL: not given, or None where that is the default. The others get a bit
 * in *given. */
int sa_sort_arguments(const sa_family_state *state, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values, uint32_t *given);

/* Calls the readers of what was given, in the table's order. */
int sa_read_arguments(const sa_family_state *state, void *call, PyObject *const *values, uint32_t given);

#endif
