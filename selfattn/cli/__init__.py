"""The command ``selfattn``: `app` runs what its first argument names."""

from selfattn.cli.app import main

__all__ = ["main"]
