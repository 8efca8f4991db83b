"""plot_attention: what is drawn, read back from the artists of matplotlib; errors; nothing shown."""

import importlib
import math
import sys

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason="plot_attention needs the extra viz")
matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from selfattn.views import plot_attention  # noqa: E402

WEIGHTS = np.array([[0.7, 0.2, 0.1], [0.25, 0.5, 0.25], [0.0, 0.4, 0.6]])
TOKENS = ["stream", "bank", "mud"]


@pytest.fixture(autouse=True)
def _nothing_is_shown_and_no_figure_is_left(monkeypatch):
    matplotlib.use("Agg")  # an example that ran before may have chosen another
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("show was called"))
    yield
    plt.close("all")


def labels(image):
    """(queries, keys) as written next to the heat map."""
    ax = image.axes
    return tuple([t.get_text() for t in side] for side in (ax.get_yticklabels(), ax.get_xticklabels()))


def written(image):
    """{(query, key): number as text}"""
    return {tuple(round(x) for x in t.get_position()[::-1]): t.get_text() for t in image.axes.texts}


def render(image):
    image.figure.canvas.draw()
    return np.asarray(image.figure.canvas.buffer_rgba())


def cell(image, pixels, i, j):
    """The pixels of one cell, from the top."""
    (left, top), (right, bottom) = image.axes.transData.transform([(j - 0.5, i - 0.5), (j + 0.5, i + 0.5)])
    rows = slice(len(pixels) - int(top), len(pixels) - int(bottom))
    return pixels[rows, int(left) + 1 : int(right)]


def test_rows_are_queries_and_columns_are_keys():
    image = plot_attention(WEIGHTS, TOKENS)
    np.testing.assert_array_equal(image.get_array(), WEIGHTS)
    assert labels(image) == (TOKENS, TOKENS)
    assert image.axes.get_xlabel() == "key" and image.axes.get_ylabel() == "query"
    assert image.axes.yaxis_inverted()  # the first query is on top
    expected = {(i, j): f"{w:.2f}" for (i, j), w in np.ndenumerate(WEIGHTS)}
    assert written(image) == expected
    assert image.get_clim() == (0, 0.7)


def test_draws_on_the_given_axes_and_makes_no_figure():
    _, axes = plt.subplots(1, 2)
    before = plt.get_fignums()
    image = plot_attention(WEIGHTS, TOKENS, axes[1], colorbar=False, title="head 1")
    assert image.axes is axes[1] and not axes[0].images
    assert axes[1].get_title() == "head 1"
    assert plt.get_fignums() == before
    assert len(image.figure.axes) == 2


def test_negative_numbers_get_a_scale_around_zero():
    image = plot_attention([[-2.0, 0.5], [-1e-9, 1.0]], ["a", "b"])
    assert image.get_clim() == (-2, 2)
    assert written(image) == {(0, 0): "−2.00", (0, 1): "0.50", (1, 0): "0.00", (1, 1): "1.00"}


def test_nan_and_infinity_are_named_and_hatched():
    weights = WEIGHTS.copy()
    weights[0, 1], weights[1], weights[2, 2] = np.nan, -np.inf, np.inf
    image = plot_attention(weights, TOKENS)
    texts = written(image)
    assert (texts[0, 1], texts[1, 0], texts[2, 2]) == ("nan", "−inf", "inf")
    assert image.get_clim() == (0, 0.7)  # the range of the finite numbers
    assert image.axes.patch.get_hatch()
    np.testing.assert_array_equal(image.get_array().mask, ~np.isfinite(weights))
    pixels, red = render(image), (0xB0, 0x40, 0x40, 255)
    for (i, j), weight in np.ndenumerate(weights):
        corner = cell(image, pixels, i, j)[2:12]  # above the number
        assert (corner == red).all(axis=-1).any() != np.isfinite(weight)


@pytest.mark.parametrize("number", [0.0, np.nan])
def test_nothing_but_zeros_or_nan(number):
    image = plot_attention(np.full((2, 2), number), ["a", "b"])
    assert image.get_clim() == (0, 1)
    render(image)


STRANGE = [
    "$x_1$",
    "\\frac",
    "$",
    "<b>&amp;",
    "100 %",
    "_a_",
    "שלום",
    "مرحبا",
    "Ωραία",
    "é",
    'don\'t "quote"',
]


def test_tokens_are_text_whatever_they_hold():
    n = len(STRANGE)
    image = plot_attention(np.eye(n), STRANGE, title="$a")
    render(image)  # wrong markup would raise here
    assert labels(image) == (STRANGE, STRANGE)
    assert not any(label.get_parse_math() or label.get_usetex() for label in image.axes.get_xticklabels())


def test_a_font_that_has_the_characters_is_found(monkeypatch):
    """Here the configured font is set to lack the letter, and Serif to have it."""
    plot = importlib.import_module("selfattn.views.plot")
    real = plot._code_points
    monkeypatch.setattr(
        plot, "_code_points", lambda path: real(path) - ({0x416} if "Serif" not in path else set())
    )
    plot._other_families.cache_clear()
    try:
        label = plot_attention([[1.0]], ["Ж"]).axes.get_yticklabels()[0]
        assert any("Serif" in family for family in label.get_fontfamily())
        assert label.get_fontfamily()[0] == matplotlib.rcParams["font.family"][0]
    finally:
        plot._other_families.cache_clear()


def test_invisible_tokens_are_spelled_out():
    tokens = ["", " ", "a\nb", "\x00", "\u2028", "\ud800", "x" * 25]
    image = plot_attention(np.eye(7), tokens)
    assert labels(image)[0] == ["∅", "␣", "a\\nb", "\\x00", "\\u2028", "\\ud800", "x" * 23 + "…"]
    render(image)


def test_every_nth_of_many_tokens_is_named():
    tokens = [f"t{n}" for n in range(100)]
    image = plot_attention(np.eye(100), tokens)
    every = math.ceil(100 / 40)
    assert labels(image)[0] == tokens[::every]
    assert image.axes.get_xlabel() == "key: 1 of 3 named"
    assert not image.axes.texts


@pytest.mark.parametrize(
    ("weights", "tokens", "options", "error", "message"),
    [
        (WEIGHTS, TOKENS[:2], {}, ValueError, r"2 tokens do not fit weights \(3, 3\), which have 3 rows"),
        (WEIGHTS[:2], TOKENS[:2], {}, ValueError, r"\(2, 3\) have 3 keys; name them with key_tokens="),
        (WEIGHTS[:2], ["a", "b"], {"key_tokens": ["a"]}, ValueError, "1 key_tokens do not fit .* 3 columns"),
        (WEIGHTS, "sky blue", {}, ValueError, "2 tokens do not fit"),
        (WEIGHTS, 3, {}, TypeError, "tokens must be a list of strings, not 3"),
        (WEIGHTS, ["a", 7, "b"], {}, TypeError, r"tokens\[1\] is 7, of type int"),
        (WEIGHTS[0], ["a"], {}, ValueError, r"\(L, S\).*they are \(3,\)"),
        (WEIGHTS[None], TOKENS, {}, ValueError, r"they are \(1, 3, 3\); choose one head"),
        (np.zeros((0, 0)), [], {}, ValueError, r"\(0, 0\) are empty"),
        (WEIGHTS.astype(complex), TOKENS, {}, TypeError, "real numbers, not complex128"),
        (np.full((3, 3), "a"), TOKENS, {}, TypeError, "real numbers, not <U1"),
        (WEIGHTS, TOKENS, {"vmin": 1, "vmax": 1}, ValueError, "vmin < vmax, not 1.0 and 1.0"),
        (WEIGHTS, TOKENS, {"precision": -1}, ValueError, "from 0 to 17, not -1"),
        (WEIGHTS, TOKENS, {"ax": np.array([1, 2])}, TypeError, "not ndarray; choose one of them"),
    ],
)
def test_errors_name_what_does_not_fit(weights, tokens, options, error, message):
    before = plt.get_fignums()
    with pytest.raises(error, match=message):
        plot_attention(weights, tokens, **options)
    assert plt.get_fignums() == before


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'selfattn\[viz\]'"):
        plot_attention(WEIGHTS, TOKENS)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("numbers", [True, False])
def test_numbers_at_the_ends_of_the_range(dtype, numbers, tmp_path):
    """Subtracting the limits of the colour scale would overflow; numbers still have their own colours and text."""
    info = np.finfo(dtype)
    for row in (
        [info.max, info.min, 0],
        [info.max, 1, 0],
        [info.min, 0, np.nan],
        [info.max / 4, -np.inf, np.inf],
        [1e6 * info.tiny, 0, 0],
        [info.smallest_subnormal, 0, 0],
    ):
        image = plot_attention(np.array([row], dtype), None, key_tokens=TOKENS, numbers=numbers)
        image.figure.savefig(tmp_path / "a.png")
        drawn = image.norm(image.get_array()).filled(np.nan)[0]
        finite = np.isfinite(row)
        farthest = np.argmax(np.abs(row)[finite])
        if np.abs(row)[finite].max() > 1e-300:  # matplotlib widens a narrower scale
            assert drawn[finite][farthest] == (np.array(row)[finite][farthest] > 0)
        plt.close("all")


def test_large_numbers_are_written_in_powers_of_ten():
    image = plot_attention([[np.finfo(np.float64).max, -2.5e7, 1e6]], None, key_tokens=TOKENS)
    assert list(written(image).values()) == ["1.8e+308", "−2.5e+7", "1000000.00"]
