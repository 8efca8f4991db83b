"""Dask: attention over arrays in chunks, and training, on one machine or many; and embeddings of many texts.

It needs ``pip install 'selfattn[dask]'``, also on each worker, in one version. ``encode`` is in the package
selfattn-models.
"""

from typing import TYPE_CHECKING, Any

from selfattn._extras import named_in_models
from selfattn.interop.dask.attention import scaled_dot_product_attention, scaled_dot_product_attention_vjp
from selfattn.interop.dask.training import reducer

__all__ = ["reducer", "scaled_dot_product_attention", "scaled_dot_product_attention_vjp"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return named_in_models(__name__, name, {"encode": "selfattn_models.interop.dask"})
