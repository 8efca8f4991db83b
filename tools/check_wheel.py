#!/usr/bin/env python3
"""Tries a wheel as a user would: installs it into an empty environment, and runs what the README shows from it.

    python tools/check_wheel.py selfattn-….whl [--python python3.11 --python python3.14] [--models
    selfattn_models-….whl] python tools/check_wheel.py selfattn-…_aarch64.whl --python 'qemu-aarch64 -L ROOT
    ROOT/usr/bin/python3.11'

Checks what the wheel holds: its size, one extension on the stable ABI, for Linux OpenMP's library, no other one, and
where libraries come from; the core in WebAssembly, of the wheel's version, if the checkout has one or could build it. A
wheel for Windows cannot run here. Then, for each Python, with the instruction set that the CPU has and on the baseline:
the README's Python, `python -m selfattn`, and the smoke test; and the loops where the system has no OpenMP, if it lets
this script hide its own. `selfattn pages` writes live pages, or says what they need. What has moved to selfattn-models
says which line installs it; with `--models` that wheel is then installed too, and its commands run. A Python given as
more than one word is run as it is, and gets its packages in a folder: one of another platform under an emulator.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from checkout import ROOT, WASM

MOST = {"wheel": 2.5e6, "extension": 2.6e6}  # bytes; docs/measurements/build.md says what takes the room
SECONDS = 5  # to install

# Runs in an environment without pytest: each test of the file, on each instruction set if it asks for one.
SMOKE = """
import importlib.util, inspect, sys
from selfattn import _core
spec = importlib.util.spec_from_file_location("smoke", sys.argv[1])
smoke = importlib.util.module_from_spec(spec)
spec.loader.exec_module(smoke)
for name, test in vars(smoke).items():
    if name.startswith("test_"):
        for isa in _core.available_isas() if inspect.signature(test).parameters else [None]:
            if isa:
                _core._set_isa(isa)
            test(*[isa] * bool(isa))
print("smoke test:", _core.available_isas(), sys.version.split()[0], _core.__file__)
"""

# Runs a command with the system's OpenMP libraries hidden.
HIDDEN = """for file in $(find /lib/ /lib64/ /usr/lib/ /usr/lib64/ -name 'libgomp.so*' 2>/dev/null); do
mount --bind /dev/null "$file"; done; exec "$@" """
LIBRARY = """
import os, numpy as np, selfattn as sa
library = sa.show_config("dicts")["build"]["team_library"]
assert os.path.dirname(library) == os.path.dirname(sa.__file__), library
x = np.ones((8, 256, 64), np.float32)
assert np.isclose(sa.scaled_dot_product_attention(x, x, x, num_threads=2), 1).all()
print("without the system's OpenMP:", library)
"""

# Run with the core alone: what has moved says how it is installed, and is no attribute that a listing would load.
ALONE = """
import inspect, subprocess, sys
import selfattn
for name in ("models", "search", "interop.sklearn"):
    try:
        __import__(f"selfattn.{name}")
    except ImportError as error:
        assert "pip install selfattn-models" in str(error), error
    else:
        raise SystemExit(f"selfattn.{name} is there")
inspect.getmembers(selfattn)
done = subprocess.run([sys.executable, "-m", "selfattn", "search", "m", "t.txt"], capture_output=True, text=True)
assert done.returncode == 1 and "pip install selfattn-models" in done.stderr, done
print("without selfattn-models:", done.stderr.strip())
"""
# Run with either: the live pages, if the wheel has the core in WebAssembly.
PAGES = """
import pathlib, subprocess, sys
from selfattn.views.live_pages import KERNELS
done = subprocess.run([sys.executable, "-m", "selfattn", "pages", "class"], capture_output=True, text=True, check=True)
live = pathlib.Path("class/playground.html").is_file()
assert live == KERNELS.is_file() == ("no core in WebAssembly" not in done.stderr), done
print("live pages:", live)
"""
# Run with both packages: a GPT learns a text, and writes.
BOTH = """
import pathlib, subprocess, sys
import selfattn.models, selfattn_models
assert selfattn.models is selfattn_models
pathlib.Path("book.txt").write_text("the sea was calm. " * 50)
run = [sys.executable, "-m", "selfattn"]
sizes = "--dim 8 --layers 1 --heads 1 --context 8 --steps 2 --quiet".split()
subprocess.run([*run, "train", "gpt", "book.txt", "--out", "gpt", *sizes], check=True)
subprocess.run([*run, "generate", "gpt", "the", "--max-new-tokens", "4"], check=True, stdout=subprocess.DEVNULL)
print("with selfattn-models", selfattn_models.__version__)
"""


def check_libraries(wheel: Path, name: str) -> None:
    """Check where the extension takes libraries from: in Linux its own folder, in Windows Python and Windows alone."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        told = subprocess.check_output(["objdump", "-p", archive.extract(name, folder)], text=True)
    if "linux" in wheel.name:
        assert re.findall(r"(?:RUN|R)PATH +(.*)", told) == ["$ORIGIN"], told
    if not name.endswith(".pyd"):
        return
    libraries = set(re.findall(r"DLL Name: (\S+)", told))
    assert libraries == {"python3.dll", "KERNEL32.dll", "msvcrt.dll"}, libraries
    names = re.findall(r"^\t\[ *\d+\] ([A-Za-z_]\w*)$", told, re.MULTILINE)
    assert set(names) == {"PyInit__core"}, names
    print("imports from", *sorted(libraries))


def check_contents(wheel: Path) -> None:
    """Check that the wheel has all of the package, its size, its extension and its libraries."""
    with zipfile.ZipFile(wheel) as archive:
        files = {file.filename: file.file_size for file in archive.infolist()}
        metadata = archive.read(next(name for name in files if name.endswith("METADATA"))).decode()
        wasm = archive.read(WASM) if WASM in files else b""
    needs = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert needs == ["Requires-Dist: numpy>=2.0"], needs
    windows = wheel.name.endswith("-win_amd64.whl")
    (extension,) = (name for name in files if re.fullmatch(r"selfattn/_core\.(.*so|pyd)", name))
    sizes = {"wheel": wheel.stat().st_size, "extension": files[extension]}
    most = MOST | ({"extension": 2.9e6} if windows else {})  # OpenMP's library is in it
    for name, size in sizes.items():
        print(f"{name}: {size / 1e6:.2f} MB, at most {most[name] / 1e6} MB")
    assert all(size <= most[name] for name, size in sizes.items())
    stable = re.search(r"-cp311-abi3-", wheel.name) is not None
    assert windows or stable == extension.endswith(".abi3.so"), "the tag and the extension's name disagree"
    libraries = {name for name in files if ".so" in name or name.endswith((".dylib", ".dll"))} - {extension}
    assert libraries == ({"selfattn/libgomp.so.1"} if "linux" in wheel.name else set()), libraries
    wanted = subprocess.check_output(["git", "ls-files", "selfattn"], cwd=ROOT, text=True).split()
    check_libraries(wheel, extension)
    missing = {name for name in wanted if not name.endswith((".md", "tsconfig.json"))} - files.keys()
    assert not missing, f"the wheel lacks {sorted(missing)}"
    built = re.search(rb"selfattn kernels \d+ of ([\w.]+), commit [\w-]+", wasm)
    if (ROOT / WASM).exists() or shutil.which("wasm-ld-14"):
        assert built and built[1].decode() == wheel.name.split("-")[1], f"the core in WebAssembly is {built}"
    print(built[0].decode() if built else "without the core in WebAssembly")
    licences = {path.name for path in ROOT.glob("LICENSE*")} - {Path(name).name for name in files}
    assert not licences, f"the wheel lacks {sorted(licences)}"
    sources = {name for name in files if name.endswith((".c", ".h"))}
    assert not sources, f"the wheel carries sources: {sorted(sources)}"
    foreign = {name.split("/")[0] for name in files if ".dist-info/" not in name} - {"selfattn"}
    assert not foreign, f"the wheel would install {sorted(foreign)} too"


def check_models(wheel: Path) -> None:
    """Check that the wheel of selfattn-models has all of its package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = subprocess.check_output(["git", "ls-files", "selfattn_models"], cwd=ROOT / "models", text=True)
    wanted = {name for name in listed.split() if not name.endswith("tsconfig.json")}
    assert files == wanted, f"the wheel lacks or adds {sorted(files ^ wanted)}"
    print(f"wheel of selfattn-models: {wheel.stat().st_size / 1e6:.2f} MB")


def install(wheel: Path, python: str, directory: Path) -> tuple[list[str], dict[str, str]]:
    """Install the wheel: the command that runs a Python with it, and its environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SELFATTN_ISA")}
    command = shlex.split(python)
    start = time.monotonic()
    if len(command) == 1:
        subprocess.run([*command, "-m", "venv", directory / "venv"], check=True)
        command, start = [str(directory / "venv/bin/python")], time.monotonic()
        pip = [*command, "-m", "pip", "install", "-q"]
    else:
        version = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = subprocess.check_output([*command, "-c", version], text=True, env=clean).strip()
        machine = re.search(r"(x86_64|aarch64)\.whl$", wheel.name)[1]
        # The platform tags of the wheel, and those that NumPy's wheel may have.
        tags = re.findall(rf"\w+_{machine}", wheel.stem.split("-")[-1].replace(".", " "))
        tags += [f"manylinux_2_{minor}_{machine}" for minor in (17, 27, 28)]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(directory / "site")]
        pip += ["--only-binary=:all:", "--python-version", version]
        pip += [argument for tag in dict.fromkeys(tags) for argument in ("--platform", tag)]
        clean["PYTHONPATH"] = str(directory / "site")
    subprocess.run([*pip, wheel], check=True, env=clean | {"PYTHONPATH": ""})
    seconds = time.monotonic() - start
    print(f"{python}: installed in {seconds:.1f} s" + f", not in {SECONDS}" * (seconds > SECONDS))
    return command, clean


def try_out(command: list[str], clean: dict[str, str], directory: Path) -> None:
    """Run the README's Python, the main job and the smoke test, in a folder without a checkout."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert blocks, "the README has no Python"
    for isa in ({}, {"SELFATTN_ISA": "baseline"}):
        if isa and "aarch64" in " ".join(command):
            continue  # its baseline is NEON
        for arguments in (
            ["-c", "\n".join(blocks)],
            ["-m", "selfattn", "--no-timing"],
            ["-c", SMOKE, ROOT / "tests/test_smoke.py"],
        ):
            run = [*command, *map(str, arguments)]
            done = subprocess.run(
                run, env=clean | isa, cwd=directory, stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode != 0:
                raise SystemExit(f"{done.stdout}\nfailed: {shlex.join(run[: len(command) + 2])} {isa}")
        print(isa.get("SELFATTN_ISA", "best instruction set"), done.stdout.strip(), sep=": ")
    hide = ["unshare", "--map-root-user", "--mount", "sh", "-c", HIDDEN, "sh"]
    if sys.platform == "linux":
        allowed = subprocess.run([*hide, "true"], capture_output=True, check=False).returncode == 0
        if not allowed:
            print("the system's OpenMP cannot be hidden here")
        subprocess.run([*hide * allowed, *command, "-c", LIBRARY], env=clean, cwd=directory, check=True)


def main() -> None:
    """Check the wheel, then try it with each Python."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", action="append", help="an interpreter, or a command; by default this one")
    parser.add_argument("--models", type=Path, help="the wheel of selfattn-models")
    options = parser.parse_args()
    check_contents(options.wheel)
    if options.models:
        check_models(options.models)
    if options.wheel.name.endswith("-win_amd64.whl"):
        return
    for python in options.python or [sys.executable]:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            command, clean = install(options.wheel.resolve(), python, directory)
            try_out(command, clean, directory)
            for script in (ALONE, PAGES):
                subprocess.run([*command, "-c", script], env=clean, cwd=directory, check=True)
            if options.models and len(shlex.split(python)) == 1:
                subprocess.run(
                    [*command, "-m", "pip", "install", "-q", options.models], env=clean, check=True
                )
                subprocess.run([*command, "-c", BOTH], env=clean, cwd=directory, check=True)


if __name__ == "__main__":
    main()
