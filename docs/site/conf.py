"""Settings of Sphinx for the site, which `tools/site` builds.

Formulas are MathML, so that no page needs a script for them.
"""

import re
import sys
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs/site"), str(ROOT / "models")]
from made import GALLERIES, SCRIPTS  # noqa: E402

import selfattn  # noqa: E402

project, author = "selfattn", "selfattn developers"
release = version = selfattn.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
html_math_renderer = "mathml"

nb_execution_mode = "off"  # notebooks have their outputs
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache", "myst.header"]
exclude_patterns = [f"{name}/*.ipynb" for name in GALLERIES]

autodoc_member_order = "bysource"
autodoc_mock_imports = [
    "torch",
    "transformers",
    "sklearn",
    "jax",
    "autograd",
    "langchain_core",
    "bertopic",
    "dask",
    "distributed",
]
autodoc_typehints = "none"
# Types are sentences, such as "array_like, shape (n, d)": their words are no links.
napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

sphinx_gallery_conf = {
    "examples_dirs": [str(SCRIPTS / name) for name in GALLERIES],
    "gallery_dirs": list(GALLERIES),
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = "selfattn"
html_static_path = [str(Path(__file__).parent / "site.css")]
html_css_files = ["site.css"]
html_extra_path = [str(ROOT / "build/site-extra")]
html_show_sourcelink = html_copy_source = False
html_domain_indices = False
html_sidebars = {page: [] for page in ("index*", "lessons", "README", "search", "genindex")}
html_theme_options = {
    "header_links_before_dropdown": 8,
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "back_to_top_button": False,
}
copyright = "selfattn developers, MIT licence"


def inline(self, node):
    """Write a formula within a line."""
    self.body.append(convert(node.astext()))
    raise SkipNode


def block(self, node):
    """Write a formula on a line of its own."""
    self.body.append(convert(node.astext(), display="block"))
    raise SkipNode


def as_rst(app, what, name, thing, options, lines):
    """Escape what reST would misread in a docstring.

    That is an asterisk before a name, and numbered references, which repeat on a page.
    """
    for n, line in enumerate(lines):
        plain = re.sub(r"``.*?``", "", line)
        escaped = re.sub(r"(?<![`*\w])\*(?=\w)", r"\\*", line) if plain.count("*") % 2 else line
        lines[n] = re.sub(r"(\.\. )?(\[\d\])_?", r"\2", escaped)


def describe(app, page, template, context, doctree):
    """Describe a page by its first paragraph; a start page has its language."""
    lang = page.partition(".")[2] if page.startswith("index.") else "en"
    if lang != "en":
        context["body"] = f'<div lang="{lang}">{context["body"]}</div>'
    if "description" not in context.get("metatags", ""):
        paragraphs = doctree.findall(lambda node: node.tagname == "paragraph") if doctree else ()
        text = next((each.astext() for each in paragraphs if len(each.astext()) > 20), "")
        text = (
            re.sub(r"\s+", " ", text)[:200]
            or f"{context.get('title', page)}, of the documentation of selfattn"
        )
        escaped = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{escaped}">'


def name_folds(app, page, template, context, doctree):
    """Name what folds a part of the navigation by the entry before it, which the theme does not."""
    make = context["generate_toctree_html"]
    fold = re.compile(r">([^<>]+)(</a><details[^>]*><summary)>")
    context["generate_toctree_html"] = lambda *args, **options: fold.sub(
        r'>\1\2 aria-label="\1">', str(make(*args, **options))
    )


def setup(app):
    """Tell Sphinx."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
    app.connect("html-page-context", describe)
    app.connect("html-page-context", name_folds, priority=900)  # after the theme
