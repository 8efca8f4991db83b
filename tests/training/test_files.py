"""selfattn.files: what is saved comes back; hostile and damaged files; nothing half written."""

import errno
import json
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from hostile import HOSTILE, entry, safetensors_file
from refusals import refusals

from selfattn import _disk, attention_steps, files, nn
from selfattn.text import WhitespaceTokenizer, train_sentencepiece
from selfattn.views import steps_page

pytest.importorskip("safetensors", reason="the extra 'text' is not installed")

SENTENCES = ["tom chase jerry", "jerry likes cheese", "harry killed voldemort"]
PAGE = steps_page(attention_steps(np.eye(2), np.eye(2), np.eye(2)))
WRITERS = {
    "page": PAGE.save,
    "arrays": lambda path: files.save_arrays(path, {"a": np.ones(2)}),
    "rows": lambda path: _disk.write_rows(Path(path), [np.ones((2, 3))], 3, np.float32),
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def whitespace_model(rng=0, dtype=np.float32, **sizes):
    tokenizer = WhitespaceTokenizer.train(SENTENCES)
    sizes = {"vocab_size": tokenizer.vocab_size, "embedding_dim": 8, "max_seq_len": 16, **sizes}
    return nn.EmbeddingModel(tokenizer, **sizes, rng=rng, dtype=dtype)


def sentencepiece_model():
    pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
    tokenizer = train_sentencepiece(SENTENCES * 5, 30)
    return nn.EmbeddingModel(tokenizer, tokenizer.get_piece_size(), 8, max_seq_len=16, rng=0)


def tokenizers_model():
    tokenizers = pytest.importorskip("tokenizers", reason="Hugging Face's tokenizers is not installed")
    words = sorted(set(" ".join(SENTENCES).split()))
    vocabulary = {word: n for n, word in enumerate(["<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return nn.EmbeddingModel(tokenizer, len(vocabulary), 8, max_seq_len=16, rng=0)


def everything_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "model"
    files.save_model(whitespace_model(), folder)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("make", [whitespace_model, sentencepiece_model, tokenizers_model])
def test_a_model_comes_back(make, tmp_path):
    model = make()
    files.save_model(model, tmp_path / "deep" / "model")
    again = files.load_model(tmp_path / "deep" / "model")
    for sentence in [*SENTENCES, "jerry killed cheese"]:
        np.testing.assert_array_equal(again(sentence), model(sentence))
    assert repr(again) == repr(model)


SIZES = [("float16", 0, 1), ("bfloat16", 1, 1), ("float32", 3, 4), ("float64", 1, 2)]


@pytest.mark.parametrize(("dtype", "layers", "heads"), SIZES)
def test_sizes_and_dtypes_come_back(dtype, layers, heads, tmp_path):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model = whitespace_model(dtype=dtype, num_layers=layers, num_heads=heads)
    files.save_model(model, tmp_path)
    state = files.load_model(tmp_path).state_dict()
    for name, array in model.state_dict().items():
        assert state[name].dtype == array.dtype
        np.testing.assert_array_equal(state[name], array)


def test_a_tokenizer_that_no_file_holds(tmp_path):
    def tokenize(sentence):
        return [len(word) for word in sentence.split()]

    model = nn.EmbeddingModel(tokenize, 20, 8, max_seq_len=16, rng=0)
    files.save_model(model, tmp_path)
    with pytest.raises(ValueError, match=r"load_model\(folder, tokenizer=...\)"):
        files.load_model(tmp_path)
    again = files.load_model(tmp_path, tokenizer=tokenize)
    np.testing.assert_array_equal(again("tom chase jerry"), model("tom chase jerry"))


def test_saving_over_another_model_leaves_nothing_of_it(saved):
    (saved / "notes.txt").write_text("mine")
    model = sentencepiece_model()
    files.save_model(model, saved)
    assert set(everything_in(saved)) == {"config.json", "model.safetensors", "tokenizer.model", "notes.txt"}
    np.testing.assert_array_equal(files.load_model(saved)("tom"), model("tom"))


def test_arrays_of_any_layout_and_dtype_come_back(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6))
    arrays = {
        "transposed": x.T,
        "strided": x[::-2, ::3],
        "swapped": x.astype(">f8"),
        "zero-dimensional": np.array(3.5, np.float16),
        "empty": np.zeros((0, 3), np.int8),
        "bool": x > 0,
        "uint64": np.array([2**64 - 1], np.uint64),
    }
    files.save_arrays(tmp_path / "arrays.safetensors", arrays)
    back = files.load_arrays(tmp_path / "arrays.safetensors")
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"names": np.array(["tom"])}, TypeError, "names holds <U3"),
        ({"a": np.ma.array([1.0, 2.0], mask=[0, 1])}, TypeError, "a is a MaskedArray; pass a plain array"),
        ({"__metadata__": np.ones(2)}, ValueError, "safetensors reserves the name '__metadata__'"),
        ({1: np.ones(2)}, TypeError, "arrays must be a mapping of names to arrays, not {1: "),
        ([("a", np.ones(2))], TypeError, r"arrays must be a mapping of names to arrays, not \[\('a'"),
        (np.ones(2), TypeError, "arrays must be a mapping of names to arrays"),
    ],
)
def test_what_no_file_of_arrays_can_hold(arrays, error, message, tmp_path):
    with pytest.raises(error, match=message):
        files.save_arrays(tmp_path / "x", arrays)
    assert not (tmp_path / "x").exists()


def test_all_that_differs_is_said(saved):
    state = files.load_arrays(saved / "model.safetensors")
    del state["attention_layers.0.key.bias"]
    state["attention_layers.0.ln.weight"] = np.zeros(9, np.float32)
    state["attention_layers.0.ln.bias"] = np.zeros(8, np.float64)
    state["head.weight"] = np.zeros((2, 3), np.float32)
    files.save_arrays(saved / "model.safetensors", state)
    expected = [
        r"missing: attention_layers.0.key.bias \(8,\)",
        r"unexpected: head.weight \(2, 3\)",
        r"attention_layers.0.ln.weight has shape \(9,\), config.json says \(8,\)",
        "attention_layers.0.ln.bias is float64, config.json says float32",
    ]
    for message in expected:
        with pytest.raises(ValueError, match=message):
            files.load_model(saved)
        with pytest.warns(UserWarning, match=message):
            files.load_model(saved, strict=False)
    with pytest.warns(UserWarning):
        model = files.load_model(saved, strict=False)
    np.testing.assert_array_equal(model.attention_layers[0].ln.bias, 0)
    np.testing.assert_array_equal(model.embedding_layer.weight, state["embedding_layer.weight"])


test_hostile_configs = refusals(
    ({"format": "other"}, "format is not 'selfattn.EmbeddingModel'"),
    ({"version": 2}, "version 2; this selfattn reads version 1"),
    ({"path": "/etc/passwd"}, r"unexpected \['path'\]"),
    ({"tokenizer": "../../etc/passwd"}, "tokenizer must be one of sentencepiece, tokenizers, whitespace"),
    ({"dtype": "object"}, "dtype must be one of float16"),
    ({"vocab_size": 2**60}, "vocab_size must be an int of at least 1"),
    ({"vocab_size": 2**31 - 1}, r"has shape \(9, 8\), config.json says \(2147483647, 8\)"),
    ({"vocab_size": True}, "vocab_size must be an int"),
    ({"embedding_dim": 7}, "embedding_dim must be even"),
    ({"embedding_dim": 10}, r"embedding_layer.weight has shape \(9, 8\), config.json says \(9, 10\)"),
    ({"num_heads": 3}, "multiple of num_heads"),
    ({"num_layers": 2**30}, "names 1073741824 layers"),
    ({"num_layers": 2}, "missing: attention_layers.1.query.weight"),
    ({"max_seq_len": 2**30}, "max_seq_len 1073741824 times embedding_dim 8"),
    given="saved",
    call=lambda saved, changes: (edit_config(saved, **changes), files.load_model(saved)),
)


def load_with(folder, contents):
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files.load_model(folder)


test_hostile_files = refusals(
    *(
        ({"config.json": content}, message)
        for content, message in (
            (b"", "is not JSON"),
            (b'{"format": ', "is not JSON"),
            (b"\xff\xfe\x00", "is not JSON"),
            (b"[" * 10**5, "is not JSON"),
            (b"[]", "does not describe"),
            (b"null", "does not describe"),
            (b'{"format": "selfattn.EmbeddingModel", "version": 1}', "missing .*vocab_size"),
            (b" " * 2**23, "more than 4194304 bytes"),
        )
    ),
    *(
        ({"vocabulary.json": content}, message)
        for content, message in (
            (b"{", "vocabulary.json is not JSON"),
            (b'{"tom": 1}', "must be a list of words"),
            (b"[1, 2]", "must be a list of words"),
            (b'["tom", "tom"]', "vocabulary.json: vocabulary has words twice"),
            (json.dumps([*"0123456789"]).encode(), "has 10 tokens, more than vocab_size 9"),
        )
    ),
    *(
        ({"model.safetensors": content}, r"model\.safetensors")
        for content in (
            *HOSTILE,
            safetensors_file({"x": entry(0, 0, (2**62, 4))}, b""),
            safetensors_file({"x": entry(0, 8, (8,), "F8_E4M3")}, b"\0" * 8),
        )
    ),
    given="saved",
    call=load_with,
)


def test_weights_that_are_cut_off(saved):
    content = (saved / "model.safetensors").read_bytes()
    for length in {*range(0, len(content), 97), len(content) - 1}:
        (saved / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors is cut off"):
            files.load_model(saved)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\xff" * 1000])
@pytest.mark.parametrize(
    ("module", "name"), [("sentencepiece", "tokenizer.model"), ("tokenizers", "tokenizer.json")]
)
def test_hostile_tokenizers(saved, content, module, name):
    pytest.importorskip(module)
    edit_config(saved, tokenizer=module)
    (saved / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not a"):
        files.load_model(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocabulary.json"])
def test_files_that_are_missing_or_no_files(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        files.load_model(saved)
    os.mkfifo(saved / name)  # reading it would wait for ever
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        files.load_model(saved)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        files.load_model(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="file is not a folder"):
        files.load_model(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        files.save_model(whitespace_model(), tmp_path / "file")


def test_a_model_that_could_not_be_loaded_is_not_saved(tmp_path):
    model = nn.EmbeddingModel(WhitespaceTokenizer(["tom", "jerry"]), 1, 4, max_seq_len=4, rng=0)
    with pytest.raises(ValueError, match="the tokenizer has 2 tokens, more than vocab_size 1 of the model"):
        files.save_model(model, tmp_path / "new")
    blocks = nn.EmbeddingModel(WhitespaceTokenizer(["tom"]), 1, 4, max_seq_len=4, rng=0)
    blocks.attention_layers.append(nn.SelfAttentionBlock(4, rng=1))
    with pytest.raises(
        ValueError,
        match=r"could not be loaded again:\n  unexpected: attention_layers.1.query.weight \(4, 4\)",
    ):
        files.save_model(blocks, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_only_embedding_models_are_saved_as_folders(tmp_path):
    with pytest.raises(TypeError, match="must be an EmbeddingModel, not Linear"):
        files.save_model(nn.Linear(2, 2), tmp_path)
    assert everything_in(tmp_path) == {}


def fail_at(monkeypatch, name, n, error):
    """Let the n-th call of a function of os raise."""
    real, calls = getattr(os, name), iter(range(10**6))

    def function(*args):
        if next(calls) == n:
            raise error
        return real(*args)

    monkeypatch.setattr(os, name, function)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("function", "n", "error"),
    [
        ("fsync", 0, FULL),
        ("fsync", 2, KeyboardInterrupt()),
        ("replace", 1, KeyboardInterrupt()),
        ("replace", 2, FULL),
    ],
)
def test_a_failure_leaves_what_was_there(saved, tmp_path, monkeypatch, function, n, error):
    """After a failure, the folder holds the old model or does not exist."""
    before = everything_in(saved)
    for folder in (saved, tmp_path / "new"):
        with monkeypatch.context() as patch:
            fail_at(patch, function, n, error)
            with pytest.raises(type(error)):
                files.save_model(whitespace_model(rng=1), folder)
    assert everything_in(saved) == before
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]


@pytest.mark.parametrize(
    "write", [*WRITERS.values(), lambda path: files.save_model(whitespace_model(), path)]
)
def test_content_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch, write):
    """After a power cut a name that was not flushed is the old file, never an empty one. Files are known by inodes."""
    flushed, fsync, replace = [], os.fsync, os.replace

    def flush(descriptor):
        flushed.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def rename(old, new):
        assert os.stat(old).st_ino in flushed, (old, new)
        flushed.append("a new name")
        replace(old, new)

    path = tmp_path / "a"
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    write(path)
    write(path)
    assert flushed.count("a new name") > 1
    if write is not WRITERS["rows"]:
        assert flushed[-1] == (path if path.is_dir() else tmp_path).stat().st_ino


def test_a_device_is_not_replaced(tmp_path):
    """A rename would replace /dev/null by a file, if permissions allow it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file, which could be replaced"):
        files.save_arrays(tmp_path / "pipe", {"a": np.ones(2)})
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_files_are_made_with_the_usual_permissions(saved):
    (saved / "other").write_text("")
    usual = (saved / "other").stat().st_mode
    assert {path.stat().st_mode for path in saved.iterdir()} == {usual}


@writers
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path, write):
    """A rename would replace the link by a file, and leave its target unchanged."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "plain")
    for name in ("there", "not yet"):
        (tmp_path / name).symlink_to(f"data/{name}")
    (tmp_path / "data" / "there").write_text("old")
    for name in ("there", "not yet"):
        write(tmp_path / name)
        assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "plain").read_bytes()
        assert (tmp_path / name).is_symlink()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="circle"):
        write(tmp_path / "circle")
    assert (tmp_path / "circle").is_symlink()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["not yet", "there"]


@writers
def test_a_file_is_replaced_whole_and_stays_private(tmp_path, monkeypatch, write):
    path = tmp_path / "file"
    path.write_text("of yesterday")
    path.chmod(0o600)
    with monkeypatch.context() as patch:
        fail_at(patch, "fsync", 0, FULL)
        with pytest.raises(OSError, match="No space left on device"):
            write(path)
    assert path.read_text() == "of yesterday"
    write(path)
    assert path.read_bytes() != b"of yesterday"
    assert [(each, stat.S_IMODE(each.stat().st_mode)) for each in tmp_path.iterdir()] == [(path, 0o600)]


def test_a_private_model_stays_private(saved):
    for path in saved.iterdir():
        path.chmod(0o600)
    files.save_model(whitespace_model(rng=1), saved)
    assert {stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()} == {0o600}


@writers
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch, write):
    """A rename needs only the folder's permission. Root may write everything, so the test fakes the system's answer."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file").chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o222))
    with pytest.raises(PermissionError, match="may not be written"):
        write(tmp_path / "file")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_names_of_descriptors():
    """A descriptor's name is written to and never replaced, whatever file it refers to."""
    for name in ("/dev/fd/7", "/proc/self/fd/7", f"/proc/{os.getpid()}/fd/7", "/dev/../dev/fd/7"):
        assert _disk.descriptor_of(name) == 7
    assert _disk.descriptor_of("/dev/stdin") == 0
    for name in ("/dev/null", "/proc/self/fd", "/dev/fd/x", "7", "-", "/proc/1/fd/7"):
        assert _disk.descriptor_of(name) is None


@writers
def test_names_as_long_as_there_are(tmp_path, write):
    """A name of 255 bytes has no room for the ending of a temporary name."""
    for name in ("x" * 255, "é" * 127, "n" * 240, "-x", "a\nb", os.fsdecode(b"\xff")):
        (tmp_path / name).write_text("old")
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes() != b"old"
        (tmp_path / name).unlink()
    _disk.write_files(tmp_path, {"x" * 255: b"1", "x" * 254 + "y": b"2"})
    _disk.write_files(tmp_path, {"x" * 255: b"3", "x" * 254 + "y": b"4"})
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == [b"3", b"4"]


def test_files_that_are_not_of_the_model_stay(saved, tmp_path):
    """Only files of a model that selfattn saved, such as its tokenizer, are removed."""
    theirs = {"vocabulary.json": b"[1]", "tokenizer.json": b"{}", "notes.txt": b"mine"}
    for name, content in theirs.items():
        (tmp_path / name).write_bytes(content)
    model = nn.EmbeddingModel(lambda s: [len(s)], 10, 4, max_seq_len=8, rng=0)
    files.save_model(model, tmp_path)
    files.save_model(model, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in theirs} == theirs
    assert (saved / "vocabulary.json").exists()
    files.save_model(model, saved)
    assert not (saved / "vocabulary.json").exists()


@writers
@pytest.mark.parametrize("name", [".", "", "folder"])
def test_a_folder_is_no_place_for_a_file(name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="a folder has the name of the file"):
        write(name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_ctrl_c_while_a_model_is_replaced_leaves_no_old_files(tmp_path, monkeypatch):
    tokenizer = WhitespaceTokenizer.train(["tom chase jerry"])
    model = nn.EmbeddingModel(tokenizer, tokenizer.vocab_size, 4, max_seq_len=4, rng=0)
    files.save_model(model, tmp_path)
    names = sorted(os.listdir(tmp_path))
    unlink, pressed = Path.unlink, []

    def press(path, missing_ok=False):
        if path.name.endswith(".old") and not pressed:
            pressed.append(path)
            signal.raise_signal(signal.SIGINT)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", press)
    with pytest.raises(KeyboardInterrupt):
        files.save_model(model, tmp_path)
    assert pressed
    assert sorted(os.listdir(tmp_path)) == names


def test_errors_of_a_library_that_is_left_alone():
    """A Ctrl-C just before the call leaves the context to the garbage collector, which closes it."""
    context = _disk.library_errors("the tokenizer cannot take it")
    context.__enter__()
    context.gen.close()
