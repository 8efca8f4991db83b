"""What the tests of the core's pages share: a browser, and folders of the core's pages alone."""

import pytest
from browser_fixtures import *  # noqa: F403
from pages import illustrated

from selfattn import views


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Write the core's pages alone, whatever packages are installed that add their own."""
    monkeypatch.setattr("selfattn.views.first_page.entry_points", lambda group: [])


@pytest.fixture
def small(visit):
    return visit(views.steps_page(*illustrated()).html)
