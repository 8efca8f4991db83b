"""The search: how a function is called, then which faults give its numbers, first without a mask, then with more.

A fault is named if the formulas that it changes give all numbers of all probes, and the right ones do not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import cast

import numpy as np

from selfattn._check import Array
from selfattn.diagnosis.calls import Convention, Student, arrange, gradient_role, role_of, source_of, turn
from selfattn.diagnosis.formula import BACKWARD, FORWARD, Formula, Values, compute
from selfattn.diagnosis.rules import RULES, Rule
from selfattn.views.language import entries, fill

TIGHT, LOOSE = 3e-5, 2e-2  # of float32, and of float16 inside
SECONDS = 1.2  # for pairs of faults
SIZES: Mapping[str, int] = {"B": 3, "H": 2, "G": 2, "L": 5, "S": 5, "E": 6}
# Sizes of the smallest inputs, tried one after the other.
SMALL = tuple(
    {"B": b, "H": h, "G": h, "L": n, "S": n, "E": e}
    for b, h, n, e in (
        (1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 3, 2), (1, 2, 2, 1), (2, 1, 2, 1), (1, 2, 2, 2),
        (2, 1, 2, 2), (2, 2, 2, 2), (2, 2, 3, 2), (3, 2, 3, 2), (1, 1, 3, 4), (1, 1, 5, 6),
    )
)  # fmt: skip
MASKS = {4: "LS B1LS BHLS HLS BLS BS B11S B1S 11LS 1HLS", 3: "LS BLS BS B1S 1LS B1LS B11S", 2: "LS"}
PADDING = {4: "BS B11S B1S BHLS", 3: "BS B1S B11S BLS", 2: "S LS"}
# Faults that are found in other ways than by formulas.
FOUND = {
    "dropout-output": "Dropout comes after the product with V: it zeroes numbers of the output, and must zero weights.",
    "dropout-scale": "The weights that dropout keeps are not divided by 1 − p.",
    "dropout-scores": "Dropout comes before the softmax: it zeroes scores, and must zero weights.",
    "heads-layout": "The heads are not transposed: axes are taken as ({taken}), and are said to be ({wanted}).",
    "scores-float16": "The scores are computed in float16, although the inputs are float64 or float32: about 3 digits "
    "are left.",
    "output-float16": "The output is computed in float16, although the inputs are float64 or float32: about 3 digits "
    "are left.",
    "dead-row": "A query whose keys are all closed gives NaN: the softmax of a row of −∞ is 0/0. "
    "It must give finite numbers, such as 0.",
}


def say(sentence: str, lang: str = "en", **values: object) -> str:
    """Say an English sentence in a language; one that `languages/` lacks, such as a lecturer's own, stays English."""
    return fill(entries(lang, "selfattn.diagnosis").get(sentence, sentence), lang, **values)


@dataclass
class Probe:
    """A call: its inputs, and what it gave."""

    inputs: Values
    convention: Convention
    got: list[tuple[str, Array]]
    changes: list[tuple[Rule, Mapping[str, Formula], bool]] | None = None


@dataclass
class Fault:
    """A rule that explains a difference, and a probe that shows it."""

    name: str
    sentence: str  # with the places of `values`
    values: Mapping[str, str]
    place: str
    probe: Probe
    changes: Mapping[str, Formula]
    result: str  # which one differs: the output, or a gradient
    expected: Array
    got: Array

    def say(self, lang: str = "en") -> str:
        """Return the sentence in a language."""
        return say(self.sentence, lang, **self.values)


STEPS = (*FORWARD, *BACKWARD)
LAST = ("mask-queries", "mask-weak", "mask-ignored")  # named if no other rule fits in any setting
FILLS: tuple[Mapping[str, Formula], ...] = (
    {"masked": lambda s: np.where(s.open, s.biased, -1e9)},
    {"masked": lambda s: s.biased - 1e9 * ~s.open},
)
Fit = list[tuple[Rule, Mapping[str, Formula]]]


class Search:
    """What is found out about a function: its convention, its faults, what was tried."""

    def __init__(self, student: Student, layout: str | None, mask: str | None) -> None:
        self.student, self.said_mask = student, mask
        self.said_layout = None if layout is None else re.sub("[^A-Z]", "", layout.upper().replace("D", "E"))
        self.convention = Convention()
        self.faults: list[Fault] = []
        self.changes: dict[str, Formula] = {}
        self.tried: list[str] = []
        self.different: Fault | None = None  # a difference that no rule explains
        self.tolerance, self.settled, self.hint = TIGHT, False, False
        self.likely: list[str] = []
        # What a backward pass forgets is no fault of the forward one.
        self.rules = sorted(RULES, key=lambda rule: rule.place in FORWARD) if student.vjp else list(RULES)
        self.rules = [rule for rule in self.rules if mask or rule.name != "mask-added"]
        self.wanted = student.gradients() if student.vjp else []
        self.truth: Search | None = None  # of the forward function of a backward one

    # ---- probes

    def draw(
        self, c: Convention, seed: int = 0, digits: int | None = None, sizes: Mapping[str, int] = SIZES
    ) -> Values:
        """Draw the inputs of a call."""
        rng = np.random.default_rng(seed)
        s = Values({**SIZES, **sizes})
        for axis in "BH":
            if axis not in c.layout and not (axis == "H" and self.student.has("heads")):
                s[axis] = 1
                s["G"] = 1 if axis == "H" else s.G
        s.setdefault("D", s.H * s.E)
        s["is_causal"], s["offset"] = c.causal or c.flag, s.S - s.L if c.lower else 0
        s["causal"] = np.tri(s.L, s.S, s.offset, dtype=bool) if s.is_causal else np.ones((1, 1), bool)

        if c.mask:
            s["given"], s["bias"] = self._mask_of(c.mask, s, 0.0)

        def array(*shape: int) -> Array:
            x = rng.standard_normal(shape)
            return x if digits is None else x.round(digits) + 0.0

        student = self.student
        own = student.make(self._weights(s, array), c) if student.layer or student.is_class else {}
        if own or student.has("wq", "wk", "wv", "wqkv", "params"):
            several = max(map(len, own.values()), default=1)  # heads that are layers of their own
            s["H"] = s["G"] = several if several > 1 else student.size("heads") or s["H"]
            self._weights(s, array)
            self._own(s, own, c)
            if student.has("params"):
                s |= {k: v for k, v in self._weights(Values(s), array).items() if k not in s}
            s["xq"] = array(s.B, s.L, s.wq.shape[0])
            if student.own_inputs and not student.has("context"):
                s["xk"] = s["xv"] = s.xq
            else:
                s["xk"] = array(s.B, s.S, s.wk.shape[0])
                s["xv"] = s.xk if student.has("context") else array(s.B, s.S, s.wv.shape[0])
            out = (s.wo if "wo" in s else s.wv).shape[-1]
            s["grad"] = array(s.B, s.L, out)
        else:
            s["E"] = student.size("head_width") or s.E
            for name in list(s):
                if name in ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"):
                    del s[name]
            s["q"], s["k"], s["v"] = (array(s.B, n, m, s.E) for n, m in ((s.H, s.L), (s.G, s.S), (s.G, s.S)))
            if student.own_inputs:
                s["k"] = s["v"] = s.q
                s["one"] = True
            s["grad"] = array(s.B, s.H, s.L, s.E)
        if student.has("keep"):
            s["keep_passed"] = np.ones((s.B, s.H, s.L, s.S), bool)
        if not student.vjp:
            del s["grad"]
        elif student.has("weights", "output"):
            s["weights_passed"], s["output_passed"] = self._saved(s)
        return s

    def _saved(self, s: Values) -> tuple[Array, Array]:
        found = compute({k: v for k, v in s.items() if k != "grad"}, {})
        return found.weights, found.output

    def _weights(self, s: Values, array: Callable[..., Array]) -> Values:
        inside = s.H * s.E
        if "wq" not in s:
            for name in ("wq", "wk", "wv"):
                s[name] = array(s.D, inside) / s.D**0.5
            s["wo"] = array(inside, s.D) / inside**0.5
            s |= {"bq": array(inside), "bk": array(inside), "bv": array(inside), "bo": array(s.D)}
        return s

    def _own(self, s: Values, own: Mapping[str, list[Array]], c: Convention) -> None:
        """Set the weights that a layer has, and remove those that it has not."""
        given = {role for role in {*self.student.roles.values(), *self.student.made.values()} if role}
        if self.student.has("params"):
            given |= {role_of(name) or "" for name in self.student._keys()}
        for role, arrays in own.items():
            joined = np.concatenate([turn(x, c) for x in arrays], -1)
            which = role[1:] if role[1:] in ("qkv", "kv") else role[1]
            for each, part in zip(which, np.split(joined, len(which), -1), strict=True):
                s[role[0] + each] = part
                given.add(role[0] + each)
        for role in given & {"wqkv", "wkv", "bqkv", "bkv"}:
            given |= {role[0] + each for each in role[1:]}
        for each in "qkvo":
            if f"w{each}" not in given and each == "o":
                del s["wo"]
            if f"b{each}" not in given:
                s[f"b{each}"] = 0.0

    def probe(
        self,
        c: Convention,
        inputs: Values | None = None,
        digits: int | None = None,
        sizes: Mapping[str, int] = SIZES,
    ) -> Probe | None:
        """Call the function once; None if it raises."""
        try:
            s = self.draw(c, digits=digits, sizes=sizes) if inputs is None else inputs
        except Exception as error:  # of the class that makes the layer
            self.student.error = error
            return None
        got = self.student.call(s, c)
        return None if got is None else Probe(s, c, got)

    # ---- comparing

    def expected(self, s: Values, c: Convention) -> list[tuple[str, list[Array]]]:
        """Return the results by name, each in the forms in which it may be returned."""
        if self.student.vjp:
            return [
                (role, [self._gradient(s, role, c)])
                for role in self.wanted
                if s.get(role) is not None or role[1:].endswith("qkv")
            ]
        if "wq" in s:
            return [("projected", [arrange(s.projected, c.layout)])]
        if "H" not in c.layout and s.H > 1:
            return [("output", [arrange(s.merged, c.layout)])]
        forms = [arrange(s.output, c.layout), arrange(s.merged, c.layout.replace("H", ""))]
        if c.layout == "BLHE":
            forms[0] = s.merged.reshape(forms[0].shape)
        return [("output", forms[: 1 + ("H" in c.layout)])]

    def _gradient(self, s: Values, role: str, c: Convention) -> Array:
        if role in ("dwqkv", "dbqkv"):
            x = np.concatenate([s[f"{role[:2]}{each}"] for each in "qkv"], -1)
        elif role in ("dq", "dk", "dv") and "wq" in s:
            x = s[f"dx{role[1]}"]
        else:
            x = s[role]
        return turn(x, c) if role[1] in "wb" else arrange(x, c.layout)

    def pairs(self, s: Values, probe: Probe) -> list[tuple[str, Array, Array]] | None:
        """Return each result's name, the expected and the given array; None if their shapes differ."""
        found = []
        wanted = self.expected(s, probe.convention)
        got = [x for _, x in probe.got]
        if self.student.vjp:
            named = [gradient_role(name) for name, _ in probe.got]
            if all(named):
                wanted = [
                    (name, [self._gradient(s, name, probe.convention)])
                    for name in named
                    if name and name in s
                ]
            for (name, forms), x in zip(wanted, got, strict=False):
                if x.shape != forms[0].shape:
                    return None
                found.append((name, forms[0], x))
            return found or None
        for name, forms in wanted:
            for form in forms:
                for x in got:
                    if x.shape == form.shape:
                        found.append((name, form, x))
        return found[:1] or None

    def agrees(self, s: Values, probe: Probe, tolerance: float | None = None) -> bool:
        """Return whether the numbers are those of the steps; rows without open keys are left out."""
        pairs, tolerance = self.pairs(s, probe), tolerance or self.tolerance
        return pairs is not None and all(same(a, b, tolerance) for _, a, b in pairs)

    def model(
        self, probe: Probe, changes: Mapping[str, Formula], right: Values | None = None, plain: bool = False
    ) -> Values | None:
        """Compute the steps with changed formulas; None if they do not fit the inputs.

        With the ``right`` steps those before the first change are not computed again.
        """
        inputs, known = dict(probe.inputs), {} if plain else dict(self.changes)
        for name in STEPS if right else ():
            if name in changes or right is None or name not in right:
                break
            inputs[name] = right[name]
            known.pop(name, None)
        try:
            with np.errstate(all="ignore"):
                return compute(inputs, {**known, **changes})
        except (ValueError, KeyError, ZeroDivisionError, IndexError, AttributeError, TypeError):
            return None

    def explain(self, settings: list[list[Probe]], most: int = 2) -> tuple[list[Probe], Fit] | None:
        """Return the first setting, and the fewest rules, that give all its numbers."""
        firsts = [setting[:1] for setting in settings]  # some functions take as many queries as keys only
        wide = any(len(setting) > 1 for setting in settings)
        for several in (settings, firsts)[: 1 + wide]:
            for find in (self._right, self._singles)[: most + 1]:
                if found := find(several):
                    return found
        return self._doubles(settings) or (self._doubles(firsts) if wide else None) if most == 2 else None

    def _right(self, settings: list[list[Probe]]) -> tuple[list[Probe], Fit] | None:
        return next(
            ((each, []) for each in settings if any(self.fits(each, fill) for fill in self.fills())), None
        )

    def fills(self) -> tuple[Mapping[str, Formula], ...]:
        """Return how closed scores may be made: −1e9 is right too, and differs if the softmax is wrong already."""
        return ({}, *FILLS) if "weights" in self.changes else ({},)

    def _changes(self, probe: Probe) -> list[tuple[Rule, Mapping[str, Formula], bool]]:
        """Return the changes that show in a probe or explain it; True for these."""
        if probe.changes is None:
            right = self.model(probe, {})
            probe.changes = []
            for rule in self.rules if right is not None else ():
                for changes in rule.changes:
                    s = self.model(probe, changes, right)
                    if s is not None and (
                        self.agrees(s, probe) or not self.equal(right, s, probe.convention)
                    ):
                        probe.changes.append((rule, changes, self.agrees(s, probe)))
        return probe.changes

    def _singles(self, settings: list[list[Probe]]) -> tuple[list[Probe], Fit] | None:
        late: dict[str, tuple[list[Probe], Fit]] = {}
        for setting in settings:
            for rule, changes, agrees in self._changes(setting[0]):
                if agrees and self.fits(setting[1:], changes):
                    if rule.name not in LAST:
                        return setting, [(rule, changes)]
                    late.setdefault(rule.name, (setting, [(rule, changes)]))
        return next((late[name] for name in LAST if name in late), None)

    def _doubles(self, settings: list[list[Probe]]) -> tuple[list[Probe], Fit] | None:
        end = time.perf_counter() + SECONDS / 2
        for setting in settings:
            for (a, x, _), (b, y, _) in combinations(self._changes(setting[0]), 2):
                if a.name != b.name and not x.keys() & y.keys() and self.fits(setting, {**x, **y}):
                    return setting, [(a, x), (b, y)]
                if time.perf_counter() > end:
                    return None
        return None

    def equal(self, right: Values | None, s: Values, c: Convention) -> bool:
        """Return whether two computations have the same results."""
        both = zip(self.expected(right or s, c), self.expected(s, c), strict=True)
        return all(same(a, b, TIGHT) for (_, x), (_, y) in both for a, b in zip(x, y, strict=True))

    def fits(
        self, setting: list[Probe], changes: Mapping[str, Formula], tolerance: float | None = None
    ) -> bool:
        """Return whether formulas give the numbers of all probes."""
        return all(
            (s := self.model(probe, changes)) is not None and self.agrees(s, probe, tolerance)
            for probe in setting
        )

    def add(self, setting: list[Probe], fit: Fit) -> None:
        """Keep what explains a difference."""
        places = [*FORWARD]
        fit = sorted(fit, key=lambda each: places.index(each[0].place) if each[0].place in places else 99)
        for rule, changes in fit:
            probe = next((each for each in setting if not self.fits([each], {})), setting[0])
            right, wrong = self.model(probe, {}), self.model(probe, {**changes})
            sums = wrong.weights.sum(-1) if wrong else np.ones(1)
            values = {"low": f"{np.nanmin(sums):.2f}", "high": f"{np.nanmax(sums):.2f}"}
            self._fault(rule.name, rule.sentence, rule.place, probe, changes, right, values)
        for _, changes in fit:
            self.changes |= changes

    def _fault(
        self,
        name: str,
        sentence: str,
        place: str,
        probe: Probe,
        changes: Mapping[str, Formula],
        right: Values | None = None,
        values: Mapping[str, str] = MappingProxyType({}),
    ) -> Fault:
        right = right or self.model(probe, {})
        pairs = self.pairs(right, probe) if right else None
        differing = (
            [each for each in pairs or [] if not same(each[1], each[2], self.tolerance)]
            or pairs
            or [("", np.zeros(0), np.zeros(0))]
        )
        fault = Fault(name, sentence, values, place, probe, changes, *differing[0])
        if name:
            self.faults.append(fault)
        return fault

    # ---- stages

    def run(self) -> None:
        """Find the convention and the faults."""
        self.base()
        for stage in (self.flag, self.masks, self.either, self.dropped, self.shared, self.dead):
            if self.different is None:
                stage()

    def layouts(self) -> list[str]:
        """Return the layouts that are tried, those of the function's own text first."""
        student = self.student
        if self.truth is not None and self.truth.settled:
            return [self.truth.convention.layout]
        if self.said_layout:
            self.likely = [self.said_layout]
            same_axes = [
                each for each in ("BHLE", "BLHE", "BLE", "LBE") if sorted(each) == sorted(self.said_layout)
            ]
            return sorted({*same_axes, self.said_layout}, key=lambda each: each != self.said_layout)
        layer = student.has("wq", "wqkv", "params") or self._has_own()
        known = ["BLE", "LE", "LBE"] if layer else ["BHLE", "BLHE", "BLE", "LE", "LBE", "HLE"]
        self.likely = self._said(known) or self._worded(known)
        return sorted(known, key=lambda each: each not in self.likely)

    def _worded(self, known: list[str]) -> list[str]:
        """Return the layouts that words of the function's text and of its file say."""
        file = getattr(getattr(self.student.run, "__func__", self.student.run), "__globals__", {})
        docs = (file.get("__doc__"), self.student.function.__doc__, source_of(self.student.run))
        text = "\n".join(each or "" for each in docs).lower()
        if re.search(r"(one|single|a) (sequence|text)", text):
            return ["LE"] if "LE" in known else []
        if re.search(r"(?<!single-)(?<!single )(?<!one )\bheads?\b|n_rep|groups?\b", text):
            return [each for each in known if "H" in each]
        return ["BLE", "LBE"] if re.search(r"\bbatch", text) and "BHLE" in known else []

    def _has_own(self) -> bool:
        if not self.student.layer:
            return False
        try:
            s = self.draw(Convention(layout="BLE"))
        except Exception as error:
            self.student.error = error
            return isinstance(error, ValueError) and "split" in str(error)
        return "wq" in s

    def _said(self, known: list[str], docs_only: bool = False) -> list[str]:
        """Return the layouts that the function's docs say, or its lines that take shapes apart and its comments."""
        text = f"{self.student.function.__doc__ or ''}\n{self.student.run.__doc__ or ''}"
        text += "" if docs_only else source_of(self.student.run)
        found = []
        for group in re.findall(
            r"\(([\w ]+(?:,[\w ]+){1,3})\)|^\s*([\w]+(?:, *\w+){1,3}) = \w+\.(?:shape|size\(\))",
            text,
            re.MULTILINE,
        ):
            names = [each.strip().lower() for each in (group[0] or group[1]).split(",")]
            axes = "".join(axis_of(each) for each in names)
            if axes in known and axes not in found:
                found.append(axes)
        return found

    def base(self) -> None:
        """Find the convention and the faults of a call without a mask."""
        settings: list[list[Probe]] = []
        layouts = self.layouts()
        layer = self.student.has("wq", "wqkv", "params") or self._has_own()
        for layout in layouts:
            for turned in (False, True) if layer else (False,):
                settings += self._settings(Convention(layout=layout, turned=turned))
        if not settings:
            raise ValueError(
                f"{self.student.name} could not be called: {type(self.student.error).__name__}: {self.student.error}; "
                "say with arguments= what its parameters mean, and with layout= how axes are ordered"
            ) from self.student.error
        found = None
        for several in (settings[: self._preferred(settings)], settings):
            found = found or (self.explain(several, 1) if several else None)
        if found is None and self._half(settings):
            return
        if found is None and (found := self.explain(settings)) is None:
            self.convention = settings[0][0].convention
            self.different = self._fault("", "", "", settings[0][0], {})
            return
        setting, fit = found
        documented = self._said(["BHLE", "BLHE"], docs_only=True)
        said = self.said_layout or (documented[0] if len(documented) == 1 else "")
        layout = setting[0].convention.layout
        if not fit and sorted(said) == sorted(layout) and said != layout:
            values = {"taken": ", ".join(layout), "wanted": ", ".join(said)}
            if other := self.probe(replace(setting[0].convention, layout=said)):
                self._fault("heads-layout", FOUND["heads-layout"], "split", other, {}, values=values)
        self.convention, self.settled = setting[0].convention, not fit
        self.tried.append(", ".join(f"{p.inputs.L} queries and {p.inputs.S} keys" for p in setting))
        self.add(setting, fit)

    def _settings(self, c: Convention) -> list[list[Probe]]:
        """Return the probes of a layout without a mask, once for each way to be causal."""
        found = []
        causals = (
            (False, True) if self.truth is None or not self.truth.settled else (self.truth.convention.causal,)
        )
        for start in self._neutral(c):
            if (first := self.probe(start)) is None:
                continue
            if self._shapeless(first):
                continue
            further = [{"S": 7}, {"L": 3, "S": 4}] if self.student.has("k", "context") else []
            if start.mask:
                further = []
            if "wq" in first.inputs and not self.student.has("heads"):
                further.append({"D": 8})
            for causal in causals:
                base = replace(start, causal=causal)
                probes = [self._again(first, base)]
                for sizes in further:
                    other = self.probe(replace(base, lower=False), sizes=sizes)
                    if other is not None:
                        probes.append(other)
                found.append(probes)
                if causal and len(probes) > 1:
                    lower = [self._again(p, replace(base, lower=True)) for p in probes]
                    found.append(lower)
        return found

    def _again(self, probe: Probe, c: Convention) -> Probe:
        """Return a probe that is read with another convention."""
        s = Values(probe.inputs)
        s["is_causal"], s["offset"] = c.causal or c.flag, s.S - s.L if c.lower else 0
        s["causal"] = np.tri(s.L, s.S, s.offset, dtype=bool) if s.is_causal else np.ones((1, 1), bool)
        return Probe(s, c, probe.got)

    def _shapeless(self, probe: Probe) -> bool:
        s = self.model(probe, {})
        if s is not None and self.pairs(s, probe) is not None:
            return False
        shapes = ", ".join(str(x.shape) for _, x in probe.got) or "no arrays"
        self.student.error = ValueError(
            f"it returns {shapes} for axes ({', '.join(probe.convention.layout)})"
        )
        return True

    def _neutral(self, c: Convention) -> list[Convention]:
        """Return the call without a mask; where one is needed, also calls with a mask that closes nothing."""
        if not self._mask_needed():
            return [c]
        found = [c]
        for means in ("open", "closed"):
            for numbers in (False, True):
                several = (
                    replace(c, mask=x, means=means, numbers=numbers) for x in MASKS[len(c.layout)].split()
                )
                found += [each for each in [next(filter(self.probe, several), None)] if each]
        return found

    def _preferred(self, settings: list[list[Probe]]) -> int:
        """Return how many settings have layouts that the function's text says, if it says some."""
        return sum(setting[0].convention.layout in self.likely for setting in settings)

    def _half(self, settings: list[list[Probe]]) -> bool:
        """Name float16: differences are small, and small changes of the inputs do not move the numbers."""
        for setting in settings:
            if self.fits(setting, {}, LOOSE):
                probe = setting[0]
                moved = {}
                for names in (("q", "k", "xq", "xk", "xv"), ("v", "grad")):
                    s = Values(probe.inputs)
                    s |= {name: s[name] * (1 + 1e-6) for name in names if name in s}
                    after = self.probe(probe.convention, s)
                    moved[names[0]] = after is not None and any(
                        (a != b).any() for (_, a), (_, b) in zip(after.got, probe.got, strict=True)
                    )
                if not all(moved.values()):
                    self.convention, self.settled = probe.convention, True
                    place = "scores" if moved["v"] else "output"
                    self._fault("float16", FOUND[f"{place}-float16"], place, probe, {})
                    self.tolerance = LOOSE
                    return True
        return False

    # masks and flags

    def flag(self) -> None:
        """Try the causal flag."""
        if not self.student.has("causal") or self.convention.causal:
            return
        c = replace(self.convention, flag=True)
        plain, flagged = self.probe(self.convention), self.probe(c)
        if self.student.masks() and plain and not (flagged and not self._alike(plain, flagged)):
            self.hint = True  # about the mask, no more
            return
        settings = [[flagged]] if flagged else []
        if self.student.has("k") and settings:
            wide = [self.probe(replace(c, lower=lower), sizes={"S": 7}) for lower in (False, True)]
            settings = [[*settings[0], each] for each in wide if each] or settings
        self._stage(settings, "the causal flag")

    @staticmethod
    def _alike(a: Probe, b: Probe) -> bool:
        """Return whether two calls gave the same numbers."""
        return all(same(x, y, TIGHT) for (_, x), (_, y) in zip(a.got, b.got, strict=False))

    def _stage(self, settings: list[list[Probe]], what: str) -> list[Probe] | None:
        """Explain settings, and keep what is found; return the setting."""
        if not settings:
            return None
        found = self.explain(settings, 1 if self.faults else 2)
        if found is None:
            if not self.faults:
                self.different = self._fault("", "", "", settings[0][0], {})
            return None
        self.tried.append(what)
        self.add(*found)
        return found[0]

    def _mask_of(self, mask: str, s: Values, share: float = 0.4, dead: bool = False) -> tuple[Array, Array]:
        """Draw a mask as (B, H, L, S), 1 where an axis is missing: which keys are open, and numbers to add."""
        rng = np.random.default_rng(1)
        shape = [s[axis] if axis in mask else 1 for axis in "BHLS"]
        for _ in range(200):
            given = rng.random(shape) >= share
            allowed = given & s.causal
            if allowed.any(-1).all() and (given.size < 3 or not given.all() or not share):
                break
        if dead:
            given = given.copy()
            given[:, :, (given.shape[2] > 1) * 1 : (given.shape[2] > 1) + 1] = False
        bias = np.where(given, rng.standard_normal(shape), -1e9) if share else np.zeros(shape)
        return given, bias

    def _masked(
        self, c: Convention, dead: bool = False, digits: int | None = None, sizes: Mapping[str, int] = SIZES
    ) -> Probe | None:
        try:
            s = self.draw(c, digits=digits, sizes=sizes)
            given, bias = self._mask_of(c.mask or "", s, dead=dead)
            del s["given"], s["bias"]
            if c.means == "additive":
                s["bias"] = bias
            else:
                s["given"] = given
            if "weights_passed" in s:
                s["weights_passed"], s["output_passed"] = self._saved(s)
        except Exception:
            return None
        return self.probe(c, s)

    def masks(self) -> None:
        """Find the shape and the meaning of a mask, and its faults."""
        if self.student.has("lengths"):
            self._lengths()
        first = self.convention
        for name in self.student.masks():
            self.convention = replace(first, name=name)
            self._mask_named(name)

    def _mask_named(self, name: str) -> None:
        truth = self.truth.convention if self.truth is not None and self.truth.settled else None
        plain = "wq" not in self.draw(self.convention)
        rank = 4 if self.student.has("heads") else len(self.convention.layout) if plain else 3
        shapes = MASKS[rank].split()
        order = [PADDING[rank].split(), shapes] if "pad" in name.lower() else [shapes, ["S"]]
        meanings = [self.said_mask] if self.said_mask else ["open", "closed", "additive"]
        if "bias" in name.lower():
            meanings.sort(key=lambda each: each != "additive")
        if truth is not None and truth.mask:
            order, meanings = [[truth.mask]], [truth.means]
        c = self.convention
        for sizes in cast("tuple[dict[str, int], ...]", ({}, {"B": 2}, {"B": 5})):
            tried: list[list[Probe]] = []
            for several in order:
                for numbers in (False, True):
                    settings = [
                        [probe]
                        for means in meanings
                        for mask in several
                        if not (numbers and means == "additive")
                        and (
                            probe := self._masked(
                                replace(c, mask=mask, means=means, numbers=numbers), sizes=sizes
                            )
                        )
                        and not self._shapeless(probe)
                    ]
                    tried += settings
                    if settings and (found := self.explain(settings, 1)):
                        self._settle(found)
                        return
            if self.faults:
                return
            if tried and sizes == {"B": 5}:
                self.different = self._fault("", "", "", tried[0][0], {})

    def _settle(self, found: tuple[list[Probe], Fit]) -> None:
        c = found[0][0].convention
        self.convention = replace(self.convention, name=c.name, mask=c.mask, means=c.means, numbers=c.numbers)
        self.tried.append("masks")
        self.add(*found)

    def _lengths(self) -> None:
        s = self.draw(self.convention)
        s["lengths"] = np.arange(s.S - s.B, s.S)
        s["given"] = (np.arange(s.S) < s.lengths[:, None])[:, None, None]
        if probe := self.probe(self.convention, s):
            self._stage([[probe]], "lengths")

    def either(self) -> None:
        """Try the causal flag and a mask together."""
        c = self.convention
        if not (self.student.has("causal") and c.mask and not c.causal) or self.faults or self.hint:
            return
        probe = self._masked(replace(c, flag=True))
        found = self.explain([[probe]], 1) if probe else None
        # One of the two may be meant to replace the other.
        if found and not any("ignored" in rule.name for rule, _ in found[1]):
            self.tried.append("a mask with the causal flag")
            self.add(*found)

    def dead(self) -> None:
        """Try a query whose keys are all closed."""
        c = self.convention
        if not c.mask or c.means == "additive" or self.student.vjp or self.faults:
            return
        probe = self._masked(c, dead=True)
        right = self.model(probe, {}) if probe else None
        pairs = self.pairs(right, probe) if probe and right else None
        if probe and pairs and np.isnan(pairs[0][2]).any():
            self._fault("dead-row", FOUND["dead-row"], "weights", probe, {})
        self.tried.append("a query without open keys")

    def shared(self) -> None:
        """Try fewer heads of keys than of queries."""
        c = replace(self.convention, mask=None) if not self._mask_needed() else self.convention
        if "H" not in c.layout or self.student.own_inputs or c.mask:
            return
        probe = self.probe(c, sizes={"H": 6, "G": 2})
        if probe is not None and not self._shapeless(probe):
            self._stage([[probe]], "6 heads of queries for 2 of keys")

    def _mask_needed(self) -> bool:
        return any(
            role == "mask" and name in self.student.required for name, role in self.student.roles.items()
        )

    def smallest(self, fault: Fault) -> Fault:
        """Return the fault with the smallest input that shows it."""
        c = fault.probe.convention
        changes = {name: f for name, f in self.changes.items() if name not in fault.changes}
        for sizes in SMALL if not fault.probe.inputs.keys() & {"p_passed", "lengths"} else ():
            if c.mask:
                probe = self._masked(c, dead=fault.name == "dead-row", digits=1, sizes=sizes)
            else:
                probe = self.probe(c, digits=1, sizes=sizes)
            right = self.model(probe, {}, plain=True) if probe else None
            others = self.model(probe, changes, plain=True) if probe else None
            if (
                probe
                and right
                and others
                and self.pairs(right, probe)
                and not self.agrees(others, probe, TIGHT)
            ):
                pairs = self.pairs(right, probe) or []
                shown = next((each for each in pairs if not same(each[1], each[2], TIGHT)), None)
                if shown:
                    return replace(
                        fault, probe=probe, result=shown[0], expected=np.nan_to_num(shown[1]), got=shown[2]
                    )
        return fault

    # dropout

    def dropped(self) -> None:
        """Try dropout: with a mask that is given, or with weights found from the output."""
        student, c = self.student, self.convention
        if self._mask_needed():
            return
        c = replace(c, mask=None)
        if student.has("keep"):
            s = self.draw(c)
            keep = np.random.default_rng(2).random((s.B, s.H, s.L, s.S)) > 0.4
            settings = []
            for passed, p in ((keep, 0.4), (keep / 0.6, 0.4), (~keep, 0.4), (keep, 0.0)):
                if (p == 0 or passed.dtype != bool) and student.has("p", "keep_p"):
                    continue
                each = Values(s)
                each |= {"keep_passed": passed, "keep": keep, "p": p, "p_passed": p}
                if probe := self.probe(c, each):
                    settings.append([probe])
            self._stage(settings, "dropout")
        elif student.has("p", "keep_p") and not student.vjp:
            s = self.draw(replace(c))
            if "wq" in s or self.changes:
                return
            s |= {"p_passed": 0.3, "training": True}
            if (student.is_class or student.layer) and not student.has("wq"):
                student.make(s, c)
            probe = self.probe(c, s)
            right = self.model(probe, {}) if probe else None
            pairs = self.pairs(right, probe) if right and probe else None
            if probe and right and pairs and pairs[0][1].shape == arrange(right.output, c.layout).shape:
                self._random(probe, right, pairs[0][2])
            if student.is_class or student.layer:
                student.make(self.draw(c), c)

    def _random(self, probe: Probe, right: Values, got: Array) -> None:
        """Name a fault of dropout whose draws are not known: weights are the output times the inverse of V."""
        s = probe.inputs
        if same(arrange(right.output, probe.convention.layout), got, self.tolerance):
            return
        self.tried.append("dropout")
        zeros = float((got == 0).mean())
        order = [a for a in "BHLE" if a in probe.convention.layout]
        sizes = [s.B, s.H, s.L, s.E]
        output = got.transpose([probe.convention.layout.index(a) for a in order]).reshape(sizes)
        weights = output @ np.linalg.pinv(right["values"])
        ratio = weights / right.weights
        kept = np.abs(ratio) > 1e-3
        name = ""
        if zeros > 0.1:
            name = "dropout-output"
        elif np.allclose(ratio[kept], 1, atol=1e-3) or np.allclose(ratio[kept], 1 / 0.3, atol=1e-3):
            name = "dropout-scale"
        elif kept.all() and np.allclose(weights.sum(-1), 1, atol=1e-3):
            name = "dropout-scores"
        if name:
            self._fault(name, FOUND[name], "output" if name == "dropout-output" else "dropped", probe, {})


AXES = {
    "B": r"b|bs|batch\w*|n_?batch|bsz|n|texts?",
    "H": r"h|heads?|n_?heads?|num_?heads?|nh|n_h",
    "L": r"l|t|s|n|m|seq\w*|len\w*|tokens?|time|length|lq|lk|l_q|n_tokens|tgt_len|src_len|n_?q|n_?k|queries|keys",
    "E": r"e|d|c|dim\w*|d_?k|d_?v|d_?h|head_dim|head_size|d_?head|d_?model|width|hs|features|embed\w*|dk",
}


def axis_of(name: str) -> str:
    """Return the letter of the axis that a name means, or ``?``."""
    return next((axis for axis in "BHLE" if re.fullmatch(AXES[axis], name)), "?")


def same(a: Array, b: Array, tolerance: float) -> bool:
    """Return whether numbers agree where those of a are finite; at least half must be."""
    if a.shape != b.shape:
        return False
    finite = np.isfinite(a)
    if finite.mean() < 0.5:
        return False
    return bool(
        np.all(np.abs(a - b)[finite] <= tolerance * max(1.0, float(np.abs(a[finite]).max(initial=0))))
    )
