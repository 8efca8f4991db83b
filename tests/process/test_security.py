"""No code runs from a file (SECURITY.md): hostile models, weights and arrays, read by a Python that watches itself."""

import io
import pickle
import re
from pathlib import Path

import numpy as np
from hostile_places import Payload, add_code, assert_no_code_runs, change_json
from processes import SUPPORT

from selfattn import attention_steps, files, nn
from selfattn.text import WhitespaceTokenizer
from selfattn.views import steps_page

ROOT = Path(__file__).parents[2]


def make_hostile(place, marker):
    payload = pickle.dumps(Payload(marker))
    expected = {}

    def own(name, what, tokenizer=str.split):
        expected[name] = what
        model = nn.EmbeddingModel(tokenizer, 10, 4, max_seq_len=8, rng=0)
        files.save_model(model, place / name)
        return place / name

    own("good-own", "ValueError")  # its tokenizer is a function, which is not saved
    (own("own weights", "ValueError") / "model.safetensors").write_bytes(payload)
    folder = own("code of its own", "EmbeddingModel", WhitespaceTokenizer([f"word{n}" for n in range(8)]))
    add_code(folder, marker)
    folder = own("code that its settings name", "ValueError")
    change_json(folder / "config.json", auto_map={"AutoModel": "evil.Model", "AutoConfig": "evil.Config"})
    add_code(folder, marker)

    q = np.ones((3, 4))
    np.savez(place / "good-arrays.npz", query=q, key=q, value=q)
    expected["good-arrays"] = "exit code 0"
    buffer = io.BytesIO()
    np.savez(buffer, query=np.array([Payload(marker)], object), key=q, value=q)
    (place / "pickled arrays.npz").write_bytes(buffer.getvalue())
    (place / "pickled.safetensors").write_bytes(payload)
    return expected | {"pickled arrays": "exit code 1", "pickled": "ValueError"}


def test_no_code_runs_from_a_file(tmp_path):
    assert_no_code_runs(SUPPORT / "watched_reading.py", make_hostile, tmp_path)


def test_pages_allow_no_connection_and_no_form():
    html = steps_page(attention_steps(*[np.eye(2)] * 3)).html
    (policy,) = re.findall(r'"Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    assert {name for name, value in rules.items() if value == "'none'"} == {
        "default-src",
        "form-action",
        "base-uri",
    }
    assert rules.keys() - {"default-src", "form-action", "base-uri"} == {"style-src", "script-src", "img-src"}


def test_each_test_that_security_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    for path, name in named:
        assert re.search(rf"^(def )?{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name
