/* Owns what the library reports and what can be set: instruction set, threads, build, limits of the machine. */
#include "python/binding.h"

#include "python/run.h"

#include "runtime/team.h"

static PyObject *get_isa(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyUnicode_FromString(sa_isa_name());
}

static PyObject *available_isas(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    const char *const *names = sa_isa_available();
    Py_ssize_t n = 0;
    while (names[n] != NULL) {
        ++n;
    }
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; ++i) {
        PyTuple_SET_ITEM(tuple, i, PyUnicode_FromString(names[i]));
        if (PyTuple_GET_ITEM(tuple, i) == NULL) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

int sa_py_choose_isa(const char *name, PyObject *error, const char *what) {
    if (sa_isa_set(name) == SA_OK) {
        return 0;
    }
    PyObject *available = available_isas(NULL, NULL);
    if (available != NULL) {
        PyErr_Format(error, "%s'%s': this build on this CPU and operating system can run %R", what, name, available);
        Py_DECREF(available);
    }
    return -1;
}

static PyObject *set_isa(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (text == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "the instruction set must be a str, got %s", sa_type_name(name));
        }
        return NULL;
    }
    return sa_py_choose_isa(text, PyExc_ValueError, "no instruction set ") < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *get_num_threads(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLong(sa_get_num_threads());
}

static PyObject *set_num_threads(PyObject *module, PyObject *number) {
    (void)module;
    if (number == Py_None) {
        sa_set_num_threads(0);
        Py_RETURN_NONE;
    }
    int threads;
    if (sa_read_threads(NULL, number, "the number of threads", &threads) < 0) {
        return NULL;
    }
    const int cpus = sa_usable_cpus();
    if (threads > cpus &&
        PyErr_WarnFormat(PyExc_UserWarning, 1,
                         "%d threads on %d CPUs wait for each other; set_num_threads(None) sets as many as there are",
                         threads, cpus) < 0) {
        return NULL;
    }
    sa_set_num_threads(threads);
    Py_RETURN_NONE;
}

static PyObject *limit_threads(PyObject *module, PyObject *number) {
    (void)module;
    const long n = PyLong_AsLong(number);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    sa_limit_num_threads(n < 1 ? 1 : n < SA_MOST_THREADS ? (int)n : SA_MOST_THREADS);
    Py_RETURN_NONE;
}

static PyObject *seed_from_rng(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *rng;
    int draws;
    uint64_t seed;
    if (!PyArg_ParseTuple(args, "Op:_seed_from_rng", &rng, &draws)) {
        return NULL;
    }
    return sa_seed_from_rng(rng, draws, &seed) < 0 ? NULL : PyLong_FromUnsignedLongLong(seed);
}

static PyObject *keep_arena(PyObject *module, PyObject *keep) {
    sa_arena_keep(sa_state_of(module), keep == Py_True);
    Py_RETURN_NONE;
}

static PyObject *build_info(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
#if defined(__clang__)
    static const char compiler[] = "Clang " __clang_version__;
#else
    static const char compiler[] = "GCC " __VERSION__;
#endif
    const char *library = sa_team_library();
    return Py_BuildValue("{s:s,s:s,s:z}", "compiler", compiler, "team", sa_team_name(), "team_library",
                         *library ? library : NULL);
}

static PyObject *fma_peak(PyObject *module, PyObject *args) {
    (void)module;
    const char *dtype;
    int threads, milliseconds;
    if (!PyArg_ParseTuple(args, "sii:_fma_peak", &dtype, &threads, &milliseconds)) {
        return NULL;
    }
    static const sa_dtype dtypes[] = {SA_F32, SA_F64, SA_I8, SA_BF16};
    size_t i = 0;
    while (i < 4 && strcmp(dtype, sa_dtype_name(dtypes[i])) != 0) {
        ++i;
    }
    if (i == 4 || threads < 1 || threads > SA_MOST_THREADS || milliseconds < 1) {
        return PyErr_Format(PyExc_ValueError,
                            "_fma_peak takes 'float32', 'float64', 'int8' or 'bfloat16', threads from 1 to 1024 "
                            "and milliseconds >= 1");
    }
    double rate;
    Py_BEGIN_ALLOW_THREADS rate = sa_measure_flops(dtypes[i], threads, 1e-3 * milliseconds);
    Py_END_ALLOW_THREADS return PyFloat_FromDouble(rate);
}

static PyObject *read_bandwidth(PyObject *module, PyObject *args) {
    Py_ssize_t bytes;
    int threads, milliseconds;
    if (!PyArg_ParseTuple(args, "nii:_read_bandwidth", &bytes, &threads, &milliseconds)) {
        return NULL;
    }
    if (bytes < 1 || threads < 1 || threads > SA_MOST_THREADS || milliseconds < 1) {
        return PyErr_Format(PyExc_ValueError,
                            "_read_bandwidth takes bytes >= 1, threads from 1 to 1024 and milliseconds >= 1");
    }
    char *data = sa_arena_take(module, (size_t)bytes);
    if (data == NULL) {
        return NULL;
    }
    double rate;
    Py_BEGIN_ALLOW_THREADS memset(data, 1, (size_t)bytes);
    rate = sa_measure_read(data, (size_t)bytes, threads, 1e-3 * milliseconds);
    Py_END_ALLOW_THREADS sa_arena_give(data);
    return PyFloat_FromDouble(rate);
}

PyMethodDef sa_runtime_methods[] = {
    {"get_isa", get_isa, METH_NOARGS,
     "get_isa($module, /)\n--\n\n"
     "The instruction set of the kernels in use.\n\n"
     "Chosen once at import: the best that the CPU and the operating system can run, unless the\n"
     "environment variable ``SELFATTN_ISA`` names another.\n\n"
     "Returns\n-------\nstr\n    ``'amx'``, ``'avx512bf16'``, ``'avx512'``, ``'avx2'``, ``'baseline'`` (x86-64),\n"
     "    ``'neon'`` or ``'generic'``.\n\n"
     "Examples\n--------\n>>> import selfattn as sa\n>>> isinstance(sa.get_isa(), str)\nTrue\n"},
    {"get_num_threads", get_num_threads, METH_NOARGS,
     "get_num_threads($module, /)\n--\n\n"
     "How many threads a call may use that does not say so itself.\n\n"
     "The number given to `set_num_threads`; without one OpenMP's for the calling thread, which is\n"
     "``OMP_NUM_THREADS`` at import, without that the CPUs that the process may use, by affinity and by\n"
     "the quota of its control group, rounded up. If OpenMP's was lowered since, as by threadpoolctl,\n"
     "no more than that. Results do not depend on it.\n\n"
     "Returns\n-------\nint\n\n"
     "Examples\n--------\n>>> import selfattn as sa\n>>> sa.get_num_threads() >= 1\nTrue\n"},
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads($module, n, /)\n--\n\n"
     "Set how many threads calls may use, for the whole process.\n\n"
     "Results do not depend on it, to the last bit. Small calls use fewer, and so do calls at once.\n\n"
     "Parameters\n----------\nn : int or None\n    1 to 1024; None goes back to the number at import.\n\n"
     "Warns\n-----\nUserWarning\n    More threads than the process has CPUs: they wait for each other.\n\n"
     "Examples\n--------\n>>> import selfattn as sa\n>>> sa.set_num_threads(1)\n>>> sa.get_num_threads()\n1\n"
     ">>> sa.set_num_threads(None)\n"},
    {"available_isas", available_isas, METH_NOARGS,
     "The instruction sets that this build and this CPU can run, best first."},
    {"build_info", build_info, METH_NOARGS, "What the extension was built with."},
    {"_limit_threads", limit_threads, METH_O, "Set the most threads that calls use by default: the CPUs of a quota."},
    {"_set_isa", set_isa, METH_O, "Choose the kernels, for tests. Not to be called while another thread computes."},
    {"_seed_from_rng", seed_from_rng, METH_VARARGS, "The seed of dropout, for the layers and the reference."},
    {"_keep_arena", keep_arena, METH_O,
     "Whether calls keep the memory they worked in for the next (True, as at first), for tests that watch memory."},
    {"_fma_peak", fma_peak, METH_VARARGS,
     "Multiply-adds out of registers, of int8 and bfloat16 out of L1: operations/s of (dtype, threads, milliseconds)."},
    {"_read_bandwidth", read_bandwidth, METH_VARARGS,
     "A loop that only reads: bytes/s of (bytes, threads, milliseconds)."},
    {NULL, NULL, 0, NULL},
};
