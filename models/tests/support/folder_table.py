"""The page of the guide about the settings of folders: what is read, found by reading, and the rows of the table.

python models/tests/support/folder_table.py  # writes the page
"""

import json
import re
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

from gguf_files import byte_level, sentencepiece, write
from language_folders import SPECIAL, save_language_model
from text_folders import add_pipeline, random_dense, save_bert, write_json

import selfattn_models as models
from selfattn.engine.rope import KINDS
from selfattn_models import _folder, _known_settings, loading

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/settings.md"
SIZES = {
    "vocab_size": 300,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "hidden_dim": 8,
    "num_key_value_heads": 2,
    "image_size": 4,
    "patch_size": 2,
}
GGUF = ("GGUF: architecture", "GGUF: tokenizer.ggml")
TEXT = """\
# Settings of folders

This page lists every key that Transformers, sentence-transformers or llama.cpp write into a model's files, and what
`models.load` does with it. **Obeyed** keys mean the same as there. Keys **of no effect** change no result here, for the
given reason. **Refused** keys are a ValueError unless they are null or have the value in brackets. Other keys that are
not null change nothing; one `models.FolderWarning` for each folder names them. `models/tests/support/folder_table.py`
writes this page, and a test compares it with what the code reads.

The library `tokenizers` reads all of `tokenizer.json`; its padding and truncation are switched off, since texts are
packed and the model's length is the limit. `special_tokens_map.json` and `added_tokens.json`, whose keys are tokens,
count only if `tokenizer_config.json` has no `added_tokens_decoder`; `chat_template.jinja` counts before
`chat_template`, and of several templates the default one. A folder with `adapter_config.json` (PEFT) is refused: merge
the adapter into its model. Code in a folder is never run, and pickles are not read. If the head of a language model
differs from its embedding table, the head is kept for any `tie_word_embeddings`, as in Transformers. A key that is both
obeyed and refused is obeyed where the folder makes embeddings, and refused in a language model.

"""


@contextmanager
def reading(found):
    """Record the keys that are read, by file or by the kind of the settings; of ``config.json`` also by model."""
    finish = _folder.Config.finish

    def recording(self):
        name = self.file if self.file.endswith(".json") else GGUF[self.before.startswith("tokenizer")]
        before = self.before if self.file.endswith(".json") else ""
        found.setdefault(name, set()).update(before + key for key in self.read)
        finish(self)

    _folder.Config.finish = recording
    try:
        yield
    finally:
        _folder.Config.finish = finish


def obeyed():
    """Return the keys that are read, by row of the table."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", models.FolderWarning)
        for table in (loading.MODELS, loading.CLASSIFIERS, loading.EMBEDDERS):
            for kind, model in table.items():
                own = {}
                with reading(own):
                    model(SIZES | {"model_type": kind}, rng=0)
                found.setdefault(f"config.json of {kind}", set()).update(own["config.json"])
        with reading(found), tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                rope = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
                rope |= {"short_factor": [1, 1], "long_factor": [1, 1], "mscale": 1.0, "mscale_all_dim": 1.0}
                models.LlamaForCausalLM(SIZES | {"rope_parameters": rope}, rng=0)
            _sample(Path(folder))
    common = found.pop("config.json")
    found["rope_parameters"] = {key.split(".", 1)[1] for key in common if key.startswith("rope_parameters.")}
    return {re.sub(r"^\d_|/config\.json$", "", name): keys for name, keys in found.items()}


def _sample(folder):
    """Load a folder of each kind with all files that are read, and a GGUF file."""
    text, language = folder / "text", folder / "language"
    more = {"transformer": {"max_seq_length": 9}, "sentence": {"prompts": {}}, "dense": random_dense(4)}
    add_pipeline(save_bert(text), {"pooling_mode": "mean"}, normalize=True, new=True, **more)
    save_language_model(language)
    write_json(language / "generation_config.json", {})
    models.load(text)
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    special = dict.fromkeys([f"{name}_token" for name in names], SPECIAL[0])
    special |= {"additional_special_tokens": [], "legacy": False}
    for name in ("GPT2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"):
        write_json(language / "tokenizer_config.json", special | {"tokenizer_class": name})
        write_json(language / "special_tokens_map.json", special)
        models.load(language)
    for kind in (models.LlamaForCausalLM, models.GPT2LMHeadModel):
        config = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8} if "gpt2" in kind.kinds else {}
        model = kind(SIZES | {"max_position_embeddings": 8} | config, rng=0)
        entries = sentencepiece({"a": 0.0}) if "llama" in kind.kinds else byte_level(SPECIAL)
        write(folder / "a.gguf", model.config, model.state_dict(), entries=entries)
        models.load(folder / "a.gguf")


# --------------------------------------------------------------------------------------------------------- the page


def code(keys):
    return ", ".join(f"`{key}`" for key in sorted(keys))


def row(*cells):
    return f"| {' | '.join(cells)} |\n" if any(cells[1:]) else ""


def as_read(keys, rows):
    return ", ".join([code(keys), *(f"`{alias}` as `{key}`" for alias, key in rows.aliases.items())])


def no_effect(rows):
    return "; ".join(f"*{reason}*: {code(keys.split())}" for reason, keys in rows.no_effect.items())


def refused(rows):
    """List refused keys, those with the same value together."""
    groups = {}
    for key, value in rows.refused.items():
        values = value if isinstance(value, tuple) else (value,)
        groups.setdefault(" or ".join(json.dumps(each) for each in values), []).append(key)
    return "; ".join(f"{code(keys)} ({value})" for value, keys in groups.items())


def by_model(read):
    """Return the rows of the keys of ``config.json`` that not all models have; models with the same keys are in one."""
    kinds = {name: keys for name, keys in read.items() if name.startswith("config.json of ")}
    common, same = set.intersection(*kinds.values()), {}
    for name, keys in kinds.items():
        own = _known_settings.TABLE.get(name, _known_settings.Rows())
        given = as_read({key for key in keys - common if "." not in key}, own)
        cells = given, no_effect(own), refused(own)
        same.setdefault(cells, []).append(name.removeprefix("config.json of "))
    rows = _known_settings.TABLE["config.json"]
    text = row("`config.json`", code(common), no_effect(rows), refused(rows))
    text += "".join(row(", ".join(names), *given) for given, names in same.items())
    return text + row("`rope_parameters`, `rope_scaling`", code(read["rope_parameters"]), "", "")


def page(read):
    """Return the page, for what :func:`obeyed` returns."""
    text = TEXT + "| file | obeyed | no effect | refused |\n| --- | --- | --- | --- |\n" + by_model(read)
    for name, rows in _known_settings.TABLE.items():
        if not name.startswith("config.json"):
            shown = f"`{name}`" if name.endswith(".json") and " " not in name else name
            text += row(shown, as_read(read.get(name, ()), rows), no_effect(rows), refused(rows))
    return text


if __name__ == "__main__":
    PAGE.write_text(page(obeyed()))
