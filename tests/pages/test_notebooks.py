"""The notebooks, executed: they compute what the tutorials print, and show what is saved."""

from pathlib import Path

import numpy as np
import pytest
from notebook_checks import Notebooks, build

from selfattn import tutorials

# What is compared of each notebook, with names of its cells. Tolerances are here, so that the lessons need none.
RESULTS = {
    "1_first_principles": """{"embed": x, "linear_layer": linear, "attention_on_raw_embeddings": outputs,
        "raw_dot_product_scores": {name: raw[name].scores for name in x}, "self_attention_class":
        {name: layer(x[name]) for name in x}, "projected_attention": {name: projected[name].output for name in x}}""",
    "2_sentence_embeddings": """{"sentence embedding": (embedding, plain_embedding), "confidence": (sure, plain_sure)
        } | {
        f"block, heads: {n}": (block(x), plain_block(x, block.parameters(), n)) for n, block in blocks.items()}""",
    "3_basics": """{"Q": Q, "K": K, "V": V, "attn_logits": steps.scores, "scaled_attention_logits": steps.scaled_scores,
        "attention_weights": steps.weights, "row_sums": steps.weights.sum(axis=-1), "output": steps.output,
        "ways": ways, "heads": (by_hand, two.result)}""",
    "4_illustrated": """{"keys": keys, "querys": querys, "values": values, "attn_scores": steps.scores,
        "attn_scores_softmax": steps.weights, "attn_scores_softmax_rounded": by_hand,
        "output_1_rounded": rounded.output[0],
        "weighted_values_rounded": rounded.weighted_values.swapaxes(0, 1),
        "outputs_2_and_3_rounded": rounded.output[1:]}""",
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
    "9_grade_your_own": """{"faults": [verdict.names for verdict in (first, second, third)], "mended":
        [sa.diagnose(mended_attention).right, sa.diagnose(MendedSelfAttention).right,
        sa.diagnose_vjp(mended_vjp).right]}""",
}
NOTEBOOKS = Notebooks(Path(__file__).parents[2] / "notebooks", RESULTS)
NAMES = NOTEBOOKS.names
notebooks = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Execute a notebook once: the notebook with fresh outputs, and its dictionary `results`."""
    yield from NOTEBOOKS.executing(tmp_path_factory)


def test_there_is_one_for_each_tutorial():
    assert [*RESULTS] == NAMES  # the first five are of tutorials, and the others continue from there
    assert {path.stem for path in NOTEBOOKS.folder.glob("*.ipynb")} == set(NAMES)


@notebooks
def test_cells_links_and_imports(name):
    NOTEBOOKS.assert_saved(name)
    NOTEBOOKS.assert_links(name)
    assert NOTEBOOKS.imported(name) - {"math"} == {"numpy", "selfattn"}


@notebooks
def test_the_outputs_are_those_saved_and_begin_with_ribbons(executed, name):
    NOTEBOOKS.assert_outputs(name)
    NOTEBOOKS.assert_lesson(name)


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


@pytest.mark.parametrize(
    ("source", "message"), [("x = 1\n# %%\nx\n", "before the first"), ("# %% [raw]\n# x\n", r"\[raw\]")]
)
def test_bad_sources(tmp_path, source, message):
    path = tmp_path / "wrong.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        build.read_source(path)


def test_three_wrong_implementations_are_found_and_mended(executed):
    _, results = executed("9_grade_your_own")
    assert results == {
        "faults": [["softmax-queries"], ["heads-split"], ["ds-row-term"]],
        "mended": [True] * 3,
    }
