/* Reads a transformer from Python's records, and what a call adds; selfattn/engine/transformer.py says what they mean.
 * The tables below name the fields. */
#include "python/transformer_call.h"

#include "python/compact.h"
#include "python/record.h"
#include "python/run.h"

#include <math.h>

void sa_transformer_release(sa_transformer_call *c) {
    for (Py_ssize_t i = 0; i < c->owned_count; ++i) {
        Py_DECREF(c->owned[i]);
    }
    PyMem_Free(c->owned);
    PyMem_Free(c->parameters);
    PyMem_Free(c->layer);
    sa_arena_give(c->numbers);
    sa_arena_give(c->saved);
    PyMem_Free(c);
}

/* ---- records: what a table's readers fill ------------------------------------------------------------------------ */

/* The record that is being read: a layer, or the model. */
typedef struct {
    sa_transformer_call *c;
    Py_ssize_t number; /* of the layer; −1: the model */
    sa_layer *l;
    npy_intp shape[SA_LAYER_PARAMETERS][2], bias[SA_LAYER_PARAMETERS]; /* of weights, and how long biases are */
    bool scales_by_width;
} reading;

typedef struct {
    PyObject *weight, *bias;
} projection;

typedef struct {
    PyObject *weight, *bias;
    double eps;
    int rms;
} norm;

typedef struct {
    PyObject *cosines, *sines;
    bool interleaved;
} rotary;

#define FIELD(name, read, type, place) {#name, read, offsetof(type, place), NULL}
#define CHOICE(name, type, place, names) {#name, sa_field_choice, offsetof(type, place), names}

static const sa_field projection_fields[] = {
    FIELD(weight, sa_field_object, projection, weight),
    FIELD(bias, sa_field_object, projection, bias),
};
const sa_record sa_projection_record = SA_RECORD("Projection", projection_fields);

static const sa_field norm_fields[] = {
    FIELD(weight, sa_field_object, norm, weight),
    FIELD(bias, sa_field_object, norm, bias),
    FIELD(eps, sa_field_real, norm, eps),
    CHOICE(kind, norm, rms, "layer rms"),
};
const sa_record sa_norm_record = SA_RECORD("Norm", norm_fields);

static const sa_field rotary_fields[] = {
    FIELD(cos, sa_field_object, rotary, cosines),
    FIELD(sin, sa_field_object, rotary, sines),
    FIELD(interleaved, sa_field_flag, rotary, interleaved),
};
const sa_record sa_rotary_record = SA_RECORD("Rotary", rotary_fields);

/* ---- arrays ------------------------------------------------------------------------------------------------------ */

/* The size that a letter of a shape means: the model's width d, the widths of all queries q and of all keys k, that of
 * the rows of query p, which may also have key and value, that of a head w, that of the feed-forward network h.
 * −1: any, or not known before all of the layer is read. */
static npy_intp size_of(const reading *r, char letter) {
    const sa_layer *l = r->l;
    if (letter == 'd') {
        return r->c->e.d;
    }
    if (l == NULL || l->width == 0) {
        return -1;
    }
    const ptrdiff_t heads = letter == 'k'                                ? l->key_heads
                            : letter == 'q' || l->weight[SA_KEY] != NULL ? l->heads
                                                                         : l->heads + 2 * l->key_heads;
    return letter == 'h' ? l->hidden : letter == 'w' ? l->width : heads * l->width;
}

/* Compares a shape with letters, one for each axis. */
static int check_shape(const reading *r, const npy_intp *shape, int ndim, const char *letters, const char *what,
                       const char *name) {
    npy_intp wanted[2] = {0};
    bool fits = ndim == (int)strlen(letters);
    for (int axis = 0; letters[axis] != 0; ++axis) {
        wanted[axis] = size_of(r, letters[axis]);
        fits = fits && (wanted[axis] < 0 || wanted[axis] == shape[axis]);
    }
    return fits ? 0
                : sa_error(PyExc_ValueError, "%s%s must have shape %s, not %s", what, name,
                           sa_shape_text((int)strlen(letters), wanted), sa_shape_text(ndim, shape));
}

/* Keeps a contiguous array of the model's dtype, and NULL for None. */
static int take_array(const reading *r, PyObject *value, const char *letters, const char *what, const char *name,
                      PyArrayObject **array) {
    sa_transformer_call *c = r->c;
    *array = NULL;
    if (value == Py_None) {
        return 0;
    }
    if (!sa_is_plain(value, sa_transformer_type(c), -1)) {
        return sa_error(PyExc_TypeError, "%s%s must be a contiguous, aligned array of %s as all others are, not %R",
                        what, name, sa_transformer_type_name(c),
                        PyArray_Check(value) ? (PyObject *)PyArray_DESCR((PyArrayObject *)value)
                                             : (PyObject *)Py_TYPE(value));
    }
    *array = sa_transformer_own(c, Py_NewRef(value));
    return check_shape(r, PyArray_SHAPE(*array), PyArray_NDIM(*array), letters, what, name);
}

/* Writes a pointer to the data of an array, which has a gradient: `gradient` is the place of the pointer to that. */
static void point(const reading *r, PyArrayObject *array, const void **to, size_t gradient) {
    *to = PyArray_DATA(array);
    r->c->parameters[r->c->parameter_count++] = (sa_trained){array, r->number, gradient};
}

/* Points to a weight, if it is an array, and takes its bias. In the structs of gradients, pointers to weight and bias
 * are as far from one another as those here. Returns how long the bias is; 0: there is none; −1: an error. */
static npy_intp take_both(const reading *r, PyArrayObject *array, PyObject *bias, const sa_field *field,
                          const void **weight, const void **to_bias, size_t gradient) {
    const char of_bias[2] = {field->of[0], 0};
    PyArrayObject *own_bias;
    if (array != NULL) {
        point(r, array, weight, gradient);
    }
    if (*weight == NULL && bias != Py_None) {
        return sa_error(PyExc_ValueError, "%s has a bias, but no weight", field->name);
    }
    if (take_array(r, bias, of_bias, "the bias of ", field->name, &own_bias) < 0) {
        return -1;
    }
    if (own_bias != NULL) {
        point(r, own_bias, to_bias, gradient + (size_t)((char *)to_bias - (char *)weight));
    }
    return sa_rows_of(own_bias);
}

/* Returns what the core reads in the place of a weight, an array or an object of engine/weights.py; owned. */
static PyObject *form_of(sa_transformer_call *c, PyObject *weight, const char *attribute) {
    const bool known = weight == Py_None || PyArray_Check(weight) || sa_compact_of(weight) != NULL;
    PyObject *form = known ? Py_NewRef(weight) : PyObject_GetAttrString(weight, attribute);
    return form == NULL ? NULL : sa_transformer_own(c, form);
}

/* ---- a layer ----------------------------------------------------------------------------------------------------- */

static int parameter_of(const reading *r, const void *to) { return (int)((const void *const *)to - r->l->weight); }

_Static_assert(offsetof(sa_layer, bias) == offsetof(sa_layer_gradients, bias),
               "layers and gradients mirror each other");

static int take_parameter(reading *r, int which, PyArrayObject *array, PyObject *bias, const sa_field *field) {
    for (int axis = 0; array != NULL && axis < PyArray_NDIM(array); ++axis) {
        r->shape[which][axis] = PyArray_DIM(array, axis);
    }
    r->bias[which] = take_both(r, array, bias, field, &r->l->weight[which], &r->l->bias[which],
                               offsetof(sa_layer_gradients, weight) + (size_t)which * sizeof(void *));
    return r->bias[which] < 0 ? -1 : 0;
}

/* All projections of a layer have the kind of query, which is read first. */
static int read_projection(void *call, PyObject *value, const sa_field *field, void *to) {
    reading *r = call;
    sa_layer *l = r->l;
    const int which = parameter_of(r, to);
    PyArrayObject *array = NULL;
    projection p;
    if (value == Py_None) {
        return 0;
    }
    if (sa_record_read(r->c->state, SA_PROJECTION_RECORD, value, field->name, r, &p) < 0) {
        return -1;
    }
    PyObject *form = form_of(r->c, p.weight, "packed");
    if (form == NULL) {
        return -1;
    }
    const sa_compact *compact = sa_compact_of(form);
    const sa_weights kind = compact == NULL ? SA_WEIGHTS_WHOLE : compact->kind;
    if ((which != SA_QUERY && l->weights != kind) || (compact != NULL && r->c->e.f64)) {
        return sa_error(PyExc_TypeError, "%s must have the kind of query, and float64 goes with arrays alone",
                        field->name);
    }
    l->weights = kind;
    if (compact != NULL) {
        l->weight[which] = compact;
        r->shape[which][0] = compact->out;
        r->shape[which][1] = compact->in;
    }
    return (compact ? sa_compact_check(compact) : take_array(r, form, field->of, "", field->name, &array)) < 0
               ? -1
               : take_parameter(r, which, array, p.bias, field);
}

/* Reads a norm's record, and takes its weight. */
static int take_norm(reading *r, PyObject *value, const sa_field *field, norm *n, PyArrayObject **weight) {
    return sa_record_read(r->c->state, SA_NORM_RECORD, value, field->name, r, n) < 0
               ? -1
               : take_array(r, n->weight, field->of, "", field->name, weight);
}

static int read_norm(void *call, PyObject *value, const sa_field *field, void *to) {
    reading *r = call;
    const int which = parameter_of(r, to);
    PyArrayObject *array;
    norm n;
    if (value == Py_None) {
        return 0;
    }
    if (take_norm(r, value, field, &n, &array) < 0) {
        return -1;
    }
    r->l->eps[which] = n.eps;
    r->l->rms[which] = n.rms;
    return take_parameter(r, which, array, n.bias, field);
}

static int read_key_heads(void *call, PyObject *value, const sa_field *field, void *to) {
    *(ptrdiff_t *)to = ((reading *)call)->l->heads;
    return value == Py_None ? 0 : sa_field_size(call, value, field, to);
}

static int read_scale(void *call, PyObject *value, const sa_field *field, void *to) {
    reading *r = call;
    r->scales_by_width = value == Py_None;
    return value == Py_None ? 0 : sa_field_real(call, value, field, to);
}

/* Limits a bound so that no sum with a row overflows. */
static int read_bound(PyObject *value, const sa_field *field, ptrdiff_t *to) {
    if (value != Py_None && sa_field_size(NULL, value, field, to) < 0) {
        return -1;
    }
    *to = value == Py_None || *to > SA_MAX_LENGTH ? SA_UNBOUNDED : *to;
    return 0;
}

static int read_window(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)to;
    sa_layer *l = ((reading *)call)->l;
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 2) {
        return sa_error(PyExc_TypeError, "window must be a tuple (left, right), not %R", value);
    }
    return read_bound(PyTuple_GET_ITEM(value, 0), field, &l->window_left) < 0
               ? -1
               : read_bound(PyTuple_GET_ITEM(value, 1), field, &l->window_right);
}

/* Takes the angles of positions, (positions, rotated / 2). */
static int read_rotary(void *call, PyObject *value, const sa_field *field, void *to) {
    reading *r = call;
    sa_rotary *of_layer = to;
    rotary given;
    PyArrayObject *cosines, *sines;
    if (value == Py_None) {
        return 0;
    }
    if (sa_record_read(r->c->state, SA_ROTARY_RECORD, value, field->name, r, &given) < 0 ||
        take_array(r, given.cosines, "**", "the cosines of ", field->name, &cosines) < 0 ||
        take_array(r, given.sines, "**", "the sines of ", field->name, &sines) < 0) {
        return -1;
    }
    if (cosines == NULL || sines == NULL || !PyArray_SAMESHAPE(cosines, sines)) {
        return sa_error(PyExc_ValueError, "rotary positions need cosines and sines of one shape");
    }
    *of_layer = (sa_rotary){.cos = PyArray_DATA(cosines),
                            .sin = PyArray_DATA(sines),
                            .rotated = 2 * PyArray_DIM(cosines, 1),
                            .interleaved = given.interleaved};
    r->c->most = sa_smaller(r->c->most, sa_rows_of(cosines));
    return 0;
}

_Static_assert(SA_ACT_NONE == 0 && SA_ACT_RELU == 1 && SA_ACT_GELU == 2 && SA_ACT_GELU_TANH == 3 && SA_ACT_SILU == 4,
               "the names of activations are in this order");

#define PARAMETER(name, which, read, shape) {#name, read, offsetof(sa_layer, weight[which]), shape}

/* Parameters are in the core's order, and in that of their gradients. num_key_heads is read after num_heads. */
enum { FIRST_PARAMETER = 2 };
static const sa_field layer_fields[] = {
    FIELD(num_heads, sa_field_size, sa_layer, heads),
    FIELD(num_key_heads, read_key_heads, sa_layer, key_heads),
    PARAMETER(query, SA_QUERY, read_projection, "pd"),
    PARAMETER(key, SA_KEY, read_projection, "kd"),
    PARAMETER(value, SA_VALUE, read_projection, "kd"),
    PARAMETER(output, SA_OUTPUT, read_projection, "dq"),
    PARAMETER(attention_norm, SA_ATTENTION_NORM, read_norm, "d"),
    PARAMETER(up, SA_UP, read_projection, "hd"),
    PARAMETER(gate, SA_GATE, read_projection, "hd"),
    PARAMETER(down, SA_DOWN, read_projection, "dh"),
    PARAMETER(feed_forward_norm, SA_FEED_FORWARD_NORM, read_norm, "d"),
    PARAMETER(query_norm, SA_QUERY_NORM, read_norm, "w"),
    PARAMETER(key_norm, SA_KEY_NORM, read_norm, "w"),
    PARAMETER(attention_post_norm, SA_ATTENTION_POST_NORM, read_norm, "d"),
    PARAMETER(feed_forward_post_norm, SA_FEED_FORWARD_POST_NORM, read_norm, "d"),
    FIELD(norm_first, sa_field_flag, sa_layer, norm_first),
    CHOICE(activation, sa_layer, activation, "None relu gelu gelu_tanh silu"),
    FIELD(causal, sa_field_flag, sa_layer, causal),
    FIELD(window, read_window, sa_layer, window_left),
    FIELD(rotary, read_rotary, sa_layer, rotary),
    FIELD(scale, read_scale, sa_layer, scale),
    FIELD(softcap, sa_field_real, sa_layer, softcap),
};
const sa_record sa_layer_record = SA_RECORD("Layer", layer_fields);

/* Finds the widths of heads and of the feed-forward network. */
static int take_sizes(reading *r) {
    sa_layer *l = r->l;
    const npy_intp rows = r->shape[SA_QUERY][0];
    const bool fits = l->key_heads >= 1 && l->key_heads <= l->heads && l->heads <= rows && l->heads % l->key_heads == 0;
    const ptrdiff_t all = fits ? l->heads + (l->weight[SA_KEY] == NULL ? 2 * l->key_heads : 0) : 1;
    if (!fits || rows % all != 0) {
        return sa_error(PyExc_ValueError,
                        "num_key_heads must divide num_heads, and the rows of query must be as many for each head; "
                        "not %zd, %zd and %zd rows",
                        l->key_heads, l->heads, rows);
    }
    l->width = rows / all;
    l->hidden = r->shape[SA_UP][0];
    l->scale = r->scales_by_width ? 1 / sqrt((double)l->width) : l->scale;
    return l->rotary.cos == NULL || (l->rotary.rotated >= 2 && l->rotary.rotated <= l->width)
               ? 0
               : sa_error(PyExc_ValueError,
                          "angles must have shape (positions, rotated / 2) with 2 to %zd rotated elements", l->width);
}

/* Compares every weight and bias with the letters of its shape. */
static int check_shapes(const reading *r) {
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        const sa_field *field = &layer_fields[FIRST_PARAMETER + which];
        const char of_bias[2] = {field->of[0], 0};
        if ((r->l->weight[which] != NULL &&
             check_shape(r, r->shape[which], (int)strlen(field->of), field->of, "", field->name) < 0) ||
            (r->l->bias[which] != NULL &&
             check_shape(r, &r->bias[which], 1, of_bias, "the bias of ", field->name) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* Checks which parameters there are. */
static int check_parts(const sa_layer *l) {
    const bool together = l->weight[SA_KEY] == NULL, feeds = l->weight[SA_UP] != NULL;
    const bool post = l->weight[SA_ATTENTION_POST_NORM] != NULL || l->weight[SA_FEED_FORWARD_POST_NORM] != NULL;
    const char *wrong = NULL;
    if (l->weight[SA_QUERY] == NULL || together != (l->weight[SA_VALUE] == NULL)) {
        wrong = "a layer has query, key and value, or a query that holds all three";
    } else if (together && l->weights != SA_WEIGHTS_WHOLE) {
        wrong = "rounded weights of query, key and value must be apart";
    } else if (feeds != (l->weight[SA_DOWN] != NULL) ||
               (!feeds && (l->weight[SA_GATE] != NULL || l->weight[SA_FEED_FORWARD_NORM] != NULL))) {
        wrong = "a layer has up and down, or no feed-forward network";
    } else if (feeds && l->activation == SA_ACT_NONE) {
        wrong = "a feed-forward network needs an activation";
    } else if (post && (!l->norm_first || l->weight[SA_OUTPUT] == NULL || !feeds)) {
        wrong = "post norms need norm_first, an output and a feed-forward network";
    } else if (l->weight[SA_OUTPUT] == NULL && (l->norm_first || l->weight[SA_ATTENTION_NORM] == NULL)) {
        wrong = "a layer has an output, or a norm after the sum";
    }
    return wrong == NULL ? 0 : sa_error(PyExc_ValueError, "%s", wrong);
}

/* Without an output, what attention returns is added to the input. */
static int check_widths(const reading *r) {
    const sa_layer *l = r->l;
    if (l->weight[SA_OUTPUT] == NULL && size_of(r, 'q') != r->c->e.d) {
        return sa_error(PyExc_ValueError, "without an output, all heads must be %zd wide together", r->c->e.d);
    }
    return (l->weight[SA_UP] != NULL) == (l->hidden > 0) ? 0 : sa_error(PyExc_ValueError, "up must have rows");
}

/* The array of query has the rows of query, then key, then value. */
static void parameter_from_query(const sa_transformer_call *c, sa_layer *l, int which, ptrdiff_t row) {
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(c->e.f64);
    l->weight[which] = (const char *)l->weight[SA_QUERY] + row * c->e.d * size;
    l->bias[which] = l->bias[SA_QUERY] == NULL ? NULL : (const char *)l->bias[SA_QUERY] + row * size;
}

static int take_layer(sa_transformer_call *c, Py_ssize_t number, PyObject *value) {
    sa_layer *l = &c->layer[number];
    reading r = {.c = c, .number = number, .l = l};
    if (sa_record_read(c->state, SA_LAYER_RECORD, value, "a layer", &r, l) < 0 || check_parts(l) < 0 ||
        take_sizes(&r) < 0 || check_shapes(&r) < 0 || check_widths(&r) < 0) {
        return -1;
    }
    l->activation = l->hidden > 0 ? l->activation : SA_ACT_NONE;
    if (l->weight[SA_KEY] == NULL) {
        parameter_from_query(c, l, SA_KEY, l->heads * l->width);
        parameter_from_query(c, l, SA_VALUE, (l->heads + l->key_heads) * l->width);
    }
    return 0;
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

/* Takes an array of the model's dtype, or what `table` of a rounded weight is: an array of the bits of bfloat16, a
 * tuple (int8, scales of rows), or quants. */
static int read_table(void *call, PyObject *value, const sa_field *field, void *to) {
    const reading *r = call;
    sa_transformer *e = &r->c->e;
    PyObject *form = form_of(r->c, value, "table"), *scale = Py_None;
    if (form == NULL) {
        return -1;
    }
    const sa_compact *quants = sa_compact_of(form);
    if (PyTuple_Check(form) && PyTuple_GET_SIZE(form) == 2) {
        scale = PyTuple_GET_ITEM(form, 1);
        form = PyTuple_GET_ITEM(form, 0);
    }
    const bool int8 = sa_is_plain(form, NPY_INT8, 2) && sa_is_plain(scale, NPY_FLOAT, 2) &&
                      sa_dim(scale, 1) == sa_ceil_div(e->d, SA_GROUP) && sa_dim(form, 0) == sa_dim(scale, 0);
    if (quants == NULL && !int8 && !sa_is_plain(form, NPY_UINT16, 2)) {
        PyArrayObject *array;
        if (take_array(r, form, "*d", "", field->name, &array) < 0) {
            return -1;
        }
        if (array != NULL) {
            point(r, array, &e->table, offsetof(sa_transformer_gradients, table));
        }
        e->vocabulary = sa_rows_of(array);
        return 0;
    }
    e->table = quants != NULL ? (const void *)quants : sa_data(form);
    e->table_kind = quants != NULL ? quants->kind : int8 ? SA_WEIGHTS_INT8 : SA_WEIGHTS_BF16;
    e->table_scale = int8 ? sa_data(scale) : NULL;
    e->vocabulary = quants != NULL ? quants->out : sa_dim(form, 0);
    const npy_intp width = quants != NULL ? quants->in : sa_dim(form, 1);
    const bool is_table = quants == NULL || quants->kind == SA_WEIGHTS_QUANTS; /* panels are not */
    (void)to;
    return !e->f64 && is_table && width == e->d
               ? 0
               : sa_error(PyExc_ValueError,
                          "a table of rounded weights must have %zd columns, not %zd, and all else must be float32",
                          e->d, width);
}

static int read_factor(void *call, PyObject *value, const sa_field *field, void *to) {
    return value == Py_None ? 0 : sa_field_real(call, value, field, to);
}

/* Takes what is added to the rows of the table; its gradient is the caller's. */
static int read_added(void *call, PyObject *value, const sa_field *field, void *to) {
    const reading *r = call;
    PyArrayObject *array;
    if (take_array(r, value, field->of, "", field->name, &array) < 0) {
        return -1;
    }
    *(const void **)to = array == NULL ? NULL : PyArray_DATA(array);
    r->c->most = array != NULL && field->of[0] == '*' ? sa_smaller(r->c->most, sa_rows_of(array)) : r->c->most;
    return 0;
}

/* Takes the norm before the first layer, or after the last. */
static int read_outer_norm(void *call, PyObject *value, const sa_field *field, void *to) {
    reading *r = call;
    sa_norm *outer = to;
    norm n;
    PyArrayObject *weight;
    if (value == Py_None) {
        return 0;
    }
    if (take_norm(r, value, field, &n, &weight) < 0) {
        return -1;
    }
    const bool first = outer == &r->c->e.embedding_norm;
    const size_t gradient =
        first ? offsetof(sa_transformer_gradients, embedding_norm) : offsetof(sa_transformer_gradients, final_norm);
    outer->eps = n.eps;
    outer->rms = n.rms;
    return take_both(r, weight, n.bias, field, &outer->weight, &outer->bias, gradient) < 0 ? -1 : 0;
}

static int read_layers(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)field, (void)to;
    sa_transformer_call *c = ((reading *)call)->c;
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        if (take_layer(c, i, PyTuple_GET_ITEM(value, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Takes floats or booleans (sequences or 1, heads or 1, longest, longest), of any dtype and layout. */
static int read_mask(void *call, PyObject *value, const sa_field *field, void *to) {
    sa_transformer_call *c = ((reading *)call)->c;
    sa_dtype dtype;
    if (value == Py_None) {
        return 0;
    }
    if (c->mask != NULL) {
        return sa_error(PyExc_ValueError, "a model with a position_bias takes no mask");
    }
    PyArrayObject *array = sa_as_array(value, field->name, SA_MASK, &dtype);
    if (array == NULL) {
        return -1;
    }
    c->mask = sa_transformer_own(c, array);
    const npy_intp *shape = PyArray_SHAPE(array);
    if (sa_is_integer(dtype) || PyArray_NDIM(array) != 4 || shape[2] != shape[3]) {
        return sa_error(PyExc_ValueError,
                        "%s must hold booleans or floats, in 4 axes, with as many rows as columns, not %s of %s",
                        field->name, sa_shape_of(array), sa_dtype_name(dtype));
    }
    sa_fill_tensor(to, array, dtype, 2, 2);
    c->most = sa_smaller(c->most, shape[2]);
    return 0;
}

/* A gradient's place in the list of gradients is that of its parameter here. */
static const sa_field transformer_fields[] = {
    FIELD(table, read_table, sa_transformer, table),
    FIELD(table_factor, read_factor, sa_transformer, table_factor),
    {"token_type_row", read_added, offsetof(sa_transformer, token_type_row), "d"},
    {"positions", read_added, offsetof(sa_transformer, positions), "*d"},
    FIELD(position_bias, read_mask, sa_transformer, mask),
    {"embedding_norm", read_outer_norm, offsetof(sa_transformer, embedding_norm), "d"},
    FIELD(layers, read_layers, sa_transformer, layer),
    {"final_norm", read_outer_norm, offsetof(sa_transformer, final_norm), "d"},
};
enum { TABLE_FIELD, EMBEDDING_NORM_FIELD = 5, LAYERS_FIELD, FINAL_NORM_FIELD };
const sa_record sa_transformer_record = SA_RECORD("Transformer", transformer_fields);

/* Borrows the first weight that a model has: of its table, its first layer, or a norm; None if there is none. */
static PyObject *first_weight(const sa_state *state, PyObject *model, PyObject *layers) {
    PyObject *table = sa_record_field(state, SA_TRANSFORMER_RECORD, model, TABLE_FIELD);
    PyObject *first = PyTuple_GET_SIZE(layers) > 0 ? PyTuple_GET_ITEM(layers, 0) : Py_None;
    if (table != Py_None) {
        return table;
    }
    if (sa_is_record(state, SA_LAYER_RECORD, first)) {
        PyObject *query = sa_record_field(state, SA_LAYER_RECORD, first, FIRST_PARAMETER + SA_QUERY);
        return sa_is_record(state, SA_PROJECTION_RECORD, query) ? sa_record_field(state, SA_PROJECTION_RECORD, query, 0)
                                                                : Py_None;
    }
    for (int field = EMBEDDING_NORM_FIELD; field <= FINAL_NORM_FIELD; field += 2) {
        PyObject *value = sa_record_field(state, SA_TRANSFORMER_RECORD, model, field);
        if (sa_is_record(state, SA_NORM_RECORD, value)) {
            return sa_record_field(state, SA_NORM_RECORD, value, 0);
        }
    }
    return Py_None;
}

/* Finds the model's width, that of the rows of its first weight, and its dtype. */
static int take_width(sa_transformer_call *c, PyObject *weight) {
    const sa_compact *compact = sa_compact_of(weight);
    PyArrayObject *array = PyArray_Check(weight) ? (PyArrayObject *)weight : NULL;
    PyObject *shape = compact == NULL && array == NULL ? PyObject_GetAttrString(weight, "shape") : NULL;
    const Py_ssize_t axes = shape != NULL && PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : 0;
    c->e.f64 = array != NULL && PyArray_TYPE(array) == NPY_DOUBLE;
    c->e.d = compact != NULL ? compact->in
             : array != NULL ? PyArray_NDIM(array) > 0 ? PyArray_DIM(array, PyArray_NDIM(array) - 1) : 0
             : axes > 0      ? PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, axes - 1))
                             : 0;
    Py_XDECREF(shape);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return c->e.d >= 1 ? 0 : sa_error(PyExc_ValueError, "a model needs a width: a table, a layer or a norm with one");
}

static int take_model(sa_transformer_call *c, PyObject *model) {
    reading r = {.c = c, .number = -1};
    if (!sa_is_record(c->state, SA_TRANSFORMER_RECORD, model)) {
        return sa_error(PyExc_TypeError, "a model must be a Transformer, not %s", sa_type_name(model));
    }
    PyObject *layers = sa_record_field(c->state, SA_TRANSFORMER_RECORD, model, LAYERS_FIELD);
    if (!PyTuple_Check(layers)) {
        return sa_error(PyExc_TypeError, "layers must be a tuple, not %s", sa_type_name(layers));
    }
    c->e.layers = PyTuple_GET_SIZE(layers);
    c->most = NPY_MAX_INTP;
    const size_t most = (size_t)(c->e.layers + 1) * (3 * SA_LAYER_PARAMETERS + 2) + 16;
    c->owned = PyMem_Calloc(most, sizeof *c->owned);
    c->parameters = PyMem_Calloc(most, sizeof *c->parameters);
    c->e.layer = c->layer = PyMem_Calloc((size_t)c->e.layers + 1, sizeof *c->layer);
    if (c->owned == NULL || c->parameters == NULL || c->layer == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_width(c, first_weight(c->state, model, layers)) < 0 ||
        sa_record_read(c->state, SA_TRANSFORMER_RECORD, model, "a model", &r, &c->e) < 0) {
        return -1;
    }
    const bool adds = c->e.token_type_row != NULL || c->e.positions != NULL;
    if (c->e.table == NULL && (adds || c->e.table_factor != 0)) {
        return sa_error(PyExc_ValueError, "a factor, a token_type_row and positions need a table");
    }
    return adds && c->e.table_factor != 0
               ? sa_error(PyExc_ValueError, "a factor needs a table to whose rows nothing is added")
               : 0;
}

/* ---- what a call adds -------------------------------------------------------------------------------------------- */

static int read_seed(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)call;
    const uint64_t seed = PyLong_Check(value) ? PyLong_AsUnsignedLongLongMask(value) : 0;
    *(uint64_t *)to = seed;
    return PyLong_Check(value) ? 0 : sa_error(PyExc_TypeError, "%s must be an int, not %R", field->name, value);
}

static const sa_field dropout_fields[] = {
    FIELD(weights, sa_field_real, sa_layer, dropout[SA_DROP_WEIGHTS]),
    FIELD(output, sa_field_real, sa_layer, dropout[SA_DROP_OUTPUT]),
    FIELD(wide, sa_field_real, sa_layer, dropout[SA_DROP_WIDE]),
    FIELD(down, sa_field_real, sa_layer, dropout[SA_DROP_DOWN]),
    FIELD(seed, read_seed, sa_layer, seed),
};
const sa_record sa_dropout_record = SA_RECORD("Dropout", dropout_fields);

static int read_dropout(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)to;
    reading *r = call;
    sa_transformer_call *c = r->c;
    const Py_ssize_t count = PyTuple_Check(value) ? PyTuple_GET_SIZE(value) : -1;
    if (count != 0 && count != c->e.layers) {
        return sa_error(PyExc_ValueError, "%s must be a tuple with a Dropout for each of %zd layers, or an empty one",
                        field->name, c->e.layers);
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        sa_layer *l = &c->layer[i];
        if (sa_record_read(c->state, SA_DROPOUT_RECORD, PyTuple_GET_ITEM(value, i), field->name, r, l) < 0) {
            return -1;
        }
        for (int n = 0; n < SA_DROPOUTS; ++n) {
            if (!(l->dropout[n] >= 0 && l->dropout[n] <= 1)) {
                return sa_error(PyExc_ValueError, "the dropouts of layer %zd must be between 0 and 1", i);
            }
        }
        l->dropout[SA_DROP_OUTPUT] = l->weight[SA_OUTPUT] == NULL ? 0 : l->dropout[SA_DROP_OUTPUT];
    }
    return 0;
}

/* Takes (sequences or 1, longest), contiguous. */
static int read_key_bias(void *call, PyObject *value, const sa_field *field, void *to) {
    sa_transformer_call *c = ((reading *)call)->c;
    sa_tensor *bias = to;
    if (take_array(call, value, "**", "", field->name, &c->key_bias) < 0) {
        return -1;
    }
    if (c->key_bias != NULL) {
        bias->m.data = PyArray_BYTES(c->key_bias);
        bias->lead_stride[0] = sa_rows_of(c->key_bias) == 1 ? 0 : PyArray_STRIDE(c->key_bias, 0);
        c->most = sa_smaller(c->most, PyArray_DIM(c->key_bias, 1));
    }
    return 0;
}

static int read_precision(void *call, PyObject *value, const sa_field *field, void *to) {
    ptrdiff_t n;
    if (sa_field_size(call, value, field, &n) < 0) {
        return -1;
    }
    *(int *)to = (int)sa_smaller(n, SA_DIGITS);
    return n <= SA_DIGITS ? 0 : sa_error(PyExc_ValueError, "%s must be 0 to %d, not %zd", field->name, SA_DIGITS, n);
}

_Static_assert(SA_EACH_ROW == 0 && SA_MEAN_ROW == 1 && SA_FIRST_ROW == 2 && SA_LAST_ROW == 3,
               "the names of poolings are in this order");

static const sa_field call_fields[] = {
    FIELD(mask, read_mask, sa_transformer, mask),
    FIELD(key_bias, read_key_bias, sa_transformer, key_bias),
    FIELD(dropout, read_dropout, sa_transformer, layer),
    CHOICE(pooling, sa_transformer, pooling, "None mean first last"),
    FIELD(prompt_precision, read_precision, sa_transformer, prompt_precision),
};
const sa_record sa_call_record = SA_RECORD("Call", call_fields);

int sa_transformer_read_model(sa_transformer_call *c, PyObject *module, PyObject *model, PyObject *call) {
    reading r = {.c = c, .number = -1};
    c->state = sa_state_of(module);
    return take_model(c, model) < 0 ? -1 : sa_record_read(c->state, SA_CALL_RECORD, call, "a call", &r, &c->e);
}
