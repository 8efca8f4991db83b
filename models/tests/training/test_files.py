"""Files that the core writes, which `selfattn_models.load` reads too."""

import numpy as np
import pytest

import selfattn_models
from selfattn import files, nn
from selfattn.text import WhitespaceTokenizer

SENTENCES = ["tom likes jerry", "jerry likes cheese", "tom chase jerry"]


def test_load_opens_an_embedding_model_too(tmp_path):
    tokenizer = WhitespaceTokenizer.train(SENTENCES)
    model = nn.EmbeddingModel(tokenizer, tokenizer.vocab_size, 8, max_seq_len=16, rng=0)
    files.save_model(model, tmp_path)
    again = selfattn_models.load(tmp_path)
    assert type(again) is nn.EmbeddingModel
    np.testing.assert_array_equal(again("tom likes jerry"), model("tom likes jerry"))
    with pytest.raises(ValueError, match="is not a pretrained model; only these are rounded to int8"):
        selfattn_models.load(tmp_path, dtype="int8")
