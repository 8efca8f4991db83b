"""Exports a graph of matrices as data that the page's scripts draw, and draws its weights as a still picture."""

from __future__ import annotations

import base64
from dataclasses import asdict
from functools import cached_property
from typing import Any

from selfattn.views.document import MAX_MATRICES, MAX_SIDE, weights_svg
from selfattn.views.graph import Graph, Node, results
from selfattn.views.language import fill
from selfattn.views.texts import SCRIPTED


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
        self.graph, self.sides, self.texts = graph, sides, texts
        self.precision, self.max_side = precision, max_side
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

    @cached_property
    def picture(self) -> str:
        """Draw the weights of all heads and sentences as SVG, with a note of what is left out."""
        matrices = []
        for node in self.graph.nodes.values():
            if node.name == "weights":
                side = self.sides[node.id.endswith("~1")] if len(self.sides) > 1 else ""
                name = ", ".join(filter(None, (self.where(node).removesuffix(": "), side)))
                blanks = set(enumerate(self.blanks.get(node.id, [])))
                labels = self.graph.labels
                matrices.append((name, node.data, labels[node.rows], labels[node.columns], blanks))
        notes = []
        if len(matrices) > MAX_MATRICES:
            notes.append(self.say("abridged heads", shown=MAX_MATRICES, all=len(matrices)))
        largest = max((max(matrix[1].shape) for matrix in matrices), default=0)
        if largest > MAX_SIDE:
            notes.append(self.say("abridged", shown=MAX_SIDE, all=largest))
        if not matrices:
            return ""
        return weights_svg(matrices, f"{self.texts['title']}: {self.texts['head.weights']}", notes)

    def where(self, node: Node) -> str:
        """Return the block and head of a matrix, if there are several: ``block 0, head 1: ``."""
        parts = [self.say(key, n=n) for key, n in (("block", node.block), ("head", node.head)) if n]
        return ", ".join(parts) + (": " if parts else "")

    def data(self) -> dict[str, Any]:
        """Return the script's data: all numbers to the last bit, how they are computed, stages, labels, sentences."""
        nodes = [
            vars(node)
            | {
                "data": base64.b64encode(node.data.astype("<f8").tobytes()).decode("ascii"),
                "shape": node.data.shape,
                "blanks": self.blanks.get(name),
                "where": self.where(node),
            }
            for name, node in self.graph.nodes.items()
        ]
        stages = []
        for stage in self.graph.stages.values():
            heading, block = self.texts[f"head.{stage.caption}"], stage.name.rpartition(".")[0]
            if block:
                heading += f", {self.say('block', n=block.removeprefix('block'))}"
            stages.append(asdict(stage) | {"heading": heading, "sentence": self.texts[stage.caption]})
        return {
            "nodes": nodes,
            "stages": stages,
            "heads": [vars(head) for head in self.graph.heads],
            "labels": self.graph.labels,
            "precision": self.precision,
            "max_side": self.max_side,
            "texts": {name: self.texts[name] for name in SCRIPTED},
        }
