"""Tests that are tables of bad calls: what is called, the error that it must raise, and what its message must say (nothing, where it is empty)."""

import pytest


def refusals(*cases, given=None):
    """Make a test of (call, error, message); a call gets what ``given()`` returns, if there is such a function."""

    @pytest.mark.parametrize(("call", "error", "message"), cases)
    def test(call, error, message):
        arguments = () if given is None else (given(),)
        with pytest.raises(error, match=message or None):
            call(*arguments)

    return test
