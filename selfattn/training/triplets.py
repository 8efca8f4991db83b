"""Triplets for training, from a file with three columns, or from a text.

Neighbouring sentences of a text count as similar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from selfattn._check import check_rows, check_size, if_missing, one_of, warn
from selfattn.nn import init
from selfattn.text import BinaryFile, PathLike, is_quoted, read_text, sentence_gaps

Triplet: TypeAlias = tuple[str, str, str]
SPLITS = ("lines", "sentences")
FAR = 10
TRIES = 100


def read_sentences(path: PathLike | BinaryFile, split: str = "lines") -> list[str]:
    r"""Read the sentences of a UTF-8 text file, in order.

    Parameters
    ----------
    path : path, or a file that is open in binary mode
    split : {"lines", "sentences"}, default "lines"
        "lines": each line is a sentence. "sentences": running text, which :func:`split_sentences` splits.

    Returns
    -------
    list of str
        Without blanks at the ends, and without empty sentences.

    Raises
    ------
    ValueError
        The file is not UTF-8 or holds no sentence.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "text.txt")
    ...     _ = path.write_text("Tom chases Jerry.\n\nJerry runs.\n", encoding="utf-8")
    ...     read_sentences(path)
    ['Tom chases Jerry.', 'Jerry runs.']
    """
    one_of("split", split, SPLITS)
    sentences = split_sentences(read_text(path)) if split == "sentences" else read_lines(path)
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise ValueError(f"{path} holds no sentence")
    return sentences


def split_sentences(text: str) -> list[str]:
    r"""Split running text into sentences: at empty lines, and where a sentence ends in its script.

    It ends after ``.``, ``!``, ``?``, ``…``, ``؟``, ``۔`` or ``।`` before white space and no small letter, and after
    ``。``, ``！`` or ``？``. The rule has no dictionary: it also splits "Mr. Smith".

    Parameters
    ----------
    text : str

    Returns
    -------
    list of str
        White space within a sentence becomes single blanks.

    Examples
    --------
    >>> split_sentences("Tom chases Jerry. Jerry\nlikes cheese!  \"So do I.\" Does he?\n\nchapter 2")
    ['Tom chases Jerry.', 'Jerry likes cheese!', '"So do I."', 'Does he?', 'chapter 2']
    """
    parts = []
    for paragraph in re.split(r"\n\s*\n", text):
        cuts = [0, *(cut for gap in sentence_gaps(paragraph) for cut in gap), len(paragraph)]
        parts += [paragraph[begin:end] for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
    return [" ".join(part.split()) for part in parts if part.strip()]


def read_triplets(path: PathLike | BinaryFile) -> list[Triplet]:
    r"""Read triplets from a UTF-8 file with three columns between tabs: main, similar, non-similar.

    Parameters
    ----------
    path : path, or a file that is open in binary mode

    Returns
    -------
    list of (str, str, str)
        Empty lines are skipped.

    Raises
    ------
    ValueError
        A line has another number of columns; or there is no triplet at all.

    Warns
    -----
    UserWarning
        How many lines were left out, because a column is empty.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "triplets.tsv")
    ...     _ = path.write_text("tom chases\tjerry runs\tit snows\n", encoding="utf-8")
    ...     read_triplets(path)
    [('tom chases', 'jerry runs', 'it snows')]
    """
    triplets: list[Any] = _table(path, "three sentences", lambda columns: len(columns) == 3)
    if not triplets:
        raise ValueError(f"{path} holds no triplet")
    return triplets


def read_pairs(
    path: PathLike | BinaryFile, least: float = -math.inf, most: float = math.inf
) -> list[tuple[Any, ...]]:
    r"""Read examples from a UTF-8 file with columns between tabs: two texts or more, or two texts and a number.

    Parameters
    ----------
    path : path, or a file that is open in binary mode
    least, most : float, optional
        The range of the numbers, such as that which a loss takes.

    Returns
    -------
    list of tuple
        A query, its answer, and wrong answers if there are some; or two texts and a float. Empty lines are skipped.
        Quotes around cells are removed if all cells that begin with one end with one.

    Raises
    ------
    ValueError
        Lines have different numbers of columns, or fewer than two; or there is none. Or half of the last columns or
        more are numbers, and one is none, or not in the range; only that of a heading in the first line may be a text.

    Warns
    -----
    UserWarning
        How many lines were left out, because a column is empty.

    Examples
    --------
    >>> import io
    >>> from selfattn import training
    >>> training.read_pairs(io.BytesIO(b"tom chases\tjerry runs\t0.5\n"))
    [('tom chases', 'jerry runs', 0.5)]
    """
    numbered = _numbered(path, "two or more texts", lambda columns: len(columns) > 1)
    rows = [row for _, row in numbered]
    if not rows:
        raise ValueError(f"{path} holds no pair")
    if other := next((row for row in rows if len(row) != len(rows[0])), None):
        raise ValueError(
            f"{path}: a line has {len(other)} columns, the first {len(rows[0])}: {other[0][:80]!r}"
        )
    scores = [_number(row[-1]) for row in rows]
    if len(rows[0]) == 2 or 2 * sum(score is not None for score in scores) < len(rows):
        return rows
    found = []
    for (number, row), score in zip(numbered, scores, strict=True):
        if score is not None and not least <= score <= most:
            what = f"the score {score:g} is not from {least:g} to {most:g}, which is what the loss takes"
            raise ValueError(f"{path}, line {number}: {what}")
        if score is not None:
            found.append((*row[:-1], score))
        elif number > numbered[0][0] or len(rows) == 1:
            what = f"the last column is {row[-1]!r:.80}, not a number as in other lines"
            raise ValueError(f"{path}, line {number}: {what}")
    return found


def _number(text: str) -> float | None:
    """Return the finite number that a text is, or None."""
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def _table(path: Any, expected: str, fits: Callable[[list[str]], bool]) -> list[tuple[str, ...]]:
    """Read the columns between tabs of each line that is not empty."""
    return [row for _, row in _numbered(path, expected, fits)]


def _numbered(
    path: Any, expected: str, fits: Callable[[list[str]], bool]
) -> list[tuple[int, tuple[str, ...]]]:
    """Read the columns between tabs of each line that is not empty, with the line's number."""
    rows, text, empty = [], read_text(path), 0
    quoted = is_quoted(text)
    for number, line in enumerate(text.split("\n"), 1):
        columns = [column.strip() for column in line.rstrip("\r").split("\t")]
        if quoted:
            columns = [c[1:-1].replace('""', '"').strip() if c[:1] == '"' else c for c in columns]
        if columns == [""]:
            continue
        if not fits(columns):
            raise ValueError(f"{path}, line {number}: expected {expected} between tabs, not {line[:80]!r}")
        if all(columns):
            rows.append((number, tuple(columns)))
        else:
            empty += 1
    if empty:
        warn(f"{path}: left out, as a cell is empty: {empty:,} rows")
    return rows


def make_triplets(
    sentences: Iterable[str],
    rng: init.Rng = None,
    *,
    near: int = 1,
    far: int | None = None,
    per_sentence: int = 1,
) -> list[Triplet]:
    """Make triplets from a text: neighbouring sentences are similar, distant ones are not.

    Parameters
    ----------
    sentences : iterable of str
        In the order of the text.
    rng : int, Generator or torch_rng, optional
        Chooses the neighbour and the distant sentence; the same seed gives the same triplets.
    near : int, default 1
        The largest distance of a neighbour, in sentences.
    far : int, optional
        Distant sentences are further away than this. By default 10, or a quarter of the text where that is less, but at
        least ``near``.
    per_sentence : int, default 1
        The number of triplets that begin with each sentence.

    Returns
    -------
    list of (str, str, str)
        main, similar, non-similar: ``per_sentence * len(sentences)`` triplets, in the order of the text.

    Raises
    ------
    ValueError
        The text is too short for ``far``, or a distant sentence that differs was not found.

    Examples
    --------
    >>> from selfattn.training import make_triplets
    >>> for triplet in make_triplets(["one", "two", "three", "four", "five", "six"], rng=0)[:2]:
    ...     print(triplet)
    ('one', 'two', 'six')
    ('two', 'three', 'five')
    """
    check_rows("sentences", sentences)
    if isinstance(sentences, str):
        raise TypeError("sentences must be an iterable of str, not one str; see split_sentences")
    sentences = list(sentences)
    for number, sentence in enumerate(sentences):
        if way := if_missing(sentence):
            raise TypeError(f"sentence {number} is {sentence!r}{way}")
    near, per_sentence = check_size("near", near), check_size("per_sentence", per_sentence)
    n = len(sentences)
    far = max(near, min(FAR, n // 4)) if far is None else check_size("far", far, near)
    least = 2 * (far + 1)
    if n < least:
        raise ValueError(
            f"a text of {n} sentence{'s' * (n != 1)} is too short: with far={far} at least {least} are needed, "
            "so that each of them has distant ones"
        )
    generator = init.as_generator(rng)
    triplets = []
    for i, main in enumerate(sentences):
        close = [j for j in range(max(0, i - near), min(n, i + near + 1)) if j != i]
        before = max(0, i - far)  # the distant sentences before i
        distant = before + max(0, n - i - far - 1)
        for _ in range(per_sentence):
            similar = sentences[close[int(generator.integers(len(close)))]]
            for _ in range(TRIES):
                j = int(generator.integers(distant))
                other = sentences[j if j < before else j - before + i + far + 1]
                if other not in (main, similar):
                    break
            else:
                raise ValueError(
                    f"{TRIES} distant sentences were all the same as {main[:60]!r} or its neighbour"
                )
            triplets.append((main, similar, other))
    return triplets


def read_lines(path: PathLike | BinaryFile) -> list[str]:
    """Read the lines of a UTF-8 text file, stripped of blanks; empty lines are kept, so that line numbers are right.

    Parameters
    ----------
    path : path, or a file that is open in binary mode

    Returns
    -------
    list of str
        Empty if the file is.

    Raises
    ------
    ValueError
        The file is not UTF-8.
    OSError
        It cannot be read.
    """
    lines = [line.strip() for line in read_text(path).split("\n")]
    return lines if lines[-1] else lines[:-1]
