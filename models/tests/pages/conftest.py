"""What the tests of pages share: the browser of the core's tests."""

from browser_fixtures import *  # noqa: F403
