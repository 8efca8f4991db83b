"""Dask: attention over arrays in chunks, embeddings of many texts, and training, on one machine or many.

It needs ``pip install 'selfattn[dask]'``, also on each worker, in one version.
"""

from selfattn.interop.dask.attention import scaled_dot_product_attention, scaled_dot_product_attention_vjp
from selfattn.interop.dask.encoding import encode
from selfattn.interop.dask.training import reducer

__all__ = ["encode", "reducer", "scaled_dot_product_attention", "scaled_dot_product_attention_vjp"]
