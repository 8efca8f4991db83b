"""The command ``selfattn``: `app` reads its arguments and shows what attention computes, `models` trains and searches."""

from selfattn.cli.app import main

__all__ = ["main"]
