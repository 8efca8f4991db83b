"""Dask: attention over arrays in chunks, on any of Dask's schedulers."""

from selfattn.interop.dask.attention import scaled_dot_product_attention, scaled_dot_product_attention_vjp

__all__ = ["scaled_dot_product_attention", "scaled_dot_product_attention_vjp"]
