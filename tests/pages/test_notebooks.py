"""The notebooks, executed: they compute what the tutorials print, and show what is saved."""

import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from pretrained_data import DATA

from selfattn import tutorials

REASON = "executing notebooks needs the extra docs"
nbformat = pytest.importorskip("nbformat", reason=REASON)
pytest.importorskip("nbclient", reason=REASON)
pytest.importorskip("ipykernel", reason=REASON)

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_spec = importlib.util.spec_from_file_location("notebooks_build", NOTEBOOKS / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

NAMES = [path.stem for path in build.SOURCES]
notebooks = pytest.mark.parametrize("name", NAMES)

# What is compared of each notebook, with names of its cells. Tolerances are here, so that the lessons need none.
RESULTS = {
    "1_first_principles": """{"embed": x, "linear_layer": linear, "attention_on_raw_embeddings": outputs,
        "raw_dot_product_scores": {name: raw[name].scores for name in x}, "self_attention_class":
        {name: layer(x[name]) for name in x}, "projected_attention": {name: projected[name].output for name in x}}""",
    "2_sentence_embeddings": """{"sentence embedding": (embedding, plain_embedding), "confidence": (sure, plain_sure)} | {
        f"block, heads: {n}": (block(x), plain_block(x, block.parameters(), n)) for n, block in blocks.items()}""",
    "3_basics": """{"Q": Q, "K": K, "V": V, "attn_logits": steps.scores, "scaled_attention_logits": steps.scaled_scores,
        "attention_weights": steps.weights, "row_sums": steps.weights.sum(axis=-1), "output": steps.output,
        "ways": ways, "heads": (by_hand, two.result)}""",
    "4_illustrated": """{"keys": keys, "querys": querys, "values": values, "attn_scores": steps.scores,
        "attn_scores_softmax": steps.weights, "attn_scores_softmax_rounded": by_hand, "output_1_rounded": rounded.output[0],
        "weighted_values_rounded": rounded.weighted_values.swapaxes(0, 1), "outputs_2_and_3_rounded": rounded.output[1:]}""",
    "5_attention_module": """{"no mask": (attention(*inputs)[1][0, 0], plain_attention(query, key, value)[1]),
        "padding": (weights, plain_attention(batch_query, batch_key, batch_value, mask)[1]),
        "dead row": (functional, np.nan_to_num(with_infinity)),
        "masked NaN": (ours, plain_attention(query, key[:3], value[:3])[0])}""",
    "6_gpt": """{"losses": losses, "spoken": spoken, "chances": sa.softmax(scores),
        "rat": weights_of("This is the dog that / worried the cat that / killed the")[:, :, -1],
        "cat": weights_of("This is the dog that / worried the")[:, :, -1],
        "together": [" ".join(vocabulary[n] for n in own) for own in together],
        "alone": [say(beginning, 6) for beginning in beginnings]}""",
    "7_classifier": """{"losses": losses, "right": right, "whole": whole, "changed": changed}""",
    "8_heads": """{"losses": losses, "whole": whole, "off": off, "before": before, "after": after, "alone": after_without} | (
        {"layers": of_layers, "heads": of_heads, "lead": lead, "look": look, "add": add, "without": without}
        if "smol" in globals() else {})""",
}
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
HAS_SMOLLM2 = (DATA / SMOLLM2).exists()  # other tests fetch it
LAST = "import json as _json\nprint(_json.dumps({}, default=lambda array: array.tolist()))"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Execute a notebook once: the notebook with fresh outputs, and its dictionary `results`."""
    done = {}
    environment = {
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),  # no start-up files
        "PYTHONSAFEPATH": "1",
    }
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)

    def execute(name):
        if name not in done:
            notebook = build.read_source(NOTEBOOKS / "src" / f"{name}.py")
            notebook.cells = runnable(notebook.cells)
            folder = DATA if name == "8_heads" and HAS_SMOLLM2 else NOTEBOOKS
            done[name] = notebook, json.loads(build.execute(notebook, LAST.format(RESULTS[name]), folder))
        return done[name]

    yield execute
    patch.undo()


def runnable(cells):
    """Leave out the cells from those on that need a model that is not on the disk."""
    needing = [] if HAS_SMOLLM2 else [n for n, cell in enumerate(cells) if "models.load(" in cell.source]
    return cells[: min(needing, default=len(cells))]


def saved(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def test_there_is_one_for_each_tutorial():
    assert [name[0] for name in NAMES] == list("12345678")  # the last three continue from there
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)


@notebooks
def test_the_saved_cells_are_those_of_the_source(name):
    source, notebook = build.read_source(NOTEBOOKS / "src" / f"{name}.py"), saved(name)
    cells = [[(cell.id, cell.cell_type, cell.source) for cell in some.cells] for some in (source, notebook)]
    assert cells[0] == cells[1], "run notebooks/build.py"
    assert notebook.metadata == build.METADATA
    assert not any(cell.metadata for cell in notebook.cells)
    runs = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert runs == list(range(1, len(runs) + 1))


@notebooks
def test_nothing_but_selfattn_and_numpy_is_imported(name):
    tree = ast.parse((NOTEBOOKS / "src" / f"{name}.py").read_text(encoding="utf-8"))
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {module.partition(".")[0] for module in modules} == {"numpy", "selfattn"}


@notebooks
def test_links_lead_to_files(name):
    text = "\n".join(cell.source for cell in saved(name).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (NOTEBOOKS / target).exists(), target


NUMBER = re.compile(r"[-−]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


def alike(a, b):
    """Whether two texts differ at most in the last place of numbers, as between two kinds of CPU."""
    if a == b:
        return True
    if NUMBER.split(a) != NUMBER.split(b):
        return False
    return all(map(numbers_alike, NUMBER.findall(a), NUMBER.findall(b)))


def numbers_alike(a, b):
    if a == b:
        return True
    places = [len(text.partition("e")[0].partition(".")[2]) for text in (a, b)]
    exponent = int(a.partition("e")[2] or 0)
    x, y = (float(text.replace("−", "-")) for text in (a, b))
    # The second bound is for HTML attributes, which hold all seventeen digits.
    return abs(x - y) <= max(1.5 * 10.0 ** (exponent - min(places)), 1e-9 * abs(x))


def shown(cell):
    """Return the visible outputs of a cell by kind, without scripts, since the tables show all their numbers."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.name, output.text
        else:
            for kind, text in sorted(output.data.items()):
                yield kind, re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)


@notebooks
def test_the_outputs_are_those_saved(executed, name):
    for new, old in zip(executed(name)[0].cells, runnable(saved(name).cells), strict=True):
        assert [kind for kind, _ in shown(new)] == [kind for kind, _ in shown(old)], new.source
        for (kind, text), (_, before) in zip(shown(new), shown(old), strict=True):
            assert alike(text, before), f"{kind} of {new.source!r}; run notebooks/build.py"


def compare(name, results):
    """Compare a notebook's tensors with what its tutorial prints, or with its plain lines; all of them."""
    tutorial = {"1": "first_principles", "3": "basics_notebook", "4": "illustrated"}.get(name[0])
    data = tutorials.load(tutorial) if tutorial else {}
    printed = {**data.get("printed", {}), **data.get("computed_not_printed", {})}
    printed |= {
        step: found["printed"]
        for step, found in data.items()
        if isinstance(found, dict) and "printed" in found
    }
    assert printed.keys() <= results.keys()
    for step, found in results.items():
        for place in printed.get(step, ()) if name[0] == "1" else [None]:
            theirs, ours = (
                np.array(each[place] if place else each, float) for each in (printed.get(step, found), found)
            )
            if step not in printed:  # selfattn and the plain lines, in float64; sums are short and near 1
                np.testing.assert_allclose(ours, np.broadcast_to(ours[0], ours.shape), rtol=1e-12, atol=1e-12)
            elif name[0] == "4":
                assert tutorials._to_digits(step, theirs, ours, data["printed_significant_digits"]).agrees, (
                    step
                )
            else:
                assert tutorials._to_decimals(step, theirs, ours, data["printed_decimals"]).agrees, step


@pytest.mark.parametrize("name", NAMES[:5])
def test_a_notebook_computes_everything_that_its_tutorial_prints(executed, name):
    compare(name, executed(name)[1])


@notebooks
def test_a_lesson_begins_with_ribbons_and_has_no_tolerances(executed, name):
    first, *others = (cell for cell in executed(name)[0].cells if cell.cell_type == "code")
    imports = re.findall(r"^(?:from \S+ )?import (.*)$", first.source, re.MULTILINE)
    assert len(imports) == 1 and "," not in imports[0]
    assert "sa-view" in first.outputs[0].data["text/html"]
    assert not re.search(r"\bassert\b|allclose|atol|results", "\n".join(cell.source for cell in others))


def test_the_trained_model_takes_from_the_word_that_shows_the_topic(executed):
    """The notebook's text claims this, and a new run does not change the text."""
    notebook, _ = executed("2_sentence_embeddings")
    (output,) = (cell.outputs[0].text for cell in notebook.cells if "untrained, trained in" in cell.source)
    lines = output.splitlines()
    for tokens, _, after in zip(lines[0::3], lines[1::3], lines[2::3], strict=True):
        weights = dict(zip(tokens.split(), map(float, after.split()[1:]), strict=True))
        assert max(weights, key=weights.get) in {"stream", "mud", "money", "loan"}
        assert max(weights.values()) > 0.8


def test_the_gpt_learned_the_rhyme_and_looks_at_the_verb(executed):
    """The notebook's text claims this."""
    _, results = executed("6_gpt")
    rhyme = "/ killed the rat that / ate the malt that / lay in the house that Jack built."
    assert results["spoken"] == rhyme
    assert results["together"] == results["alone"]
    assert results["losses"][-1] < 0.15
    weights = {name: np.array(results[name])[0, 1] for name in ("rat", "cat")}  # layer 0, head 1
    words = ["This", "is", "the", "dog", "that", "/", "worried", "the", "cat", "that", "/", "killed", "the"]
    assert weights["rat"][[words.index("worried"), words.index("killed")]].sum() > 0.7
    assert weights["cat"][words.index("worried")] > 0.6


def test_the_classifier_learned_what_not_and_but_mean(executed):
    _, results = executed("7_classifier")
    assert results["right"] > 0.97
    whole, changed = results["whole"], results["changed"]
    assert whole < -3 and min(changed["not"], changed["lovely"]) > 3
    assert all(abs(changed[word] - whole) < 0.5 for word in ("food", "good", "music"))


def test_two_heads_carry_on_a_row_and_two_know_a_name(executed):
    """The notebook's text claims this."""
    results = {name: np.array(found) for name, found in executed("8_heads")[1].items()}
    assert results["losses"][60] > 2 and results["losses"][-1] < 0.05
    off, before, after = results["off"], results["before"][0], results["after"][1]
    assert results["whole"] > 0.99 and off[0, before.argmax()] < 0.3 and off[1, after.argmax()] < 0.3
    assert before.max() > 0.5 and after.max() > 0.9
    assert results["alone"][1, after.argmax()] < 0.2
    if not HAS_SMOLLM2:
        return
    lead, look, add = results["lead"], results["look"], results["add"]
    layers, heads = lead + results["layers"], lead + results["heads"]  # how far Mary is ahead
    assert lead > 5 and layers.argmin() == 23 and heads.argmin() == 3
    assert max(layers[23], heads[3]) < 0 < 3 * lead / 5 < min(*np.delete(layers, 23), *np.delete(heads, 3))
    (once, twice), (copied, _) = look[3], look[0]
    assert once < 0.1 and twice > 0.6 and copied > 0.5
    np.testing.assert_allclose(add[[3, 0]], [[0.4, -2.5], [1.1, 0.3]], atol=0.1)
    assert abs(results["without"] - [lead / 2, lead, lead / 2]).max() < 0.3


@pytest.mark.parametrize("name", NAMES[:5])
def test_a_wrong_number_is_found(executed, name):
    for step in executed(name)[1]:
        results = json.loads(json.dumps(executed(name)[1]))
        inside, at = results[step], 0
        if isinstance(inside, dict):
            inside, at = inside["finance"], 0
        while isinstance(inside[at], list):
            inside, at = inside[at], -1
        inside[at] += 0.501 if name[0] == "4" else 0.0011
        with pytest.raises(AssertionError):
            compare(name, results)


@pytest.mark.parametrize(
    ("source", "message"), [("x = 1\n# %%\nx\n", "before the first"), ("# %% [raw]\n# x\n", r"\[raw\]")]
)
def test_bad_sources(tmp_path, source, message):
    path = tmp_path / "wrong.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        build.read_source(path)
