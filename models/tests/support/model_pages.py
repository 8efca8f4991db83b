"""Pages of models from tokens, which the tests of hostile tokens share."""

import numpy as np
from pages import attention

from selfattn_models.pages import corpus_map, explorer

PAGES = {
    "explorer": lambda tokens: explorer(*attention(tokens), word=tokens[1]),
    "map": lambda tokens: corpus_map(
        np.eye(len(tokens)), tokens, dict.fromkeys(tokens, tokens), name="".join(tokens)
    ),
}
