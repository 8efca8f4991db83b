"""Take ``docs/images/steps.png`` from a page in a browser: the first screen of tutorial 1.

pip install playwright; then, with Chromium on the PATH,
python docs/figures/steps.py docs/images/steps.png
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from selfattn.views import tutorial_page


def main() -> None:
    """Open the page without a network, and take what is on the screen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = tutorial_page("first_principles").save(Path(folder) / "steps.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1366, "height": 768}, reduced_motion="reduce")
        page.goto(file.as_uri())
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main()
