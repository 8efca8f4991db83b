"""A real browser for the tests of both packages' pages: Chromium, driven by Playwright, with the network off.

Both are optional: ``pip install 'selfattn[docs]'`` brings Playwright, and Chromium is found on the PATH, in
``CHROMIUM``, or where ``playwright install chromium`` puts it. Without them these tests are skipped, and say so.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import UNFOLD


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="the tests in a browser need playwright")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        if path is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("the tests in a browser need Chromium: on the PATH, or from playwright install")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def kernels():
    """The path of the core in WebAssembly, which is built if there is a compiler for it."""
    root = Path(__file__).parents[2]
    if not shutil.which("clang-14") or not shutil.which("wasm-ld-14"):
        pytest.skip("live pages need clang-14, lld-14, wasi-libc and libclang-rt-14-dev-wasm32")
    import fcntl  # Windows has none

    make = ["make", "-s", "-j2", "-C", root / "csrc", "wasm-library"]
    with open(root / "csrc/Makefile", "rb") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)  # each process of the session makes it
        subprocess.run(make, check=True, capture_output=True)
    return root / "csrc/build/selfattn.wasm"


@pytest.fixture
def visit(browser, tmp_path):
    """Open HTML from a file without a network; at the end, check that there were no requests and no messages.

    With `unfold` everything is shown, and the details of all stages.
    """
    contexts, trouble = [], []

    def open_page(html, *, fragment="", width=1280, height=900, unfold=True, **options):
        context = browser.new_context(
            viewport={"width": width, "height": height}, offline=True, reduced_motion="reduce", **options
        )
        contexts.append(context)
        context.set_default_timeout(60_000)
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        page = context.new_page()
        page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: trouble.append(f"dialog: {dialog.message}"))
        allowed = (path.as_uri(), "data:,")
        page.on(
            "request", lambda r: r.url.startswith((*allowed, "blob:")) or trouble.append(f"fetched {r.url}")
        )
        page.goto(path.as_uri() + fragment)
        if unfold:
            page.evaluate(UNFOLD)
            page.wait_for_selector("[data-stale]", state="detached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


@pytest.fixture
def opened(visit):
    """Open a page that its script draws, and wait until it is drawn."""

    def open_page(page, **options):
        found = visit(page.html, **options)
        found.wait_for_selector("[data-ready]")
        return found

    return open_page
