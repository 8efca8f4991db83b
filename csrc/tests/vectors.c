/* Files of vectors: see vectors.h. */
#include "tests/vectors.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#if defined(_WIN32)
#include <fcntl.h>
#include <io.h>
#endif

#include "drivers/rowops.h"

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static char *vectors, *vectors_end;

void read_vectors(void) {
    size_t room = 1 << 20, used = 0, got;
#if defined(_WIN32)
    _setmode(_fileno(stdin), _O_BINARY);
#endif
    vectors = malloc(room);
    while (vectors && (got = fread(vectors + used, 1, room - used - 1, stdin)) > 0) {
        used += got;
        if (room - used < 2) {
            vectors = realloc(vectors, room *= 2);
        }
    }
    if (vectors == NULL) {
        abort();
    }
    vectors[used] = '\n';
    vectors_end = vectors + used;
}

static void word(char **at, char *to, size_t size) {
    size_t n = 0;
    for (; **at == ' '; ++*at) {
    }
    for (; **at != ' ' && **at != '\n'; ++*at) {
        to[n] = **at;
        n += n + 1 < size;
    }
    to[n] = 0;
}

static ptrdiff_t integer(char **at) { return (ptrdiff_t)strtoll(*at, at, 10); }

static char *take(char **at, ptrdiff_t bytes) {
    char *taken = *at;
    *at += bytes;
    return taken;
}

static void read_array(vector_array *a, char **at) {
    static const char *const dtypes[SA_DTYPES] = {"f16", "bf16", "f32", "f64", "bool", "i8", "u8",
                                                  "i16", "u16",  "i32", "u32", "i64",  "u64"};
    char role[NAME], dtype[NAME];
    word(at, a->name, sizeof a->name);
    word(at, role, sizeof role);
    word(at, dtype, sizeof dtype);
    a->role = (array_role)role[0];
    for (a->dtype = 0; a->dtype < SA_DTYPES && strcmp(dtypes[a->dtype], dtype) != 0; ++a->dtype) {
    }
    a->swapped = integer(at) != 0;
    a->first = integer(at);
    a->bytes = integer(at);
    a->axes = (int)integer(at);
    for (int axis = 0; axis < a->axes; ++axis) {
        a->count *= a->shape[axis] = integer(at);
    }
    for (int axis = 0; axis < a->axes; ++axis) {
        a->stride[axis] = integer(at);
    }
    ++*at;
    a->content = a->role == INPUT || a->role == CHANGED ? take(at, a->bytes) : NULL;
}

/* Reads the case at *at, and moves *at to the next. */
static void read_case(vector_case *c, char **at) {
    char kind[NAME];
    c->arrays = c->numbers = 0;
    word(at, kind, sizeof kind);
    word(at, c->operation, sizeof c->operation);
    word(at, c->name, sizeof c->name);
    c->tolerance = strtod(*at, at);
    c->coarse = strtod(*at, at);
    for (++*at; *at < vectors_end && strncmp(*at, "case ", 5) != 0;) {
        word(at, kind, sizeof kind);
        if (strcmp(kind, "number") == 0 && c->numbers < MOST_NUMBERS) {
            vector_number *n = &c->number[c->numbers++];
            char text[NAME], *end = text;
            word(at, n->name, sizeof n->name);
            word(at, text, sizeof text);
            n->real = strtod(text, &end);
            n->integer = strtoll(text, &end, 10);
            n->bound = false;
            ++*at;
        } else if (strcmp(kind, "array") == 0 && c->arrays < MOST_ARRAYS) {
            c->array[c->arrays] = (vector_array){.count = 1};
            read_array(&c->array[c->arrays++], at);
        } else if (strcmp(kind, "expect") == 0) { /* of the last array */
            vector_array *a = &c->array[c->arrays - 1];
            a->expected_count = integer(at);
            a->wide = integer(at) == sizeof(double);
            const ptrdiff_t sizes = integer(at);
            ++*at;
            a->expected = take(at, a->expected_count * (a->wide ? 8 : 4));
            a->size = sizes > 0 ? take(at, 2 * a->expected_count) : NULL;
            a->coarse = sizes > 1 ? take(at, 2 * a->expected_count) : NULL;
        } else {
            printf("%s: a bad line\n", c->name);
            abort();
        }
    }
}

/* ---- binding ----------------------------------------------------------------------------------------------------- */

vector_array *find_array(vector_case *c, const char *format, ...) {
    char name[2 * NAME];
    va_list words;
    va_start(words, format);
    vsnprintf(name, sizeof name, format, words);
    va_end(words);
    for (vector_array *a = c->array; a < c->array + c->arrays; ++a) {
        if (strcmp(a->name, name) == 0) {
            a->bound = true;
            return a;
        }
    }
    return NULL;
}

char *data_of(const vector_array *a) { return a && !a->left_out ? a->data : NULL; }

static vector_number *number_named(vector_case *c, const char *name) {
    for (int n = 0; n < c->numbers; ++n) {
        if (strcmp(c->number[n].name, name) == 0) {
            c->number[n].bound = true;
            return &c->number[n];
        }
    }
    return NULL;
}

int64_t find_number(vector_case *c, const char *name, int64_t otherwise) {
    const vector_number *n = number_named(c, name);
    return n ? n->integer : otherwise;
}

static sa_matrix matrix_of(const vector_array *a) {
    return (sa_matrix){data_of(a), a->stride[a->axes - 2], a->stride[a->axes - 1], a->dtype, a->swapped};
}

static void set_array(const vector_array *a, field_kind kind, char *to) {
    char *data = data_of(a);
    if (kind == DATA) {
        memcpy(to, &data, sizeof data);
    } else if (kind == TENSOR) {
        sa_tensor *t = (sa_tensor *)(void *)to;
        t->m = matrix_of(a);
        memcpy(t->lead_stride, a->stride, (size_t)(a->axes - 2) * sizeof *a->stride);
    } else if (kind == STRIDED) {
        sa_strided *s = (sa_strided *)(void *)to;
        *s = (sa_strided){.data = data, .dtype = a->dtype, .swapped = a->swapped};
        memcpy(s->stride, a->stride, sizeof a->stride);
    } else {
        *(sa_row_gradient *)(void *)to = (sa_row_gradient){data, a->dtype};
    }
}

static void set_number(const vector_number *n, field_kind kind, char *to) {
    const int64_t most = PTRDIFF_MAX; /* no bound, also with 32 bits */
    switch (kind) {
    case FLAG: *(bool *)to = n->integer != 0; break;
    case CODE: *(int *)(void *)to = (int)n->integer; break;
    case SIZE: *(ptrdiff_t *)(void *)to = (ptrdiff_t)(n->integer < most ? n->integer : most); break;
    case WORD: *(uint64_t *)(void *)to = (uint64_t)n->integer; break;
    default: *(double *)(void *)to = n->real; break;
    }
}

int bind_fields(vector_case *c, const char *prefix, const field *fields, size_t count, void *to) {
    int found = 0;
    for (size_t i = 0; i < count; ++i) {
        char name[2 * NAME];
        snprintf(name, sizeof name, "%s%s", prefix, fields[i].name);
        const vector_array *a = fields[i].kind >= DATA ? find_array(c, "%s", name) : NULL;
        const vector_number *n = fields[i].kind < DATA ? number_named(c, name) : NULL;
        if (a) {
            set_array(a, fields[i].kind, (char *)to + fields[i].offset);
        } else if (n) {
            set_number(n, fields[i].kind, (char *)to + fields[i].offset);
        }
        found += a || n;
    }
    return found;
}

void skip_case(vector_case *c) {
    for (int n = 0; n < c->arrays; ++n) {
        c->array[n].left_out = c->array[n].bound = true;
    }
    for (int n = 0; n < c->numbers; ++n) {
        c->number[n].bound = true;
    }
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

#if defined(__wasm__)
static char *edge_memory(size_t bytes, bool at_end) {
    (void)at_end;
    return zero_memory(bytes);
}
static void free_edges(void) {}
#else
enum { PAGE = 1 << 16, MOST_EDGES = 1024 }; /* the largest page of any CPU */
static struct {
    char *memory;
    size_t bytes;
} edges[MOST_EDGES];
static int edge_count;

/* Memory between pages that cannot be read, that begins after the first or ends before the last. */
static char *edge_memory(size_t bytes, bool at_end) {
    const size_t inside = (bytes + PAGE - 1) / PAGE * PAGE, all = inside + 2 * (size_t)PAGE;
    char *memory = closed_pages(all);
    if (memory == NULL || edge_count == MOST_EDGES || (inside && !open_pages(memory + PAGE, inside))) {
        abort();
    }
    edges[edge_count].memory = memory;
    edges[edge_count++].bytes = all;
    return memory + PAGE + (at_end ? inside - bytes : 0);
}

static void free_edges(void) {
    while (edge_count > 0) {
        --edge_count;
        free_pages(edges[edge_count].memory, edges[edge_count].bytes);
    }
}
#endif

void *scratch_memory(size_t bytes) {
    char *memory = edge_memory(bytes, bytes % 64 == 0);
    return bytes ? memset(memory, 0xFF, bytes) : memory;
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

enum { PATTERN = 0xA5 };

static ptrdiff_t offset_of(const vector_array *a, ptrdiff_t n) {
    ptrdiff_t at = 0;
    for (int axis = a->axes - 1; axis >= 0; --axis) {
        at += n % a->shape[axis] * a->stride[axis];
        n /= a->shape[axis];
    }
    return at;
}

static void place(vector_array *a, int run) {
    const size_t item = sa_itemsize(a->dtype);
    char *memory = edge_memory((size_t)a->bytes, run == ALONE);
    a->data = memory + a->first;
    a->left_out = false;
    if (a->content) {
        memcpy(memory, a->content, (size_t)a->bytes);
        return;
    }
    memset(memory, PATTERN, (size_t)a->bytes);
    for (ptrdiff_t n = 0; n < a->count; ++n) {
        memset(a->data + offset_of(a, n), a->role == ZEROS ? 0 : 0xFF, item);
    }
}

static char *bits_of(const vector_array *a) {
    const ptrdiff_t item = (ptrdiff_t)sa_itemsize(a->dtype);
    char *bits = dirty_memory((size_t)(a->count * item));
    for (ptrdiff_t n = 0; n < a->count; ++n) {
        memcpy(bits + n * item, a->data + offset_of(a, n), (size_t)item);
    }
    return bits;
}

/* True if only elements have changed, and of inputs none. */
static bool is_intact(const vector_array *a) {
    const char *memory = a->data - a->first;
    if (a->role == INPUT) {
        return memcmp(memory, a->content, (size_t)a->bytes) == 0;
    }
    FREES_AT_END;
    char *inside = zero_memory((size_t)a->bytes);
    bool intact = true;
    for (ptrdiff_t n = 0; n < a->count; ++n) {
        memset(inside + a->first + offset_of(a, n), 1, sa_itemsize(a->dtype));
    }
    for (ptrdiff_t n = 0; n < a->bytes; ++n) {
        intact &= inside[n] || memory[n] == (a->content ? a->content[n] : (char)PATTERN);
    }
    return intact;
}

/* Element n; or, with fewer numbers than elements, the n-th sum over the rows of x − y·z of their columns, or of x. Two
 * columns have a sum each. */
static double result_at(const vector_array *a, ptrdiff_t n) {
    const ptrdiff_t item = (ptrdiff_t)sa_itemsize(a->dtype), each = a->count / a->expected_count,
                    columns = each > 1 ? a->shape[a->axes - 1] : 1, sums = columns == 2 ? 2 : 1;
    double sum = each == 1 ? -0.0 : 0;
    for (ptrdiff_t i = 0; i < each; ++i) {
        const char *x = a->bits + (n / sums * sums * each + i * sums + n % sums) * item;
        sum += element_get(x, a->dtype);
        if (columns == 3) {
            sum -= element_get(x + item, a->dtype) * element_get(x + 2 * item, a->dtype);
            i += 2;
        }
    }
    return sum;
}

/* The rounding to which the active set rounds products of pairs of bfloat16, if it does. AMX takes the gradient's δ
 * from rounded outputs, also of float16. */
static double coarse_eps(vector_case *c) {
    const bool is_amx = strcmp(sa_isa_name(), "amx") == 0;
    const double eps = strcmp(sa_isa_name(), "avx512bf16") == 0 ? 0x1p-8 : is_amx ? 0x1p-16 : 0;
    const vector_array *out = find_array(c, "out");
    return c->coarse * eps + (is_amx && out && out->dtype <= SA_BF16 ? unit_roundoff(out->dtype) : 0);
}

/* NaN must be NaN, infinities the same; 16 bits overflow, and underflow gradually. A number of size infinity may be
 * anything. */
static bool agrees(double got, double right, double error, sa_dtype dtype) {
    const double most = dtype == SA_F16 ? 65504 : dtype == SA_F64 ? DBL_MAX : (double)FLT_MAX;
    if (isnan(right) || isinf(error)) {
        return isnan(got) || isinf(error);
    }
    if (isinf(right) || (dtype <= SA_F64 && fabs(right) > most)) {
        return got == copysign((double)INFINITY, right);
    }
    if (dtype > SA_F64 || error < 0) { /* exact */
        return got == right;
    }
    const double smallest = dtype == SA_F16 ? 0x1p-24 : 4 * (dtype == SA_F64 ? DBL_MIN : (double)FLT_MIN);
    const double rounding = dtype == SA_F16 || dtype == SA_BF16 ? 1.01 * unit_roundoff(dtype) : 0;
    return fabs(got - right) <= error + rounding * (fabs(right) + error) + smallest;
}

static void compare(const vector_case *c, const vector_array *a, double eps, double coarse_eps) {
    ptrdiff_t wrong = 0, first = 0;
    double first_error = 0, first_right = 0;
    for (ptrdiff_t n = 0; n < a->expected_count; ++n) {
        const double right =
            a->wide ? element_get(a->expected + 8 * n, SA_F64) : element_get(a->expected + 4 * n, SA_F32);
        const double size = a->size ? element_get(a->size + 2 * n, SA_BF16) : 0;
        const double coarse = a->coarse ? element_get(a->coarse + 2 * n, SA_BF16) : 0;
        const double error = c->tolerance > 0 || isinf(size)
                                 ? (isinf(size) ? size : c->tolerance * eps * size) + coarse_eps * coarse
                                 : -1; /* exact */
        const double got = result_at(a, n);
        note_result(got);
        if (!agrees(got, right, error, a->dtype) && wrong++ == 0) {
            first = n;
            first_error = error;
            first_right = right;
        }
    }
    CHECK(wrong == 0, "%s %s: %td of %td wrong in %s; number %td is %.17g, not %.17g ± %.3g", c->operation, c->name,
          wrong, a->expected_count, a->name, first, result_at(a, first), first_right, first_error);
}

/* The type that computes: float64 if any output is, else float32. */
static double eps_of(const vector_case *c) {
    for (int n = 0; n < c->arrays; ++n) {
        if (c->array[n].role != INPUT && c->array[n].dtype == SA_F64) {
            return DBL_EPSILON;
        }
    }
    return (double)FLT_EPSILON;
}

static void replay_case(vector_case *c, replay_function *call) {
    FREES_AT_END;
    const double eps = eps_of(c);
    for (int run = 0; run < RUN_KINDS; ++run) {
        for (int n = 0; n < c->arrays; ++n) {
            place(&c->array[n], run);
        }
        call(c, run);
        for (int n = 0; n < c->arrays; ++n) {
            vector_array *a = &c->array[n];
            CHECK(is_intact(a), "%s %s: run %d wrote outside %s", c->operation, c->name, run, a->name);
            CHECK(a->bound, "%s %s: nothing reads %s", c->operation, c->name, a->name);
            if (a->role == INPUT || a->left_out) {
                continue;
            }
            char *bits = bits_of(a);
            if (run == 0) {
                a->bits = bits;
                if (a->expected_count > 0) {
                    compare(c, a, eps, coarse_eps(c));
                }
            }
            CHECK(memcmp(bits, a->bits, (size_t)a->count * sa_itemsize(a->dtype)) == 0,
                  "%s %s: run %d has other bits in %s", c->operation, c->name, run, a->name);
        }
        for (int n = 0; n < c->numbers && run == 0; ++n) {
            CHECK(c->number[n].bound, "%s %s: nothing reads %s", c->operation, c->name, c->number[n].name);
        }
        free_edges();
    }
}

void replay(const char *operation, replay_function *run) {
    static vector_case c;
    char *at = vectors;
    long cases = 0;
    while (at < vectors_end) {
        read_case(&c, &at);
        if (strcmp(c.operation, operation) == 0) {
            replay_case(&c, run);
            ++cases;
        }
    }
    CHECK(cases > 0, "there are no vectors of %s on standard input", operation);
}
