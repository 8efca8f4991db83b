"""The base of all pretrained models: parameters under Transformers' names, and the core's settings made of them."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from selfattn.engine import Array, copy_doc, weights
from selfattn.engine.transformer import Layer, Norm, Projection, Transformer
from selfattn.engine.weights import Compact, Quants, Weight, is_compact, kind_of, to_float32, to_kind
from selfattn.nn import init
from selfattn.nn.inspection import InspectableModel
from selfattn.nn.module import Gradients, IncompatibleKeys, Module
from selfattn_models._folder import Config, check_quantization, fit, one_warning

Shapes = dict[str, tuple[int, ...]]
Pulled = Callable[[Array], Gradients]
ALL = slice(None)
HEAD_NORMS = ("query_norm", "key_norm")  # fields whose weights have the width of a head


def linear(name: str, out: int, into: int) -> Shapes:
    """Return the shapes of a linear layer."""
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


class CompactWeight(NamedTuple):
    """A compact weight, and the arrays it was made of."""

    values: Array
    scale: Array | None
    factor: bytes
    compact: Compact


class Parameters:
    """The parameters of a model as elements of the core's settings; remembers the origin of each, for gradients.

    Settings name each parameter with its shape, which :class:`WeightNames` collects. Compact weights are kept in
    ``made``, by their names and rows, so that they are packed once; with None they stay arrays. Quants are not arrays.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        made: dict[Any, Any] | None = None,
        quants: Mapping[str, Quants] | None = None,
    ) -> None:
        self.arrays, self.quants = arrays, quants or {}
        # By id() of an array: the array, kept alive so that no other gets its id(), its parameter, rows, and the
        # factor of each row.
        self.origins: dict[int, tuple[Weight, str, slice, str | None]] = {}
        self.made = made

    def array(self, name: str, *shape: int, rows: slice = ALL, factor: str | None = None) -> Array:
        """Return a parameter, some of its rows, or its rows times the elements of another one."""
        whole = self.arrays[name]
        array = whole if rows == ALL else whole[rows]
        if factor is not None:
            scale = self.arrays[factor]
            array = array * (scale[:, None] if array.ndim == 2 else scale)
        self.origins[id(array)] = array, name, rows, factor
        return array

    def weight(self, name: str, *shape: int, rows: slice = ALL, factor: str | None = None) -> Weight:
        """Return what :meth:`array` does, for a table or the weight of a projection, which may be compact."""
        if name in self.quants:
            whole, key = self.quants[name], (name, rows.start, rows.stop)
            assert self.made is not None
            return whole if rows == ALL else self.made.setdefault(key, whole.take(rows))  # copied once
        values, scale = self.arrays[name], self.arrays.get(name + weights.SCALE)
        if self.made is None or not is_compact(values):
            return self.array(name, rows=rows, factor=factor)
        factors = None if factor is None else self.arrays[factor][:, None]
        now = b"" if factors is None else factors.tobytes()
        key = name, rows.start, rows.stop
        made = self.made.get(key)
        if made is None or made.values is not values or made.scale is not scale or made.factor != now:
            compact = _cut(name, values, scale, rows, factors)
            made = self.made[key] = CompactWeight(values, scale, now, compact)
        self.origins[id(made.compact)] = made.compact, name, rows, factor
        return made.compact

    def projection(
        self, name: str, out: int, into: int, bias: bool = True, rows: slice = ALL, factor: str | None = None
    ) -> Projection:
        """Return ``name.weight`` (out, into) or some of its rows, with ``name.bias`` if there is one."""
        weight = self.weight(f"{name}.weight", out, into, rows=rows, factor=factor)
        return Projection(weight, self.array(f"{name}.bias", out, rows=rows, factor=factor) if bias else None)

    def norm(self, name: str, width: int, eps: float, bias: bool = True, offset: float = 0.0) -> Norm:
        """Return a LayerNorm, which may have a bias; a copy of its weight if there is an offset."""
        weight = self.array(f"{name}.weight", width)
        if offset:
            weight = weight + weight.dtype.type(offset)
            self.origins[id(weight)] = weight, f"{name}.weight", ALL, None
        return Norm(weight, self.array(f"{name}.bias", width) if bias else None, eps)

    def gradients(self, of: Iterable[Weight], grads: Iterable[Array]) -> Gradients:
        """Turn the gradients of the core's arrays into those of parameters."""
        found: Gradients = {}
        for array, grad in zip(of, grads, strict=True):
            _, name, rows, factor = self.origins[id(array)]
            if factor is not None:
                product = grad * self.arrays[name]
                add(found, factor, product.sum(axis=1) if product.ndim == 2 else product)
                scale = self.arrays[factor]
                grad = grad * (scale[:, None] if grad.ndim == 2 else scale)  # noqa: PLW2901
            if rows == ALL:
                add(found, name, grad)
            else:
                found.setdefault(name, np.zeros(self.arrays[name].shape, grad.dtype))[rows] += grad
        return found


class WeightNames(Parameters):
    """The shapes of the parameters that settings ask for; an empty array takes the place of each."""

    def __init__(self) -> None:
        super().__init__({})
        self.shapes: Shapes = {}
        self.weights: set[str] = set()  # names of weights that may be compact

    def array(self, name: str, *shape: int, rows: slice = ALL, factor: str | None = None) -> Array:
        """Note a shape."""
        self.shapes[name] = shape
        return np.zeros((1,) * len(shape), np.float32)

    def weight(self, name: str, *shape: int, rows: slice = ALL, factor: str | None = None) -> Array:
        """Note the shape of a weight."""
        self.weights.add(name)
        return self.array(name, *shape)


def _cut(name: str, values: Array, scale: Array | None, rows: slice, factors: Array | None) -> Compact:
    """Return some rows, times factors (out, 1), as a compact weight; the arrays it is made of become read-only."""
    values.flags.writeable = False
    if scale is None:
        if factors is None:
            return Compact(values[rows])
        return Compact(*to_kind(name, to_float32(values[rows], None) * factors, "bfloat16"))
    scale.flags.writeable = False
    return Compact(values[rows], scale[rows] if factors is None else scale[rows] * factors)


def add(found: Gradients, name: str, grad: Array) -> None:
    """Add to a gradient."""
    found[name] = found[name] + grad if name in found else grad


class Pretrained(InspectableModel, Module):
    """A pretrained model: parameters by Transformers' names; subclasses make the core's settings of them.

    Parameters
    ----------
    config : mapping
        As in ``config.json``.
    arrays : mapping of str to ndarray, optional
        The parameters. Contiguous ones of one dtype, float32 or float64, are kept, others converted; int8 with
        ``…weight_scale``, and bits of bfloat16 in uint16, are kept where :meth:`quantize` rounds to them. None draws
        new ones, as Transformers does.
    rng : int, Generator or torch_rng, optional
        The source of new parameters.
    where : str, optional
        The source of all this, for messages.
    dtype : {"float32", "bfloat16", "int8"}, optional
        As for :func:`selfattn_models.load`.

    Attributes
    ----------
    config : dict
    dtype : str
        Of the weights that are multiplied: ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"int8"``. With the last
        two, all other parameters are float32. Of a GGUF file as it is stored, the kind of most bytes, such as
        ``"Q4_1"``.
    quants : dict of str to Quants
        The weights of a GGUF file that are multiplied as they are stored. They are not parameters.
    training : bool
        Always False: these models have no dropout.
    """

    training = False
    small_lr = 5e-5  # the default learning rate of `training.fit`: weights that are trained already move in small steps
    # model_type of configurations, and the beginning of the names of Transformers' classes, whose end is the suffix.
    kinds: ClassVar[dict[str, str]]
    suffix: ClassVar[str] = "Model"
    prefix: ClassVar[str]  # what the bare model's names begin with in a model with a head
    buffers: ClassVar[tuple[str, ...]] = ()  # ends of the names of stored arrays that are not parameters
    # Ends of the names of weights that Transformers has as (in, out). They are held as (out, in), and shown transposed.
    transposed: ClassVar[tuple[str, ...]] = ()
    # Beginnings of the names of other tasks' heads, which a file may have and which are not read.
    heads: ClassVar[tuple[str, ...]] = (
        "cls.",
        "lm_head.",
        "classifier.",
        "pre_classifier.",
        "qa_outputs.",
        "vocab_",
        "head.",
        "decoder.",
        "pooler.",
    )
    layer_name: ClassVar[str]  # what the names of a layer's parameters begin with, before its number
    # A layer's fields, each with the middle of its parameters' names, in the order of files. Fields of one name are
    # rows of one weight.
    fields: ClassVar[dict[str, str]]
    norm_offset: ClassVar[float] = 0.0  # is added to the weights of norms
    arrays: dict[str, Array]

    def __init__(
        self,
        config: Mapping[str, Any],
        arrays: Mapping[str, Array] | None = None,
        rng: init.Rng = None,
        where: str = "",
        dtype: str | None = None,
    ) -> None:
        for name, given in {"config": config, "arrays": {} if arrays is None else arrays}.items():
            if not isinstance(given, Mapping):
                raise TypeError(f"{name} must be a mapping, not {type(given).__name__}")
        self.config = {"model_type": next(iter(self.kinds))} | copy.deepcopy(dict(config))
        if arrays is not None and self._has_own_head(arrays):  # as Transformers has it
            self.config["tie_word_embeddings"] = False
        file = str(Path(where, "config.json")) if os.path.isdir(where) else where or "the configuration"
        read = Config(self.config, file, f"config.json of {self.config['model_type']}")
        self.config.pop("quantization_config", None)  # self.dtype says the same, and save() writes it again
        self.quants: dict[str, Quants] = {}
        self._prepared: dict[Any, Any] = {}
        self._made: dict[Any, CompactWeight] = {}
        if self.config["model_type"] not in self.kinds:
            takes = f"{type(self).__name__} takes {', '.join(self.kinds)}"
            raise ValueError(f"{read.where} is of type {self.config['model_type']!r}; {takes}")
        read.read |= {"architectures", "model_type"}  # obeyed by `load`, and above
        with one_warning(read.where):
            self._read(read)
            self._read_head(read)
            check_quantization(read)
            read.finish()
        if arrays is not None and 4 * self.num_layers > len(arrays) + 1000:  # too many to name
            layers = f"{read.where} describes {self.num_layers} layers"
            raise ValueError(f"{layers}; there are {len(arrays)} weights")
        shapes, optional = self._shapes()
        if arrays is None:
            deviation, one = float(config.get("initializer_range", 0.02)), 1 - self.norm_offset
            self.arrays = _drawn(shapes, init.as_generator(rng), deviation, one)
        else:
            ignored = tuple(head for head in self.heads if not any(name.startswith(head) for name in shapes))
            stored: dict[str, Any] = {n: x for n, x in arrays.items() if not n.endswith(self.buffers)}
            self.quants = {name: array for name, array in stored.items() if isinstance(array, Quants)}
            self._check_quants(shapes, where or "the model")
            kept = {name: array for name, array in stored.items() if name not in self.quants}
            shapes = {name: shape for name, shape in shapes.items() if name not in self.quants}
            self.arrays = fit(kept, shapes, optional, ignored, self.prefix, where or "the model")
        self.arrays = {name: self._taken(name, array) for name, array in self.arrays.items()}
        self._round(dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is prepared: in a copy, views of parameters would not be views any more."""
        # A tokenizer's copy would forget its encode_special_tokens, by which special tokens in a text are tokenised
        # like other text.
        cuts = getattr(getattr(self, "tokenizer", None), "encode_special_tokens", False)
        return vars(self) | {"_prepared": {}, "_made": {}, "_cuts_marks": cuts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        cuts = state.pop("_cuts_marks")
        self.__dict__.update(state)
        if cuts:
            cast(Any, self).tokenizer.encode_special_tokens = True

    @property
    def dtype(self) -> str:
        """The dtype, or kind of quants, of the weights that are multiplied."""
        if self.quants:
            sizes: dict[str, int] = {}
            for quants in self.quants.values():
                sizes[quants.kind] = sizes.get(quants.kind, 0) + quants.nbytes
            return max(sizes, key=lambda kind: sizes[kind])
        kinds = {kind_of(array) for array in self.arrays.values()}
        return next(kind for kind in (*weights.KINDS, "float64", "float32") if kind in kinds)

    def quantize(self, dtype: str) -> Self:
        """Round the weights of all layers, and the table of words, to 8 or 16 bits.

        The model changes in place; :meth:`parameters` then has the rounded weights. int8 has a scale for each 128
        numbers of a row, under ``…weight_scale``; bfloat16 is held as its bits, in uint16. All other parameters stay
        float32. From then on the model computes with the rounded weights, for int8 also with inputs that are rounded
        to 8 bits, and has no gradients.

        Parameters
        ----------
        dtype : {"int8", "bfloat16"}

        Returns
        -------
        Pretrained
            The model itself.

        Raises
        ------
        ValueError
            The dtype is another one, the model is not float32, or a weight is NaN or infinite; then nothing changes.
        RuntimeError
            ``"bfloat16"`` on a CPU that cannot multiply it.

        Examples
        --------
        ::

            model = models.load("all-MiniLM-L6-v2").quantize("int8")
        """
        weights.check_kind(dtype)
        if self.dtype != "float32":
            load = f"load it as float32 to round it to {dtype}: models.load(path, dtype='float32')"
            raise ValueError(f"this model is {self.dtype}; {load}")
        self._round(dtype)
        return self

    def _round(self, dtype: str | None) -> None:
        """Round the weights of layers and the table to a dtype (None: their own), and widen all other arrays."""
        names = self._rounded
        compact = [name for name in self.arrays if name in names and is_compact(self.arrays[name])]
        if dtype is None and compact:
            dtype = kind_of(self.arrays[compact[0]])
        if dtype in weights.KINDS:
            weights.check_kind(dtype)
        found: dict[str, Array] = {}
        for name, given in self.arrays.items():
            if name.endswith(weights.SCALE):
                continue  # rounded together with its weight
            array, scale = given, self.arrays.get(name + weights.SCALE)
            if not is_compact(array):
                with np.errstate(over="ignore"):
                    array = array if dtype is None else array.astype(np.float32, copy=False)
                if name in names and dtype in weights.KINDS:
                    array, scale = to_kind(name, array, dtype)
            elif name not in names or dtype == "float32":
                array, scale = to_float32(array, scale), None
            elif dtype != kind_of(array):
                raise ValueError(f"{name} is {kind_of(array)} already, which is not rounded to {dtype} again")
            found[name] = array
            if scale is not None:
                found[name + weights.SCALE] = scale
        self.arrays = found
        self._prepared.clear()
        self._made.clear()

    @copy_doc(Module.load_state_dict)
    def load_state_dict(self, state: Mapping[str, npt.ArrayLike], strict: bool = True) -> IncompatibleKeys:
        """Copy arrays of a model of the same ``dtype`` into the parameters.

        Raises
        ------
        ValueError
            A shape, a name or a dtype differs, or scales are negative or not finite.
        """
        for name, array in self.arrays.items():
            if not array.flags.writeable:
                self.arrays[name] = array.copy()
        self._prepared.clear()
        return super().load_state_dict(state, strict)

    def _own_parameters(self) -> Any:
        return ((self._name(name), self._shown(name, array)) for name, array in self.arrays.items())

    def _has_own_head(self, arrays: Mapping[str, Any]) -> bool:
        """Tell whether there is a head that differs from the table, as after training it.

        Not every configuration says so.
        """
        head, name = arrays.get("lm_head.weight"), getattr(self, "word_table", "")
        table = arrays.get(name, arrays.get(name.removeprefix(self.prefix)))
        if isinstance(head, np.ndarray) and isinstance(table, np.ndarray):
            return not np.array_equal(head, table)
        return False

    def _check_quants(self, shapes: Shapes, where: str) -> None:
        """Refuse quants that the model does not have, or of another shape."""
        for name, quants in self.quants.items():
            wanted = shapes.get(name)
            if wanted is not None and name.endswith(self.transposed):
                wanted = wanted[::-1]
            if wanted != quants.shape:
                says = "the configuration " + ("has no such weight" if wanted is None else f"says {wanted}")
                raise ValueError(f"the weights of {where} do not fit: {name} is {quants.shape}, {says}")

    def _taken(self, name: str, array: Array) -> Array:
        """Return an array of Transformers' shape in the shape in which it is held."""
        if not name.endswith(self.transposed):
            return array
        if array.dtype == np.int8:
            raise ValueError(f"{name} is int8; these weights are rounded when they are loaded, not before")
        return np.ascontiguousarray(array.T)

    def _shown(self, name: str, array: Array) -> Array:
        """Return a view of a held array in Transformers' shape; int8 keeps the held shape, which its scales need."""
        return array.T if name.endswith(self.transposed) and array.dtype != np.int8 else array

    def _name(self, name: str) -> str:
        """Return Transformers' name of a parameter, which may have a prefix."""
        return name

    def _named(self, grads: Gradients) -> Gradients:
        """Return gradients under Transformers' names, in the order of the parameters."""
        return {self._name(name): self._shown(name, grads[name]) for name in self.arrays if name in grads}

    def extra_repr(self) -> str:
        """Return the sizes and the dtype."""
        count = sum(array.size for name, array in self.arrays.items() if not name.endswith(weights.SCALE))
        count += sum(math.prod(quants.shape) for quants in self.quants.values())
        return f"hidden_size={self.hidden_size}, num_layers={self.num_layers}, parameters={count}, dtype={self.dtype}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    # ----------------------------------------------------------------------------------------- of each architecture

    hidden_size: int
    num_layers: int
    num_heads: int
    head_width: int  # where it is read apart, or heads have norms
    wide: int  # the width of the feed-forward network
    activation: Any
    eps: float
    attention_widths: tuple[int, int] | None = None  # of all queries, and of all keys; None: hidden_size
    unbiased: Collection[str] = ()  # fields without a bias
    factors: Mapping[str, str] = MappingProxyType({})  # names of parameters that multiply the rows of a field

    def _read(self, config: Config) -> None:
        """Read sizes from the configuration."""
        raise NotImplementedError

    def _read_head(self, config: Config) -> None:
        """Read what the configuration says about a head."""

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        """Return the core's settings for sequences of at most ``longest`` tokens."""
        raise NotImplementedError

    def _layers(self, p: Parameters, longest: int) -> tuple[Layer, ...]:
        return tuple(self._layer(p, n, longest) for n in range(self.num_layers))

    def _layer(self, p: Parameters, n: int, longest: int) -> Layer:
        d, wide = self.hidden_size, self.wide
        queries, keys = self.attention_widths or (d, d)
        shapes = {"query": (queries, d), "key": (keys, d), "value": (keys, d), "output": (d, queries)}
        shapes |= {"gate": (wide, d), "up": (wide, d), "down": (d, wide)}
        names = {field: f"{self.layer_name}{n}.{own}" for field, own in self._fields(n).items()}
        factors = {field: f"{self.layer_name}{n}.{own}" for field, own in self.factors.items()}
        found: dict[str, Any] = {}
        for field, name in names.items():
            if field not in shapes:
                found[field] = self._norm(p, name, self.head_width if field in HEAD_NORMS else d)
                continue
            (out, into), together = shapes[field], [other for other in names if names[other] == name]
            outs = [shapes[other][0] for other in together]
            begin = sum(outs[: together.index(field)])
            rows = slice(begin, begin + out) if len(outs) > 1 else ALL
            factor, bias = factors.get(field), field not in self.unbiased
            found[field] = p.projection(name, sum(outs), into, bias, rows, factor)
        for factor in factors.values():
            p.array(factor, d)
        more = self._options(n, longest, found["feed_forward_norm"].weight.dtype)
        return Layer(self.num_heads, **found, activation=self.activation, **more)

    def _fields(self, n: int) -> dict[str, str]:
        """Return the fields of a layer with their names."""
        return self.fields

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        """Return the settings of a layer that are no parameters."""
        return {}

    def _norm(self, p: Parameters, name: str, width: int) -> Norm:
        return p.norm(name, width, self.eps)

    def _head(self, p: Parameters) -> Any:
        """Return what makes logits of the last hidden states, in a language model."""

    def _more_shapes(self) -> tuple[Shapes, bool]:
        """Return the shapes of parameters that the settings do not have, and whether these may be missing."""
        return {}, False

    def _shapes(self) -> tuple[Shapes, set[str]]:
        """Return Transformers' shapes of all parameters by name, and the names of those that may be missing."""
        names, (more, optional) = WeightNames(), self._more_shapes()
        self._settings(names, 0)
        self._head(names)
        self._rounded = names.weights  # the names of those that `quantize` rounds
        shapes = {n: x[::-1] if n.endswith(self.transposed) else x for n, x in names.shapes.items()}
        return shapes | more, set(more) if optional else set()

    # ------------------------------------------------------------------------------------------------------- calls

    def _built(self, longest: int) -> tuple[Transformer, Parameters]:
        """Return the core's settings for sequences of at most ``longest`` tokens, and the origins of their arrays."""
        parameters = Parameters(self.arrays, self._made, self.quants)
        return self._settings(parameters, longest), parameters


def _drawn(shapes: Shapes, rng: Any, deviation: float, one: float) -> dict[str, Array]:
    """Draw parameters as Transformers does: weights from a normal distribution, norms ``one``, biases 0."""
    arrays = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            arrays[name] = (rng.standard_normal(shape) * deviation).astype(np.float32)
        else:
            arrays[name] = np.full(shape, 0 if name.endswith("bias") else one, np.float32)
    return arrays
