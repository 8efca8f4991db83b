"""What stands in the place of a file of a model or an index is an error that names it: pipes, devices, links, holes."""

import json
import os

import fuzzing_language
import fuzzing_models
import pytest
from hostile import contents, put
from hostile_places import THINGS, assert_refused
from hypothesis import given
from hypothesis import strategies as st
from killed_writers import embed
from processes import PYTHON, finish, start

import selfattn_models as models
from selfattn_models import search


def sharded():
    return fuzzing_models.around_index(b"") | {"model.safetensors.index.json": fuzzing_models.an_index()[0]}


def speaking():
    more = {
        "chat_template.jinja": b"{{ messages }}",
        "added_tokens.json": b"{}",
        "adapter_config.json": b"{}",
    }
    named = json.loads(fuzzing_language.speaking()["tokenizer_config.json"])
    plain = {key: value for key, value in named.items() if key != "tokenizer_class"}
    return fuzzing_language.speaking() | more | {"tokenizer_config.json": json.dumps(plain).encode()}


def use_index(folder):
    index = search.Index.open(folder, embed)
    index.search("the sea", where={"n": 1})
    index.add(["new"])


def loads(name=""):
    return lambda folder: models.load(folder / name)


# The files of each kind of place, and what reads them.
PLACES = {
    "encoder": (fuzzing_models.piped, loads()),
    "shards": (sharded, loads()),
    "language model": (speaking, loads()),
    "GGUF": (lambda: {"x.gguf": b""}, loads("x.gguf")),
    "index": (lambda: fuzzing_models.searched("float32"), use_index),
    "index of int8": (lambda: fuzzing_models.searched("int8"), use_index),
}
PAIRS = [(kind, name, thing) for kind, (found, _) in PLACES.items() for name in found() for thing in THINGS]


@given(st.sampled_from(PAIRS))
def test_what_is_no_file(pair):
    kind, name, thing = pair
    found, use = PLACES[kind]
    assert_refused(found(), name, thing, use)


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path):
    model = fuzzing_models.piped()
    put(tmp_path / "received", model)
    (tmp_path / "received" / "1_Pooling").rename(tmp_path / "elsewhere")
    (tmp_path / "received" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    loaded = models.load(tmp_path / "received")
    (tmp_path / "elsewhere" / "config.json").write_text("mine")
    with pytest.raises(OSError, match="1_Pooling"):
        models.save(loaded, tmp_path / "received")
    assert contents(tmp_path / "elsewhere") == {"config.json": b"mine"}
    assert not list((tmp_path / "received").glob(".*"))


# Reads files of 3 GB in 1 GB of memory, beyond what is in use.
SHORT = """
import resource, sys
import selfattn_models as models
from selfattn import files
from selfattn.text import read_text
with open("/proc/self/statm") as file:
    in_use = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, resource.RLIM_INFINITY))
for read, path in zip((models.load, models.load, files.load_arrays, read_text), sys.argv[1:]):
    try:
        read(path)
    except MemoryError as error:
        print(error)
"""


def test_a_file_that_does_not_fit_into_memory_is_named(tmp_path):
    size = 3 * 2**30
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    start_of = {"model.safetensors": len(header).to_bytes(8, "little") + header}
    start_of |= {"x.gguf": b"GGUF", "x.safetensors": start_of["model.safetensors"], "x.txt": b""}
    put(tmp_path, {"config.json": json.dumps(fuzzing_models.BERT).encode()} | start_of)
    for name, begin in start_of.items():
        os.truncate(tmp_path / name, len(begin) + size)
    paths = [tmp_path, *(tmp_path / name for name in list(start_of)[1:])]
    done = finish(start([*PYTHON, "-c", SHORT, *paths]))
    expected = [
        f"{tmp_path / name}: its {len(begin) + size} bytes do not fit" for name, begin in start_of.items()
    ]
    assert [line.partition(" into")[0] for line in done.stdout.splitlines()] == expected, done.stderr
