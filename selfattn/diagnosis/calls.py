"""How one's own attention is called: what its parameters' names mean, and arrays in its layout and of its library."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.diagnosis.formula import Values

_Q, _K, _V = r"q(?:s|uer(?:y|ies))?", r"k(?:s|eys?)?", r"v(?:s|als?|alues?)?"
_WHICH = rf"({_Q}|{_K}|{_V}|o|out|output|proj|c|qkv|kv)"
_WEIGHT = r"(?:proj(?:ection)?s?)?(?:w|weights?|proj(?:ection)?|linear|layer|matrix|mat|kernel|fc|attn)"
# What the parameters of a call mean, by their names in lower case without anything but letters; the first one fits.
_ROLES = {
    "rng": r"rng|.*seed|generator|randomstate|prngkey|rngkey",
    "keep": r"keep(mask)?|drop(out)?mask|kept",
    "keep_p": r"keep(p|prob|rate)",
    "training": r"(is)?train(ing|mode)?",
    "evaluation": r"deterministic|eval(uation)?|inference",
    "causal": r"(is|use)?(causal|autoregressive|lookahead|masked)|decoder|isdecoder|future",
    "mask": r".*mask.*|.*pad(ding|s|ded)?|(attn|attention|score)s?bias|bias",
    "lengths": r"(valid|key|kv|src)?len(s|gths?)",
    "p": r"(attn|attention|att|p)?(drop|dropout)(p|rate|prob|out)?|p|rate|prob|pdrop",
    "kv_heads": r"(n|num|number)?(of)?(kv|key|keyvalue)heads?|(n|num)?groups?",
    "heads": r"(n|num|number)?(of)?(attention|attn|query|q)?heads?|(n|num)?h|nh",
    "head_width": r"(head|d|dim)?(dim|size|width|head)|d(im)?[qkv]k?|hs|[qkv](k)?dim|attn?dim",
    "width": r"d|dims?|(d|dim)model|(model|embed|embedding|emb|hidden|input|in|out|output|query|key|value|n)?"
    r"(dims?|size|width|units|features|hiddens|embd?|channels)|embed|numhiddens|d(in|out)|dim(in|out)|c",
    "length": r"(max|block|context|seq|sequence|ctx|n)+(len|length|size|positions|ctx)+",
    "scale": r"(softmax)?scale|scaling|scal(e|ing)factor|factor",
    "temperature": r"temp(erature)?|sqrtd\w*|sqrtdim",
    "q": rf"x?{_Q}(in|inputs?|states?|vecs?|mat|matrix|tensor|h|heads?)?",
    "k": rf"x?{_K}(in|inputs?|states?|vecs?|mat|matrix|tensor|h|heads?)?",
    "v": rf"x?{_V}(in|inputs?|states?|vecs?|mat|matrix|tensor|h|heads?)?",
    "x": r"x|xs|inputs?|inp|hidden(states?)?|tokens?|embeddings?|embs?|seq|sequence|src|words|data|e|xin|z",
    "context": r"context|memory|enc(oder)?\w*|y|cross|source|other|ctx|xkv",
    "params": r"params?|parameters",
    "weights": r"(attn|attention|att)?(weights?|probs?|probabilities)|attn|attention|a",
    "output": r"o|out|output",
}
_GRAD = (
    r"g|grads?|gradients?|(grad|gradient|upstream|g)_?(in|out|outputs?|o|y|z|of_?out)|"
    r"d_?(out|outputs?|o|y|z|context|ctx|attn|h)|"
    r"(out|outputs?)_?(grad|gradient)|upstream|delta|cotangents?|ct"
)


# Roles of parameters that are passed although they have a default.
TRIED = {
    *("q", "k", "v", "x", "heads", "kv_heads", "grad", "head_width", "width"),
    *("mask", "keep", "keep_p", "causal", "p", "rng", "training", "evaluation", "lengths"),
}


def letters(name: str) -> str:
    """Return a name in lower case, its letters alone."""
    return re.sub("[^a-z]", "", name.lower())


def weight_role(name: str, bare: bool = False) -> str | None:
    """Return ``wq`` for ``W_query``, ``q_proj`` and so on, and ``bq`` for a bias; a layer's name may be ``bare``."""
    n = letters(name)
    kind = "b" if re.search(r"bias$|^bias|^b(?!$)[a-z]{1,6}$|^[qkvo]b$", n) and not bare else "w"
    n = re.sub(r"^bias|bias$", "", n)
    patterns = [
        rf"(?:w|weights?|proj|linear|lin|kernel|to|fc|c|in|b){_WHICH}(?:{_WEIGHT})?",
        rf"{_WHICH}(?:{_WEIGHT}|b)",
    ]
    if bare or kind == "b":
        patterns.append(_WHICH)
    if n in ("inproj", "inprojw", "inprojweight", "cattn", "wqkv"):
        return f"{kind}qkv"
    for pattern in patterns:
        if found := re.fullmatch(pattern, n):
            which = found[1]
            return kind + (which if which in ("qkv", "kv") else "o" if which in ("proj", "c") else which[0])
    return None


def role_of(name: str, default: Any = inspect.Parameter.empty, vjp: bool = False) -> str | None:
    """Return what a parameter of this name means, or None.

    Examples
    --------
    >>> [role_of(name) for name in ("Q", "key_padding_mask", "W_o", "n_heads", "attn_dropout", "eta")]
    ['q', 'mask', 'wo', 'heads', 'p', None]
    """
    if vjp and re.fullmatch(_GRAD, name.lower()):
        return "grad"
    if name == "P" and vjp:
        return "weights"
    n = letters(name)
    if isinstance(default, bool) and ("mask" in n or "causal" in n) and "return" not in n:
        return "causal"
    if weight := weight_role(name):
        return weight
    return next((role for role, pattern in _ROLES.items() if re.fullmatch(pattern, n)), None)


@dataclass(frozen=True)
class Convention:
    """How a function is called, and what it computes where there is a choice."""

    layout: str = "BHLE"  # of queries, keys, values or inputs
    turned: bool = False  # weights are (out, in)
    name: str = ""  # of the mask, if there are several
    mask: str | None = None  # axes of the mask, such as "B1LS"
    means: str = "open"  # what True says; "additive"
    numbers: bool = False  # a boolean mask has 0 and 1
    flag: bool = False  # the causal flag
    causal: bool = False
    lower: bool = False  # with fewer queries than keys the last query sees all

    def text(self) -> str:
        """Say it in words."""
        axes = ", ".join(self.layout)
        found = [f"arrays are ({axes})"]
        found += ["weights are (out, in)"] * self.turned
        if self.mask:
            what = "it is added" if self.means == "additive" else f"True is {self.means}"
            found.append(f"the mask is ({', '.join(self.mask)}), {what}")
        found += ["causal"] * self.causal
        return "; ".join(found)


def arrange(x: Array, layout: str) -> Array:
    """Bring (B, H, L, E) or (B, L, E) into the layout; axes of size 1 that it lacks go.

    Examples
    --------
    >>> arrange(np.ones((3, 1, 5, 6)), "LBE").shape
    (5, 3, 6)
    """
    if x.ndim == 4 and x.shape[1] > 1 and "H" not in layout:  # heads next to each other
        x = x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)
    axes = "BHLE" if x.ndim == 4 else "BLE"
    kept = [axis for axis in axes if axis in layout]
    x = x.reshape([n for n, axis in zip(x.shape, axes, strict=True) if axis in layout])
    return x.transpose([kept.index(axis) for axis in layout if axis in kept])


def _fits(role: str, default: Any, function: Any) -> bool:
    """Return whether a default is one of a parameter of the role; sizes are passed to classes, not to functions."""
    if role in ("mask", "keep", "lengths"):  # mask_value=-1e9 is no mask
        return default is None
    if role in ("width", "head_width"):
        return inspect.isclass(function)
    return role not in ("causal", "p") or default is not None


# Whose arrays a function may take; PyTorch's also in float32.
LIBRARIES = {"torch": "torch", "torch32": "torch", "tape": "selfattn.tape", "jax": "jax"}


class Student:
    """A function, a layer or a class of layers, which is called by the names of its parameters."""

    def __init__(self, function: Any, arguments: Mapping[str, Any], vjp: bool = False) -> None:
        self.function, self.given, self.vjp = function, dict(arguments), vjp
        self.is_class = inspect.isclass(function)
        layer = self.is_class or not (inspect.isroutine(function) or hasattr(function, "func"))
        self.layer = layer
        self.run = self._method(function) if self.layer else function
        self.two = self.layer and vjp  # forward, then backward
        self.error: Exception | None = None
        self.required: set[str] = set()
        self.made = self._roles(function) if self.is_class else {}
        self.roles = self._roles(self.run, self._unbound(self.run))
        if not self.roles and not self.given:
            raise ValueError(f"{self.name} has no arguments; attention takes queries, keys and values")
        self.kinds = self._kinds()
        self.instance: Any = None
        if self.layer and not self.is_class:
            self.instance = copy.deepcopy(function)
            if self.kinds[0] in ("torch", "tape"):
                with contextlib.suppress(AttributeError):
                    self.instance.double().eval()
        self.backward_roles = (
            self._roles(function.backward, self._unbound(function.backward)) if self.two else {}
        )
        self._check_roles()

    @property
    def name(self) -> str:
        """The name in messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def _method(self, layer: Any) -> Callable[..., Any]:
        for name in ("forward", "__call__", "call", "attention", "attend", "compute", "apply"):
            if name in dir(layer) and callable(found := getattr(layer, name)):
                return found  # type: ignore[no-any-return]
        raise TypeError(f"{self.name} has no forward")

    def _unbound(self, method: Any) -> bool:
        """Return whether a method of a class takes the instance first."""
        static = inspect.getattr_static(self.function, getattr(method, "__name__", ""), None)
        return self.is_class and not isinstance(static, staticmethod)

    def _roles(self, function: Any, unbound: bool = False) -> dict[str, str | None]:
        """Return what each parameter means, and leave out those that keep their defaults."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[1 if unbound else 0 :]
        except (TypeError, ValueError):
            self.required |= {"query", "key", "value"}
            return {"query": "q", "key": "k", "value": "v"}
        found: dict[str, str | None] = {}
        for each in parameters:
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                continue
            said = self.given.get(each.name)
            role = said if isinstance(said, str) and (said in _ROLES or said in ("grad",)) else None
            role = role or role_of(each.name, each.default, self.vjp)
            optional = each.default is not each.empty
            if each.name in self.given and role != said:
                role = f"={each.name}"
            elif optional and ((role or "") not in TRIED or not _fits(role or "", each.default, function)):
                continue
            found[each.name] = role
            self.required |= set() if optional else {each.name}
        return found

    def _check_roles(self) -> None:
        """Refuse a call whose parameters are not known; three without a meaning are queries, keys and values."""
        vague = (None, "width", "weights", "output", "p", "params", "heads")
        known = {"q", "k", "v", "x"} & set(self.roles.values())
        unknown = [name for name, role in self.roles.items() if role in (vague if not known else (None,))]
        places = ["q", "k", "v"] if len(unknown) >= 3 else ["x"]
        for name, role in zip(list(unknown), places, strict=False) if not known else ():
            self.roles[name] = role
            unknown.remove(name)
        unknown = [name for name in unknown if self.roles[name] is None]
        if self.vjp and unknown and "grad" not in {*self.roles.values(), *self.backward_roles.values()}:
            self.roles[unknown.pop()] = "grad"
        unknown += [name for name, role in self.made.items() if role is None]
        if unknown:
            raise ValueError(
                f"it is not clear what {', '.join(unknown)} of {self.name} means: say it with arguments=, such as "
                f'{{{unknown[0]!r}: "mask"}} (a role: {", ".join(("q", "k", "v", *_ROLES))}), or with a value'
            )

    def _kinds(self) -> list[str]:
        """Return the libraries whose arrays are tried, those that the function's file has imported first."""
        names = getattr(getattr(self.run, "__func__", self.run), "__globals__", {}).values()
        modules = {each.__name__ for each in names if inspect.ismodule(each)}
        modules |= {getattr(each, "__module__", None) or "" for each in names}
        loaded = [kind for kind, module in LIBRARIES.items() if module in sys.modules]
        used = [
            kind for kind in loaded if any(f"{each}.".startswith(f"{LIBRARIES[kind]}.") for each in modules)
        ]
        return list(dict.fromkeys([*used, "numpy", *loaded]))

    # ---- a call

    def has(self, *roles: str) -> bool:
        """Return whether a parameter has one of the roles."""
        return bool({*self.roles.values(), *self.made.values(), *self.backward_roles.values()} & set(roles))

    @property
    def own_inputs(self) -> bool:
        """True if one array is queries, keys and values."""
        return self.has("x") and not self.has("q")

    def make(self, s: Values, c: Convention) -> dict[str, list[Array]]:
        """Make the layer of a class, and return the weights that a layer has of its own."""
        if self.is_class:
            arguments = {
                name: self.value(role, s, c, self.kinds[0])
                for name, role in self.made.items()
                if role not in ("rng", "training", "evaluation", "mask", "keep")
            }
            with self._quiet():
                self.instance = self.function(**arguments)
                if hasattr(self.instance, "double"):
                    self.instance.double()
        if self.instance is None:
            return {}
        if callable(getattr(self.instance, "train", None)) and hasattr(self.instance, "parameters"):
            self.instance.train(bool(s.get("training")))
        found: dict[str, list[Array]] = {}
        if self.has("wq", "wqkv"):
            return found
        for path, array in _arrays(self.instance):
            parts = [part for part in path.split(".") if part]
            last = letters(parts[-1])
            role = weight_role(parts[-1])
            if last in ("weight", "weights", "w", "kernel", "bias", "b") and len(parts) > 1:
                if parts[-2].isdigit() and len(parts) == 3 and int(parts[-2]) < 4 and "head" not in parts[-3]:
                    role = "w" + "qkvo"[int(parts[-2])]  # a list of four layers
                else:
                    role = weight_role(parts[-2], bare=True)
                if role and last in ("bias", "b"):
                    role = "b" + role[1:]
            if role and array.ndim == (2 if role[0] == "w" else 1):
                found.setdefault(role, []).append(array)
        return found

    def size(self, role: str) -> int | None:
        """Return a size of a layer that is made already: ``heads``, ``width``, ``head_width``."""
        known = vars(self.instance) if self.instance is not None and not self.is_class else {}
        found = {
            role_of(name): x for name, x in known.items() if isinstance(x, int | float) and x is not True
        }
        if role == "head_width" and role not in found:
            width = found.get("width") or found.get("temperature", found.get("scale", 1e9) ** -1) ** 2
            found[role] = round(width / found.get("heads", 1))
        return int(found[role]) if 0 < found.get(role, 0) <= 1024 else None

    def masks(self) -> list[str]:
        """Return the names of the masks that the function takes; one is given at a time."""
        return [name for name, role in self.roles.items() if role == "mask"]

    def value(self, role: str | None, s: Values, c: Convention, kind: str) -> Any:
        """Return what is passed for a role."""
        if role is None:
            raise KeyError(role)
        if role[0] == "=":
            return self.given[role[1:]]
        p, width = s.get("p_passed", 0.0), s.D if "wq" in s or self.has("heads") else s.E
        plain = {
            "heads": s.H, "kv_heads": s.G, "head_width": s.E, "width": width, "length": max(s.L, s.S, 16),
            "scale": s.E**-0.5, "temperature": s.E**0.5, "causal": c.flag, "p": p, "keep_p": 1 - p,
            "training": bool(s.get("training")), "evaluation": not s.get("training"),
        }  # fmt: skip
        if role == "rng":
            return np.random.default_rng(0)
        if role in plain:
            return plain[role]
        if role == "params":
            return {name: self.value(role_of(name), s, c, kind) for name in self._keys()}
        return wrap(self._array(role, s, c), kind)

    def _array(self, role: str, s: Values, c: Convention) -> Any:
        if role == "mask":
            return given_mask(s, c)
        if role == "lengths":
            return s.lengths if "lengths" in s else None
        if role in ("keep", "weights"):
            x = s.get("keep_passed") if role == "keep" else s.get("weights_passed")
            return (
                None
                if x is None
                else x.reshape(
                    [n for n, a in zip(x.shape, "BHLS", strict=True) if a in c.layout or a in "LS"]
                )
            )
        if role in ("q", "k", "v"):
            return arrange(s["x" + role] if "xq" in s else s[role], c.layout)
        if role == "x":
            return arrange(s.xq if "xq" in s else s.q, c.layout)
        if role == "context":
            return arrange(s.xk, c.layout)
        if role in ("grad", "output"):
            x = s[role if role == "grad" else "output_passed"]
            return arrange(x, c.layout)
        if role in ("wqkv", "bqkv", "wkv", "bkv"):
            return turn(np.concatenate([s[role[0] + each] for each in role[1:]], -1), c)
        return turn(s[role], c)

    def _keys(self) -> list[str]:
        source = source_of(self.run)
        return list(dict.fromkeys(re.findall(r"""\w+\[["'](\w+)["']\]""", source)))

    def call(self, s: Values, c: Convention) -> list[tuple[str, Array]] | None:
        """Call the function, and return the arrays of its result with their names; None if it raises."""
        for kind in self.kinds:
            try:
                with self._quiet():
                    arguments = {name: self.value(role, s, c, kind) for name, role in self.roles.items()}
                    arguments |= (
                        dict.fromkeys(set(self.masks()) - {c.name or self.masks()[0]}) if self.masks() else {}
                    )
                    result = self._result(arguments, s, c, kind)
                found = list(_unwrapped("", result))
            except Exception as error:  # of any kind: the function is not ours
                self.error = error
                continue
            self.kinds = [kind]
            return found
        return None

    def _result(self, arguments: dict[str, Any], s: Values, c: Convention, kind: str) -> Any:
        arguments = {name: x for name, x in arguments.items() if x is not None or name in self.required}
        run = self._method(self.instance) if self.layer else self.run
        result = (
            run(*arguments.values())
            if list(arguments) == list(self.roles)[: len(arguments)] and not self._keyword_only(run)
            else run(**arguments)
        )
        if self.two:
            backward = {name: self.value(role, s, c, kind) for name, role in self.backward_roles.items()}
            return self.instance.backward(**backward)
        if self.vjp and not self.has("grad"):
            pull = next(each for each in result if callable(each))
            return pull(self.value("grad", s, c, kind))
        return result

    @staticmethod
    def _keyword_only(run: Any) -> bool:
        try:
            return any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(run).parameters.values())
        except (TypeError, ValueError):
            return False

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        with np.errstate(all="ignore"), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield

    # ---- what gradients are of

    def gradients(self) -> list[str]:
        """Return the roles of the gradients in the order in which they are returned."""
        named = returned_names(self.function.backward if self.two else self.run)
        if named and all(named):
            return [each for each in named if each]
        order = [
            role
            for role in self.roles.values()
            if role in ("q", "k", "v", "x") or (role or "")[:1] in ("w", "b")
        ]
        return [f"d{role}" for role in order if role not in ("weights", "width")]


def gradient_role(name: str) -> str | None:
    """Return ``dq`` for dQ, grad_q, q_grad and so on."""
    n = name.lower().removeprefix("self.")
    n = re.sub(r"^(gradients?|grads?|dl_?d|d|g)_?|_?(gradients?|grads?)$", "", n)
    role = role_of(n)
    return f"d{role}" if role in ("q", "k", "v", "x") or (role or "")[:1] in ("w", "b") else None


def source_of(function: Any) -> str:
    """Return the text of a function, or nothing."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def returned_names(function: Any) -> list[str | None]:
    """Return the roles of the names that the last line of a function returns."""
    try:
        tree = ast.parse(source_of(function))
    except SyntaxError:
        return []
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value]
    last = max(found, key=lambda value: value.lineno, default=None)
    several = last.elts if isinstance(last, ast.Tuple) else []
    return [gradient_role(getattr(each, "id", getattr(each, "attr", ""))) for each in several]


def turn(w: Array, c: Convention) -> Array:
    """Return weights as the function takes them."""
    return w.T if c.turned and w.ndim == 2 else w


def given_mask(s: Values, c: Convention) -> Any:
    """Return the mask as the function takes it."""
    if c.mask is None:
        return None
    x = s.bias if c.means == "additive" else s.given if c.means == "open" else ~s.given
    x = x.reshape([n for n, axis in zip(x.shape, "BHLS", strict=True) if axis in c.mask or n > 1])
    shape = iter(x.shape)
    x = x.reshape([1 if axis == "1" else next(shape) for axis in c.mask])
    return x.astype(float) if c.numbers else x


def wrap(x: Any, kind: str) -> Any:
    """Return a copy of an array for a library."""
    if x is None or not isinstance(x, np.ndarray):
        return x
    if kind == "numpy":
        return x.copy()
    if kind == "jax":
        return sys.modules["jax"].numpy.asarray(x)
    torch = sys.modules[LIBRARIES[kind]]
    tensor = torch.tensor(np.ascontiguousarray(x))
    return tensor.float() if kind == "torch32" and tensor.is_floating_point() else tensor


def _plain(x: Any) -> Array:
    for name in ("detach", "cpu"):
        if hasattr(x, name):
            x = getattr(x, name)()
    x = np.asarray(x.float() if "bfloat16" in str(getattr(x, "dtype", "")) and hasattr(x, "float") else x)
    found: Array = x.astype(float)
    return found


def _unwrapped(name: str, result: Any) -> Iterator[tuple[str, Array]]:
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from _unwrapped(str(key), value)
    elif isinstance(result, tuple | list) and not all(isinstance(x, int | float) for x in result):
        names = getattr(result, "_fields", [name] * len(result))
        if isinstance(result, list):  # rows of one array, or several arrays
            names = [name] * len(result)
            with contextlib.suppress(ValueError, TypeError):
                together = np.array([_plain(each) for each in result], float)
                if together.ndim < 3:
                    yield name, together
                    return
                result = [*result, together]
                names.append("rows")
        for each, value in zip(names, result, strict=True):
            yield from _unwrapped(each, value)
    elif result is not None and not isinstance(result, str | bool | int | float):
        with contextlib.suppress(TypeError, ValueError):
            yield name, _plain(result)


def _arrays(thing: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a layer with the paths of their names."""
    if hasattr(thing, "named_parameters"):
        for name, x in thing.named_parameters():
            yield f"{path}.{name}", _plain(x)
        return
    if hasattr(thing, "shape") and hasattr(thing, "dtype"):
        yield path, _plain(thing)
        return
    inner: Any = (
        thing
        if isinstance(thing, Mapping)
        else dict(enumerate(thing))
        if isinstance(thing, list | tuple)
        else getattr(thing, "__dict__", {})
    )
    for name, value in inner.items() if depth < 4 else ():
        yield from _arrays(value, f"{path}.{name}", depth + 1)
