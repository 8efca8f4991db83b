"""What pages say of numbers: each sentence of an explorer, for drawn weights and every word and head, against these
weights."""

import re

import numpy as np
import pytest

import selfattn as sa
from selfattn import views

# For each word of the first text and each head: all sentences of the page.
READ = """() => {
  const all = (root, what) => [...root.querySelectorAll(what)], said = (e) => e.textContent, root = document;
  return all(all(root, ".sa-text")[0], "button").flatMap((word, i) => all(root, ".sa-thumb").map((_, head) => {
    word.click();
    const finds = all(root, ".sa-finds button").map((each) => all(each, "b, small").map(said));
    all(root, ".sa-thumb")[head].click();
    return { i, head, finds, takes: all(root, ".sa-takes").map(said), means: said(root.querySelector(".sa-means")),
      heading: said(root.querySelector("h2")) };
  }));
}"""
NUMBER = re.compile(r"\d\.\d+")


def written(x):
    """A number as a page writes it; NumPy's float32 first becomes what a page stores."""
    return f"{round(float(x) * 65535) / 65535:.2f}"


@pytest.mark.parametrize("kind", ["one text", "causal", "two texts", "crossed"])
def test_every_sentence_of_an_explorer_is_so(opened, kind):
    rng = np.random.default_rng(["one text", "causal", "two texts", "crossed"].index(kind))
    n, heads, options = 5, 3, {"is_causal": True} if kind == "causal" else {}
    words = [[f"{letter}{i}" for i in range(n)] for letter in "pr"]
    words[1][rng.integers(n)] = words[0][rng.integers(n)] = "both"
    q, k = rng.standard_normal((2, 2, heads, n, 4)) * rng.choice([0.1, 1, 4], (1, 1, heads, 1, 1))
    steps = [sa.attention_steps(q[side], k[side], k[side], **options) for side in (0, 1)]
    weights = [each.weights for each in steps[: 1 + (kind == "two texts")]]
    more = {"two texts": {"compare": (steps[1], words[1])}, "crossed": {"key_tokens": words[1]}}.get(kind, {})
    page = opened(views.explorer(steps[0], words[0], **more))
    if kind != "two texts":
        assert not re.search(r"\b(text|in) [AB]\b", page.locator("body").aria_snapshot(), re.IGNORECASE)
    keys = words if kind != "crossed" else words[1:]
    places = [{word: i for i, word in enumerate(each)} for each in words]
    named = {f"layer 0, head {h}": h for h in range(heads)}
    for seen in page.evaluate(READ):
        h, at = seen["head"], [seen["i"]] * 2
        if kind == "two texts":  # the second text follows to the same word, or to this place
            at[1] = places[1].get(words[0][at[0]], at[1])
        for side, line in enumerate(seen["takes"]):
            word, found = re.fullmatch(r"(\w+) gives weight (.+)", line).groups()
            row, parts = weights[side][h, at[side]], [part.split(" to ") for part in found.split(", ")]
            assert word == words[side][at[side]]
            order = np.argsort(-row, kind="stable")[: max(1, min(3, (row >= 0.005).sum()))]
            assert [number for number, _ in parts] == [written(row[j]) for j in order]
            assert all(number == written(row[keys[side].index(source)]) for number, source in parts)
            assert all(number != "0.00" for number, _ in parts)
        for says, why in seen["finds"]:
            head = named[re.search(r"layer 0, head \d", why)[0]]
            numbers = NUMBER.findall(says)
            assert numbers and numbers[0] != "0.00"
            if why.startswith("largest weight"):
                word, number, source, letter = re.fullmatch(
                    r"(\w+) gives weight (\S+) to (\w+)(?: \(([AB])\))?", says
                ).groups()
                assert (letter is None) == (kind != "two texts")
                side = int(letter == "B")
                i = at[side]
                apart = [j for j in range(n) if kind == "crossed" or (j and abs(j - i) > 1)]
                assert word == words[side][i] and number == written(weights[side][:, i, apart].max())
                assert number == written(weights[side][head, i, keys[side].index(source)])
            elif why.startswith("largest difference"):
                gaps = np.abs(weights[0][:, at[0]] - weights[1][:, at[1]]).sum(axis=-1) / 2
                assert head == gaps.argmax() and abs(float(numbers[0]) - gaps[head]) < 0.00503
            else:
                kept = [w[head] for w in weights]
                near = {"itself": 0, "before": -1, "after": 1}[says.split(": ")[0].removeprefix("the word ")]
                shares = [w[i, i + near] if 0 < i + near < n else 0 for w in kept for i in range(1, n)]
                assert abs(float(numbers[0]) - np.mean(shares)) < 0.00503
        for number in NUMBER.findall(seen["means"]):
            assert "only" in seen["means"] or number == written(
                max(w[h, i].max() for w, i in zip(weights, at, strict=False))
            )
