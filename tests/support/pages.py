"""Steps that the tests of the pages share, and readers of their elements and data."""

import base64
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np

from selfattn import attention_steps, views
from selfattn.steps.layers import LayerSteps, ModelSteps, layer_steps, model_steps
from selfattn.tutorials import load
from selfattn.views.writing import visible

NASTY = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"quoted\" 'twice' &amp; <!-- -->",
    "\u202eright to left\u202c שלום",
    "👩‍👩‍👧 ]]> \u2028 \u2029 \x00 \ud800",
    "${alert(1)} `x` \\u003c",
]

# A script that shows everything of a page, and the details of all stages.
UNFOLD = (
    """document.querySelectorAll("[data-do='open all'], [data-first] [data-do=everything]")"""
    ".forEach((b) => b.click())"
)


def illustrated():
    """Tutorial 4: whole numbers up to the scores."""
    data = load("illustrated")
    weights = (np.array(data[name]) for name in ("w_query", "w_key", "w_value"))
    return layer_steps(np.array(data["x"]), *weights, scale=1.0), ["one", "two", "three"]


def bank(sentence):
    """Tutorial 1: *bank* in a sentence, projected."""
    data = load("first_principles")
    tokens, given = data["tokens"][sentence], data["projected_attention"]
    x = np.array([data["vocab"][token] for token in tokens])
    return layer_steps(x, *(np.array(given[name]) for name in ("W_query", "W_key", "W_value"))), tokens


def everything(dtype=np.float64, add=0.0):
    """Every option at once, in two heads; `add` is added to the first input."""
    rng = np.random.default_rng(7)
    x, *weights = (
        rng.standard_normal(shape).astype(dtype) for shape in [(5, 8), (8, 8), (8, 8), (8, 6), (6, 8)]
    )
    x[0, 0] += add
    biases = [rng.standard_normal(n).astype(dtype) for n in (8, 8, 6, 8, 8)]
    mask = rng.standard_normal((5, 5))
    mask[2, 1] = -np.inf
    return layer_steps(
        x,
        *weights[:3],
        W_out=weights[3],
        num_heads=2,
        b_query=biases[0],
        b_key=biases[1],
        b_value=biases[2],
        b_out=biases[3],
        residual=True,
        norm=(biases[4], None, 1e-5),
        attn_mask=mask,
        is_causal=True,
        softcap=2.0,
        alibi_slopes=[0.5, 0.25],
        sinks=[0.1, -0.2],
        dropout_p=0.3,
        rng=3,
    ), list("abcde")


def additive(add=0.0):
    """A layer with an additive score; `add` is added to the first input."""
    rng = np.random.default_rng(10)
    x, *weights = (rng.standard_normal(shape) for shape in [(4, 3), (3, 5), (3, 5), (3, 2)])
    x[0, 0] += add
    biases = {f"b_{name}": rng.standard_normal(n) for name, n in (("query", 5), ("key", 5), ("value", 2))}
    return layer_steps(x, *weights, v=rng.standard_normal(5), **biases, is_causal=True), list("abcd")


def model(tokens=4, add=0.0):
    """Two blocks of a sentence-embedding model; `add` is added to the first number of the embeddings."""
    rng = np.random.default_rng(8)
    embeddings, positions = rng.standard_normal((2, tokens, 6))
    embeddings[0, 0] += add
    x, blocks = embeddings + positions, []
    for _ in range(2):
        weights = rng.standard_normal((3, 6, 6)) / 2
        blocks.append(layer_steps(x, *weights, residual=True, norm=(None, None, 1e-5)))
        x = blocks[-1].result
    return model_steps(embeddings, positions, blocks), [f"word{n}" for n in range(tokens)]


def large():
    """A layer of 64 tokens and 64 dims."""
    rng = np.random.default_rng(9)
    x, *weights = rng.standard_normal((4, 64, 64)) / 8
    return layer_steps(8 * x, *weights), [f"token{n}" for n in range(64)]


def dead_row():
    """Attention alone, with different lengths of queries and keys; the second query may see no key."""
    mask = np.array([[True, True, False], [False, False, False]])
    q, k, v = np.eye(2), np.array([[1.0, 2.0], [np.nan, 0.0], [np.inf, 1.0]]), np.arange(6.0).reshape(3, 2)
    return attention_steps(q, k, v, mask)


def numbers_by_node(steps):
    """Return the matrices that a page must show, by the names of their nodes."""
    if isinstance(steps, ModelSteps):
        found = {
            "embeddings": steps.embeddings,
            "positions": steps.positions,
            "inputs": steps.inputs,
            "mean": steps.output[None],
        }
        for n, block in enumerate(steps.blocks):
            found |= {f"block{n}.{name}": a for name, a in numbers_by_node(block).items() if name != "inputs"}
        return found
    found, heads = {}, isinstance(steps, LayerSteps) and steps.parameters.num_heads > 1
    names = steps.to_dict() | {"query": steps.query, "key": steps.key, "value": steps.value}
    if isinstance(steps, LayerSteps):
        names |= {n: a for n, a in vars(steps.parameters).items() if n[:2] in ("W_", "b_") and a is not None}
    if steps._call.keep is None:
        del names["dropped_weights"]
    for name, array in names.items():
        per_head = heads and array.ndim > (3 if name == "weighted_values" else 2)
        for h in range(len(array) if per_head else 1):
            matrix, end = (array[h], f".{h}") if per_head else (array, "")
            if name == "weighted_values":
                found |= {f"{name}[{i}]{end}": matrix[i] for i in range(min(8, len(matrix)))}
            else:
                found[name + end] = np.atleast_2d(matrix)
    return found


def attention(tokens):
    return attention_steps(*np.random.default_rng(0).standard_normal((3, len(tokens), 4))), tokens


# A page of each kind from tokens.
PAGES = {
    "steps": lambda tokens: views.steps_page(*attention(tokens), compare=attention(tokens), exercise=True),
    "joined": lambda tokens: views.join_pages([views.steps_page(*attention(tokens))] * 2, "".join(tokens)),
    "way back": lambda tokens: views.way_back_page(*attention(tokens)),
}


def data_of(html, kind="sa-data", every=False):
    """The first data in a page that its script reads, or all."""
    found = [json.loads(data) for data in re.findall(rf'class="{kind}">(.*?)</script>', html, re.DOTALL)]
    return found if every else found[0]


def matrices(html):
    """The matrices of a page's views by their ids, the first of each, to the last bit."""
    return {
        node["id"]: np.frombuffer(base64.b64decode(node["data"])).reshape(node["shape"])
        for data in reversed(data_of(html, every=True))
        for node in data.get("nodes", [])
    }


def pairs(page):
    """The matrices of a way back, and their gradients."""
    data, found = data_of(page.body), matrices(page.body)
    named = {name: found[pair[0]] for name, pair in data["pairs"].items()}
    return named | {f"d{name}": found[pair[1]] for name, pair in data["pairs"].items()}


class Reader(HTMLParser):
    """Collects elements and text of a page."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.scripts = [], [], []
        self.open = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_comment(self, data):
        self.elements.append(("comment", {}))

    def handle_data(self, data):
        script = self.open and self.open[-1] in ("script", "style")
        (self.scripts if script else self.text).append(data)


PLAIN = [f"word{n}" for n in range(len(NASTY))]


def tags(page):
    """Return all elements with the names of their attributes, except bdi, which encloses words in other scripts."""
    return [(tag, [*attributes]) for tag, attributes in page.elements if tag != "bdi"]


def assert_harmless(make, tokens_of, said=True):
    """Hostile tokens add and remove no element of a page; its data has all of them, and its text if ``said``."""
    page, plain = make(NASTY), make(PLAIN)
    for made, expected in ((page.html, plain.html), (page.fragment, plain.fragment)):
        made.encode("utf-8")
        read = Reader(made)
        assert tags(read) == tags(Reader(expected))
        assert not said or all(visible(token) in "".join(read.text) for token in NASTY)
        for script in read.scripts:
            if script.startswith("{"):
                assert not set("<>&\u2028\u2029\x00") & set(script)
    ElementTree.fromstring(page.svg)
    assert tokens_of(data_of(page.html)) == [visible(token) for token in NASTY]
