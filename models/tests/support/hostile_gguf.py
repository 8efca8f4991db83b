"""GGUF files in parts, which can be changed and put together again; the package `gguf` writes only valid files."""

import struct
from dataclasses import dataclass, field, replace

from hostile import NUMBERS, SIZES, TEXTS, change_bytes

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
KINDS = [*range(16), 20, 23, 30, 99, 2**32 - 1]  # kinds of tensors
ALIGNED = 32


@dataclass
class Parts:
    """The content of a file: entries are (name, type, bytes of the value), tensors (name, shape, kind, offset)."""

    entries: list = field(default_factory=list)
    tensors: list = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    counts: tuple = (0, 0)  # how many more tensors and entries the header claims


def packed(value):
    """The type of a value, and its bytes."""
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return 8, struct.pack("<Q", len(text)) + text
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        code = next((n for n in (4, 5, 10, 11) if fits(CODES[n], value)), 10)
        return code, struct.pack("<" + CODES[code], value % 2**64 if code == 10 else value)
    if isinstance(value, float):
        return (6, struct.pack("<f", value)) if fits("f", value) else (12, struct.pack("<d", value))
    inner = [packed(each) for each in value]
    kind = inner[0][0] if inner else 4
    return 9, struct.pack("<IQ", kind, len(inner)) + b"".join(content for _, content in inner)


def fits(code, value):
    try:
        struct.pack("<" + code, value)
    except (struct.error, OverflowError):
        return False
    return True


def put_together(parts):
    """The file."""
    more_tensors, more_entries = parts.counts
    counts = max(0, len(parts.tensors) + more_tensors), max(0, len(parts.entries) + more_entries)
    found = [b"GGUF", struct.pack("<IQQ", parts.version, *(n % 2**64 for n in counts))]
    for name, kind, content in parts.entries:
        found += [packed(name)[1], struct.pack("<I", kind), content]
    for name, shape, kind, offset in parts.tensors:
        numbers = (n % 2**64 for n in shape[::-1])
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *numbers, kind % 2**32, offset % 2**64)
        found += [packed(name)[1], place]
    header = b"".join(found)
    return header + bytes(-len(header) % ALIGNED) + parts.data


def taken_apart(content):
    """Return the parts of a file; raise ValueError or struct.error if it cannot be parsed."""
    at = 4

    def take(form):
        nonlocal at
        found = struct.unpack_from("<" + form, content, at)
        at += struct.calcsize("<" + form)
        return found

    def text():
        nonlocal at
        (length,) = take("Q")
        if length > len(content) - at:
            raise ValueError
        at += length
        return content[at - length : at].decode()

    def value(kind):
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = take("IQ")
            if count > len(content):
                raise ValueError
            for _ in range(count):
                value(inner)
        else:
            take(CODES.get(kind, "999999999B"))

    version, tensors, entries = take("IQQ")
    if max(tensors, entries) > 1000:
        raise ValueError
    parts = Parts(version=version)
    for _ in range(entries):
        name, (kind,) = text(), take("I")
        begin = at
        value(kind)
        parts.entries.append((name, kind, content[begin:at]))
    for _ in range(tensors):
        name, (dimensions,) = text(), take("I")
        if dimensions > 10:
            raise ValueError
        shape = take(f"{dimensions}Q")[::-1]
        parts.tensors.append((name, shape, *take("IQ")))
    return replace(parts, data=content[at + -at % ALIGNED :])


def change_gguf(content, draw):
    """Change entries and tensors of the header, or bytes anywhere."""
    try:
        parts = taken_apart(content)
    except (ValueError, struct.error):
        return change_bytes(content, draw)
    if draw.randrange(8) == 0:
        return change_bytes(content, draw)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        what = draw.randrange(8)
        if what < 4 and parts.entries:
            change_entry(parts, draw)
        elif what < 6 and parts.tensors:
            change_tensor(parts, draw)
        elif what == 6:  # numbers that mean something else
            cut = parts.data[: -draw.choice([1, 32, 1000])]
            parts.data = change_bytes(parts.data, draw) if draw.randrange(2) else cut
        elif not draw.randrange(2):
            parts.counts = (draw.choice([0, 1, -1, 2**61]), draw.choice([0, 1, -1, 2**62]))
        else:
            parts.version = draw.choice([0, 1, 2, 3, 4, 0x03000000, 2**32 - 1])
    return put_together(parts)


def change_entry(parts, draw):
    n = draw.randrange(len(parts.entries))
    name, kind, content = parts.entries[n]
    what = draw.randrange(8)
    if what == 0:
        del parts.entries[n]
    elif what == 1:
        parts.entries.append(parts.entries[n])
    elif what == 2:
        other, *_ = draw.choice(parts.entries)
        parts.entries[n] = draw.choice([other, name + "x", draw.choice(TEXTS)]), kind, content
    elif what == 3:
        parts.entries[n] = name, *draw.choice(parts.entries)[1:]
    elif what == 4:
        parts.entries[n] = name, kind, change_bytes(content, draw)
    elif what == 5 and kind == 9:
        parts.entries[n] = name, kind, content[:4] + struct.pack("<Q", draw.choice(SIZES)) + content[12:]
    else:
        value = draw.choice([*NUMBERS, *TEXTS, True, False, [], [1, 2], ["a", "b"], [0.5], [[1]], [True]])
        parts.entries[n] = name, *packed(value)


def change_tensor(parts, draw):
    n = draw.randrange(len(parts.tensors))
    name, shape, kind, offset = parts.tensors[n]
    what = draw.randrange(7)
    if what == 0:
        del parts.tensors[n]
    elif what == 1:
        other = draw.choice(parts.tensors)[0]
        parts.tensors[n] = draw.choice([other, name + ".x", *TEXTS]), shape, kind, offset
    elif what == 2:
        other = draw.choice(parts.tensors)
        parts.tensors[n] = name, *other[1:]
    elif what == 3:
        parts.tensors[n] = name, shape, draw.choice(KINDS), offset
    elif what == 4:
        offset = draw.choice([offset + 1, offset + 32, max(0, offset - 32), *SIZES])
        parts.tensors[n] = name, shape, kind, offset
    elif what == 5:
        shape = draw.choice([shape[::-1], shape[1:], (1, *shape), (*shape, 1), ()])
        parts.tensors[n] = name, shape, kind, offset
    elif shape:
        at = draw.randrange(len(shape))
        size = draw.choice([shape[at] + 1, shape[at] * 2, shape[at] // 2, *SIZES])
        parts.tensors[n] = name, (*shape[:at], size, *shape[at + 1 :]), kind, offset
