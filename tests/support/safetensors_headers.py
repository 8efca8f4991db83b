"""Contents of files that are not safetensors files, although some look like them."""

import json
import struct


def hostile(header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape=(16,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = [
    b"",
    b"\0\0\0",
    struct.pack("<Q", 2**63),
    hostile({}, length=2**40),
    hostile(b"not json"),
    hostile(b"{" * 10_000),
    hostile({"a": 3}),
    hostile({"a": entry(0, 128)}),  # beyond the end
    hostile({"a": entry(-64, 0)}),
    hostile({"a": entry(64, 0)}),
    hostile({"a": entry(0, 64, (2**62, 8))}),  # a product beyond 64 bits
    hostile({"a": entry(0, 64, (-4, -4))}),
    hostile({"a": entry(0, 60)}),  # fewer bytes than the shape needs
    hostile({"a": entry(0, 64), "b": entry(0, 64)}),  # two tensors overlap
    hostile({"a": entry(0, 64), "b": entry(32, 96)}, b"\0" * 96),
    hostile({"a": entry(8, 72)}, b"\0" * 72),  # a hole before the tensor
    hostile({"a": entry(0, 64)}, b"\0" * 80),  # more bytes than the header says
    hostile({"a": entry(0, 64, dtype="F33")}),
    hostile(b'{"a": {"dtype": "F32", "shape": [16]}}'),
    b"\x80\x02}q\x00." + b"\0" * 64,  # a pickle
    hostile({"__metadata__": {"a": 1}}),
]
