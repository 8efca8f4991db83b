"""selfattn.training: triplets of a text, and texts from files."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import selfattn as sa
from selfattn import training


@given(
    n=st.integers(4, 60), near=st.integers(1, 4), far=st.none() | st.integers(1, 30), per_sentence=st.integers(1, 3),
    seed=st.integers(0, 2**32), torch=st.booleans(),
)  # fmt: skip
def test_neighbours_are_near_and_the_others_are_far(n, near, far, per_sentence, seed, torch):
    sentences = [str(i) for i in range(n)]
    least = max(near, min(10, n // 4)) if far is None else far

    def make():
        rng = sa.torch_rng(seed) if torch else seed
        return training.make_triplets(sentences, rng, near=near, far=far, per_sentence=per_sentence)

    if least < near or n < 2 * (least + 1):
        with pytest.raises(ValueError, match="far"):
            make()
        return
    triplets = make()
    assert triplets == make()
    assert [int(main) for main, _, _ in triplets] == [i for i in range(n) for _ in range(per_sentence)]
    for main, similar, other in triplets:
        assert 0 < abs(int(main) - int(similar)) <= near
        assert abs(int(main) - int(other)) > least


def test_all_that_is_far_is_drawn_equally_often():
    sentences = [str(i) for i in range(12)]
    triplets = training.make_triplets(sentences, 0, far=2, per_sentence=2000)
    others = np.array([int(other) for main, _, other in triplets if main == "5"])
    counts = np.bincount(others, minlength=12)
    allowed = [0, 1, 2, 8, 9, 10, 11]
    assert counts.sum() == counts[allowed].sum() == 2000
    # 2000 draws of 7: a standard deviation of 15.6 around 286; six of them
    assert np.all(np.abs(counts[allowed] - 2000 / 7) < 6 * 15.6)
    similar = [near for main, near, _ in triplets if main == "5"]
    assert abs(similar.count("4") - 1000) < 6 * 22.4


def test_a_distant_sentence_is_never_the_same_as_the_main_one_or_its_neighbour():
    sentences = ["a", "b", "a", "b", "c", "a", "b", "a", "b", "c"] * 4
    for main, similar, other in training.make_triplets(sentences, 0, per_sentence=20):
        assert other not in (main, similar)
    with pytest.raises(ValueError, match="distant sentences were all the same as 'x'"):
        training.make_triplets(["x"] * 40, 0)


def test_one_string_is_not_a_text():
    with pytest.raises(TypeError, match="split_sentences"):
        training.make_triplets("Tom chases Jerry. Jerry runs.")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []), (" \n\n ", []), ("No end", ["No end"]),
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("Wrapped\nat  a\twidth. Next\none.", ["Wrapped at a width.", "Next one."]),
        ("TITLE\n\nText.\n \nMore", ["TITLE", "Text.", "More"]),
        ("“Go!” he said. “Where?” (Out.) Now.", ["“Go!” he said.", "“Where?”", "(Out.)", "Now."]),
        ("It cost 3.5 dollars, i.e. little. 7 of them.", ["It cost 3.5 dollars, i.e. little.", "7 of them."]),
        ("What?! Émile. ÉTÉ.", ["What?!", "Émile.", "ÉTÉ."]),
    ],
)  # fmt: skip
def test_running_text_is_cut_into_sentences(text, sentences):
    assert training.split_sentences(text) == sentences


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_a_file(tmp_path, end):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + end.join([" one ", "", "zwei ß", "three"]).encode() + end.encode())
    assert training.read_lines(path) == ["one", "", "zwei ß", "three"]
    assert training.read_sentences(path) == ["one", "zwei ß", "three"]
    assert training.read_sentences(path, "sentences")[0] == "one"


def test_files_that_hold_nothing_or_something_else(tmp_path):
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ValueError, match="empty holds no sentence"):
        training.read_sentences(tmp_path / "empty")
    with pytest.raises(ValueError, match="empty holds no triplet"):
        training.read_triplets(tmp_path / "empty")
    (tmp_path / "latin").write_bytes("eins\nzwei\nGrüße\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin is not UTF-8: byte 0xfc in line 3 \(offset 12\)"):
        training.read_lines(tmp_path / "latin")
    with pytest.raises(ValueError, match="split must be one of"):
        training.read_sentences(tmp_path / "empty", "words")


@pytest.mark.parametrize("read", [training.read_lines, training.read_sentences, training.read_triplets])
@pytest.mark.parametrize(
    "file", [b"lines.txt", None, 3, ["a line"], io.StringIO("a line")], ids=lambda file: type(file).__name__
)
def test_what_is_no_file_in_binary_mode(read, file):
    with pytest.raises(TypeError, match="path must be a path, or a file that is open in binary mode, not"):
        read(file)


def test_triplets_between_tabs(tmp_path):
    (tmp_path / "t.tsv").write_text("a b\tc\td e\n\n f \tg\th\r\n")
    assert training.read_triplets(tmp_path / "t.tsv") == [("a b", "c", "d e"), ("f", "g", "h")]
    (tmp_path / "t.tsv").write_text("a\tb\tc\n\nd\te\n")
    with pytest.raises(ValueError, match=r"line 3: expected three sentences between tabs, not 'd\\te'"):
        training.read_triplets(tmp_path / "t.tsv")
