"""The commands `index`, `search`, `evaluate` and `map` on an index, as a new user would type them."""

import json
import re

import pytest
import text_folders as folders
from processes import run_command

from selfattn_models import _encoders, search
from selfattn_models.cli import corpus
from selfattn_models.search import _adding

TABLE = [
    {"id": "a", "text": "the sea was calm near old stones .", "kind": "sea", "stars": "3"},
    {"id": "b", "text": "a ship sailed over dark water .", "kind": "ship", "stars": "4"},
    {"id": "c", "text": "ships near the stones", "kind": "ship", "stars": "3"},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders.save_bert(tmp_path / "model", 64)
    return tmp_path


def as_csv(rows, comma=","):
    names = list(rows[0])
    lines = [names, *([f'"{row[name]}"' for name in names] for row in rows)]
    return "\r\n".join(map(comma.join, lines)) + "\r\n"


FORMS = {
    "t.csv": as_csv(TABLE),
    "t.tsv": as_csv(TABLE, "\t"),
    "t.jsonl": "\n\n".join(map(json.dumps, TABLE)),
    "t.json": json.dumps(TABLE),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_corpus_gives_the_same_records(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + FORMS[name].encode())
    found = corpus.read_corpus(str(tmp_path / name))
    metadata = [{"kind": row["kind"], "stars": row["stars"]} for row in TABLE]
    expected = [(row["id"], row["text"], more) for row, more in zip(TABLE, metadata, strict=True)]
    assert found == expected


def test_quotes_of_a_text_lose_no_row(tmp_path):
    lines = ["id\ttext", '1\t"Hello," she said', "2\tsecond", '3\tto here"']
    (tmp_path / "t.tsv").write_text("\n".join(lines))
    found = corpus.read_corpus(str(tmp_path / "t.tsv"))
    assert [f"{name}\t{text}" for name, text, _ in found] == lines[1:]


def test_a_table_of_parquet_is_read(tmp_path):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.Table.from_pylist(TABLE), tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(FORMS["t.json"])
    assert corpus.read_corpus(str(tmp_path / "t.parquet")) == corpus.read_corpus(str(tmp_path / "t.json"))


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        (
            "t.csv",
            "id,body\n1,a\n",
            {},
            "line 2 has no column 'text'; its columns are id, body, and --column",
        ),
        ("t.csv", "id,text\n1,a,b\n", {}, "t.csv, line 2 has 3 columns for 2 different names"),
        ("t.csv", "id,text\n1,a\n\n1,b\n", {}, "line 4 has the id '1', and so has"),
        ("t.csv", "text,text\n1,a\n", {}, "line 1 has 2 columns for 1 different names in the heading"),
        ("t.csv", 'text\n"a\n', {}, "line 2: unexpected end"),
        (
            "t.csv",
            "id;text\n1;a\n",
            {},
            "line 1 has one column, 'id;text'; expected columns with ',' between",
        ),
        ("t.csv", "id,text\n1,a\n", {"key": "text"}, "--column and --id are both 'text'"),
        ("t.jsonl", '{"text": "a", "id": true}', {}, "line 1 has true as 'id'"),
        ("t.csv", "id,text\n1, \n", {}, "holds no text"),
        ("t.jsonl", '{"text": 3}', {}, "line 1 has 3 as 'text'"),
        ("t.jsonl", '\n{"text": "a"', {}, "line 2 is not JSON"),
        ("t.json", '{"text": {"0": "a"}}', {}, 'as to_json(orient="records") writes it; with lines=True'),
        ("t.csv", "text,n\na,x\n", {"numbers": ["n"]}, "line 2 has 'x' as 'n', which --number needs"),
        ("t.csv", "text,n\na,1\n", {"numbers": ["m"]}, "line 2 has no column 'm'"),
        ("t.jsonl", "[1]", {}, "expected an object or a text, not [1]"),
        ("t.jsonl", '{"text": "a", "id": null}', {}, "line 1 has null as 'id'"),
        ("t.csv", "a,b\nc,d\n", {"column": "a", "key": "c"}, "no column 'c'"),
        ("t.txt", b"\xff", {}, "is not UTF-8"),
    ],
)
def test_a_corpus_that_will_not_do(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(message)):
        corpus.read_corpus(str(tmp_path / name), **options)


def test_the_next_day_only_new_texts_are_embedded(here, run, monkeypatch):
    embedded = []
    encode = _encoders.encoder("model").__class__.encode_document

    def counted(model, texts, **options):
        embedded.append(len(texts))
        return encode(model, texts, **options)

    monkeypatch.setattr("selfattn_models.bert.BertModel.encode_document", counted)
    (here / "t.txt").write_text("the sea\n\na ship\nthe stones\na ship\n")
    assert "5" not in run("index", "model", "t.txt", "--out", "i").err
    assert search.Index.open("i").ids == [1, 3, 4, 5]
    assert sum(embedded) == 3
    embedded.clear()
    # All lines have moved; one is new, one went.
    (here / "t.txt").write_text("new water\nthe sea\n\na ship\nthe stones\n")
    monkeypatch.setattr("selfattn_models.search.index.BATCH", 1)
    found = run("index", "model", "t.txt", "--out", "i")
    assert "4 texts: 1 to embed, 4 to write, 1 to remove" in found.err
    index = search.Index.open("i")
    expected = {1: "new water", 2: "the sea", 4: "a ship", 5: "the stones"}
    assert dict(zip(index.ids, index.texts, strict=True)) == expected
    assert sum(embedded) == 1 + 1  # and the text by which an opened index knows its model
    assert "4 texts: 0 to embed, 0 to write, 0 to remove" in run("index", "model", "t.txt", "--out", "i").err
    folders.save_bert(here / "other", 24)
    assert "another model" in run("index", "other", "t.txt", "--out", "i", code=1).err


def test_an_interrupted_index_goes_on(here, run, monkeypatch):
    (here / "t.jsonl").write_text(FORMS["t.jsonl"])
    monkeypatch.setattr("selfattn_models.search.index.BATCH", 1)
    add, calls = _adding.add, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add(*arguments)

    monkeypatch.setattr("selfattn_models.search.index.add", once)
    found = run("index", "model", "t.jsonl", "--out", "i", code=130)
    assert "stopped: i holds 1 texts; the same command goes on" in found.err
    found = run("index", "model", "t.jsonl", "--out", "i")
    assert "3 texts: 2 to embed, 2 to write, 0 to remove" in found.err
    assert found.out == 'i: 3 texts, 2 embedded; try: selfattn search i "..."\n'


def test_search_evaluate_and_map(here, run):
    (here / "t.csv").write_text(FORMS["t.csv"])
    run("index", "model", "t.csv", "--out", "i")
    lines = [line.split("\t") for line in run("search", "i", "dark water", "-k", "2").out.splitlines()]
    expected = search.Index.open("i").search("dark water", 2)
    expected = [(round(hit.score, 3), hit.id, hit.text) for hit in expected]
    assert [(float(a), b, c) for a, b, c in lines] == expected
    out = run("search", "i", "the sea", "ships", "--where", "stars=3", "--where", "kind=ship", "--json").out
    found = [json.loads(line) for line in out.splitlines()]
    expected = [(query, "c", {"kind": "ship", "stars": "3"}) for query in ("the sea", "ships")]
    assert [(each["query"], each["id"], each["metadata"]) for each in found] == expected
    found = run("search", "i", "the sea", "--where", "kind=ship", "--where", "kind=sea", "--hybrid")
    assert len(found.out.splitlines()) == 3
    (here / "q.tsv").write_text("query\tid\ndark water\tb\nships\tc\n")
    assert run("evaluate", "i", "q.tsv").out.splitlines()[2].split() == ["index", *["1.000"] * 3]
    assert json.loads(run("evaluate", "i", "q.tsv", "--json").out)["measures"]["index"]["MRR@10"] == 1
    assert run("map", "i", "--colour", "kind").out == "map.html\n"
    assert "A map of 3 texts: i" in (here / "map.html").read_text()
    found = run("map", "i", "--most", "2", "--out", "-")
    assert "selfattn map: 2 of 3 texts" in found.err
    assert '"texts":["the sea was calm near old stones .","ships near the stones"]' in found.out


def test_a_model_that_has_moved_is_named(here, run):
    (here / "t.csv").write_text(FORMS["t.csv"])
    run("index", "model", "t.csv", "--out", "i")
    (here / "model").rename(here / "moved")
    assert "and so does --model" in run("search", "i", "water", code=1).err
    assert run("map", "i").out == "map.html\n"
    found = run("search", "i", "water", "--model", "moved").out
    for given in (["i", "t.csv", "--model", "moved"], ["i", "t.csv"], ["moved", "t.csv", "--out", "i"]):
        assert (
            "i: 3 texts, 0 embedded" in run("index", *given).out and run("search", "i", "water").out == found
        )
    assert "another model" in run("map", "i", "--model", folders.save_bert(here / "new", 24), code=1).err


def test_a_column_of_numbers_has_ranges(here, run):
    (here / "t.csv").write_text(FORMS["t.csv"] + "d, ,ship,5\r\n")
    assert (
        "left out, as they have no text: 1 rows"
        in run("index", "model", "t.csv", "--out", "i", "--number", "stars").err
    )
    for where, ids in (("stars>3", "b"), ("stars<=3", "ac"), ("stars!=3", "b"), ("kind>sea", "bc")):
        found = run("search", "i", "sea", "--json", "--where", where, "--where", "stars>=0").out
        assert sorted(json.loads(line)["id"] for line in found.splitlines()) == list(ids)


def test_numbers_of_json_are_found_by_where(here, run):
    rows = "\n".join(json.dumps({"text": "sea", "n": value}) for value in (3, "3", True, "A4"))
    done = run_command("index", "model", "-", "--format", "jsonl", "--out", "i", given=rows)
    assert "4 texts, 1 embedded" in done.stdout, done.stderr
    for value, count in (("3", 2), ("true", 1), ("A4", 1)):
        assert len(run("search", "i", "sea", "--where", f"n={value}").out.splitlines()) == count
    assert "no text has n=4" in run("search", "i", "sea", "--where", "n=4").err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["search", "i", "a", "--dtype", "int8"], 2, "--dtype is for a model, and not for an index"),
        (["search", "model", "t.csv", "a", "--hybrid"], 2, "--hybrid is for an index, from selfattn index"),
        (["search", "model", "t.csv"], 2, "a model needs a CORPUS and a QUERY"),
        (["search", "i", " "], 2, "a query is empty"),
        (["index", "i", "t.csv", "--out", "i"], 2, "expected MODEL CORPUS --out DIR, or INDEX CORPUS"),
        (["index", "model", "t.csv", "--model", "b", "--out", "j"], 2, "expected MODEL CORPUS --out DIR, or"),
        (
            ["search", "model", "t.csv", "a", "--model", "b"],
            2,
            "--model is for an index, from selfattn index",
        ),
        (["evaluate", "nothing"], 2, "nothing is no index, and a language model needs a TEXT"),
        (["search", "i", "a", "--split", "sentences"], 2, "--split is for a model"),
        (["evaluate", "i", "--tokens", "9"], 2, "--tokens is for a model, and not for an index"),
        (["evaluate", "model", "t.csv", "--where", "a=b"], 2, "--where is for an index"),
        (["evaluate", "model"], 2, "a language model needs a TEXT"),
        (["search", "i", "a", "--where", "kind"], 1, "--where must be FIELD=VALUE, not 'kind'"),
        (
            ["evaluate", "i", "t.csv"],
            1,
            "line 2: expected 'query', a text, and 'id', that of a text of the index",
        ),
        (
            ["index", "model", "t.csv", "--out", "i", "--dtype", "int8"],
            1,
            "i is an index of float32, not int8",
        ),
        (["map", "i", "--colour", "x"], 1, "no field is named 'x'; the fields are kind, stars"),
        (["index", "model", "t.csv", "--out", "model"], 1, "model"),
    ],
)
def test_what_a_command_cannot_do(here, run, arguments, code, message):
    (here / "t.csv").write_text(FORMS["t.csv"])
    run("index", "model", "t.csv", "--out", "i")
    assert message in run(*arguments, code=code).err


def test_many_lines_are_better_kept(here, run, monkeypatch):
    monkeypatch.setattr("selfattn_models.cli.models.MANY", 2)
    (here / "t.txt").write_text("the sea\na ship\nwater\n")
    hint = "3 lines are embedded anew for each search; selfattn index model t.txt --out DIR keeps them"
    assert hint in run("search", "model", "t.txt", "sea").err
