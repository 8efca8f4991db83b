"""Arrays of bfloat16 that offer DLPack, whose capsules may be hostile."""

import ctypes
import struct

import numpy as np

RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Library:
    """An array of bfloat16 of a library that offers DLPack alone; it counts how often its memory is given back."""

    dtype, devices = "library.bfloat16", (1, 0)

    def __init__(self, x, old=False, name=None, flags=0, major=1, **changes):
        given = {
            "data": x.ctypes.data,
            "device": 1,
            "number": 0,
            "ndim": x.ndim,
            "code": 4,
            "bits": 16,
            "lanes": 1,
            "shape": x.shape,
            "strides": [n // 2 for n in x.strides],
            "offset": 0,
            **changes,
        }
        self.kept = [x]
        for key in ("shape", "strides"):
            self.kept.append(np.array(given[key] or (), np.int64))
            given[key] = 0 if given[key] is None else self.kept[-1].ctypes.data
        tensor = struct.pack("PiiiBBHPPQ", *given.values())
        self.released, self.old, self.release = 0, old, RELEASE(self.count)
        free = ctypes.cast(self.release, ctypes.c_void_p).value
        tail, head = struct.pack("PP", 0, free), struct.pack("IIPPQ", major, 0, 0, free, flags)
        owner = tensor + tail if old else head + tensor
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
