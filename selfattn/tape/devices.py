"""What tutorials ask of devices: there is the CPU alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from selfattn.tape.generator import manual_seed


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _no(*args: Any, **kwargs: Any) -> bool:
    """Return False."""
    return False


def _zero() -> int:
    """Return 0."""
    return 0


cuda = SimpleNamespace(
    is_available=_no,
    is_bf16_supported=_no,
    device_count=_zero,
    empty_cache=_nothing,
    synchronize=_nothing,
    set_device=_nothing,
    manual_seed=manual_seed,
    manual_seed_all=manual_seed,
)
mps = SimpleNamespace(is_available=_no, is_built=_no, manual_seed=manual_seed)
# Settings that scripts assign, and that have no effect.
backends = SimpleNamespace(
    mps=mps,
    cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False), is_built=_no),
    cudnn=SimpleNamespace(allow_tf32=False, benchmark=False, deterministic=True, enabled=False),
)
