"""Makes tests from tables of bad calls: the call, or what it is given, the error that it must raise, and its message
(if empty, any)."""

import re

import pytest


def refusals(*cases, given=None, call=None, ids=None):
    """Make a test of (what, error, message) or (what, message of a ValueError); a message is a pattern, or words that
    must all be in it.

    ``what`` is called, or ``call`` with ``what`` last. The first argument of either is what ``given()`` returns, or
    the fixture of that name, if there is one.
    """
    cases = [case if len(case) == 3 else (case[0], ValueError, case[1]) for case in cases]

    @pytest.mark.parametrize(("what", "error", "message"), cases, ids=ids)
    def test(what, error, message, request):
        arguments = () if given is None else (given() if callable(given) else request.getfixturevalue(given),)
        if not isinstance(message, str):
            message = "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in message)
        with pytest.raises(error, match=message or None):
            what(*arguments) if call is None else call(*arguments, what)

    return test
