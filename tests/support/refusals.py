"""Makes tests from tables of bad calls: the call, the error that it must raise, and its message (if empty, any)."""

import pytest


def refusals(*cases, given=None):
    """Make a test of (call, error, message); a call gets what ``given()`` returns, or the fixture of that name, if there is one."""

    @pytest.mark.parametrize(("call", "error", "message"), cases)
    def test(call, error, message, request):
        arguments = () if given is None else (given() if callable(given) else request.getfixturevalue(given),)
        with pytest.raises(error, match=message or None):
            call(*arguments)

    return test
