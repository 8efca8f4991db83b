"""The package on a Linux that lacks what Windows lacks (support/windows.py): fork, folders that open, and the like."""

import io
import sys

from processes import run_script

from selfattn.cli import streams

WINDOWS = "from windows import become_windows; become_windows()\n"
IMPORTS = """
    import importlib, pkgutil
    import numpy as np
    import selfattn as sa

    for module in pkgutil.walk_packages(sa.__path__, "selfattn."):
        if ".interop." not in module.name and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                print(error)
    x = np.ones((2, 300, 64), np.float32)
    assert np.isclose(sa.scaled_dot_product_attention(x, x, x, num_threads=2), 1).all()
"""
COMMANDS = """
    import pathlib, sys
    from selfattn.cli.app import main

    pathlib.Path("book.txt").write_text("".join(f"the sea was calm on day {n}\\n" for n in range(30)))
    sizes = "--tokenizer whitespace --dim 8 --heads 1 --epochs 1 --quiet".split()
    for more in ([], ["--force"]):  # which writes over the files of the first
        assert main(["train", "book.txt", "--out", "model", *sizes, *more]) == 0
    assert main(["info"]) == 0
"""
WRITES = """
    import pathlib
    import numpy as np
    from selfattn import _disk

    here, rows = pathlib.Path("."), pathlib.Path("rows.npy")
    _disk.write_rows(rows, [np.ones((3, 4))], 4, np.float32)
    _disk.write_files(here, {"rows.npy": rows.read_bytes(), "other": b"old"})
    mapped, before = np.load(rows, mmap_mode="r"), rows.read_bytes()
    for write in (
        lambda: _disk.write_file(rows, b"new"),
        lambda: _disk.write_files(here, {"rows.npy": b"new", "other": b"new"}),
        lambda: _disk.write_rows(rows, [np.ones((2, 4))], 4, np.float32),
    ):
        try:
            write()
        except PermissionError as error:
            assert error.filename == "rows.npy" and "Windows replaces no file that is open" in str(error), error
        else:
            raise SystemExit("a mapped file was replaced")
    del mapped
    assert rows.read_bytes() == before and pathlib.Path("other").read_bytes() == b"old"
    assert sorted(path.name for path in here.iterdir()) == ["other", "rows.npy"]
"""


def test_imports():
    """Whatever an import lacks is another library, or has moved."""
    for line in run_script(IMPORTS, prelude=WINDOWS).splitlines():
        assert "pip install" in line or "No module named" in line, line


def test_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_script(COMMANDS, prelude=WINDOWS)


def test_a_file_that_is_mapped_is_not_replaced(tmp_path, monkeypatch):
    """The error names the file and says what to do; no file changes, and none stays under another name."""
    monkeypatch.chdir(tmp_path)
    run_script(WRITES, prelude=WINDOWS)


def test_output_is_utf8_without_returns(monkeypatch):
    """A pipe of Windows has the encoding of a code page, and writes two characters at a line's end."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "cp1252", newline="\r\n"))
    monkeypatch.setattr(sys, "platform", "win32")
    streams.prepare()
    print("Ω → 猫", flush=True)
    assert written.getvalue().decode() == "Ω → 猫\n"
