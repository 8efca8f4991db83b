"""Doors to other libraries: one small module for each, which imports its library and is imported only by name.

``selfattn.interop.torch`` needs ``pip install 'selfattn[torch]'``, ``selfattn.interop.jax`` needs ``selfattn[jax]``, and so on.
"""
