/* The stable ABI, with which one built extension serves CPython 3.11 and every later one. What is a macro in the whole API
 * is a function here. Free-threaded CPython has no such ABI: there the macros stay. */
#ifndef SA_PYTHON_STABLE_H
#define SA_PYTHON_STABLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
/* Not included by a Python.h that is limited to the stable ABI. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where the GIL does not keep other threads from an object, its lock does. With the GIL, and before 3.13, an empty block. */
#if !defined(Py_GIL_DISABLED)
#undef Py_BEGIN_CRITICAL_SECTION
#undef Py_END_CRITICAL_SECTION
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

#if defined(Py_LIMITED_API)
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_SET_ITEM (void)PyTuple_SetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_GET_ITEM PyList_GetItem
#define PyList_SET_ITEM (void)PyList_SetItem
#define PyBytes_AS_STRING PyBytes_AsString
#if Py_LIMITED_API + 0 < 0x030D0000 /* promised from 3.13 on, and there in 3.11 and 3.12 */
PyAPI_FUNC(void *) PyMem_RawMalloc(size_t size);
PyAPI_FUNC(void *) PyMem_RawCalloc(size_t nelem, size_t elsize);
PyAPI_FUNC(void *) PyMem_RawRealloc(void *ptr, size_t new_size);
PyAPI_FUNC(void) PyMem_RawFree(void *ptr);
#endif
#endif

#endif
