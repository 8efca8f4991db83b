"""Take ``docs/images/steps.png`` from a page in a browser: a weight of tutorial 1 and what it is made of.

pip install playwright; then, with Chromium on the PATH,
python docs/figures/steps.py docs/images/steps.png
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from selfattn import tutorials
from selfattn.layer_steps import layer_steps
from selfattn.views import Page, steps_page


def river_page() -> Page:
    """Show *bank* by a river."""
    data = tutorials.load("first_principles")
    tokens, given = data["tokens"]["river"], data["projected_attention"]
    x = np.array([data["vocab"][token] for token in tokens])
    weights = (np.array(given[name]) for name in ("W_query", "W_key", "W_value"))
    return steps_page(layer_steps(x, *weights), tokens)


def main() -> None:
    """Open the page without a network, point at a weight, and take what is on the screen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = river_page().save(Path(folder) / "steps.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 940, "height": 480}, device_scale_factor=1.5)
        page.goto(file.as_uri())
        page.locator("[data-stage=weights] .sa-result tbody tr").nth(1).locator("td").nth(0).hover()
        page.evaluate(
            "scrollBy(0, document.querySelector('[data-stage=weights] .sa-say').getBoundingClientRect().bottom - 350)"
        )
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main()
