"""Texts: the whitespace tokenizer, adapting others, training SentencePiece; triplets of a text, and texts from
files."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusals

import selfattn as sa
from selfattn import nn, training
from selfattn.text import WhitespaceTokenizer, as_tokenizer, train_sentencepiece

SENTENCES = ["tom chase jerry", "jerry likes cheese", "", "harry killed voldemort", "  "]


def test_a_vocabulary_is_ordered_by_how_often_words_appear():
    tokenizer = WhitespaceTokenizer.train(iter(SENTENCES))
    expected = ["<unk>", "jerry", "tom", "chase", "likes", "cheese", "harry", "killed", "voldemort"]
    assert tokenizer.vocabulary == expected
    assert (tokenizer.vocab_size, tokenizer.unknown_id) == (9, 0)
    assert repr(tokenizer) == "WhitespaceTokenizer(9 words, unknown_id=0)"
    assert WhitespaceTokenizer.train(SENTENCES, vocab_size=3).vocabulary == expected[:3]
    assert WhitespaceTokenizer.train(SENTENCES, min_count=2).vocabulary == expected[:2]
    assert WhitespaceTokenizer.train(["<unk> a", "<unk>"]).vocabulary == ["<unk>", "a"]


def test_words_become_ids_and_words_again():
    tokenizer = WhitespaceTokenizer.train(SENTENCES)
    ids = tokenizer.encode("  tom likes\tspike\n")
    assert ids == [2, 4, 0]
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids)) == "tom likes <unk>"
    assert tokenizer.encode("tom likes spike", out_type=str) == ["tom", "likes", "<unk>"]
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    again = WhitespaceTokenizer(tokenizer.vocabulary)
    assert again.encode("tom likes spike") == ids


@pytest.mark.parametrize(
    "form", [iter, tuple, dict.fromkeys, np.array, lambda words: (word for word in words)]
)
def test_a_vocabulary_may_be_any_iterable(form):
    tokenizer = WhitespaceTokenizer(form(["tom", "likes"]))
    assert tokenizer.vocabulary == ["tom", "likes"] and tokenizer.encode("likes tom") == [1, 0]


test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: WhitespaceTokenizer("tom"), TypeError, "sequence of words, not 'tom'"),
    (lambda: WhitespaceTokenizer(None), TypeError, "sequence of words, not None"),
    (lambda: WhitespaceTokenizer(iter(["a", b"b"])), TypeError, "sequence of words, not <list_iterator"),
    (lambda: WhitespaceTokenizer(["a", "b", "a"]), ValueError, r"twice: \['a'\]"),
    (lambda: WhitespaceTokenizer(["a"]).encode("a b"), ValueError, "'b' is not in the vocabulary"),
    (lambda: WhitespaceTokenizer(["a"]).encode(b"a"), TypeError, "must be a str, not bytes"),
    (lambda: WhitespaceTokenizer(["a"]).encode("a", out_type=bytes), ValueError, "out_type must be"),
    (lambda: WhitespaceTokenizer(["a"]).decode([1]), ValueError, r"0\.\.\.0, not 1"),
    (lambda: WhitespaceTokenizer.train(["", " "]), ValueError, "no text to train on"),
    (lambda: WhitespaceTokenizer.train("tom"), TypeError, "a list of str"),
    (lambda: WhitespaceTokenizer.train([b"tom"]), TypeError, "must be str, not bytes: b'tom'"),
    (lambda: WhitespaceTokenizer.train(None), TypeError, "a list of str, or a file, not None"),
    (
        lambda: WhitespaceTokenizer.train(["a"], vocab_size=2.5),
        TypeError,
        "vocab_size must be an int, not 2.5",
    ),
    (lambda: WhitespaceTokenizer.train(["a"], vocab_size=1), ValueError, "at least 2, not 1"),
    (lambda: WhitespaceTokenizer.train(["a"], min_count=0), ValueError, "at least 1, not 0"),
    (lambda: as_tokenizer(None), TypeError, "tokenizer must have encode.*not None"),
    (lambda: as_tokenizer(WhitespaceTokenizer), TypeError, "not <class"),
)


def test_a_tokenizer_of_sentencepiece_is_trained_and_taken():
    pytest.importorskip("sentencepiece", reason="SentencePiece is an extra")
    tokenizer = train_sentencepiece(iter(SENTENCES), 1000)
    assert 10 < tokenizer.get_piece_size() < 1000
    again = train_sentencepiece(SENTENCES, 1000)
    assert again.serialized_model_proto() == tokenizer.serialized_model_proto()
    ids = tokenizer.encode("tom likes cheese", out_type=int)
    assert as_tokenizer(tokenizer)("tom likes cheese") == ids
    model = nn.EmbeddingModel(tokenizer, tokenizer.get_piece_size(), 4, max_seq_len=8, rng=0)
    np.testing.assert_array_equal(model("tom likes cheese"), model(ids))
    assert train_sentencepiece(SENTENCES, 10, model_type="word").get_piece_size() == 10


def test_lines_without_end_do_not_take_for_ever():
    """Without a cut, the first line takes hours: SentencePiece's time grows with the square of its length."""
    pytest.importorskip("sentencepiece", reason="SentencePiece is an extra")
    lines = ["tom chases jerry " * 100_000, "-" * 300_000, "harry"]
    tokenizer = train_sentencepiece(lines, 60)
    assert tokenizer.unk_id() not in tokenizer.encode("tom chases jerry - harry")


def test_cutting_a_long_line_changes_no_piece():
    pytest.importorskip("sentencepiece", reason="SentencePiece is an extra")
    words = np.random.default_rng(0).choice(" ".join(SENTENCES).split(), 3000).tolist()
    options = {"model_type": "bpe"}  # BPE counts only words
    short = train_sentencepiece([" ".join(words[i : i + 10]) for i in range(0, 3000, 10)], 40, **options)
    long = train_sentencepiece([" ".join(words)], 40, **options)
    pieces = [[each.id_to_piece(i) for i in range(each.get_piece_size())] for each in (short, long)]
    assert pieces[0] == pieces[1]


test_what_sentencepiece_refuses_is_an_error = refusals(
    ((SENTENCES, 5), "SentencePiece could not be trained with vocab_size=5: "),
    ((SENTENCES, 99999999999), "could not be trained with vocab_size=99999999999: "),
    ((SENTENCES, 0), "at least 1, not 0"),
    (([" "], 100), "no text to train on"),
    call=lambda given: pytest.importorskip("sentencepiece") and train_sentencepiece(*given),
)


def test_a_tokenizer_of_hugging_face_is_taken():
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers of Hugging Face are optional")
    vocabulary = {"[UNK]": 0, "tom": 1, "chase": 2, "jerry": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert as_tokenizer(tokenizer)("tom chase spike") == [1, 2, 0]
    model = nn.EmbeddingModel(tokenizer, 4, 4, max_seq_len=8, rng=0)
    np.testing.assert_array_equal(model("tom chase spike"), model([1, 2, 0]))


def test_the_padding_of_a_tokenizer_of_hugging_face_is_no_part_of_a_sentence():
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers of Hugging Face are optional")
    vocabulary = {"[PAD]": 0, "tom": 1, "chase": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for direction in ("left", "right"):
        tokenizer.enable_padding(length=12, direction=direction)
        assert as_tokenizer(tokenizer)("tom dog chase") == [1, 0, 2]  # unknown options are kept


@pytest.mark.parametrize("text", ["\ud800", "sea \udcff sea"])
def test_a_lone_surrogate_is_no_text(text):
    """Libraries report a failed cast; selfattn's error names the sentence."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    lines = ["the sea was calm", "a ship on the water"] * 10
    pieces = train_sentencepiece(lines, 30)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"sea": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert isinstance(pieces, sentencepiece.SentencePieceProcessor)
    for tokenizer in (pieces, words):
        model = nn.EmbeddingModel(tokenizer, 40, 4, max_seq_len=8, rng=0)
        for call in (model, model.steps, lambda x, m=model: m.encode(["sea", x])):
            with pytest.raises(ValueError, match="is not Unicode: it has a lone surrogate"):
                call(text)
    with pytest.raises(ValueError, match="is not Unicode: it has a lone surrogate"):
        train_sentencepiece([*lines, text], 30)
    with pytest.raises(ValueError, match="is not Unicode: it has a lone surrogate"):
        WhitespaceTokenizer.train([*lines, text])  # no UTF-8 file could hold the word


@given(
    n=st.integers(4, 60),
    near=st.integers(1, 4),
    far=st.none() | st.integers(1, 30),
    per_sentence=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    torch=st.booleans(),
)
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
        ("", []),
        (" \n\n ", []),
        ("No end", ["No end"]),
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("Wrapped\nat  a\twidth. Next\none.", ["Wrapped at a width.", "Next one."]),
        ("TITLE\n\nText.\n \nMore", ["TITLE", "Text.", "More"]),
        ("“Go!” he said. “Where?” (Out.) Now.", ["“Go!” he said.", "“Where?”", "(Out.)", "Now."]),
        ("It cost 3.5 dollars, i.e. little. 7 of them.", ["It cost 3.5 dollars, i.e. little.", "7 of them."]),
        ("What?! Émile. ÉTÉ.", ["What?!", "Émile.", "ÉTÉ."]),
        ("Кот спит. Пёс лает, т. е. шумит.", ["Кот спит.", "Пёс лает, т. е. шумит."]),
        ("¿Vienes? ¡Qué bien!", ["¿Vienes?", "¡Qué bien!"]),
        ("هل رأيت؟ نعم رأيت.", ["هل رأيت؟", "نعم رأيت."]),
        ("कुत्ता है। बिल्ली है।", ["कुत्ता है।", "बिल्ली है।"]),
        ("他来了。“她走了。”", ["他来了。", "“她走了。”"]),
    ],
)
def test_running_text_is_cut_into_sentences(text, sentences):
    assert training.split_sentences(text) == sentences


def test_a_score_that_is_no_number_is_named():
    rows = "a\tb\t0.5\nc\td\t1\n"
    read = lambda text: training.read_pairs(io.BytesIO(text.encode()))  # noqa: E731
    assert read("one\ttwo\tscore\n" + rows) == read(rows) == [("a", "b", 0.5), ("c", "d", 1.0)]
    for wrong in ("n/a", "0,5", "nan"):
        with pytest.raises(ValueError, match=f"line 3: the last column is '{wrong}', not a number"):
            read(rows + f"e\tf\t{wrong}\n")
    with pytest.raises(ValueError, match="line 2: the score 1 is not from 0 to"):
        training.read_pairs(io.BytesIO(rows.encode()), 0, 0.5)
    with pytest.warns(UserWarning, match="left out, as a cell is empty: 2 rows"):
        assert read(rows + "\t\t0\n e\t \t1\n") == read(rows)
    assert read('"a ""b"" c"\t"d"\ne\tf\n') == [('a "b" c', "d"), ("e", "f")]
    assert read('"a\td"\ne\tf\n')[0] == ('"a', 'd"')  # quotes of its own
    assert read("a\tb\tc\nd\te\tf\ng\th\t1\n")[2] == ("g", "h", "1")


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
    with pytest.raises(ValueError, match='split must be "lines" or "sentences"'):
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
