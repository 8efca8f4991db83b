"""The program that renders chat templates, in a process of its own, which `_chat.py` starts.

A template comes with a model, and so from anybody. It runs in Jinja2's immutable sandbox with Transformers' settings,
and what the sandbox lets through ends with the process: a watchdog ends it after some seconds of one rendering,
whatever that does, and the system refuses it more memory than `BYTES`.

Standard input has a request in each line, and standard output gets an answer in each: JSON, which has no other line
ends. `_chat.py` has the folders of Jinja2 in the command; nothing else is imported.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import json
import os
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

BYTES = 512 << 20
LONGEST = 10_000_000  # characters of a text
LONGEST_REASON = 500  # characters of a refusal


class RefusedError(TemplateError):
    """A template's own refusal of messages."""


class Generation(Extension):
    """Transformers' tags around what a model said, which they mark for training; here they change nothing."""

    tags = {"generation"}  # noqa: RUF012 - a set in Jinja2

    def parse(self, parser: Any) -> Any:
        """Make a block of what is between the tags: variables that it sets stay within, as in Transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Any) -> str:
        """Return the text of a block."""
        return str(caller())


class MakeDict:
    """``dict`` of a template, without the attributes of a class."""

    def __call__(self, *args: Any, **given: Any) -> dict[Any, Any]:
        """Make a dict."""
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make a dict of keys with one value."""
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """``namespace`` of a template; names that begin with an underscore are refused."""

    def __init__(*args: Any, **given: Any) -> None:  # `self` may be one of the names
        for name in (values := dict(*args[1:], **given)):
            check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: Any) -> None:
    """Refuse a private name."""
    if str(name).startswith("_"):
        raise SecurityError(f"the name {name!r:.80} of a namespace begins with an underscore")


def raise_exception(message: Any) -> None:
    """Refuse the messages: a function of templates."""
    raise RefusedError(str(message))


def strftime_now(form: str) -> str:
    """Return the date or time: a function of templates."""
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON: a filter of templates. Jinja2's own is for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(4)
def compiled(template: str) -> Any:
    """Compile a template."""
    tags = ["jinja2.ext.loopcontrols", Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=tags)
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "dict": MakeDict(),
        "namespace": PublicNamespace,
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    return environment.from_string(template)


def answer(template: str, variables: dict[str, Any]) -> dict[str, str]:
    """Return the text of a template, or why there is none."""
    try:
        text = compiled(template).render(variables)
        if len(text) <= LONGEST:
            return {"text": text}
        why = f"makes a text of more than {LONGEST} characters"
    except RefusedError as error:
        why = f"refuses these messages: {error}"
    except RecursionError:
        why = "calls itself without end"
    except MemoryError:
        why = "fills the memory"
    except Exception as error:  # whatever the template's own expressions raise, as Python or as Jinja2
        why = f"fails: {type(error).__name__}: {error}"
    return {"why": " ".join(why[:LONGEST_REASON].split())}


def limit_memory() -> None:
    """Bound the memory of this process, where the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows, macOS
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def main(seconds: float) -> None:
    """Answer requests until there are no more, each within some seconds."""
    limit_memory()
    with open(os.devnull, "w") as nowhere:
        for request in sys.stdin.buffer:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            found = json.dumps(answer(**json.loads(request)), ensure_ascii=False) + "\n"
            line = found.encode("utf-8", "surrogatepass")
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
