"""The core's door to Transformers, with a pretrained model."""

import numpy as np
import pytest
from pretrained_data import fetched_minilm

pytest.importorskip("torch")
pytest.importorskip("transformers")
from selfattn.interop import huggingface

huggingface.register()


def test_minilm(tmp_path_factory):
    """Padded batches of a pretrained model, by sentence-transformers."""
    library, folder = pytest.importorskip("sentence_transformers"), str(fetched_minilm(tmp_path_factory))
    texts, found = ["a storm at sea", "tea with milk and sugar " * 30, "the ship sank in the gale"], []
    for name in ("eager", "selfattn"):
        model = library.SentenceTransformer(folder, model_kwargs={"attn_implementation": name})
        found.append(model.encode(texts))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
