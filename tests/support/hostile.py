"""Hostile contents of files: changes, headers of safetensors, and what the targets of `fuzzing` share."""

import contextlib
import copy
import io
import json
import struct
import warnings
import zipfile

SENTENCE = "the sea was calm"

NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    10**400,
    -(2**63),
    0.0,
    0.5,
    -0.5,
    1e-320,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
]
SIZES = [n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64]  # numbers that 8 bytes can hold
TEXTS = [
    "",
    " ",
    "a",
    "\0",
    "é",
    "\ud800",
    "🙂",
    "..",
    "../x",
    "/",
    "/etc/passwd",
    "a/b",
    "x" * 5000,
    "0",
    "8",
    "true",
    "float32",
    "BF16",
    "F8_E4M3",
    "int8",
    "nan",
    "__class__",
    "{}",
    "%s%n",
    "mean",
    "cls",
]
OTHERS = [None, True, False, [], {}, [[]], [None], [0], {"": None}, {"a": {"b": []}}, [1, 2, 3], ["a", "b"]]


def places(node):
    """All places in a tree of JSON, as (container, key)."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(pairs):
        yield node, key
        yield from places(value)


def hostile(draw, value):
    """Return a value to replace another: a near one, one of the same type, or any."""
    kind = draw.randrange(4)
    if kind == 0 and isinstance(value, int | float):
        number = draw.choice([value + 1, value - 1, value * 2, -value, value * 10**9])
        return number if draw.randrange(4) else float(max(-(2**900), min(number, 2**900)))
    if kind == 1 and isinstance(value, str) and value:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(TEXTS) + value[at + draw.randrange(3) :]
    if kind == 2:
        return draw.choice([[value], {"value": value}, str(value), [value] * 3])
    return copy.deepcopy(draw.choice(draw.choice([NUMBERS, TEXTS, OTHERS])))


def change_tree(tree, draw):
    """Change a tree of JSON in one to three places."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        found = list(places(tree))
        if not found:
            return hostile(draw, tree)
        node, key = draw.choice(found)
        what = draw.randrange(8)
        if what == 0:
            del node[key]
        elif what == 1:
            other, there = draw.choice(found)
            with contextlib.suppress(KeyError, IndexError):
                node[key] = copy.deepcopy(other[there])
        elif what == 2 and isinstance(node, dict):
            names = [name for _, name in found if isinstance(name, str)] + TEXTS
            node[draw.choice(names)] = node.pop(key)
        elif what == 3 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        else:
            node[key] = hostile(draw, node[key])
    if not draw.randrange(40):
        return hostile(draw, tree)
    return tree


def dumps(tree):
    return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")


def change_bytes(content, draw):
    """Change a content in one to four places."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, length = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8, 64])
        what = draw.randrange(6)
        if what == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            data[at : at + length] = draw.randbytes(length)
        elif what == 2:
            del data[at : at + length]
        elif what == 3:
            data[at:at] = data[at : at + length] * draw.choice([1, 2, 100])
        elif what == 4:
            data[at : at + 8] = draw.choice(SIZES).to_bytes(8, "little")
        elif not draw.randrange(4):
            del data[at:]
    return bytes(data)


def change_json(content, draw):
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return change_bytes(content, draw)
    if draw.randrange(12):
        with contextlib.suppress(ValueError):  # an int of thousands of digits
            return dumps(change_tree(tree, draw))
    if draw.randrange(2):
        return change_bytes(content, draw)
    deep = draw.choice([50, 500, 100_000])
    made = [b"[" * deep, b'{"a":' * deep, b"9" * deep, content + content, b"\xef\xbb\xbf" + content]
    return draw.choice(made)


def change_safetensors(content, draw):
    """Change the header as JSON, or bytes anywhere."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if draw.randrange(5) == 0:
        return change_bytes(content, draw)
    if draw.randrange(4) == 0:  # numbers that mean something else
        data = change_bytes(data, draw) if draw.randrange(2) else data[: len(data) - draw.randrange(1, 9)]
    else:
        header = change_json(header, draw)
    length = len(header) if draw.randrange(8) else draw.choice(SIZES)
    return length.to_bytes(8, "little") + header + data


def change_zip(content, draw):
    """Change a member of an archive, or bytes anywhere."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # a damaged archive raises many kinds of errors
        return change_bytes(content, draw)
    if not members or draw.randrange(3) == 0:
        return change_bytes(content, draw)
    n = draw.randrange(len(members))
    name, data = members[n]
    what = draw.randrange(6)
    if what == 0:
        del members[n]
    elif what == 1:
        names = [*TEXTS[2:5], "query.npy", "tokens.npy", "dropout_p.npy", "window.npy"]
        members[n] = draw.choice(names), data
    elif what == 2:
        members[n] = name, members[draw.randrange(len(members))][1]
    elif what == 3:  # a header that contradicts the content
        for old, new in draw.choice(
            [
                [
                    (
                        b"'<f4'",
                        draw.choice([b"'<f8'", b"'|O'  ", b"'<U9'", b"'>c16'", b"'|V4'", b"[('a', '<f4')]"]),
                    )
                ],
                [(b"(", draw.choice([b"(-1, ", b"(99999999999, ", b"((", b"(0, ", b"(2, 3, "]))],
                [(b"False", b"True")],
                [(b"descr", b"dsecr")],
            ]
        ):
            data = data.replace(old, new, 1)
        members[n] = name, data
    else:
        members[n] = name, change_bytes(data, draw)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", draw.choice([0, 8])) as archive:
        warnings.simplefilter("ignore")  # two members with one name give a warning
        for name, data in members:
            with contextlib.suppress(UnicodeEncodeError):
                archive.writestr(name.partition("\0")[0] or "x", data)
    return buffer.getvalue()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_parts(folder, known, names, content):
    """Write known files; files of these names get the members of a JSON object, or are left out without an object."""
    found = {name: data for name, data in known.items() if name not in names}
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(content)
        if isinstance(tree, dict):
            found |= {name: dumps(part) for name, part in tree.items() if name in names}
    put(folder, found)


def put(folder, found):
    for name, content in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def reads(name, use, known=lambda content: {}):
    """Read a content under a name, among other files that are known."""

    def read(folder, content):
        put(folder, known(content) | {name: content})
        use(folder)

    return read


def closest(content, configs, setting):
    """Return the configuration with the model type of a content, and the same setting if there is one."""
    try:
        given = [str(json.loads(content).get(key)) for key in ("model_type", setting)]
    except (ValueError, AttributeError, RecursionError):
        return 0
    same = [[str(config.get("model_type")), str(config.get(setting))] for config in configs]
    return max(range(len(same)), key=lambda n: (same[n][0] == given[0], same[n] == given))


def use(function, *arguments):
    """Use what was read. It may raise errors, as for a word that its tokenizer lacks, which need not name a file."""
    try:
        function(*arguments)
    except ValueError as error:
        if type(error) is not ValueError:
            raise


def safetensors_file(header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape=(16,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = [
    b"",
    b"\0\0\0",
    struct.pack("<Q", 2**63),
    safetensors_file({}, length=2**40),
    safetensors_file(b"not json"),
    safetensors_file(b"{" * 10_000),
    safetensors_file({"a": 3}),
    safetensors_file({"a": entry(0, 128)}),  # beyond the end
    safetensors_file({"a": entry(-64, 0)}),
    safetensors_file({"a": entry(64, 0)}),
    safetensors_file({"a": entry(0, 64, (2**62, 8))}),  # a product beyond 64 bits
    safetensors_file({"a": entry(0, 64, (-4, -4))}),
    safetensors_file({"a": entry(0, 60)}),  # fewer bytes than the shape needs
    safetensors_file({"a": entry(0, 64), "b": entry(0, 64)}),  # two tensors overlap
    safetensors_file({"a": entry(0, 64), "b": entry(32, 96)}, b"\0" * 96),
    safetensors_file({"a": entry(8, 72)}, b"\0" * 72),  # a hole before the tensor
    safetensors_file({"a": entry(0, 64)}, b"\0" * 80),  # more bytes than the header says
    safetensors_file({"a": entry(0, 64, dtype="F33")}),
    safetensors_file(b'{"a": {"dtype": "F32", "shape": [16]}}'),
    b"\x80\x02}q\x00." + b"\0" * 64,  # a pickle
    safetensors_file({"__metadata__": {"a": 1}}),
]
