"""Pretrained models: another name of ``selfattn_models``, of the package selfattn-models."""

from typing import TYPE_CHECKING, Any

from selfattn._extras import import_models

import_models(__name__, "selfattn_models")

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
