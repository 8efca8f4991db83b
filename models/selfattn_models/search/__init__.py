"""Search that stays: an index of one's texts on the disk, searched by meaning.

>>> from selfattn_models import search
>>> index = search.Index.create("tickets.index", "all-MiniLM-L6-v2")  # doctest: +SKIP
>>> index.add(["the printer is on fire", "no sound"], ids=["t1", "t2"])  # doctest: +SKIP
>>> search.Index.open("tickets.index").search("it burns", k=1)[0].id  # doctest: +SKIP
't1'
"""

from selfattn_models.search._evaluate import evaluate
from selfattn_models.search.index import Hit, Index
from selfattn_models.search.negatives import mine_negatives

__all__ = ["Hit", "Index", "evaluate", "mine_negatives"]
