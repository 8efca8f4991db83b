"""No code runs from a file (SECURITY.md): hostile models, weights and arrays, read by a Python that watches itself."""

import io
import pickle

import numpy as np
from hostile_places import Payload, add_code, assert_no_code_runs, change_json
from processes import SUPPORT

from selfattn import files, nn
from selfattn.text import WhitespaceTokenizer


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
