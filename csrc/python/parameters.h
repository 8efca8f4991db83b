/* The parameters of functions that take keywords: families of functions share a table of them. */
#ifndef SA_PYTHON_PARAMETERS_H
#define SA_PYTHON_PARAMETERS_H

#define SA_MAX_PARAMETERS 32
#define SA_MAX_FUNCTIONS 16

typedef struct {
    const char *name;
    const char *otherwise; /* what stands for it when it is not given, as documentation prints it ("=None"); "": required */
    uint32_t functions;    /* those that take it: bit n is number n of the family */
    /* Reads a value that was given into `to`, a field of the call; −1 with an exception. NULL: the call reads it by itself. */
    int (*read)(void *call, PyObject *value, const char *name, void *to);
    size_t to; /* the offset of that field */
} sa_parameter;

typedef struct {
    const sa_parameter *parameters; /* in the order of the signatures; the last has no name */
    struct {
        const char *name;
        int positional; /* so many parameters may be given by position */
    } functions[SA_MAX_FUNCTIONS];
} sa_family;

/* What calls of a family need, in the module's state: interned names, and bits that stand for parameters. */
typedef struct {
    const sa_family *family;
    int count; /* of parameters */
    PyObject *names[SA_MAX_PARAMETERS];
    uint32_t optional; /* None stands for them */
    uint32_t readable; /* have a reader */
    uint32_t takes[SA_MAX_FUNCTIONS],
        requires[
            SA_MAX_FUNCTIONS];
} sa_family_state;

int sa_family_start(sa_family_state *state, const sa_family *family);
void sa_family_clear(sa_family_state *state);

/* Sorts a fastcall's arguments into values[], borrowed, one for each parameter: NULL where none was given, or None that stands
 * for none. *given gets a bit for each of the others. */
int sa_sort_arguments(const sa_family_state *state, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values, uint32_t *given);

/* Reads those that were given, in the order of the table. */
int sa_read_arguments(const sa_family_state *state, void *call, PyObject *const *values, uint32_t given);

#endif
