"""Arrays of bfloat16 that offer DLPack, whose capsules may be hostile."""

import ctypes
import struct

import numpy as np

RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = (
    ctypes.py_object,
    (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
)


class Library:
    """An array of bfloat16 of a library that offers DLPack alone; it counts how often its memory is given back."""

    dtype, devices = "library.bfloat16", (1, 0)

    def __init__(self, x, old=False, name=None, flags=0, major=1, **changes):
        given = {
            "data": x.ctypes.data, "device": 1, "number": 0, "ndim": x.ndim, "code": 4, "bits": 16, "lanes": 1,
            "shape": x.shape, "strides": [n // 2 for n in x.strides], "offset": 0,
        } | changes  # fmt: skip
        self.kept = x, *(np.array(given[key] or (), np.int64) for key in ("shape", "strides"))
        pointers = {
            key: 0 if given[key] is None else self.kept[n].ctypes.data
            for n, key in ((1, "shape"), (2, "strides"))
        }
        tensor = struct.pack("PiiiBBHPPQ", *(given | pointers).values())
        self.released, self.old, self.release = 0, old, RELEASE(self.count)
        free = ctypes.cast(self.release, ctypes.c_void_p).value
        owner = (
            tensor + struct.pack("PP", 0, free)
            if old
            else struct.pack("IIPPQ", major, 0, 0, free, flags) + tensor
        )
        self.owner = ctypes.create_string_buffer(owner, len(owner))
        self.name = name or (b"dltensor" if old else b"dltensor_versioned")

    def count(self, owner):
        self.released += owner == ctypes.addressof(self.owner)

    def __dlpack__(self, **settings):
        if settings and self.old:
            raise TypeError("there are no versions")
        return new_capsule(ctypes.addressof(self.owner), self.name, None)

    def __dlpack_device__(self):
        return self.devices
