"""No code runs from a file (SECURITY.md): hostile pretrained models, weights, tokenizers and templates."""

import json
import pickle
from pathlib import Path

from hostile_places import Payload, add_code, assert_no_code_runs, change_json
from language_folders import save_language_model
from text_folders import D, save_bert

PROGRAM = Path(__file__).parents[1] / "support" / "watched_models.py"
ESCAPES = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch %s') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute": "{{ messages|map(attribute='__class__')|list }}"
    "{{ self.__init__.__globals__['__builtins__']['open']('%s', 'w') }}",
    "format": "{{ '.{0.__class__}'.format(messages)[:2] }}.",  # the sandbox formats nothing: ".."
    "import": "{% import 'os' as os %}{{ os.system('touch %s') }}",
}


def make_hostile(place, marker):
    payload = pickle.dumps(Payload(marker))
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
    add_code(folder, marker)
    folder = bert("modules of its own", "ValueError")
    add_code(folder, marker, ["evil"])
    module = {"idx": 0, "name": "0", "path": "", "type": "evil.Module"}
    (folder / "modules.json").write_text(json.dumps([module]))
    folder = bert("a pickled tokenizer", "ValueError")
    (folder / "tokenizer.json").write_bytes(payload)

    expected["good-chat"] = "<|user|>hi"
    save_language_model(place / "good-chat")
    for name, template in ESCAPES.items():
        expected[f"template {name}"] = ".." if name == "format" else "ValueError"
        folder = save_language_model(place / f"template {name}")
        change_json(folder / "tokenizer_config.json", chat_template=template.replace("%s", str(marker)))

    (place / "a pickle for llama.gguf").write_bytes(payload)
    return expected | {"a pickle for llama": "ValueError"}


def test_no_code_runs_from_a_file(tmp_path):
    assert_no_code_runs(PROGRAM, make_hostile, tmp_path)
