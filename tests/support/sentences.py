"""How the tests of pages find what a package's pages say, in Python, scripts and files of languages."""

import ast
import re
from pathlib import Path

from selfattn.views import language

SENTENCE = re.compile(r"^[*{“]*[A-Z].*[a-z]{2}|[a-z]{2,}[,.:;?!]? [a-z]{2,}")

ROOT = Path(__file__).parents[2]
TERMS = ROOT / "selfattn/views/languages/terms.md"


def strings(node):
    """Yield the strings of an expression, without those of comparisons, indices and f-strings."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.Compare | ast.Subscript | ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def said(folder, package):
    """Return the English sentences of a package's pages: of the file, stops, lessons, calls of `say`, variables."""
    found = {line for part in language.read("en", package).values() for line in part.values()}
    for path in folder.glob("*.py"):
        whole = SENTENCE if path.name == "tutorial_pages.py" else re.compile(r"^[*A-Z].* .*[.?!]$")
        for node in ast.walk(ast.parse(path.read_text())):
            name, captions = getattr(getattr(node, "func", 0), "id", ""), getattr(node, "keywords", [])
            if name in ("Stop", "say", "_page", "_captions"):
                given = node.args if name in ("Stop", "say") else [x for x in captions if x.arg != "word"]
                found |= {line for each in given for line in strings(each)}
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Tuple):
                found |= set(filter(whole.search, strings(node)))
    return {line for line in found - {"en"} if any(map(str.isalpha, line))}


def places(line):
    plurals = [(name, *re.findall(r"(\w+) \{", forms)) for name, forms in language._PLURAL.findall(line)]
    return {*plurals, *re.findall(r"\{(\w+)\}", language._PLURAL.sub("", line))}, line.count("*")


def assert_translated(sentences, package):
    """A package's files of languages have each of these sentences, with its places, and no other."""
    for lang in ("de", "fr"):
        found = language.read(lang, package)
        assert sentences ^ set(found) == set(), "not in the file, or said by nobody"
        assert [line for line, own in found.items() if not own.strip() or places(line) != places(own)] == []
        # In French no line begins with such a mark: the space before it does not break.
        assert [own for own in found.values() if lang == "fr" and re.search(r" [:;?!»]|« ", own)] == []


def table(heading):
    """Return the rows of a table of terms, each cell as its forms, without what is in brackets."""
    text = TERMS.read_text("utf-8").split(heading)[1]
    rows = re.findall(r"^\| (.+) \|$", re.sub(r" \(.*?\)", "", text.split("##")[0]), re.MULTILINE)[2:]
    return [[cell.lower().split(", ") for cell in row.split(" | ")] for row in rows]


def assert_of_terms(package):
    """Sentences have the words of `terms.md`: translations those of their English, and no language one not used."""
    terms, banned = table("# Terms"), [word for row in table("## Not used") for word in row[0]]
    for column, lang in enumerate(("de", "fr"), 1):
        for line, own in language.read(lang, package).items():
            assert [word for word in banned if re.search(rf"\b{word}\b", f"{line}\n{own}".lower())] == [], (
                line
            )
            for word in {word for row in terms for word in row[0]}:
                forms = [form for row in terms if word in row[0] for form in row[column]]
                if re.search(rf"\b{word}\b", re.sub(r"\{\w+", "", line.lower())):
                    assert any(form in own.lower() for form in forms), (line, own, forms)


def assert_names_are_used(package):
    """A script or a module of pages has each name of a package's English, whole or with places for its parts."""
    folders = [ROOT / "selfattn/views", ROOT / "models/selfattn_models/pages"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".js")]
    source = "\n".join(path.read_text("utf-8") for path in files)
    made = ["".join(found) for found in re.findall(r'`([^`\n]*\$\{[^`\n]*)`|f"([^"\n]*\{[^"\n]*)"', source)]
    parts = [re.split(r"\$?\{[^{}]*\}", each) for each in made]
    joined = re.compile(
        "|".join(".+".join(map(re.escape, each)) for each in parts if re.search("[a-z]{2}", str(each)))
    )
    names = {
        name for part in language.read("en", package).values() for name in part if not joined.fullmatch(name)
    }
    assert [each for each in names if not re.search(rf"""["'.]{re.escape(each)}(["']|\b)""", source)] == []


def assert_no_sentence_but(names, folder, more=""):
    """The scripts and the markup of a folder have no sentence of their own; ``more`` matches strings that are none."""
    literal = r'((?:aria\w+|title|placeholder): )?(?:"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`)'
    code = r"^(import|from|def| ) *\w| = |sa-|^\(|"
    code += r"^(true|None|false|polite|off|step|Arrow\w*|Enter|Escape|Home|End|Tab|tour (back|next)|\W*)$"
    for path in folder.rglob("*.js"):
        script = re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*|throw [^\n]*", "", path.read_text(), flags=re.S)
        for label, plain, template in re.findall(literal, script):
            text = plain or re.sub(r"\$\{.*?\}", "…", template)
            assert text in names or re.search(code + more, text) or not (label or SENTENCE.search(text)), text
    markup = "".join(path.read_text() for path in folder.glob("*.py"))
    assert [line for line in re.findall(r">([^<>{}()=\n]+)</", markup) if SENTENCE.search(line)] == []


def assert_of_one_language(folder, *packages):
    """Pages of French and German, as their names say, say no English of these packages, and link to each other."""
    for path in folder.iterdir():
        lang, other = ("de", "fr") if ".de." in path.name else ("fr", "de")
        html = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", path.read_text(), flags=re.S)
        plain = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), html)
        link = re.search(f'<html lang="{lang}">.* hreflang="{other}" href="(.+?)"', html, re.S)[1]
        assert link != path.name and (folder / link).exists() and 'lang="en"' not in html
        known = {line: own for each in packages for line, own in language.read(lang, each).items()}
        english = [line for line, own in known.items() if line != own and " " in line]
        assert [line for line in english if f':"{line}"' in plain or f">{line}<" in plain] == [], path.name
