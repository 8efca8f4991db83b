/* Files of vectors, which vectors.py writes and describes: reading a case, binding it to structs, arrays at the edge of
 * memory, comparing. */
#ifndef SA_VECTORS_H
#define SA_VECTORS_H

#include "tests/test.h"

enum { MOST_AXES = 6, MOST_ARRAYS = 256, MOST_NUMBERS = 160, NAME = 40 };

/* An input, or an output: full of NaN, of zeros, or of numbers that the call changes. */
typedef enum { INPUT = 'i', OUTPUT = 'o', ZEROS = 'z', CHANGED = 'c' } array_role;

typedef struct {
    char name[NAME];
    array_role role;
    sa_dtype dtype;
    bool swapped;
    int axes;
    ptrdiff_t shape[MOST_AXES], stride[MOST_AXES], count; /* count: elements */
    ptrdiff_t first, bytes;                               /* where element 0 is, and the size, of the array's memory */
    const char *content;
    const char *expected; /* floats in C order, float64 if wide; or NULL */
    ptrdiff_t expected_count;
    bool wide;
    const char *size, *coarse; /* bfloat16: what the tolerance's two numbers multiply; or NULL */
    char *data;                /* element 0 in this run */
    bool bound;                /* something reads it, or writes to it */
    bool left_out;             /* this run does not have the output */
    char *bits;                /* the elements of the first run, in C order */
} vector_array;

typedef struct {
    char name[NAME];
    int64_t integer;
    double real;
    bool bound;
} vector_number;

typedef struct {
    char operation[NAME], name[80];
    double tolerance, coarse;
    int arrays, numbers;
    vector_array array[MOST_ARRAYS];
    vector_number number[MOST_NUMBERS];
} vector_case;

/* How a case runs. Of every case all runs must have the same bits: with one thread, arrays end where memory ends; with
 * three, they begin where memory begins; then other things change too. */
enum { ALONE, TEAM, OTHERWISE, RUN_KINDS };
static inline int threads_of(int run) { return run == ALONE ? 1 : run == TEAM ? 3 : 2; }

/* ---- binding ----------------------------------------------------------------------------------------------------- */

/* What a field of a struct takes: numbers; or of an array its address, or a sa_tensor, sa_strided, sa_row_gradient. */
typedef enum { FLAG, CODE, SIZE, WORD, REAL, DATA, TENSOR, STRIDED, GRADIENT } field_kind;

typedef struct {
    const char *name;
    field_kind kind;
    size_t offset;
} field;
#define FIELD(type, kind, member) {#member, kind, offsetof(type, member)}

/* Sets the fields of a struct whose names, after `prefix`, the case has; the others stay. Returns how many it has. */
int bind_fields(vector_case *c, const char *prefix, const field *fields, size_t count, void *to);
#define BIND(c, prefix, fields, to) bind_fields(c, prefix, fields, sizeof fields / sizeof *fields, to)

vector_array *find_array(vector_case *c, const char *format, ...) __attribute__((format(printf, 2, 3))); /* or NULL */
char *data_of(const vector_array *a);                                                                    /* or NULL */
#define find_data(...) data_of(find_array(__VA_ARGS__))
/* A number, or `otherwise` if the case does not have it. */
int64_t find_number(vector_case *c, const char *name, int64_t otherwise);

/* The active instruction set does not have what the case needs: nothing is compared. */
void skip_case(vector_case *c);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* NaN throughout, 64-byte aligned, and followed by memory that cannot be read if the size is a multiple of 64. */
void *scratch_memory(size_t bytes);

/* ---- operations (replay.c, replay_products.c, replay_transformer.c) ---------------------------------------------- */

#define ALL_VECTORS(V)                                                                                                 \
    V(attention) V(varlen) V(rows) V(update) V(matmul) V(linear) V(rounding) V(leaf) V(table) V(quants) V(transformer)
typedef void replay_function(vector_case *c, int run);
#define DECLARE_REPLAY(name) replay_function replay_##name;
ALL_VECTORS(DECLARE_REPLAY)

/* Runs the cases of an operation on the active instruction set. */
void replay(const char *operation, replay_function *run);
void read_vectors(void); /* from standard input */

#endif
