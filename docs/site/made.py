"""The site's pages that no file of the repository is.

They are start pages, lists, a page for each module, lessons and examples to run, of both packages.
"""

import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import jinja2

import selfattn
import selfattn_models as models
from selfattn import views
from selfattn.cli import main as command
from selfattn.views.texts import START
from selfattn_models.pages.texts import START as START_OF_MODELS

ROOT = Path(__file__).resolve().parents[2]
SOURCE, EXTRA, SCRIPTS = (ROOT / "build" / name for name in ("site-source", "site-extra", "site-scripts"))
SITE = ROOT / "docs/site"
LANGUAGES = ("en", "de", "fr")
# Folders of scripts, by where the site has their pages.
GALLERIES = {
    "gallery": "docs/gallery",
    "asked": "docs/asked",
    "models/gallery": "models/docs/gallery",
    "models/asked": "models/docs/asked",
}


def doors(package: str, folder: Path) -> list[str]:
    """Return the modules of ``interop``; one that is another name of a module of selfattn-models is left out."""
    found = {path.stem: path / "__init__.py" if path.is_dir() else path for path in folder.glob("[!_]*")}
    own = (name for name, path in found.items() if "import_models(__name__" not in path.read_text("utf-8"))
    return [f"{package}.interop.{name}" for name in sorted(own)]


MODULES = [
    "selfattn",
    *(f"selfattn.{name}" for name in selfattn._MODULES),
    "selfattn.nn.init",
    "selfattn.optim.lr_scheduler",
    *doors("selfattn", ROOT / "selfattn/interop"),
]
MODULES_OF_MODELS = [
    "selfattn_models",
    *(f"selfattn_models.{name}" for name in models._MODULES),
    *doors("selfattn_models", ROOT / "models/selfattn_models/interop"),
]


def write(name: str, text: str) -> None:
    """Write a file of the copy that Sphinx reads."""
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def contents(*entries: str, caption: str = "") -> str:
    """Return a hidden table of contents, which the navigation shows with its caption."""
    options = ":hidden:\n:glob:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n```{{toctree}}\n{options}\n" + "\n".join(entries) + "\n```\n"


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
    """Write a page for each module, and a page for each package that lists them."""
    about = "Every public name, as `help()` shows it. Each example is run by the tests."
    further = "[Modules of selfattn-models](../models/api/index.md) have pages of their own."
    write("api/index.md", f"# API\n\n{about} {further}\n\n{modules('api', MODULES)}")
    about = f"{about} [Modules of selfattn](../../api/index.md) have pages of their own."
    write("models/api/index.md", f"# API of models\n\n{about}\n\n{modules('models/api', MODULES_OF_MODELS)}")


def modules(folder: str, names: list[str]) -> str:
    """Write a page for each module, and return a list of them."""
    listed = ""
    for name in names:
        doc = "" if ".interop." in name else (importlib.import_module(name).__doc__ or "").split("\n")[0]
        listed += f"- {{doc}}`{name} <{name}>` {doc.strip()}\n"
        write(f"{folder}/{name}.rst", module_page(name))
    return listed + contents(*names)


def module_page(name: str) -> str:
    """Return the page of a module."""
    text = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n"
    if name.endswith(".interop"):  # its names are modules, which have pages
        return text
    # One that needs another library is not imported here.
    module = None if ".interop." in name else importlib.import_module(name)
    names = getattr(module, "__all__", ())
    text += "   :members:\n"
    # What `functional` has too has its docs there alone.
    shared = [
        each
        for each in names
        if module is not selfattn.functional
        and getattr(module, each) is getattr(selfattn.functional, each, module)
    ]
    if shared:
        text += f"   :exclude-members: {', '.join(shared)}\n\nFrom :mod:`selfattn.functional` it has too: "
        text += ", ".join(f":py:obj:`~selfattn.functional.{each}`" for each in shared) + ".\n"
    for each in names:
        thing = getattr(module, each)
        if not (inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing)):
            text += f"\n.. py:data:: {each}\n   :module: {name}\n\n   A {type(thing).__name__}.\n"
    return text


def lessons() -> None:
    """Write the lessons, and a page that lists them."""
    if command(["pages", str(EXTRA / "pages"), "--lang", *LANGUAGES]):
        raise RuntimeError("the lessons could not be written")
    about = "Pages to look at and to play with, also in German and French, as `selfattn pages FOLDER` writes them."
    of_models = "The command also writes these if selfattn-models is installed."
    link = '<p><a href="pages/index.html">All lessons, with exercises</a></p>'
    text = f"# Lessons\n\n{about}\n\n{lesson_list(START)}\n## Lessons with models\n\n{of_models}\n\n"
    text += f"{lesson_list(START_OF_MODELS)}\n```{{raw}} html\n{link}\n```\n"
    write("lessons.md", text)


def lesson_list(start: dict[str, str]) -> str:
    """Return a list of the lessons that are written, with what a start page says of each."""
    listed = ""
    for name, about in start.items():
        if (EXTRA / f"pages/{name}.html").is_file():
            title, rest = re.fullmatch(r"\*(.+?)\* (.+?)(?: \{n\} questions\.)?", about).groups()
            listed += f'<li><p><a href="pages/{name}.html">{title}</a>: {rest}</p></li>\n'
    return f"```{{raw}} html\n<ol>{listed}</ol>\n```\n"


def examples() -> None:
    """Copy the scripts, with small models of random weights next to them under the names that they load."""
    sys.path[:0] = [str(ROOT / "models/tests/support"), str(ROOT / "tests/support")]
    import gguf_files
    import language_folders
    import text_folders

    for name, folder in GALLERIES.items():
        shutil.copytree(ROOT / folder, SCRIPTS / name)
    asked = SCRIPTS / "models/asked"
    text_folders.save_bert(asked / "all-MiniLM-L6-v2", 512)
    small = language_folders.save_language_model(SCRIPTS / "small", intermediate_size=64, hidden_size=32)
    config = json.loads((small / "config.json").read_text("utf-8"))
    state = models.load(small).state_dict()
    entries = gguf_files.byte_level(language_folders.SPECIAL, template=language_folders.TEMPLATE)
    gguf_files.write(asked / "SmolLM2-135M-Instruct.Q4_1.gguf", config, state, "Q4_1", entries)
