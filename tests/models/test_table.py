"""Every key that a folder may have is obeyed, of no effect, refused, or in one warning."""

import json

import pytest

from selfattn import models

pytest.importorskip("safetensors", reason="weights are safetensors files")

BERT = {
    "model_type": "bert", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 9,
}  # fmt: skip
LLAMA = BERT | {
    "model_type": "llama",
    "sliding_window": 5,
    "rope_scaling": {"type": "linear", "factor": 2, "also": 3},
}


def test_one_warning_names_every_setting_that_is_not_known(tmp_path):
    models.save(models.BertModel(BERT, rng=0), tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(BERT | {"new": 3, "other": False, "null": None, "_own": 1})
    )
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{path or 'Transformer'}"}
        for path in ("", "Pooling")
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling/config.json").write_text(
        '{"pooling_mode": "mean", "weights": [1], "embedding_dimension": 8}'
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"expansion": 32}')
    with pytest.warns(models.FolderWarning) as found:
        models.load(tmp_path)
    assert len(found) == 1 and found[0].filename == __file__
    names = "Pooling/config.json: weights; config.json: new, other; sentence_bert_config.json: expansion"
    assert str(found[0].message).startswith(f"{tmp_path}: ") and str(found[0].message).endswith(f": {names}")


def test_a_model_that_is_made_warns_where_it_is_made():
    with pytest.warns(
        models.FolderWarning, match=": config.json: rope_scaling.also, sliding_window$"
    ) as found:
        models.LlamaForCausalLM(LLAMA, rng=0)
    assert len(found) == 1 and found[0].filename == __file__
