"""Pages of models.

They show what every head does with a text, texts of an index as points, and encoders and language models that
compute live.

Scripts of selfattn's pages (`selfattn.views`) draw what several pages share.
"""

from selfattn_models.pages.explore import Explorer, explorer
from selfattn_models.pages.map import CorpusMap, corpus_map

__all__ = ["CorpusMap", "Explorer", "corpus_map", "explorer"]
