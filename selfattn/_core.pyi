"""Typed signatures of the C extension; the documentation is in the docstrings of the functions themselves."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfattn.functional.block_mask import BlockMask
from selfattn.random import TorchGenerator

def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    rng: int | np.random.Generator | TorchGenerator | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    out: NDArray[Any] | None = None,
    num_threads: int | None = None,
) -> Any: ...
def softmax(x: ArrayLike, axis: int = -1) -> NDArray[Any]: ...
def log_softmax(x: ArrayLike, axis: int = -1) -> NDArray[Any]: ...
def layer_norm(
    x: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-05,
) -> NDArray[Any]: ...
def rms_norm(
    x: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None = None,
    eps: float | None = None,
) -> NDArray[Any]: ...
def gelu(x: ArrayLike, approximate: Literal["none", "tanh"] = "none") -> NDArray[Any]: ...
def apply_rotary_emb(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, interleaved: bool = False
) -> NDArray[Any]: ...
def get_isa() -> str: ...
def available_isas() -> tuple[str, ...]: ...
def get_num_threads() -> int: ...
def set_num_threads(n: int | None, /) -> None: ...
def build_info() -> dict[str, str]: ...
def _attention_forward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *args: Any, **options: Any
) -> tuple[NDArray[Any], ...]: ...
def _attention_backward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *args: Any, **options: Any
) -> tuple[NDArray[Any] | None, ...]: ...
def _cached_attention(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any) -> Any: ...
def _varlen_attention(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any) -> Any: ...
def _varlen_forward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any
) -> tuple[NDArray[Any], ...]: ...
def _varlen_backward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any
) -> tuple[Any, ...]: ...
def _softmax_backward(x: ArrayLike, dy: ArrayLike, axis: int, /) -> NDArray[Any]: ...
def _log_softmax_backward(x: ArrayLike, dy: ArrayLike, axis: int, /) -> NDArray[Any]: ...
def _layer_norm_backward(
    x: ArrayLike,
    dy: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    eps: float | None,
    /,
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]: ...
def _rms_norm_backward(
    x: ArrayLike,
    dy: ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    eps: float | None,
    /,
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]: ...
def _gelu_backward(x: ArrayLike, dy: ArrayLike, approximate: str, /) -> NDArray[Any]: ...
def _sgd_step(
    parameters: list[NDArray[Any]],
    gradients: list[NDArray[Any]],
    means: list[NDArray[Any]] | None,
    steps: list[int],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    targets: list[NDArray[Any] | None] | None = None,
    /,
) -> None: ...
def _scale(arrays: tuple[NDArray[Any], ...], factors: tuple[float, ...], /) -> None: ...
def _are_plain(parameters: list[Any], gradients: list[Any], /) -> bool: ...
def _adam_step(
    parameters: list[NDArray[Any]],
    gradients: list[NDArray[Any]],
    means: list[NDArray[Any]],
    squares: list[NDArray[Any]],
    steps: list[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    targets: list[NDArray[Any] | None] | None = None,
    /,
) -> None: ...
def _pack_ids(lists: list[list[int]], vocab_size: int, /) -> tuple[NDArray[Any], NDArray[Any]] | None: ...
def _transformer_forward(
    inputs: NDArray[Any],
    cu_seqlens: NDArray[np.intp],
    model: tuple[Any, Any, Any],
    keep: bool,
    cache: tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]] | None = None,
    /,
) -> Any: ...
def _transformer_backward(
    saved: Any, grad: NDArray[Any], wants_rows: bool, wants_mask: bool, /
) -> tuple[list[NDArray[Any]], NDArray[Any] | None, NDArray[Any] | None]: ...
def _linear_forward(
    x: NDArray[Any], weight: Any, bias: NDArray[Any] | None, gemv: bool = False, /
) -> NDArray[Any]: ...
def _int8_panels(weight: NDArray[np.int8], scale: NDArray[np.float32], /) -> Any: ...
def _bfloat16_panels(weight: NDArray[np.uint16], /) -> Any: ...
def _quant_shapes() -> dict[str, tuple[int, int]]: ...
def _quants(rows: NDArray[np.uint8], kind: str, columns: int, /) -> Any: ...
def _expand_quants(quants: Any, rows: NDArray[np.int64], /) -> NDArray[np.float32]: ...
def _compact_unit(int8: bool, /) -> str | None: ...
def _linear_backward(
    dy: NDArray[Any], x: NDArray[Any], weight: NDArray[Any], /
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
def _proxy_confidences(y: NDArray[Any], /) -> tuple[NDArray[Any], NDArray[Any]]: ...
def _proxy_gradients(y: NDArray[Any], products: NDArray[Any], /) -> NDArray[Any]: ...
def _narrow(x: NDArray[Any], out: NDArray[Any], threads: int, /) -> None: ...
def _checksum(arrays: tuple[NDArray[Any], ...], /) -> int: ...
def _set_isa(name: str, /) -> None: ...
def _keep_arena(keep: bool, /) -> None: ...
def _fma_peak(dtype: str, threads: int, milliseconds: int, /) -> float: ...
def _read_bandwidth(nbytes: int, threads: int, milliseconds: int, /) -> float: ...
