"""Packs: a header of JSON, then arrays at multiples of 64 bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from selfattn import nn
from selfattn.views.packs import described, gpt_pack, pack_bytes


def read(pack: bytes) -> dict[str, Any]:
    """Return a header with its arrays, as ``live/pack.js`` reads them."""
    assert pack[:8] == b"sa-pack1"
    first = 16 + int.from_bytes(pack[8:16], "little")
    assert first % 64 == 0

    def array(value: dict[str, Any]) -> Any:
        if "at" not in value:
            return value
        assert value["at"] % 64 == 0
        dtype = np.dtype(value["type"]).newbyteorder("<")
        found = np.frombuffer(pack, dtype, int(np.prod(value["shape"])), first + value["at"])
        return found.reshape(value["shape"])

    return json.loads(pack[16:first], object_hook=array)


def test_a_pack_of_a_gpt_has_what_the_kernel_takes():
    model = nn.GPT(3, 8, num_layers=2, num_heads=2, max_seq_len=5, rng=0)
    header = read(gpt_pack(model, "ab ", "mine"))
    assert (header["kind"], header["name"], header["most"]) == ("language", "mine", 5)
    assert header["tokenizer"] == {"letters": ["a", "b", " "]}
    found, state = header["model"], model.state_dict()
    assert (found["d"], found["vocabulary"], found["output"]) == (8, 3, "table")
    assert_array_equal(found["table"], state["token_embedding.weight"])
    assert_array_equal(found["positions"], state["position_embedding.weight"])
    layer = found["layers"][1]
    assert (layer["heads"], layer["width"], layer["hidden"], layer["causal"]) == (2, 4, 32, True)
    assert_array_equal(layer["parameters"]["key"]["weight"], state["layers.1.self_attn.in_proj_weight"][8:16])
    assert_array_equal(layer["parameters"]["feedForwardNorm"]["bias"], state["layers.1.norm2.bias"])


def test_an_array_that_is_there_twice_is_stored_once():
    model = nn.GPT(3, 8, 2, 2, max_seq_len=64, positions="rotary", tie_word_embeddings=False, rng=0)
    pack = gpt_pack(model, "ab ")
    numbers = sum(array.size for array in model.parameters().values()) + 2 * 64 * 2
    assert len(pack) < 4 * numbers + 64 * 50 + 8000
    layers = read(pack)["model"]["layers"]
    assert_array_equal(layers[0]["rotary"]["cos"], layers[1]["rotary"]["cos"])


def test_what_pages_do_not_compute_is_refused():
    model = nn.GPT(3, 8, 2, 2, max_seq_len=5, rng=0)
    settings = model._model(model._description())
    with pytest.raises(ValueError, match="a table_factor"):
        described(settings._replace(table_factor=2.0))
    with pytest.raises(ValueError, match="float32 and int8, not float64"):
        pack_bytes({"model": {"table": np.zeros(2)}})
