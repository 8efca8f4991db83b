"""No C files of the drivers or of the binding call each other in a circle, directly or through others."""

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"
# A comment, a string, or a character.
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
# A definition at the left margin that is not static: a function with its body, or data with its value.
DEFINED = re.compile(
    r"^(?!static|typedef|extern|#)[A-Za-z][^;{}=]*?\b(sa_\w+)(?:\([^;{}]*\) \{|(?:\[\])? = )", re.MULTILINE
)


def names_of(folder):
    """What each file of a folder defines, and all names in it."""
    texts = {
        path.name: NO_CODE.sub('""', path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.c"))
    }
    return {
        name: (set(DEFINED.findall(text)), set(re.findall(r"\bsa_\w+", text))) for name, text in texts.items()
    }


def calls_of(files):
    return {
        name: {other for other, (defined, _) in files.items() if other != name and defined & used}
        for name, (_, used) in files.items()
    }


def circle(calls):
    """Return files that call one another in a circle, if any: those that remain after removing files that call no others."""
    left = dict(calls)
    while ground := [name for name, others in left.items() if not others & left.keys()]:
        for name in ground:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("folder", ["drivers", "python"])
def test_no_files_call_each_other(folder):
    if not SOURCES.exists():
        pytest.skip("the sources are not here")
    calls = calls_of(names_of(SOURCES / folder))
    assert any(calls.values()), "no calls are found"
    assert not circle(calls), calls


def test_a_circle_is_found(tmp_path):
    (tmp_path / "a.c").write_text("int sa_low(int x) { return x; }\nconst int sa_table[] = {1};\n")
    (tmp_path / "b.c").write_text(
        "/* sa_high */\nint\nsa_middle(int x) {\n    return sa_low(x) + sa_table[0];\n}\n"
    )
    (tmp_path / "c.c").write_text("int sa_high(int x) { return sa_middle(x); }\n")
    assert not circle(calls_of(names_of(tmp_path)))
    (tmp_path / "a.c").write_text("int sa_low(int x) { return sa_high(x); }\n")
    assert circle(calls_of(names_of(tmp_path))) == ["a.c", "b.c", "c.c"]
