"""The verdict on one's own attention: the steps that are wrong, the evidence, a page."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from selfattn._check import Array, one_of
from selfattn.diagnosis.calls import Student
from selfattn.diagnosis.search import TIGHT, Fault, Search, say
from selfattn.steps.attention import AttentionSteps, attention_steps
from selfattn.views.document import Document
from selfattn.views.page import steps_page
from selfattn.views.way_back import way_back_page

# Where a page shows a changed step that has no stage of its own.
STAGES = {
    "scale": "scaled_scores",
    "scaled": "scaled_scores",
    "drop": "weights",
    "dropped": "weights",
} | dict.fromkeys(("given", "causal", "open", "biased", "masked"), "masked_scores")
MEANINGS = ("open", "closed", "additive")
MANY = 60  # numbers: the text names a larger array by its shape, or shows one row


class Verdict:
    """What :func:`diagnose` found: its text says it, with evidence.

    Attributes
    ----------
    faults : list of str
        A sentence for each step that is wrong, in the order of computation; empty if nothing differs or if no known
        fault explains the numbers.
    names : list of str
        The names of the faults, as in `selfattn.diagnosis.rules`.
    called : str
        How the function is called: the order of the axes, what a mask means.
    tried : list of str
        The kinds of calls that were tried.
    right : bool
        True if nothing differs.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self.faults = [fault.say() for fault in search.faults]
        self.names = [fault.name for fault in search.faults]
        self.called, self.tried = search.convention.text(), search.tried
        self.right = not search.faults and search.different is None

    @cached_property
    def _evidence(self) -> list[Fault]:
        """Each fault, or the difference that no rule explains, with its smallest input."""
        search = self._search
        found = search.faults or ([search.different] if search.different else [])
        return [search.smallest(fault) for fault in found]

    def __str__(self) -> str:
        name = self._search.student.name
        lines = [f"{name}: {self.called}."]
        if self.right:
            lines.append(f"nothing differs. Tried: {'; '.join(self.tried)}.")
        elif not self.faults:
            lines.append("The numbers differ, and no known fault explains them.")
        for n, fault in enumerate(self._evidence, 1):
            lines += [f"{n}. {fault.say()}"] if fault.name else []
            lines += [f"   {line}" for line in self._shown(fault)]
        return "\n".join(lines)

    def _shown(self, fault: Fault) -> Iterator[str]:
        """Yield the lines of the evidence: the input, then expected and got beside each other."""
        s, c, student = fault.probe.inputs, fault.probe.convention, self._search.student
        for name, role in {**student.roles, **student.backward_roles}.items():
            other = role == "mask" and c.name not in ("", name)
            if role in ("q", "k", "v", "x", "mask", "grad", "context", "lengths", "keep") and not other:
                x = student.value(role, s, c, "numpy")
                if x is not None and np.size(x) > MANY:
                    yield f"{name}: drawn, {' x '.join(map(str, np.shape(x)))}"
                elif x is not None:
                    yield from _rows(f"{name} =", x)
        if fault.expected.size:
            different = ~np.isclose(fault.expected, fault.got, rtol=0, atol=TIGHT)
            place = tuple(int(n) for n in np.argwhere(different | (different.sum() == 0))[0])
            at = f"{fault.result}{list(place)}"
            yield f"first difference: {at} must be {fault.expected[place]:.4f}, and is {fault.got[place]:.4f}"
            part = place[:-1] if fault.expected.size > MANY else ()  # the row of the first difference
            left, right = (
                list(_rows(label, x[part])) for label, x in (("expected", fault.expected), ("got", fault.got))
            )
            width = max(map(len, left))
            yield from (f"{a:{width}}   {b}" for a, b in zip(left, right, strict=False))
        else:
            shapes = ", ".join(str(x.shape) for _, x in fault.probe.got)
            yield f"the shapes that it returns, {shapes}, are not those of attention"

    __repr__ = __str__

    @property
    def stage(self) -> str:
        """The stage of the page that shows the first fault, for links: ``page.html#stage=weights&row=0``."""
        place = self._search.faults[0].place if self._search.faults else "scores"
        return STAGES.get(place, place if place in ("scores", "weights", "output") else "given")

    def _repr_html_(self) -> str:
        page = self.page().fragment if self._search.faults else ""
        return f"<div><pre>{escape(str(self))}</pre>{page}</div>"

    def page(self, lang: str = "en") -> Document:
        """Return the page of all steps of the smallest input, with the wrong steps next to the right ones.

        For a backward pass it is the page of the way back, with the right gradients.

        Parameters
        ----------
        lang : {"en", "de", "fr"}
            The language of the page.
        """
        fault = self._evidence[0] if self._evidence else None
        probe = fault.probe if fault else self._search.probe(self._search.convention)
        right = self._search.model(probe, {}, plain=True) if probe else None
        if probe is None or right is None:
            raise ValueError("the function takes none of the inputs that a page could show")
        text = 0
        if fault and fault.expected.ndim and fault.probe.convention.layout[0] == "B":
            apart = np.abs(np.nan_to_num(fault.expected - fault.got))
            text = int(apart.reshape(len(apart), -1).max(1, initial=0).argmax())
        steps = _steps(right, text % len(right.q))
        if self._search.student.vjp:
            gradient = right.d_output[text % len(right.q), 0]
            return way_back_page(_steps(right, text % len(right.q), head=0), grad_output=gradient, lang=lang)
        wrong = self._search.model(probe, fault.changes, plain=True) if fault else None
        if wrong is None or not fault or not fault.changes:
            return steps_page(steps, lang=lang)
        mine = _replaced(steps, wrong, text % len(right.q))
        rows = range(steps.scores.shape[-2])
        both = [[say(whose, lang, n=n) for n in rows] for whose in ("right {n}", "yours {n}")]
        title = {"title": fault.say(lang)}
        return steps_page(steps, both[0], compare=(mine, both[1]), captions=title, lang=lang)


def _rows(label: str, x: Any) -> Iterator[str]:
    """Yield the lines of an array after its label."""
    plain = np.asarray(x)
    shown = plain if plain.dtype == bool else np.round(plain.astype(float), 4) + 0.0
    for n, line in enumerate(np.array2string(shown, max_line_width=60).splitlines()):
        yield f"{label if n == 0 else '':{len(label)}} {line}"


NAMES = {"scores": "scores", "scaled_scores": "scaled", "masked_scores": "masked", "weights": "weights",
         "dropped_weights": "dropped", "output": "output"}  # fmt: skip


def _one(x: Array, text: int) -> Array:
    """Return one text; a single head needs no axis."""
    found: Array = x[text if len(x) > 1 else 0]
    return found[0] if len(found) == 1 else found


def _steps(s: Any, text: int, head: int | None = None) -> AttentionSteps:
    """Return the right steps of one text."""
    bias = np.where(s.open, np.broadcast_to(s.get("bias", 0.0), s.open.shape), -np.inf)
    q, k, v, mask = (
        _one(x if head is None else x[:, head : head + 1], text) for x in (s.q, s["keys"], s["values"], bias)
    )
    return attention_steps(q, k, v, mask, scale=float(s.scale))


def _replaced(steps: AttentionSteps, wrong: Any, text: int) -> AttentionSteps:
    """Return steps with the numbers of a fault, where they have the shapes of the right ones."""
    found = {
        name: _one(np.broadcast_to(wrong[step], wrong[step].shape), text) for name, step in NAMES.items()
    }
    fitting: dict[str, Any] = {
        name: x.copy() for name, x in found.items() if x.shape == getattr(steps, name).shape
    }
    return replace(steps, **fitting)


def diagnose(
    function: Any,
    *,
    layout: str | None = None,
    mask: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Verdict:
    """Say which step of one's own attention is wrong, and why.

    The function is called with small drawn inputs. What its parameters mean is found from their names, and from
    trying: the order of axes, the shape of a mask and what True says in it, how weights lie, what is returned.

    Parameters
    ----------
    function : callable, layer or class
        Attention on arrays of NumPy, PyTorch, JAX or :mod:`selfattn.tape`; a layer with ``forward``; a class of
        layers, which is made with small sizes.
    layout : str, optional
        The order of the axes of queries, keys and values, such as ``"BHLE"`` or ``"B, L, H, E"``: texts, heads,
        tokens, width.
    mask : {"open", "closed", "additive"}, optional
        What True in a mask says of a key, or that the mask is added to the scores. By default that which is right.
    arguments : mapping, optional
        For parameters whose names do not say what they are: a role, such as ``"mask"``, ``"q"`` or ``"heads"``, or
        the value to pass.

    Returns
    -------
    Verdict
        Its text says what is wrong, with the smallest input that shows it, or "nothing differs".

    Raises
    ------
    ValueError
        It cannot be decided how to call the function; the message says what is missing.
    TypeError
        It is nothing to call.

    Examples
    --------
    >>> import numpy as np
    >>> def attention(q, k, v):
    ...     scores = q @ k.T
    ...     weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    ...     return weights @ v
    >>> diagnose(attention).faults
    ['The scores are not scaled: 1/√d is missing, d being the width of a head.']
    """
    return _verdict(Student(function, arguments or {}), None, layout, mask)


def diagnose_vjp(
    function: Any,
    *,
    forward: Any = None,
    layout: str | None = None,
    mask: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Verdict:
    """Say which step of one's own backward pass of attention is wrong, and why.

    Parameters
    ----------
    function : callable, layer or class
        It takes what the forward function takes and the gradient of the output, and returns the gradients; or it
        returns the output and a pullback; or it is a layer with ``forward`` and ``backward``.
    forward : callable, optional
        The forward function, which says what is differentiated: whether it is causal, what a mask means. By default
        the function of the same name without ``_vjp``, ``_backward`` or ``_grad`` in the same file, if there is one.
    layout, mask, arguments
        As for :func:`diagnose`.

    Returns
    -------
    Verdict

    Raises
    ------
    ValueError, TypeError
        As :func:`diagnose`.

    Examples
    --------
    >>> import numpy as np
    >>> def attention_vjp(q, k, v, grad_out):
    ...     scale = q.shape[-1] ** -0.5
    ...     weights = np.exp(q @ k.T * scale)
    ...     weights /= weights.sum(axis=-1, keepdims=True)
    ...     dweights = grad_out @ v.T
    ...     dscores = weights * dweights * scale
    ...     return dscores @ k, dscores.T @ q, weights.T @ grad_out
    >>> diagnose_vjp(attention_vjp).faults
    ['dS lacks its row term: it must be P ∘ (dP − rowsum(dP ∘ P)), not P ∘ dP.']
    """
    student = Student(function, arguments or {}, vjp=True)
    found = _forward_of(function) if forward is None else forward
    truth = None
    if found is not None:
        try:
            truth = Search(Student(found, arguments or {}), layout, mask)
            truth.base()
            if truth.settled:
                truth.masks()
        except (ValueError, TypeError):
            truth = None
    return _verdict(student, truth, layout, mask)


def _verdict(student: Student, truth: Search | None, layout: str | None, mask: str | None) -> Verdict:
    if mask is not None:
        one_of("mask", mask, MEANINGS)
    search = Search(student, layout, mask)
    search.truth = truth
    with _one_thread():
        search.run()
    return Verdict(search)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread: for small arrays, waiting for the others takes longer than the work."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    try:
        if torch:
            torch.set_num_threads(1)
        yield
    finally:
        if torch:
            torch.set_num_threads(before)


def _forward_of(function: Any) -> Any:
    """Return the forward function of a backward one, if its file has one of such a name."""
    if hasattr(function, "forward"):
        return function
    names = getattr(function, "__globals__", {})
    own = getattr(function, "__name__", "")
    base = re.sub(r"_?(vjp|backward|bwd|back|grads?|gradients?)$", "", own)
    others = (
        base,
        f"{base}_forward",
        f"{base}_fwd",
        own.replace("backward", "forward"),
        own.replace("bwd", "fwd"),
    )
    return next((names[each] for each in others if each != own and callable(names.get(each))), None)
