"""Dask: embeddings of texts in parts are those of all texts, whatever fails."""

import os
import shutil

import numpy as np
import pytest
from dask_workers import die_once, started_workers  # noqa: F401 the fixture
from text_folders import WORDS, save_bert

import selfattn_models as models

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
db = pytest.importorskip("dask.bag")
interop = pytest.importorskip("selfattn_models.interop.dask")

pytestmark = pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")  # of another cluster on this machine
TEXTS = [f"{' '.join(WORDS[n % 7 : n % 7 + 3])} {WORDS[n % len(WORDS)]}" for n in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_bert(folder, 64)
    return folder


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("workers", [2], indirect=True)
def test_a_worker_that_dies_changes_nothing(folder, tmp_path):
    bag = db.from_sequence(TEXTS, npartitions=5).map(
        lambda text: die_once(str(tmp_path / "encode")) or text if text == TEXTS[30] else text
    )
    expected = models.load(folder).encode(TEXTS)
    np.testing.assert_array_equal(interop.encode(folder, bag), expected)
    assert (tmp_path / "encode").exists()


def test_files_of_embeddings_continue(folder, tmp_path, monkeypatch):
    expected = models.load(folder).encode(TEXTS)
    texts = da.from_array(np.array(TEXTS, dtype=object), chunks=25)
    encoded = []
    embedded = interop._embedded

    def fails_once(*given):
        encoded.append(len(given[-1]))
        if len(encoded) == 2:
            raise MemoryError("no memory")
        return embedded(*given)

    monkeypatch.setattr(interop, "_embedded", fails_once)
    with dask.config.set(scheduler="sync"):
        for name in ("e.npy", "e.parquet"):
            encoded.clear()
            with pytest.raises(MemoryError):
                interop.encode(folder, texts, out=tmp_path / name)
            assert not (tmp_path / "e.npy").exists() or name == "e.parquet"
            found = interop.encode(folder, texts, out=tmp_path / name)
            assert sum(encoded) == 60 + encoded[1]  # the part that failed was computed again, no other
            if name == "e.npy":
                np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(np.load(tmp_path / name), expected)
            else:
                table = pytest.importorskip("pyarrow.parquet").read_table(found)
                np.testing.assert_array_equal(np.stack(table["embedding"].to_pandas()), expected)
        given = da.from_array(np.array([*"abc", None]), ((1, 1, 2),))
        with pytest.raises(ValueError, match="text 1 is None"):
            interop.encode(folder, given, out=tmp_path / "e.npy")
        moved = np.array([*"aabc"], object)  # "b" is the second part again, in another row
        found = interop.encode(folder, da.from_array(moved, ((2, 1, 1),)), out=tmp_path / "e.npy")
        np.testing.assert_array_equal(found, models.load(folder).encode(moved))
    assert sorted(os.listdir(tmp_path)) == ["e.npy", "e.parquet"]
    with pytest.raises(FileExistsError, match=r"other embeddings, such as .*part.000001.parquet"):
        interop.encode(folder, texts.rechunk(30)[:30], out=tmp_path / "e.parquet")
    with pytest.raises(ValueError, match=r"must end with .npy or .parquet, got 'e'"):
        interop.encode(folder, texts, out=tmp_path / "e")
    with pytest.warns(UserWarning, match="longer than 64 tokens"):
        interop.encode(folder, db.from_sequence(["sea " * 99])).compute(scheduler="sync")
    with pytest.raises(TypeError, match="of Dask, got list"):
        interop.encode(folder, TEXTS)


def test_a_table_keeps_its_rows_names_and_columns(folder, tmp_path, monkeypatch):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    given = pd.DataFrame({"text": TEXTS, "n": range(60)}, index=[f"t{n}" for n in range(60)])
    frame, expected = dd.from_pandas(given, npartitions=3, sort=False), models.load(folder).encode(TEXTS)
    moved = shutil.copytree(
        folder, tmp_path / "moved"
    )  # the same model, with other times and a file of the user's
    (moved / "notes.txt").write_text("mine")
    with dask.config.set(scheduler="sync"):
        of_frame = {"column": "text", "out": tmp_path / "frame.parquet"}
        for texts, options, columns in (
            (frame, of_frame, ["text", "n"]),
            (frame["text"], {"out": tmp_path / "e.parquet"}, []),
        ):
            found = pd.read_parquet(interop.encode(folder, texts, **options))
            assert list(found.index) == list(given.index) and list(found) == [*columns, "embedding"]
            np.testing.assert_array_equal(np.stack(found["embedding"]), expected)
        np.testing.assert_array_equal(interop.encode(folder, frame, column="text"), expected)
        encoded, embedded = [], interop._embedded
        monkeypatch.setattr(interop, "_embedded", lambda *given: encoded.append(1) or embedded(*given))
        interop.encode(moved, frame, **of_frame)
        assert not encoded
        interop.encode(moved, frame.assign(n=frame["n"] + 1), **of_frame)
        assert len(encoded) == 3 and pd.read_parquet(of_frame["out"])["n"].iloc[0] == 1
