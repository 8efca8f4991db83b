"""Documentation runs: examples of modules, code in Markdown, links. Both packages' tests of docs use this."""

import doctest
import importlib
import importlib.util
import inspect
import re
import subprocess

import pytest

from selfattn.views.live_pages import packaged_kernels

# What a module's examples need beyond the tests' own packages.
EXTRAS = {
    "selfattn.views.plot": "matplotlib",
    "selfattn.interop.torch": "torch",
    "selfattn.interop.huggingface": "transformers",
    "selfattn.interop.jax": "jax",
    "selfattn.interop.autograd": "autograd",
    "selfattn.interop.dask": "distributed",
    "selfattn_models.interop.sklearn": "sklearn",
    "selfattn_models.interop.langchain": "langchain_core",
    "selfattn_models.interop.bertopic": "bertopic",
    "selfattn_models.interop.dask": "distributed",
}


class Finder(doctest.DocTestFinder):
    """A doctest finder that finds decorated functions too."""

    def _from_module(self, module, thing):
        return super()._from_module(module, inspect.unwrap(thing))


def run_examples(text, name, namespace, path=None, line=0):
    test = doctest.DocTestParser().get_doctest(text, namespace, name, str(path) if path else None, line)
    report = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=report.append, clear_globs=False)
    namespace.update(test.globs)  # the test had a copy; the next block continues with these names
    assert not runner.failures, "".join(report)
    return runner.tries


def modules_with_examples(root, package):
    """The names of a package's modules that have examples; ``root`` is the folder that the package is in."""
    return [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((root / package).rglob("*.py"))
        if ">>> " in path.read_text(encoding="utf-8")
    ]


def check_examples_of_module(name):
    """Run all examples of a module; skip those of a door whose library is missing."""
    for module, needed in EXTRAS.items():
        if name.startswith(module):
            pytest.importorskip(needed)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner()
    for test in Finder().find(module):
        report = []
        runner.run(test, out=report.append)
        assert not runner.failures, "".join(report)


def check_code(path):
    """Run the ```python blocks of a file, one after the other, in one namespace: sessions (>>>) or plain code."""
    namespace, text = {"__name__": "__example__"}, path.read_text(encoding="utf-8")
    for block in re.finditer(r"^```(?:python|pycon)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line, code = text.count("\n", 0, block.start(1)), block[1]
        imported = re.findall(r"^ *(?:import|from) ([\w.]+)", code, re.MULTILINE)
        if not all(importlib.util.find_spec(EXTRAS.get(name, name).partition(".")[0]) for name in imported):
            continue  # a library is missing; blocks without it do not depend on this one
        if "gpt_page(" in code and packaged_kernels() is None:
            continue  # this build has no live pages
        if ">>> " in code:
            run_examples(code, path.name, namespace, path, line)
        else:
            exec(compile("\n" * line + code, str(path), "exec"), namespace)


def without_code(path):
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def names_of_no_file(root, path):
    """The files and folders that a page names, and that the checkout ``root`` does not track."""
    command = ["git", "ls-files"]
    tracked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("this is no checkout")
    named = {
        name.rstrip("/") for name in re.findall(r"`([\w./]+/[\w./]*|\w+\.(?:py|c|h|md))`", without_code(path))
    }
    return sorted(
        name for name in named if not re.search(rf"(^|/){re.escape(name)}($|/)", tracked, re.MULTILINE)
    )


def anchors(path):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def check_links(path):
    """Check that the links of a page lead to files, and to headings that they have."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        if "://" not in target and not target.startswith("mailto:"):
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), target
