"""A notebook in JupyterLab: a real server, Chromium, trusted and untrusted, run to the end; two views in it."""

import itertools
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from pages import UNFOLD

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra docs")
pytest.importorskip("jupyterlab", reason="JupyterLab comes with the extra docs")
pytest.importorskip("ipykernel", reason="a kernel comes with the extra docs")

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
NAME = "3_basics.ipynb"  # has two views and every tensor of a tutorial
PATIENCE = 180_000  # milliseconds: the machine may be busy


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Serve copies of the notebook, one of them trusted, with default settings; yield a function that returns an
    address."""
    home = tmp_path_factory.mktemp("lab")
    work = home / "work"
    work.mkdir()
    # The page of the first cell has two views, and later outputs have one each: an untrusted copy has the page, a
    # trusted one the rest.
    trusted, untrusted = (nbformat.read(NOTEBOOKS / NAME, 4) for _ in range(2))
    trusted.cells[1].outputs = []
    for cell in untrusted.cells[2:]:
        cell.update({"outputs": []} if cell.cell_type == "code" else {})
    nbformat.write(trusted, work / "trusted.ipynb")
    nbformat.write(untrusted, work / "untrusted.ipynb")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        **{f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")},
        **{f"JUPYTERLAB_{name}_DIR": str(home / name) for name in ("SETTINGS", "WORKSPACES")},
    }
    run = [sys.executable, "-P", "-m"]
    subprocess.run([*run, "jupyter", "trust", str(work / "trusted.ipynb")], env=environment, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    options = {
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": work,
        "IdentityProvider.token": token,
        "LabApp.expose_app_in_browser": True,
        "LabApp.extension_manager": "readonly",
        "LabApp.news_url": None,
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LanguageServerManager.autodetect": False,
    }
    settings = [f"--{name}={x}" for name, x in options.items()]
    command = [*run, "jupyterlab", "--no-browser", "--allow-root", *settings]
    with open(home / "log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=work)
        try:
            wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, home / "log")
            # A new workspace for each visit, so that earlier ones are not opened again.
            number = itertools.count()
            base = f"http://127.0.0.1:{port}/lab/workspaces"
            yield lambda name: f"{base}/visit{next(number)}/tree/{name}?token={token}"
        finally:
            server.terminate()
            server.wait(60)


def wait_for(address, server, log):
    for _ in range(PATIENCE // 500):
        try:
            with urllib.request.urlopen(address, timeout=10):
                return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
    pytest.fail(f"the server does not answer: {log.read_text()}")


@pytest.fixture
def visit(lab, browser):
    """Open a notebook; at the end, all requests were local, and no script failed."""
    contexts, trouble = [], []

    def open_notebook(name, *, alive):
        context = browser.new_context(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce")
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: trouble.append(f"dialog: {dialog.message}"))
        page.on("request", lambda r: None if local(r.url) else trouble.append(f"fetched {r.url}"))
        page.goto(lab(name))
        page.wait_for_function("document.querySelectorAll('.jp-Notebook .sa-steps').length == 2")
        if alive:  # their scripts run
            page.wait_for_function("document.querySelectorAll('.jp-Notebook .sa-bar').length == 2")
            page.evaluate(UNFOLD)
        page.wait_for_function(
            "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'"
        )
        return page

    yield open_notebook
    for context in contexts:
        context.close()
    assert trouble == []


def local(url):
    return url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def views(page):
    return page.locator(".jp-OutputArea-output .sa-steps")


def number(view, stage, node, i, j):
    """A cell of the first table of a matrix in a stage."""
    tables = view.locator(f"[data-stage='{stage}'] table[data-node='{node}']:not([data-t])")
    return tables.first.locator("tbody tr").nth(i).locator("td").nth(j)


def notebook_state(page):
    """Return the state that Jupyter's own keys would change."""
    return page.evaluate(
        """() => {
        const notebook = jupyterapp.shell.currentWidget.content;
        return {cells: notebook.widgets.length, active: notebook.activeCellIndex, mode: notebook.mode,
                sources: notebook.widgets.map(w => w.model.sharedModel.getSource()),
                runs: notebook.widgets.map(w => w.model.executionCount ?? null)};
    }"""
    )


def test_an_untrusted_notebook_says_that_the_picture_is_still_and_shows_it(visit):
    """JupyterLab removes scripts, styles and data attributes."""
    page = visit("untrusted.ipynb", alive=False)
    assert page.locator(".sa-bar, .jp-OutputArea-output script").count() == 0  # no script has run
    output = page.locator(".jp-OutputArea-output", has=page.locator(".sa-steps")).first
    assert output.inner_text().startswith("This is a still picture.")
    assert output.locator("img").first.bounding_box()["height"] > 200


def test_two_trusted_views_are_independent(visit):
    page = visit("trusted.ipynb", alive=True)
    first, second = views(page).nth(0), views(page).nth(1)
    assert page.locator(".jp-OutputArea-output [id]").count() == 0
    number(first, "scores", "scores", 0, 1).hover()
    assert first.locator("[data-stage='scores'] .sa-say").inner_text().startswith("scores[sky, is] = ")
    assert first.locator("td.sa-to").count() and not second.locator("td.sa-to").count()
    before = second.locator("td").all_text_contents()  # even if JupyterLab has not drawn it yet
    number(first, "inputs", "inputs", 0, 0).dblclick()
    page.keyboard.type("2.5")
    page.keyboard.press("Enter")
    assert first.locator("td.sa-moved").count() > 10
    assert second.locator("td.sa-moved").count() == 0
    second.locator("[data-do=next]").click()
    assert first.locator(".sa-now").count() == 0
    first.locator("[data-do=reset]").click()
    assert first.locator("td.sa-moved").count() == 0
    assert second.locator("td").all_text_contents() == before


def test_keys_of_jupyter_and_of_a_view_are_separate(visit):
    page = visit("trusted.ipynb", alive=True)
    view, before = views(page).nth(0), notebook_state(page)
    number(view, "weights", "weights", 0, 0).click()
    active = notebook_state(page)["active"]
    # Keys by which Jupyter would add, cut, convert, move, edit or run cells.
    for key in ("a", "b", "x", "d", "d", "m", "y", "1", "ArrowDown", "ArrowUp", "j", "k", "Enter", "Escape"):
        page.keyboard.press(key)
        number(view, "weights", "weights", 0, 0).focus()
    after = notebook_state(page)
    assert after == before | {"active": active}
    # An input being typed into: Enter takes the number, and no cell is run.
    number(view, "inputs", "inputs", 0, 0).dblclick()
    page.keyboard.type("0.5")
    page.keyboard.press("Enter")
    assert number(view, "inputs", "inputs", 0, 0).inner_text().startswith("0.5")
    assert notebook_state(page) == after
    # Outside the view, Jupyter's keys work as usual.
    page.locator(".jp-MarkdownCell").first.click()
    page.keyboard.press("b")
    page.wait_for_function(f"jupyterapp.shell.currentWidget.content.widgets.length == {after['cells'] + 1}")
    page.keyboard.press("z")
    page.wait_for_function(f"jupyterapp.shell.currentWidget.content.widgets.length == {after['cells']}")
