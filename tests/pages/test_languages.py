"""The languages of pages: every sentence has a translation with the same places, pages say no English, plurals are CLDR's."""

import ast
import re
from pathlib import Path

import pytest

from selfattn import views
from selfattn.views import language

VIEWS = Path(views.__file__).parent
SENTENCE = re.compile(r"^[*{“]*[A-Z].*[a-z]{2}|[a-z]{2,}[,.:;?!]? [a-z]{2,}")


def strings(node):
    """Yield the strings of an expression, without those of comparisons, indices and f-strings."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not isinstance(node, ast.Compare | ast.Subscript | ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def said():
    """Return the English sentences of pages: of the file, of stops, of tutorials, of calls of `say` and of variables."""
    found = {line for part in language.read("en").values() for line in part.values()}
    for path in VIEWS.glob("*.py"):
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


def test_files_have_each_sentence_with_its_places_and_no_other():
    for lang in ("de", "fr"):
        found = language.read(lang)
        assert said() ^ set(found) == set(), "not in the file, or said by nobody"
        assert [line for line, own in found.items() if not own.strip() or places(line) != places(own)] == []


def test_no_script_and_no_markup_has_a_sentence_of_its_own():
    names = {name for part in language.read("en").values() for name in part}
    literal = r'((?:aria\w+|title|placeholder): )?(?:"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`)'
    code = r"^(import|from|def| ) *\w| = |sa-|^\(|^(true|None|false|polite|off|step|Arrow\w*|Enter|Escape|Home|End|Tab|tour (back|next)|\W*)$"
    code += r"|^[\w.]*(Norm|Pooling|Dropout|Tokenizer|Piece|Processing)\w*$|^(Fault|True|Sequence|Split|Isolated|Digits|ByteLevel|Lowercase|\w*Bert|MPNet|Bart|Roberta|Qwen2)$"  # names in files of models
    for path in VIEWS.rglob("*.js"):
        script = re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*|throw [^\n]*", "", path.read_text(), flags=re.S)
        for label, plain, template in re.findall(literal, script):
            text = plain or re.sub(r"\$\{.*?\}", "…", template)
            assert text in names or re.search(code, text) or not (label or SENTENCE.search(text)), text
    markup = "".join(path.read_text() for path in VIEWS.glob("*.py"))
    assert [line for line in re.findall(r">([^<>{}()=\n]+)</", markup) if SENTENCE.search(line)] == []


def test_pages_of_a_language_say_no_english_and_link_to_the_other(tmp_path):
    views.write_pages(tmp_path, lang=("fr", "de"))
    for path in tmp_path.iterdir():
        lang, other = ("de", "fr") if ".de." in path.name else ("fr", "de")
        html = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", path.read_text(), flags=re.S)
        plain = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), html)
        link = re.search(f'<html lang="{lang}">.* hreflang="{other}" href="(.+?)"', html, re.S)[1]
        assert link != path.name and (tmp_path / link).exists() and 'lang="en"' not in html
        english = [line for line, own in language.read(lang).items() if line != own and " " in line]
        assert [line for line in english if f':"{line}"' in plain or f">{line}<" in plain] == [], path.name


def test_plurals_are_those_of_cldr_and_what_a_file_lacks_is_english():
    sentence = "{n, plural, one {one} many {many} other {other}} of {n}"
    for lang, forms in {"de": "other one other other", "fr": "one one other many"}.items():  # CLDR 48
        found = [language.say(sentence, lang, n=n) for n in (0, 1, 2, 1_000_000)]
        assert [line.split()[0] for line in found] == forms.split() and found[-1].endswith(" of 1000000")
    with pytest.raises(ValueError, match='lang must be "en", "de" or "fr", not '):
        language.say("Reset", "nl")
