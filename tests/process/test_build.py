"""What setup.py builds of a small project: the files that it compiles again, and the core in WebAssembly."""

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

SETUP = Path(__file__).parents[2] / "setup.py"
pytestmark = pytest.mark.skipif(
    not SETUP.exists() or sys.platform == "win32" or shutil.which("gcc") is None,
    reason="needs setup.py and GCC",
)


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """Run setup.py for its name alone in a project of two files; return what it defines."""
    pytest.importorskip("setuptools")
    monkeypatch.chdir(tmp_path)
    for path, text in {
        "csrc/python/a.c": '#include "near.h"\n#include <numpy/here.h>\nint a = NEAR + HERE + MORE;\n',
        "csrc/python/b.c": "int b = MORE;\n",
        "csrc/python/near.h": '#include "deep/far.h"\n',
        "csrc/deep/far.h": "#define NEAR 1\n",
        "numpy/numpy/here.h": "#define HERE 1\n",
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="ascii")
    monkeypatch.setattr(np, "get_include", lambda: str(tmp_path / "numpy"))
    monkeypatch.setattr(sys, "argv", ["setup.py", "--name"])
    return runpy.run_path(str(SETUP))


class Builder:
    """A build with a compiler of setuptools that counts the files which it compiles."""

    def __init__(self, setup):
        self.setup, self.compiled = setup, []
        self.define, self.version, self.then = "1", "gcc 1", lambda: None

    def __call__(self):
        """Build; return the names of the files that were compiled."""
        from setuptools._distutils.ccompiler import new_compiler
        from setuptools._distutils.sysconfig import customize_compiler

        self.setup["headers"][:] = [str(path) for path in Path("csrc").rglob("*.h")]
        compiler, self.compiled = new_compiler(), []
        customize_compiler(compiler)
        compiler.set_executables(compiler_so=["gcc", "-c"])
        compile_files = compiler.compile

        def counted(files, **options):
            self.compiled += [Path(file).name for file in files]
            compile_files(files, **options)
            self.then()

        compiler.compile = counted
        objects = self.setup["Objects"](compiler, self.version)
        for name in ("a", "b"):
            objects.compile(
                f"csrc/python/{name}.c",
                output_dir="out",
                macros=[("MORE", self.define)],
                include_dirs=["csrc", np.get_include()],
                extra_postargs=[],
                depends=self.setup["headers"],
            )
        return sorted(self.compiled)


def test_what_is_compiled_again(setup, monkeypatch, tmp_path):
    build, made = Builder(setup), Path("out/csrc/python/a.o")
    both = ["a.c", "b.c"]
    assert build() == both
    assert build() == []
    first = made.read_bytes()
    # A header of a header, with the time that it had: what counts is the content.
    far = Path("csrc/deep/far.h")
    times = far.stat()
    far.write_text("#define NEAR 2\n", encoding="ascii")
    os.utime(far, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert build() == ["a.c"]
    assert made.read_bytes() != first
    # The earlier content again; an object that is not whole, and none.
    far.write_text("#define NEAR 1\n", encoding="ascii")
    assert build() == ["a.c"]
    assert made.read_bytes() == first
    made.write_bytes(first[:-9])
    assert build() == ["a.c"]
    made.unlink()
    assert build() == ["a.c"]
    Path("csrc/python/b.c").touch()
    assert build() == []
    # Another flag, compiler or variable.
    build.define = "2"
    assert build() == both
    build.version = "gcc 2"
    assert build() == both
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert build() == both
    assert build() == []
    # NumPy in another folder, and then another NumPy.
    other = shutil.copytree("numpy", "elsewhere")
    monkeypatch.setattr(np, "get_include", lambda: str(tmp_path / other))
    assert build() == []
    Path(other, "numpy/here.h").write_text("#define HERE 2\n", encoding="ascii")
    assert build() == ["a.c"]
    # A header that is found before the one that was read; a header with a name that nobody includes.
    Path("csrc/unread.h").touch()
    assert build() == []
    Path("csrc/python/deep").mkdir()
    Path("csrc/python/deep/far.h").write_text("#define NEAR 3\n", encoding="ascii")
    assert build() == ["a.c"]


def test_a_build_that_fails_or_is_killed_leaves_no_object_to_use(setup, monkeypatch):
    build, made, near = Builder(setup), Path("out/csrc/python/a.o"), Path("csrc/python/near.h")
    build()
    text = near.read_text(encoding="ascii")
    near.write_text("#error\n", encoding="ascii")
    with pytest.raises(Exception, match="exit"):
        build()
    near.write_text(text, encoding="ascii")
    assert build() == ["a.c"]
    # Killed after the compiler, before the record: the object is of the new text, and then the old text comes back.
    near.write_text(text + "#define MORE_THAN_BEFORE\n", encoding="ascii")
    with monkeypatch.context() as patch:
        patch.delattr(Path, "replace")
        with pytest.raises(AttributeError):
            build()
    assert made.exists()
    near.write_text(text, encoding="ascii")
    assert build() == ["a.c"]


def test_an_edit_while_the_compiler_runs_is_seen_by_the_next_build(setup):
    build, far = Builder(setup), Path("csrc/deep/far.h")
    build.then = lambda: far.write_text("#define NEAR 5\n", encoding="ascii")
    assert build() == ["a.c", "b.c"]
    build.then = lambda: None
    assert build() == ["a.c"]
    assert build() == []


# ---- the core in WebAssembly, with programs in place of Clang and make

WASM = Path("selfattn/views/data/selfattn.wasm")


@pytest.fixture
def programs(setup, monkeypatch, tmp_path):
    """Let PATH have a make that writes the wasm, and a Clang that links what `clang` returns; return the PATH."""
    WASM.parent.mkdir(parents=True)
    Path("bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def program(name, script):
        path = Path("bin", name)
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        path.chmod(0o755)

    program("make", 'echo "$@" >asked && echo new >csrc/build/selfattn.wasm')
    return program


def test_the_core_in_webassembly_is_built_where_clang_links_it(setup, programs, capfd):
    make_wasm = setup["make_wasm"]
    for clang, message in (
        (None, "there is no clang-14 (Debian: "),
        ("exit 1", "clang-14 links no WebAssembly"),
    ):
        if clang:
            programs("clang-14", clang)
        make_wasm()
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("selfattn is built without live pages: ") and message in line
        assert "wasi-libc" in line and not WASM.exists()
    programs("clang-14", "exit 0")
    make_wasm()
    assert WASM.read_text() == "new\n" and "wasm-library" in Path("asked").read_text()
    programs("make", "exit 2")
    WASM.unlink()
    with pytest.raises(SystemExit, match="does not compile"):
        make_wasm()


def test_a_core_in_webassembly_that_others_have_built_is_taken(setup, programs, capfd):
    WASM.write_text("of an sdist")
    programs("clang-14", "exit 0")
    setup["make_wasm"]()
    assert WASM.read_text() == "of an sdist"
    Path(".git").touch()  # a checkout, whose sources may be newer
    programs("clang-14", "exit 1")
    setup["make_wasm"]()
    assert WASM.read_text() == "of an sdist" and capfd.readouterr().err == ""
    programs("clang-14", "exit 0")
    setup["make_wasm"]()
    assert WASM.read_text() == "new\n"


def test_sdists_and_builds_have_the_core_in_webassembly(setup, programs):
    pytest.importorskip("setuptools", "77")  # older ones refuse pyproject.toml's licence
    programs("clang-14", "exit 0")
    shutil.copy(SETUP.with_name("pyproject.toml"), ".")
    shutil.copy(SETUP, ".")
    for path in SETUP.parent.glob("LICENSE*"):
        shutil.copy(path, ".")
    for path in (
        "README.md",
        "csrc/Makefile",
        "csrc/wasm/api.c",
        "selfattn/__init__.py",
        "selfattn/views/__init__.py",
    ):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    Path("selfattn/_version.py").write_text('__version__ = "1.2.3"\n')
    for command in (["sdist"], ["build_py", "-d", "built"]):
        WASM.unlink(missing_ok=True)
        subprocess.run([sys.executable, "setup.py", "-q", *command], check=True)
    assert Path("built", WASM).read_text() == "new\n"
    with tarfile.open("dist/selfattn-1.2.3.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(WASM), "LICENSE-wasi-libc", "csrc/Makefile", "csrc/wasm/api.c"} <= names
