"""Readers of live pages, under node: every form of a model against Python's readers, bit by bit; damaged files."""

import base64
import io
import random
import re
import zipfile
import zlib

import numpy as np
from gguf_files import random_blocks
from hostile import change_bytes, change_safetensors
from hostile_gguf import change_gguf
from live import READERS, run

from selfattn import _disk
from selfattn.views import language
from selfattn_models._gguf_file import GGUF
from selfattn_models.pages.texts import PACKAGE

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Reads a model of whatever form, and all its tensors, some rows at a time.
READ = """
const read = async (given) => {
  const files = await readModel(
    given.map(([path, bytes]) => ({ path, file: new Blob([Buffer.from(bytes, "base64")]) })),
  );
  const found = { names: [...files.keys()], tensors: {} };
  for (const [name, entry] of files) {
    const gguf = name.endsWith(".gguf") ? await readGguf(entry) : null;
    const tensors = gguf?.tensors ?? (
      name.endsWith(".npz") ? await npz(entry)
      : name.endsWith(".safetensors") ? await safetensors(entry)
      : []
    );
    if (gguf) found.metadata = [...gguf.metadata];
    for (const [name, tensor] of tensors) {
      const rows = tensor.shape.slice(0, -1).reduce((a, b) => a * b, 1), some = Math.min(rows, 3);
      const parts = tensor.kind === "I64" ? [] : [await tensor.read(0, some), await tensor.read(some)];
      const bytes = Buffer.concat(parts.map((x) => Buffer.from(x.buffer)));
      found.tensors[name] = [tensor.kind, tensor.shape, bytes.toString("base64")];
    }
  }
  return found;
};
"""
ALL = (
    f"{READ} return Promise.all("
    "given.map((one) => read(one).catch((error) => [error.sentence ?? error.stack, error.values])));"
)
MEMORY = 200  # MB of node's heap: hostile sizes would need more


def read_all(models, memory=None):
    """Read models, each a dict of files; of one that cannot be read, its fault."""
    given = [[[path, base64.b64encode(x).decode()] for path, x in files.items()] for files in models]
    return run(READERS, ALL, given, memory)


def zipped(files, method=zipfile.ZIP_DEFLATED, large=False, comment=b""):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.comment = comment
        for name, content in files.items():
            with archive.open(name, "w", force_zip64=large) as to:
                to.write(content)
    return file.getvalue()


def arrays():
    rng = np.random.default_rng(0)
    return {
        "f32": rng.standard_normal((5, 8)).astype(np.float32),
        "f16": rng.integers(0, 2**16, (7, 4), np.uint16).view(np.float16),
        "bf16": rng.integers(0, 0x7F80, (4, 3), np.uint16),
        "i8": rng.integers(-128, 128, (6, 5), np.int8),
        "ids": np.arange(4)[None],
        "no rows": np.zeros((0, 3), np.float32),
        "one": np.float32(2.5).reshape(()),
    }


def wide(name, array):
    """What pages read: float32, and int8 as it is."""
    if name == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array if array.dtype == np.int8 else array.astype(np.float32)


def check(found, expected, bits=True):
    """Compare tensors; without ``bits`` 0 and -0 are equal, which differ between Python and a page only in damaged
    quants."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        _, shape, content = found[name]
        assert shape == list(array.shape), name
        same = np.frombuffer(base64.b64decode(content), array.dtype).reshape(shape)
        np.testing.assert_array_equal(same, array, name)
        kept = ~np.isnan(array) & bits
        assert same[kept].tobytes() == array[kept].tobytes(), name


def test_folders_zips_and_npz_are_read_bit_by_bit():
    given = arrays()
    folder = {
        "config.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "modules.json": b"[]",
        "tokenizer.json": b"{}" * 9999,
        "model.safetensors": _disk.to_safetensors(given, bfloat16=["bf16"]),
    }
    inner = {f"mine/{name}": content for name, content in folder.items()}
    packed = [
        zipped(inner),
        zipped(folder, zipfile.ZIP_STORED),
        zipped(inner, large=True, comment=b"PK\5\6" * 9),
    ]
    junk = {"mine/.DS_Store": b"", "__MACOSX/mine/config.json": b"{}"}
    npz = io.BytesIO()
    np.savez_compressed(npz, **{name: given[name] for name in ("f32", "f16", "i8", "no rows")})
    models = [
        folder,
        inner | junk,
        *({"some.zip": content} for content in packed),
        {"gpt.npz": npz.getvalue()},
    ]
    *folders, alone = read_all(models)
    expected = {name: wide(name, array) for name, array in given.items()}
    for found in folders:
        assert set(folder) <= set(found["names"]) and found["tensors"].pop("ids")[0] == "I64"
        check(found["tensors"], {name: expected[name] for name in given if name != "ids"})
    check(alone["tensors"], {name: expected[name] for name in ("f32", "f16", "i8", "no rows")})


def gguf_file(path, entries):
    import gguf

    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(1)
    for name, value in entries.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for kind in KINDS:
        quant, array = gguf.GGMLQuantizationType[kind], rng.standard_normal((6, 512)).astype(np.float32)
        array[:, ::7] = 0
        raw = random_blocks(quant, 6, 512) if kind.endswith("_K") else gguf.quants.quantize(array, quant)
        writer.add_tensor(kind, raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


ENTRIES = {
    "a.text": "é 😀",
    "a.list": ["b", "ü", ""],
    "numbers": [1, -2, 3],
    "yes": True,
    "half": 0.5,
    "much": 2**31 - 1,
}


def test_gguf_is_read_as_python_reads_it(tmp_path):
    path = tmp_path / "model.gguf"
    (found,) = read_all([{"model.gguf": gguf_file(path, ENTRIES)}])
    python = GGUF(path)
    assert dict(found["metadata"]) == python.metadata
    assert {name: kind for name, (kind, *_) in found["tensors"].items()} == {kind: kind for kind in KINDS}
    check(found["tensors"], {name: python.array(name) for name in python.tensors})


ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError)
# What JavaScript cannot see, 6.0 for 6, or has no use for: texts in the header.
LENIENT = "floating point|expected string or map|import ml_dtypes"


def truth(name, content, tmp_path):
    """What Python reads of a damaged file: its tensors, None if it refuses the file, or why it does if a page may
    read it."""
    path = tmp_path / name
    path.write_bytes(content)
    try:
        if name.endswith(".gguf"):
            file = GGUF(path)
            return {name: file.array(name) for name in file.tensors}
        if name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                path, content = tmp_path / "inner.safetensors", archive.read("model.safetensors")
            path.write_bytes(content)
        return {name: wide(name, array) for name, array in _disk.read_safetensors(path)[0].items()}
    except (ValueError, ImportError, KeyError, NotImplementedError, RuntimeError, *ZIP_ERRORS) as error:
        return str(error) if re.search(LENIENT, str(error)) else None


@np.errstate(all="ignore")  # damaged scales are infinite
def test_drawn_damage_is_a_fault_or_what_python_reads(tmp_path):
    """A file that Python refuses is a Fault, with memory for no claimed size; one that it takes has the same numbers,
    or is refused for its kind."""
    draw = random.Random(5)
    given = {name: array for name, array in arrays().items() if name not in ("bf16", "ids")}
    whole = _disk.to_safetensors(given)
    kinds = {
        "model.safetensors": (whole, change_safetensors),
        "model.gguf": (gguf_file(tmp_path / "whole.gguf", ENTRIES), change_gguf),
        "model.zip": (zipped({"config.json": b"{}", "model.safetensors": whole}), change_bytes),
    }
    cases = [(name, change(content, draw)) for name, (content, change) in kinds.items() for _ in range(150)]
    models = [{name: content} | ({"config.json": b"{}"} if "safe" in name else {}) for name, content in cases]
    known = set(language.read("en", PACKAGE)["files"])
    refused = 0
    for (name, content), found in zip(cases, read_all(models, MEMORY), strict=True):
        expected = truth(name, content, tmp_path)
        if isinstance(found, list):
            assert found[0] in known, found
            refused += 1
            # Python also reads archives with something before them.
            assert not isinstance(expected, dict) or found[0] == "kind of numbers" or name.endswith("zip"), (
                name,
                found,
            )
        elif isinstance(expected, dict):
            check(found["tensors"], expected, bits=False)
        else:  # Python also compares names, which an archive has twice; what the page reads has the right checksum
            assert expected is not None or name.endswith("zip"), (name, content)
            if expected is None and found["tensors"]:
                check(found["tensors"], {name: wide(name, array) for name, array in given.items()})
    assert 200 < refused < len(cases)
