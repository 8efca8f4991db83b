"""The site that `tools/site` builds: its links, what its pages say of themselves, what they fetch, the way to
answers, axe, the search."""

import importlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import selfattn as sa

ROOT = Path(__file__).parents[3]
if "SELFATTN_SITE" not in os.environ:
    pytest.skip(
        "tools/site FOLDER builds the site, and SELFATTN_SITE=FOLDER names it", allow_module_level=True
    )
selfattn_models = pytest.importorskip("selfattn_models", reason="the site shows both packages")
SITE = Path(os.environ["SELFATTN_SITE"]).resolve()
KINDS = [
    "index.html",
    "index.de.html",
    "index.fr.html",
    "lessons.html",
    "docs/index.html",
    "docs/guide/semantics.html",
    "docs/guide/benchmarks.html",
    "docs/guide/coming_from/pytorch.html",
    "docs/measurements/attention.html",
    "gallery/index.html",
    "gallery/padding.html",
    "asked/index.html",
    "asked/a_weights.html",
    "api/index.html",
    "api/selfattn.optim.html",
    "notebooks/3_basics.html",
    "csrc/README.html",
    "models/README.html",
    "models/docs/index.html",
    "models/docs/guide/models.html",
    "models/docs/guide/coming_from/sentence_transformers.html",
    "models/docs/measurements/search.html",
    "models/gallery/index.html",
    "models/gallery/banks.html",
    "models/asked/index.html",
    "models/asked/h_filter.html",
    "models/api/index.html",
    "models/api/selfattn_models.search.html",
    "models/notebooks/8_heads.html",
    "search.html",
    "genindex.html",
]
# Questions of the start page, and what answers them on the page that a click opens.
QUESTIONS = {
    "mask padding?": "key_lengths=",
    "see what my model attends to?": "selfattn explore",
    "search my text?": "selfattn search",
    "know how fast it is on my CPU?": "ms, NumPy",
    "use it from PyTorch?": "selfattn.interop.torch",
    "run it on two machines?": "client of any scheduler",
}


class Parsed(HTMLParser):
    """A page's title, description, ids, links with their texts, what it fetches, and its text."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.fetched, self.text, self.meta = set(), [], [], "", {}
        self.title, self._inside = "", None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self._inside = tag
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.fetched += [given[name] for name in ("src", "srcset", "poster", "data") if given.get(name)]
        self.fetched += re.findall(r"url\(([^)]*)", given.get("style") or "")
        if tag == "link" and given.get("rel") not in ("alternate", "up", "index", "search", "next", "prev"):
            self.fetched.append(given["href"])
        if tag == "meta":
            self.meta[given.get("name")] = given.get("content")
        if tag == "a" and given.get("href"):
            self.links.append([given["href"], ""])

    def handle_data(self, data):
        if self._inside == "title":
            self.title += data
        if self._inside == "style":
            self.fetched += re.findall(r"""(?:url\(|@import )["']?([^"')]*)""", data)
        elif self._inside != "script":
            self.text += data
            if self.links:
                self.links[-1][1] += data


@pytest.fixture(scope="module")
def pages():
    return {path: Parsed(path) for path in sorted(SITE.glob("**/*.html")) if "_static" not in path.parts}


def test_pages_fetch_nothing_from_outside_and_say_what_they_are(pages):
    fetched = {each for page in pages.values() for each in page.fetched}
    for sheet in SITE.glob("**/*.css"):
        fetched |= set(re.findall(r"""(?:url\(|@import )["']?([^"')]*)""", sheet.read_text(encoding="utf-8")))
    assert len(fetched) > 50
    assert [each for each in fetched if re.match(r"(?!data:)([a-z]+:|//)", each)] == []
    for path, page in pages.items():
        assert page.title.strip(), path
        assert path.parent == SITE / "pages" or len(page.meta.get("description") or "") > 10, path


def test_links_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for address, _ in page.links:
            parts = urlsplit(address)
            if parts.scheme in ("", "file"):
                target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
                ids = pages[target].ids if target in pages else None
                known = ids is None or not parts.fragment or "=" in parts.fragment
                known = known or unquote(parts.fragment) in ids
                if not target.exists() or not known:
                    broken.append((path.name, address))
    assert broken == []


def test_one_click_from_the_start_answers(pages):
    start = pages[SITE / "index.html"]
    for question, answer in QUESTIONS.items():
        (address,) = (address for address, text in start.links if text.strip() == question)
        page = pages[SITE / urlsplit(address).path]
        assert answer in page.text, question
    for lang in ("de", "fr"):
        other = pages[SITE / f"index.{lang}.html"]
        own, theirs = ({address for address, _ in each.links if address[0] != "#"} for each in (start, other))
        assert own - theirs <= {f"index.{lang}.html"}
        words = json.loads((ROOT / f"docs/site/languages/{lang}.json").read_text(encoding="utf-8"))
        used = re.findall(r'_\("(.*?)"\)', (ROOT / "docs/site/start.md.jinja").read_text(encoding="utf-8"))
        assert list(words) == used


def test_every_public_name_has_its_docs(pages):
    ids = {each for page in pages.values() for each in page.ids}
    modules = [
        importlib.import_module(f"{package.__name__}.{name}")
        for package in (sa, selfattn_models)
        for name in package._MODULES
        if name != "interop"
    ]
    public = [
        (module, name)
        for module in [sa, selfattn_models, *modules]
        for name in getattr(module, "__all__", ())
    ]
    names = {  # what functional has too has its docs there
        f"{module.__name__}.{name}"
        for module, name in public
        if module is sa.functional or getattr(module, name) is not getattr(sa.functional, name, module)
    }
    assert names - {each.removeprefix("module-") for each in ids} == set()
    for name in sa.interop.__all__:  # modules, some of them other names of the second package's
        assert {f"module-{package}.interop.{name}" for package in ("selfattn", "selfattn_models")} & ids, name


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_pages_in_a_browser(browser, width, scheme):
    """No request leaves the folder, nothing is wider than the window, and axe finds nothing serious."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page, trouble = context.new_page(), []
    page.on("pageerror", lambda error: trouble.append((name, str(error))))
    page.on(
        "request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or trouble.append((name, r.url))
    )
    for name in KINDS:
        page.goto((SITE / name).as_uri())
        found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
        trouble += [
            (name, each["id"], [node["html"][:150] for node in each["nodes"][:3]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        if page.evaluate("document.documentElement.scrollWidth") > width:
            trouble.append((name, "wider than the window"))
    context.close()
    assert trouble == []


def test_search_finds(browser):
    page = browser.new_page()
    page.goto((SITE / "search.html").as_uri() + "?q=key_lengths")
    page.wait_for_selector("#search-results li a[href*='gallery/padding.html']")
    page.close()
