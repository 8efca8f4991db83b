"""The command ``selfattn``: `app` starts what its first argument names, in the file of that name, `models` or `language`."""

from selfattn.cli.app import main

__all__ = ["main"]
