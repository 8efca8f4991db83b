"""No code runs from a file (SECURITY.md): hostile models, weights, templates and arrays, read by a Python that watches itself."""

import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from processes import PYTHON, finish, start

from selfattn import files, nn

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("jinja2")
from language_folders import save_language_model
from text_folders import D, save_bert

PROGRAM = Path(__file__).parents[1] / "support" / "watched_reading.py"
ESCAPES = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch %s') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute": "{{ messages|map(attribute='__class__')|list }}{{ self.__init__.__globals__['__builtins__']['open']('%s', 'w') }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "import": "{% import 'os' as os %}{{ os.system('touch %s') }}",
}


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_hostile(place, marker):
    """Make good and hostile folders and files, each with the expected result: a message's beginning, or an object."""
    payload = pickle.dumps(Payload(marker))
    code = f"open({str(marker)!r}, 'w')\n"
    expected = {}

    def bert(name, what):
        expected[name] = what
        return save_bert(place / name, num_hidden_layers=1)

    bert("good-encoder", D)
    folder = bert("pickled weights", "FileNotFoundError")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "pytorch_model.bin").write_bytes(payload)
    (bert("a pickle of another name", "ValueError") / "model.safetensors").write_bytes(payload)
    (bert("a pickle besides", D) / "pytorch_model.bin").write_bytes(payload)
    folder = bert("code of its own", D)
    change_json(folder / "config.json", auto_map={"AutoModel": "evil.Model", "AutoConfig": "evil.Config"})
    for module in ("evil", "__init__", "sitecustomize", "tokenizers", "safetensors", "modeling_bert"):
        (folder / f"{module}.py").write_text(code)
    folder = bert("modules of its own", "ValueError")
    (folder / "evil.py").write_text(code)
    module = {"idx": 0, "name": "0", "path": "", "type": "evil.Module"}
    (folder / "modules.json").write_text(json.dumps([module]))
    folder = bert("a pickled tokenizer", "ValueError")
    (folder / "tokenizer.json").write_bytes(payload)

    expected["good-chat"] = "<|user|>hi"
    save_language_model(place / "good-chat")
    for name, template in ESCAPES.items():
        expected[f"template {name}"] = "ValueError"
        folder = save_language_model(place / f"template {name}")
        change_json(folder / "tokenizer_config.json", chat_template=template.replace("%s", str(marker)))

    def own(name, what):
        expected[name] = what
        model = nn.EmbeddingModel(str.split, 10, 4, max_seq_len=8, rng=0)
        files.save_model(model, place / name)
        (place / name / "selfattn").touch()
        return place / name

    own("good-own", "ValueError")  # its tokenizer is a function, which is not saved
    (own("own weights", "ValueError") / "model.safetensors").write_bytes(payload)

    q = np.ones((3, 4))
    np.savez(place / "good-arrays.npz", query=q, key=q, value=q)
    expected["good-arrays"] = "exit code 0"
    buffer = io.BytesIO()
    np.savez(buffer, query=np.array([Payload(marker)], object), key=q, value=q)
    (place / "pickled arrays.npz").write_bytes(buffer.getvalue())
    (place / "pickled.safetensors").write_bytes(payload)
    (place / "a pickle for llama.gguf").write_bytes(payload)
    return expected | {"pickled arrays": "exit code 1", "pickled": "ValueError", "a pickle for llama": "ValueError"}  # fmt: skip


def test_no_code_runs_from_a_file(tmp_path):
    marker, place = tmp_path / "ran", tmp_path / "place"
    place.mkdir()
    expected = make_hostile(place, marker)
    done = finish(start([*PYTHON, PROGRAM, place], cwd=place / "code of its own"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [event.split()[0] for event in found.pop("control")[1]] == ["pickle.find_class", "compile", "exec"]
    assert found.keys() == expected.keys()
    for name, (came, events) in found.items():
        wanted = expected[name]
        assert came == wanted or (isinstance(wanted, str) and str(came).startswith(wanted)), (name, came)
        assert not events, (name, events)
    assert not marker.exists()
