"""The five tutorials: their inputs, their printed tensors, and selfattn's values of the same tensors.

Tutorials 1, 3 and 4 print tensors, which are in ``data/tutorials/*.json`` with their inputs. What no tutorial prints is
compared with `selfattn.reference`: outputs 2 and 3 of tutorial 4, which it leaves to its reader; a small model trained
for this, for tutorial 2, and inputs made by hand, for tutorial 5, which describe modules without numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn import nn, reference
from selfattn._check import Array
from selfattn.functional import scaled_dot_product_attention
from selfattn.random import torch_rng
from selfattn.steps import attention_steps

Function = Callable[..., Any]

PRINTED, REFERENCE = "printed", "the reference"  # what a tensor is compared with
NOT_PRINTED = "prints no tensors; compared with selfattn's own reference, to rounding"
_exact_attention = partial(reference.scaled_dot_product_attention, compute_dtype=np.float64)
_exact_layer_norm = partial(reference.layer_norm, compute_dtype=np.float64)


@dataclass(frozen=True)
class Comparison:
    """One tensor: expected and computed, the format of its numbers, and the largest difference that is allowed."""

    name: str
    expected: Array
    computed: Array
    style: str  # format of one number
    tolerance: Array  # broadcastable to `expected`
    source: str = PRINTED  # or REFERENCE

    @property
    def agrees(self) -> bool:
        """Whether the shapes are equal and every difference is within the tolerance."""
        same = self.expected.shape == self.computed.shape
        return same and bool(np.all(np.abs(self.computed - self.expected) <= self.tolerance))

    @property
    def difference(self) -> str:
        """The largest difference, in words."""
        if self.expected.shape != self.computed.shape:
            return "another shape"
        return f"largest difference: {np.max(np.abs(self.computed - self.expected)):.3g}"


@dataclass(frozen=True)
class Tutorial:
    """A tutorial: its title, the precision of its numbers, the comparisons, and notes on its text."""

    number: int
    title: str
    precision: str
    comparisons: tuple[Comparison, ...]
    errata: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether every tensor agrees."""
        return all(comparison.agrees for comparison in self.comparisons)


def load(name: str) -> dict[str, Any]:
    """Read the inputs and printed tensors of one tutorial, such as ``"first_principles"``."""
    text = resources.files("selfattn").joinpath(f"data/tutorials/{name}.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def class_weights() -> Array:
    """Return the three 4×3 weights that the first tutorial's class draws: query, key and value."""
    return torch_rng(0).random((3, 4, 3))


def _rounding_slack(computed: Array) -> Array:
    """Return a tolerance within which a computed number at a rounding boundary may be rounded up or down."""
    eps = np.finfo(computed.dtype).eps if computed.dtype.kind == "f" else 0.0
    return np.asarray(16 * eps * (1 + np.abs(computed.astype(np.float64))))


def _to_decimals(name: str, printed: Any, computed: Array, decimals: int) -> Comparison:
    tolerance = 0.5 * 10.0**-decimals + _rounding_slack(computed)
    return Comparison(name, np.asarray(printed, np.float64), computed, f".{decimals}f", tolerance)


def _to_digits(name: str, printed: Any, computed: Array, digits: int) -> Comparison:
    """Allow half a unit in the last of `digits` significant digits; a printed zero means zero."""
    expected = np.asarray(printed, np.float64)
    size = np.abs(expected)
    exponent = np.floor(np.log10(np.where(size > 0, size, 1.0)))
    unit = np.where(size > 0, 10.0 ** (exponent - digits + 1), 0.0)
    tolerance = 0.5 * unit + _rounding_slack(computed)
    return Comparison(name, expected, computed, f".{digits}g", tolerance)


def _to_reference(name: str, expected: Array, computed: Array) -> Comparison:
    # Sums are short and near 1; the deviation in LayerNorm is not far below 1.
    tolerance = 64 * np.finfo(computed.dtype).eps * (1 + np.abs(expected))
    return Comparison(name, np.asarray(expected, np.float64), computed, ".6f", tolerance, REFERENCE)


def first_principles(dtype: npt.DTypeLike = np.float64) -> Tutorial:
    """Embed five words, of which *bank* comes from a river sentence and from a finance sentence."""
    data = load("first_principles")
    decimals = data["printed_decimals"]
    projected = data["projected_attention"]
    w_query, w_key, w_value = (np.array(projected[w], dtype) for w in ("W_query", "W_key", "W_value"))
    own = class_weights().astype(dtype)

    def compute(x: Array) -> dict[str, Array]:
        return {
            "embed": x,
            "linear_layer": x @ np.array(data["linear_layer"]["W"], dtype),
            "raw_dot_product_scores": attention_steps(x, x, x, scale=1.0).scores,
            "attention_on_raw_embeddings": scaled_dot_product_attention(x, x, x, scale=1.0),
            "projected_attention": scaled_dot_product_attention(x @ w_query, x @ w_key, x @ w_value),
            "self_attention_class": scaled_dot_product_attention(*(x @ weight for weight in own)),
        }

    computed = {
        sentence: compute(np.array([data["vocab"][token] for token in tokens], dtype))
        for sentence, tokens in data["tokens"].items()
    }
    comparisons = tuple(
        _to_decimals(f"{step}, {sentence}", printed, computed[sentence][step], decimals)
        for step in computed["river"]
        for sentence, printed in data[step]["printed"].items()
    )
    return Tutorial(1, data["tutorial"], f"printed to {decimals} decimals", comparisons)


def embedding_model(
    name: str, dtype: npt.DTypeLike = np.float64, more: Mapping[str, Sequence[float]] | None = None
) -> nn.EmbeddingModel:
    """Return a small model of the second tutorial: ``"untrained"``, ``"trained"`` or ``"two_heads"``.

    ``more`` has embeddings of more words.
    """
    data, more = load("sentence_embeddings"), more or {}
    given, words = data["models"][name], [*data["words"], *more]
    state = {key: np.array(array, dtype) for key, array in given["parameters"].items()}
    for row in more.values():
        state["embedding_layer.weight"] = np.vstack([state["embedding_layer.weight"], np.array(row, dtype)])
    width = state["embedding_layer.weight"].shape[1]
    model = nn.EmbeddingModel(
        lambda sentence: [words.index(word) for word in sentence.split()],
        len(words),
        width,
        max_seq_len=16,
        num_heads=given["num_heads"],
        dtype=dtype,
        rng=0,
    )
    model.load_state_dict(state)
    return model


def module_inputs(dtype: npt.DTypeLike = np.float64) -> tuple[Array, Array, Array]:
    """Return query, key and value of the fifth tutorial, (1, 2, 4, d): two heads, made by hand."""
    data = load("attention_module")
    query, key, value = (np.array(data[name], dtype) for name in ("query", "key", "value"))
    return (
        np.stack([query, np.roll(query, 1, axis=1)])[None],
        np.stack([key, key])[None],
        np.stack([value, value])[None],
    )


def sentence_embeddings(dtype: npt.DTypeLike = np.float64) -> Tutorial:
    """Compute a small trained model: embeddings, three Linears, attention, residual, LayerNorm, mean."""
    data = load("sentence_embeddings")

    def compare(name: str, sentence: str) -> Iterator[Comparison]:
        model = embedding_model(name, dtype)
        block: Any = model.attention_layers[0]
        ids = model.tokens(sentence)
        x = model.embedding_layer.weight[ids] + model.positions.table[: len(ids)]
        heads = [
            layer(x).reshape(len(x), block.num_heads, -1).swapaxes(0, 1)
            for layer in (block.query, block.key, block.value)
        ]

        def after(attended: Array, layer_norm: Function) -> Array:
            y = attended.swapaxes(0, 1).reshape(x.shape) + x
            return np.asarray(layer_norm(y, x.shape[1:], block.ln.weight, block.ln.bias, block.ln.eps))

        expected, expected_weights = _exact_attention(*heads, return_weights=True)
        expected_output = after(expected, _exact_layer_norm)
        _, weights = scaled_dot_product_attention(*heads, return_weights=True)
        title = f"{name.replace('_', ' ')}, {sentence}"
        yield _to_reference(f"attention weights, {title}", expected_weights, weights)
        yield _to_reference(f"block output, {title}", expected_output, block(x))
        yield _to_reference(f"sentence embedding, {title}", expected_output.mean(axis=0), model(sentence))

    several = (compare(name, sentence) for name in data["models"] for sentence in data["sentences"])
    return Tutorial(2, "LLMs: Self Attention", NOT_PRINTED, tuple(chain.from_iterable(several)))


def basics_notebook(dtype: npt.DTypeLike = np.float64) -> Tutorial:
    """Compute every stage of one small attention, "sky is blue"."""
    data = load("basics_notebook")
    decimals = data["printed_decimals"]
    x = np.array(data["embedded_tokens"], dtype)
    query, key, value = (x @ np.array(data[name], dtype) for name in ("WQ", "WK", "WV"))
    steps = attention_steps(query, key, value)
    output, weights = scaled_dot_product_attention(query, key, value, return_weights=True)
    stages = {
        "Q": query,
        "K": key,
        "V": value,
        "attn_logits": steps.scores,
        "scaled_attention_logits": steps.scaled_scores,
        "attention_weights": weights,
        "row_sums": weights.sum(axis=-1),
        "output": output,
    }
    printed = data["printed"]
    comparisons = [_to_decimals(name, printed[name], computed, decimals) for name, computed in stages.items()]
    comparisons.append(_to_decimals("output, weights @ V", printed["output"], weights @ value, decimals))
    precision = f"printed to {decimals} decimals"
    return Tutorial(3, data["tutorial"], precision, tuple(comparisons), tuple(data["errata"]))


def illustrated(dtype: npt.DTypeLike = np.float64) -> Tutorial:
    """Compute floats from integers; the last two steps use weights that the author rounded by hand."""
    data = load("illustrated")
    digits = data["printed_significant_digits"]
    printed = data["printed"]
    x, w_key, w_query, w_value = (np.array(data[name]) for name in ("x", "w_key", "w_query", "w_value"))
    keys, querys, values = x @ w_key, x @ w_query, x @ w_value
    as_floats = [t.astype(dtype) for t in (querys, keys, values)]
    scores = attention_steps(*as_floats, scale=1.0).scores
    _, weights = scaled_dot_product_attention(*as_floats, scale=1.0, return_weights=True)
    # The softmax of the logarithms of weights is the weights.
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.array(printed["attn_scores_softmax_rounded"], dtype))
    nothing = np.zeros((len(x), 0), dtype)
    rounded = attention_steps(nothing, nothing, values.astype(dtype), attn_mask=log_weights)
    outputs = scaled_dot_product_attention(nothing, nothing, values.astype(dtype), attn_mask=log_weights)
    exact = _exact_attention(nothing, nothing, values.astype(np.float64), log_weights)
    stages = {
        "keys": keys,
        "querys": querys,
        "values": values,
        "attn_scores": scores,
        "attn_scores_softmax": weights,
        "weighted_values_rounded [key][query]": rounded.weighted_values.swapaxes(0, 1),
        "output_1_rounded": outputs[0],
    }
    comparisons = [_to_digits(name, printed[name.split()[0]], x, digits) for name, x in stages.items()]
    comparisons.append(_to_reference("outputs 2 and 3, left to the reader", exact[1:], outputs[1:]))
    precision = f"printed to {digits} significant digits"
    return Tutorial(4, data["tutorial"], precision, tuple(comparisons), tuple(data["errata"]))


def attention_module(dtype: npt.DTypeLike = np.float64) -> Tutorial:
    """Compute (batch, n_heads, len, d) attention without and with a (batch, 1, 1, len) mask of integers."""
    query, key, value = module_inputs(dtype)
    integers = np.array([1, 1, 1, 0]).reshape(1, 1, 1, 4)
    masks = {"no mask": None, "mask 1 1 1 0": integers != 0}

    def compare() -> Iterator[Comparison]:
        for title, mask in masks.items():
            output, weights = scaled_dot_product_attention(query, key, value, mask, return_weights=True)
            expected = _exact_attention(query, key, value, mask, return_weights=True)
            yield _to_reference(f"attention weights, {title}", expected[1], weights)
            yield _to_reference(f"weighted values, {title}", expected[0], output)

    return Tutorial(5, "Self-Attention: ScaledDotProductAttention module", NOT_PRINTED, tuple(compare()))


TUTORIALS: tuple[Callable[[npt.DTypeLike], Tutorial], ...] = (
    first_principles,
    sentence_embeddings,
    basics_notebook,
    illustrated,
    attention_module,
)


def compute_all(dtype: npt.DTypeLike = np.float64) -> list[Tutorial]:
    """Compute all five, in the order of the tutorials."""
    return [tutorial(dtype) for tutorial in TUTORIALS]
