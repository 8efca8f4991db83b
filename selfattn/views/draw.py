"""Draws a graph of matrices as HTML: stages, equations, tables, legends, answers, and the script's data."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from selfattn.views.document import MAX_MATRICES, MAX_SIDE, weights_svg
from selfattn.views.graph import OPERATORS, Equation, Graph, Node, Stage, results, start_of_results
from selfattn.views.language import fill
from selfattn.views.texts import SCRIPTED
from selfattn.views.writing import Array, decimals_of, number, script_data, text

_LOW = re.compile(r"_([0-9A-Za-z]+)")
LEVELS = 8  # shades of each sign


class Drawing:
    """One view: a graph, and the settings with which it is drawn."""

    def __init__(
        self,
        graph: Graph,
        sides: list[str],
        texts: dict[str, str],
        exercise: bool,
        precision: int,
        max_side: int,
    ) -> None:
        self.graph, self.sides, self.texts, self.exercise = graph, sides, texts, exercise
        self.precision, self.max_side = precision, max_side
        self.decimals = {name: decimals_of(node.data, precision) for name, node in graph.nodes.items()}
        self.sizes: dict[str, float] = {}  # the largest number of each name, for one colour scale
        for node in graph.nodes.values():
            finite = np.abs(node.data[np.isfinite(node.data)])
            key = node.name.partition("[")[0]
            self.sizes[key] = max(self.sizes.get(key, 0.0), float(finite.max(initial=0.0)))
        self.blanks = self._blanks() if exercise else {}

    def _blanks(self) -> dict[str, list[int]]:
        """Return an exercise's blanks: for each node that a stage computes, the column of the blank in each row."""
        blanks: dict[str, list[int]] = {}
        for n, stage in enumerate(self.graph.stages.values()):
            for equation in stage.equations:
                for name in (name for side in equation.sides for name in results(side)):
                    node, (rows, columns) = self.graph.nodes[name], self.graph.nodes[name].data.shape
                    if columns and node.op not in ("given", "row_sums"):
                        step = 2 if columns % 2 else 1  # so that blanks reach all columns
                        blanks[name] = [(step * i + n) % columns for i in range(rows)]
        return blanks

    def say(self, name: str, /, **values: object) -> str:
        """Return a caption with values in its places."""
        return fill(self.texts[name], self.texts["lang"], **values)

    def html(self) -> str:
        """Draw everything: the heading, the stages, the answers of an exercise, the data for the script."""
        stages = "\n".join(self.stage(stage) for stage in self.graph.stages.values())
        title = f'<h2 class="sa-head">{text(self.texts["title"])}</h2>'
        look = "".join(
            f"<p>{emphasised(line)}</p>" for line in (self.texts["look"], self.texts["made up"]) if line
        )
        still = self.picture if any(node.name == "weights" for node in self.graph.nodes.values()) else ""
        answers = self.answers() if self.exercise else ""
        return (
            f'<div class="sa-steps">\n{title}<div class="sa-still">{look}{still}</div>\n{stages}\n{answers}'
            f"{script_data(self.data())}</div>"
        )

    @cached_property
    def picture(self) -> str:
        """Draw the weights of all heads and sentences as SVG, with a note of what is left out."""
        matrices = []
        for node in self.graph.nodes.values():
            if node.name == "weights":
                side = self.sides[node.id.endswith("~1")] if len(self.sides) > 1 else ""
                name = ", ".join(filter(None, (self.where(node).removesuffix(": "), side)))
                blanks = set(enumerate(self.blanks.get(node.id, [])))
                matrices.append((name, node.data, *self.axes(node), blanks))
        notes = []
        if len(matrices) > MAX_MATRICES:
            notes.append(self.say("abridged heads", shown=MAX_MATRICES, all=len(matrices)))
        largest = max((max(matrix[1].shape) for matrix in matrices), default=0)
        if largest > MAX_SIDE:
            notes.append(self.say("abridged", shown=MAX_SIDE, all=largest))
        return weights_svg(matrices, f"{self.texts['title']}: {self.texts['head.weights']}", notes)

    def stage(self, stage: Stage) -> str:
        """Draw one step: heading, sentence, formula, NumPy, equations, notes, legend."""
        sentence = self.texts[stage.caption]
        equations = "".join(self.equation(stage, equation) for equation in stage.equations)
        notes = {self.say(key, **values) for key, values in stage.notes}
        notes |= self.abridged(stage)
        masks = [node for node in self.nodes_of(stage) if node.name == "mask"]
        if masks and all(mask.data.all() for mask in masks):
            notes.add(self.texts["open mask"])
        note = "".join(f'<p class="sa-note">{text(line)}</p>' for line in sorted(notes))
        return (
            f'<section class="sa-stage" data-stage="{stage.name}" id="stage={stage.name}">'
            f'<h3>{text(self.heading(stage))}</h3><p class="sa-sentence">{text(sentence)}</p>'
            f'<p class="sa-formula"><i>{formula(stage.formula)}</i></p><pre><code>{text(stage.numpy)}</code></pre>'
            f"{equations}{note}{self.legend(stage)}</section>"
        )

    def heading(self, stage: Stage) -> str:
        """Return the name of a step, with its block if there are several."""
        block = stage.name.rpartition(".")[0].removeprefix("block")
        heading = self.texts[f"head.{stage.caption}"]
        return f"{heading}, {self.say('block', n=block)}" if block else heading

    def equation(self, stage: Stage, equation: Equation) -> str:
        """Draw one line; two sentences have their operands side by side, and their results below."""
        label = f"<h4>{text(self.say('head', n=equation.label))}</h4>" if equation.label else ""
        ids = stage.name if stage.equations[0] is equation else ""
        if len(equation.sides) == 1:
            return f'<div class="sa-equation">{label}{self.line(equation.sides[0], ids)}</div>'
        halves = []
        for name, terms in zip(self.sides, equation.sides, strict=True):
            if operands := terms[: start_of_results(terms)]:
                line = self.line(operands, "")
                halves.append(f'<div><p class="sa-side"><bdi>{text(name)}</bdi></p>{line}</div>')
        got = [
            self.side_by_side(a, b, ids if n == 0 else "")
            for n, (a, b) in enumerate(zip_longest(*map(results, equation.sides)))
        ]
        return f'<div class="sa-equation">{label}<div class="sa-halves">{"".join(halves)}</div>{"".join(got)}</div>'

    def line(self, terms: Sequence[str], ids: str) -> str:
        """Draw tables and signs; a sign stays with the table after it."""
        made, drawn, sign = results(terms), [], ""
        for term in terms:
            if term in OPERATORS:
                sign += f'<span class="sa-op">{text(term)}</span>'
            elif term:
                table = self.table(term, ids=ids if term in made[:1] else "", result=term in made)
                drawn.append(f'<div class="sa-term">{sign}{table}</div>')
                sign = ""
        return f'<div class="sa-eq">{"".join(drawn)}{sign}</div>'

    def side_by_side(self, a: str | None, b: str | None, ids: str) -> str:
        """Draw the results of two sentences, aligned by row, and the second minus the first."""
        drawn = [
            self.table(node, ids=ids if node is a else "", result=True, of=side)
            for node, side in zip((a, b), self.sides, strict=True)
            if node is not None
        ]
        if a is not None and b is not None:
            drawn = drawn[:1] if a == b else [*drawn, self.difference(a, b)]
        return f'<div class="sa-eq sa-compare">{"".join(drawn)}</div>'

    def difference(self, a: str, b: str) -> str:
        """Draw the second minus the first, for the rows and columns that both have."""
        first, second = self.graph.nodes[a], self.graph.nodes[b]
        rows, columns = map(min, zip(first.data.shape, second.data.shape, strict=True))
        with np.errstate(invalid="ignore", over="ignore"):
            data = second.data[:rows, :columns] - first.data[:rows, :columns]
            # A difference that is only rounding becomes 0.
            data[np.abs(data) <= 1e-12 * self.sizes[first.name.partition("[")[0]]] = 0.0
        labels = [
            [x if x == y else f"{x} → {y}" for x, y in zip(*pair, strict=False)]
            for pair in zip(self.axes(first), self.axes(second), strict=True)
        ]
        hidden = {*enumerate(self.blanks.get(a, [])), *enumerate(self.blanks.get(b, []))}
        decimals = max(self.decimals[a], self.decimals[b])
        size = float(np.abs(data[np.isfinite(data)]).max(initial=0.0))
        attributes = f'data-a="{text(a)}" data-b="{text(b)}" data-size="{size!r}" data-decimals="{decimals}"'
        caption = f"{text(self.texts['difference'])}: {text(first.name)}"
        return self.grid(data, labels, caption, "sa-m sa-diff", attributes, decimals, size, hidden)

    def axes(self, node: Node) -> tuple[list[str], list[str]]:
        """Return the labels of rows and columns."""
        rows, columns = node.data.shape
        return (
            self.graph.labels[node.rows] if node.rows else [str(n) for n in range(rows)],
            self.graph.labels[node.columns] if node.columns else [str(n) for n in range(columns)],
        )

    def table(self, term: str, *, ids: str, result: bool, of: str = "") -> str:
        """Draw a matrix or its transpose; with `ids` links can lead to its rows; `of` names its sentence."""
        name = term.removeprefix("T:")
        node, transposed = self.graph.nodes[name], term.startswith("T:")
        data, labels, hidden = node.data, list(self.axes(node)), set(enumerate(self.blanks.get(name, [])))
        if transposed:
            data, labels, hidden = data.T, labels[::-1], {(j, i) for i, j in hidden}
        size = self.sizes[node.name.partition("[")[0]]
        caption = text(node.name) + (".T" if transposed else "")
        if node.op == "pairs":
            token = self.graph.labels[f"t{node.rows[1:]}"][node.options["query"]]
            caption += f" (<bdi>{text(self.say('of query', token=token))}</bdi>)"
        if of:
            caption += f" <bdi class=sa-of>{text(of)}</bdi>"
        attributes = f'data-node="{text(name)}"' + (" data-t" if transposed else "")
        kind = "sa-m" + (" sa-result" if result else "") + (" sa-input" if node.editable else "")
        return self.grid(data, labels, caption, kind, attributes, self.decimals[name], size, hidden, ids)

    def shown(self, n: int) -> list[int]:
        """Return the shown indices: all, or at most max_side, of which a third are the last ones."""
        if n <= self.max_side:
            return list(range(n))
        tail = self.max_side // 3
        return [*range(self.max_side - tail), *range(n - tail, n)]

    def nodes_of(self, stage: Stage) -> list[Node]:
        """Return the matrices that a stage shows."""
        terms = {t.removeprefix("T:") for e in stage.equations for side in e.sides for t in side}
        return [node for name, node in self.graph.nodes.items() if name in terms]

    def abridged(self, stage: Stage) -> set[str]:
        """Return a note if some rows or columns of a stage are left out."""
        largest = max((max(node.data.shape) for node in self.nodes_of(stage)), default=0)
        if largest <= self.max_side:
            return set()
        return {self.say("abridged", shown=self.max_side, all=largest)}

    def grid(
        self,
        data: Array,
        labels: Sequence[list[str]],
        caption: str,
        kind: str,
        attributes: str,
        decimals: int,
        size: float,
        hidden: set[tuple[int, int]],
        ids: str = "",
    ) -> str:
        """Write a table, on whose structure steps.js relies; `caption` is HTML, all else is text."""
        rows, columns = (self.shown(n) for n in data.shape)
        if len(rows) < data.shape[0] or len(columns) < data.shape[1]:
            attributes += f' data-rows="{_list(rows)}" data-columns="{_list(columns)}"'

        def cell(i: int, j: int) -> str:
            if (i, j) in hidden:
                return '<td class="sa-blank">____</td>'
            level = shade(data[i, j], size)
            written = number(data[i, j], decimals, self.precision)
            return f"<td{f' class={level}' if level else ''}>{written}</td>"

        def line(i: int) -> str:
            cells = with_gaps(columns, lambda j: cell(i, j), '<td class="sa-gap">…</td>')
            where = f' id="stage={ids}&amp;row={i}"' if ids else ""
            return f"<tr{where}><th scope=row>{isolated(labels[0][i])}</th>{cells}</tr>"

        body = with_gaps(
            rows, line, f'<tr class="sa-gap"><th>…</th><td colspan={len(columns) + 1}></td></tr>'
        )
        head = with_gaps(columns, lambda j: f"<th scope=col>{isolated(labels[1][j])}</th>", "<th>…</th>")
        shape = " × ".join(map(str, data.shape))
        return (
            f'<table class="{kind}" {attributes}><caption>{caption} <small>{shape}</small></caption>'
            f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def legend(self, stage: Stage) -> str:
        """Show the range of colours of each matrix that the stage computes."""
        of: dict[str, list[Node]] = {}
        for equation in stage.equations:
            for name in (name for side in equation.sides for name in results(side)):
                node = self.graph.nodes[name]
                if node.op != "row_sums":
                    of.setdefault(node.name.partition("[")[0], []).append(node)
        lines = [self.swatches(name, nodes) for name, nodes in of.items() if self.sizes[name]]
        return f'<p class="sa-legend">{" ".join(lines)}</p>' if lines else ""

    def swatches(self, name: str, nodes: list[Node]) -> str:
        """Show colours from the smallest to the largest number of matrices of one name."""
        size = self.sizes[name]
        negative = any(np.any((node.data < 0) & np.isfinite(node.data)) for node in nodes)
        ends = [-size, -size / 2, 0.0, size / 2, size] if negative else [0.0, size / 2, size]
        whole = all(self.decimals[node.id] == 0 for node in nodes) and size % 2 == 0
        decimals = 0 if whole else min(self.precision, 2)
        drawn = [
            f'<span class="sa-swatch {shade(x, size)}">{number(x, decimals, self.precision)}</span>'
            for x in ends
        ]
        of = f'data-name="{text(name)}" data-nodes="{text(" ".join(node.id for node in nodes))}"'
        return f"<span {of}>{text(self.say('legend', name=name))} {' '.join(drawn)}</span>"

    def answers(self) -> str:
        """List the answers of the blanks, which are printed on a separate sheet."""
        sheet = []
        for stage in self.graph.stages.values():
            made = {
                r: side for e in stage.equations for side, terms in enumerate(e.sides) for r in results(terms)
            }
            lines = [line for name, side in made.items() for line in self.answers_of(name, side)]
            if lines:
                sheet.append(f"<h4>{text(self.heading(stage))}</h4><ul>{''.join(lines)}</ul>")
        return (
            f'<details class="sa-answers"><summary>{text(self.texts["answers"])}</summary>'
            f"{''.join(sheet)}</details>\n"
        )

    def answers_of(self, name: str, side: int) -> list[str]:
        """Write the answers of a matrix, one for each row that is shown."""
        node = self.graph.nodes[name]
        rows, columns = self.axes(node)
        shown_rows, shown_columns = map(self.shown, node.data.shape)
        of = f" <small>(<bdi>{text(self.sides[side])}</bdi>)</small>" if len(self.sides) > 1 else ""
        start = text(self.where(node) + node.name)
        return [
            f"<li>{start}[<bdi>{text(rows[i])}</bdi>, <bdi>{text(columns[j])}</bdi>] = "
            f"{number(node.data[i, j], self.decimals[name], self.precision)}{of}</li>"
            for i, j in enumerate(self.blanks.get(name, []))
            if i in shown_rows and j in shown_columns
        ]

    def where(self, node: Node) -> str:
        """Return the block and head of a matrix, if there are several: ``block 0, head 1: ``."""
        parts = [self.say(key, n=n) for key, n in (("block", node.block), ("head", node.head)) if n]
        return ", ".join(parts) + (": " if parts else "")

    def data(self) -> dict[str, Any]:
        """Return the script's data: all numbers to the last bit, how they are computed, all labels."""
        nodes = [
            {
                "id": name,
                "name": node.name,
                "shape": node.data.shape,
                "data": base64.b64encode(node.data.astype("<f8").tobytes()).decode("ascii"),
                "rows": node.rows,
                "columns": node.columns,
                "op": node.op,
                "args": node.args,
                "options": node.options,
                "editable": node.editable,
                "decimals": self.decimals[name],
                "size": self.sizes[node.name.partition("[")[0]],
                "blanks": self.blanks.get(name),
                "where": self.where(node),
            }
            for name, node in self.graph.nodes.items()
        ]
        used = {name: self.texts[name] for name in SCRIPTED}
        heads = [vars(head) for head in self.graph.heads]
        data = {"nodes": nodes, "heads": heads, "labels": self.graph.labels, "precision": self.precision}
        return data | {"texts": used}


def with_gaps(shown: Sequence[int], drawn: Callable[[int], str], gap: str) -> str:
    """Join what ``drawn`` returns for each shown index, with a gap where indices are left out."""
    parts = [gap * (n > 0 and i != shown[n - 1] + 1) + drawn(i) for n, i in enumerate(shown)]
    return "".join(parts)


def shade(value: float, size: float) -> str:
    """Return the class of a number's colour: p1 to p8 if it is positive, n1 to n8 if negative, x for -inf and NaN."""
    if not np.isfinite(value):
        return "x"
    level = min(LEVELS, round(abs(value) / size * LEVELS)) if size else 0
    return "" if level == 0 else f"{'n' if value < 0 else 'p'}{level}"


def emphasised(sentence: str) -> str:
    """Escape a sentence, and make its *words* bold, as `phrase` of the kit does."""
    return re.sub(r"\*([^*]+)\*", r"<strong>\1</strong>", text(sentence))


def isolated(label: str) -> str:
    """Escape a label; if it is not ASCII, isolate its writing direction."""
    return text(label) if label.isascii() else f"<bdi>{text(label)}</bdi>"


def formula(line: str) -> str:
    """Write indices as subscripts: ``s_ij`` becomes ``s<sub>ij</sub>``."""
    return _LOW.sub(r"<sub>\1</sub>", text(line))


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
