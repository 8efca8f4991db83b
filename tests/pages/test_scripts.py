"""The scripts of pages: each is a function, which takes what it imports; no two have one name."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import selfattn
from selfattn.views import document

FILES = sorted(Path(selfattn.__file__).with_name("views").rglob("*.js"))


def test_no_two_scripts_have_one_name():
    names = [file.name for file in FILES]
    assert len(set(names)) == len(names) > 15


def test_a_script_takes_what_it_imports_and_nothing_is_global():
    node = shutil.which("node") or pytest.skip("there is no node")
    code = document.code("kit/ribbons.js", "compute.js")
    assert re.findall(r"^const \$(\w+) = ", code, re.MULTILINE) == ["compute", "page", "ribbons"]
    told = (
        f"const before = Object.keys(globalThis);{code}"
        "const added = Object.keys(globalThis).filter((name) => !before.includes(name));"
        "process.stdout.write(JSON.stringify([added, typeof range]));"
    )
    done = subprocess.run([node, "--eval", told], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [[], "undefined"]
