"""The site's pages that no file of the repository is: start pages, lists, a page for each module, lessons, examples to run."""

import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import jinja2

import selfattn
from selfattn import models, views
from selfattn.cli import main as command
from selfattn.views.texts import START

ROOT = Path(__file__).resolve().parents[2]
SOURCE, EXTRA, SCRIPTS = (ROOT / "build" / name for name in ("site-source", "site-extra", "site-scripts"))
SITE = ROOT / "docs/site"
LANGUAGES = ("en", "de", "fr")
MODULES = [
    "selfattn",
    *(f"selfattn.{name}" for name in selfattn._MODULES),
    "selfattn.nn.init",
    "selfattn.optim.lr_scheduler",
]
MODULES += [f"selfattn.interop.{path.stem}" for path in sorted((ROOT / "selfattn/interop").glob("[!_]*.py"))]


def write(name: str, text: str) -> None:
    """Write a file of the copy that Sphinx reads."""
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def contents(*entries: str) -> str:
    """Return a hidden table of contents."""
    return "\n```{toctree}\n:hidden:\n:glob:\n\n" + "\n".join(entries) + "\n```\n"


def make() -> None:
    """Write all of them."""
    for n, lang in enumerate(LANGUAGES):
        start(lang, f".{lang}" if n else "")
    api()
    lessons()
    examples()


def start(lang: str, end: str) -> None:
    """Write the start page of a language: the words are English sentences, which are the keys of their translations."""
    words = {} if lang == "en" else json.loads((SITE / "languages" / f"{lang}.json").read_text("utf-8"))
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(
        (SITE / "start.md.jinja").read_text("utf-8")
    )
    write(f"views/{lang}.html", views.tutorial_page("first_principles", lang=lang).fragment)
    say = (lambda sentence: sentence) if lang == "en" else words.__getitem__
    write(f"index{end}.md", template.render(_=say, lang=lang, end=end))


def api() -> None:
    """Write a page for each module, and a page that lists them."""
    listed = ""
    for name in MODULES:
        module = None if name.startswith("selfattn.interop.") else importlib.import_module(name)
        doc = ((module and module.__doc__) or "").split("\n")[0]
        listed += f"- {{doc}}`{name} <{name}>` {doc.strip()}\n"
        # What `functional` has too has its docs there alone.
        names = () if module is selfattn.functional else getattr(module, "__all__", ())
        shared = [
            each for each in names if getattr(module, each) is getattr(selfattn.functional, each, module)
        ]
        text = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
        if shared:
            text += (
                f"   :exclude-members: {', '.join(shared)}\n\nFrom :mod:`selfattn.functional` it has too: "
            )
            text += ", ".join(f":py:obj:`~selfattn.functional.{each}`" for each in shared) + ".\n"
        for each in getattr(module, "__all__", ()):
            thing = getattr(module, each)
            if not (inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing)):
                text += f"\n.. py:data:: {each}\n   :module: {name}\n\n   A {type(thing).__name__}.\n"
        write(f"api/{name}.rst", text)
    about = "Every public name, as `help()` shows it. Each example is run by the tests."
    write("api/index.md", f"# API\n\n{about}\n\n{listed}{contents(*MODULES)}")


def lessons() -> None:
    """Write the lessons, and a page that lists them."""
    kernels = ROOT / "csrc/build/selfattn.wasm"
    live = ["--kernels", str(kernels)] if kernels.is_file() else []  # without it the command says so
    if command(["pages", str(EXTRA / "pages"), "--lang", *LANGUAGES, *live]):
        raise RuntimeError("the lessons could not be written")
    listed = ""
    for name, about in START.items():
        if (EXTRA / f"pages/{name}.html").is_file():
            title, rest = re.fullmatch(r"\*(.+?)\* (.+?)(?: \{n\} questions\.)?", about).groups()
            listed += f'<li><p><a href="pages/{name}.html">{title}</a>: {rest}</p></li>\n'
    about = "Pages to look at and to play with, also in German and French, as `selfattn pages FOLDER` writes them."
    link = '<p><a href="pages/index.html">All lessons, with exercises</a></p>'
    write("lessons.md", f"# Lessons\n\n{about}\n\n```{{raw}} html\n<ol>{listed}</ol>{link}\n```\n")


def examples() -> None:
    """Copy the scripts, with small models of random weights next to them under the names that they load."""
    sys.path.insert(0, str(ROOT / "tests/support"))
    import gguf_files
    import language_folders
    import text_folders

    for name in ("gallery", "asked"):
        shutil.copytree(ROOT / "docs" / name, SCRIPTS / name)
    text_folders.save_bert(SCRIPTS / "asked/all-MiniLM-L6-v2", 512)
    small = language_folders.save_language_model(SCRIPTS / "small", intermediate_size=64, hidden_size=32)
    config = json.loads((small / "config.json").read_text("utf-8"))
    state = models.load(small).state_dict()
    entries = gguf_files.byte_level(language_folders.SPECIAL, template=language_folders.TEMPLATE)
    path = SCRIPTS / "asked/SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_files.write(path, config, state, "Q4_1", entries)
