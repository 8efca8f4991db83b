"""Chat templates: they turn the messages of a chat into a text, in Jinja2's sandbox and in a bounded number of steps.

A template comes with a model, and so from anybody. The sandbox lets it reach only its own values, but would let it run without end,
or make texts that fill the memory. So each turn of a loop, each call and each filter costs steps, and a result costs its length; a
template that spends too much is an error. The results of operators are bounded before they are computed.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from selfattn._extras import import_extra

MOST_STEPS, STEPS_OF_MESSAGE = 250_000, 1000
LETTERS = 64  # letters of a text that cost one step
LONGEST = 10_000_000  # characters of a text, or elements of a list
LARGEST = 10_000  # the largest number in an argument, such as a width
# Filters that look only at the elements of a list. Other filters may make a text of all that the elements contain.
SHALLOW = {
    "length", "count", "first", "last", "list", "select", "selectattr", "reject", "rejectattr", "map", "reverse", "default", "d", "items",
}  # fmt: skip
ROLES = ("system", "user", "assistant", "tool", "developer", "function")


class Budget:
    """The number of steps that a template may still take for a number of messages."""

    def __init__(self, messages: int) -> None:
        self.messages, self.most = messages, MOST_STEPS + STEPS_OF_MESSAGE * messages
        self.left = self.most

    def spend(self, steps: int) -> None:
        """Take steps; a ValueError if none are left."""
        self.left -= steps
        if self.left < 0:
            much = f"the chat template took more than {self.most} steps for {self.messages} messages"
            raise ValueError(f"{much}; does it loop? Shorter chats take fewer")

    def turns(self, items: Iterable[Any], letters: int) -> Iterator[Any]:
        """Go through a loop whose body writes this many letters each time."""
        for item in items:
            self.spend(1 + letters // LETTERS)
            yield item

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, shallow: bool = False) -> Any:
        """Call a function, and pay for its arguments, of a shallow one for their lengths alone, and for its result."""
        for value in (*args, *kwargs.values()):
            (self.result if shallow else self.weigh)(value)
        return self.result(function(*args, **kwargs))

    def weigh(self, value: Any) -> Any:
        """Pay for everything in a value before it becomes, for example, a text; it may hold another value many times."""
        waiting = [value]
        while waiting:
            each = waiting.pop()
            self.result(each)
            if isinstance(each, Mapping):
                waiting += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple):
                waiting += each
        return value

    def result(self, value: Any) -> Any:
        """Pay for a result."""
        if isinstance(value, str | bytes | list | tuple | dict):
            check_length(len(value))
            self.spend(1 + len(value) // LETTERS)
        else:
            self.spend(1)
        return value


def check_length(length: int) -> None:
    """Refuse a length that would fill the memory."""
    if length > LONGEST:
        raise ValueError(f"the chat template made a value of more than {LONGEST} characters or elements")


def _check_numbers(arguments: Iterable[Any]) -> None:
    for value in arguments:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"the chat template calls something with {value}, more than {LARGEST}")


def _operate(name: str, left: Any, right: Any) -> None:
    """Refuse operations whose results are too large."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if name == "**" or (name == "%" and isinstance(left, str)):
        raise ValueError(f"the chat template uses the operator {name}, which is not supported")
    if name == "*" and not numbers:
        sizes = [len(x) if isinstance(x, str | bytes | list | tuple) else x for x in (left, right)]
        if all(isinstance(x, int) for x in sizes):
            check_length(abs(sizes[0] * sizes[1]))
    elif numbers and name == "*":
        if any(isinstance(x, int) and x.bit_length() > 64 for x in (left, right)):
            raise ValueError("the chat template multiplies numbers beyond 64 bits")
    elif name == "+" and all(isinstance(x, str | bytes | list | tuple) for x in (left, right)):
        check_length(len(left) + len(right))


@functools.cache
def _environment_class() -> Any:
    """Return the class of a sandbox that counts steps; Jinja2 is imported here."""
    nodes = import_extra("jinja2.nodes", "models")
    sandbox = import_extra("jinja2.sandbox", "models")
    extension = import_extra("jinja2.ext", "models").Extension
    macro = import_extra("jinja2.runtime", "models").Macro

    class Generation(extension):  # type: ignore[misc, valid-type]
        """Transformers' tags that mark what a model said, and change nothing else."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Counting(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc, name-defined]
        intercepted_binops = frozenset(["*", "**", "%", "+"])
        budget: Budget
        generation = Generation

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            tree = super()._parse(source, name, filename)
            for loop in list(tree.find_all(nodes.For)):
                if loop.recursive:
                    raise ValueError("the chat template has a recursive loop, which is not supported")
                letters = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
                size = nodes.Const(letters, lineno=loop.lineno)
                loop.iter = nodes.Filter(loop.iter, "_turns", [size], [], None, None, lineno=loop.lineno)
            for block in list(tree.find_all(nodes.AssignBlock)):
                block.filter = nodes.Filter(block.filter, "_result", [], [], None, None, lineno=block.lineno)
            for concat in list(tree.find_all(nodes.Concat)):
                parts = nodes.List(concat.nodes, lineno=concat.lineno)
                concat.nodes = [nodes.Filter(parts, "_joined", [], [], None, None, lineno=concat.lineno)]
            return tree

        def wrap_str_format(self, value: Any) -> Any:
            of_text = isinstance(getattr(value, "__self__", None), str)
            if of_text and value.__name__ in ("format", "format_map"):
                raise sandbox.SecurityError("str.format, which may make any length, is not supported")
            return None

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _operate(operator, left, right)
            return self.budget.result(super().call_binop(context, operator, left, right))

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            if obj is not self.globals["range"]:
                _check_numbers([*args, *kwargs.values()])
            function = functools.partial(super().call, context, obj)
            return self.budget.call(function, args, kwargs, isinstance(obj, macro))

    return Counting


def _counted(function: Callable[..., Any], budget: Budget, shallow: bool = False) -> Callable[..., Any]:
    """Return a filter that pays for its arguments and its result, with the marks of Jinja2."""

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _check_numbers([*args, *kwargs.values()][1:])
        return budget.call(function, args, kwargs, shallow)

    return filtered


def _environment(messages: int) -> Any:
    """Return a new sandbox with Transformers' settings, filters and functions, for a number of messages."""
    budget, kind = Budget(messages), _environment_class()
    tags = ["jinja2.ext.loopcontrols", kind.generation]
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=tags, finalize=budget.weigh)
    environment.budget = budget
    environment.filters = {
        name: _counted(function, budget, name in SHALLOW)
        for name, function in environment.filters.items()
        if name not in ("format", "pprint", "xmlattr", "urlize", "random")
    }
    environment.filters |= {
        "_turns": budget.turns, "_result": budget.result, "_joined": lambda parts: _joined(parts, budget),
        "tojson": _counted(_to_json, budget),
    }  # fmt: skip
    for name in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(name, None)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _joined(parts: Sequence[Any], budget: Budget) -> str:
    texts = [str(budget.weigh(part)) for part in parts]
    check_length(sum(map(len, texts)))
    return str(budget.result("".join(texts)))


class _RefusedError(ValueError):
    """A template's own error."""


def _raise(message: Any) -> None:
    raise _RefusedError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, *given: Any, **more: Any) -> str:
    named = dict(zip(("indent", "separators", "sort_keys"), given, strict=False))
    return json.dumps(value, ensure_ascii=ensure_ascii, **named, **more)


def checked_messages(messages: Any, template: str) -> list[dict[str, Any]]:
    """Return the messages of a chat, whose contents are texts.

    A TypeError if they are not a str or a list of dicts, or a content is neither text nor parts; a ValueError if there are none, if a
    role is neither usual nor named by the template, or if a part of a content is not text.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise TypeError(f"messages must be a str or a list of dicts, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must not be empty")
    found = []
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            such = '{"role": "user", "content": "…"}'
            raise TypeError(f"message {n} must be a dict such as {such}, not {message!r:.80}")
        if "content" not in message:
            raise ValueError(f"message {n} has no content")
        role, content = message["role"], message["content"]
        if role not in ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
            raise ValueError(f"message {n} has the role {role!r:.80}; usual roles are {', '.join(ROLES)}")
        if isinstance(content, list | tuple):
            content = "\n".join(_text_of(part, n) for part in content)
        if not isinstance(content, str | None):  # None, as beside calls of tools, is for the template
            raise TypeError(f"message {n} has the content {content!r:.80}, neither a str nor a list of parts")
        found.append({**message, "content": content})
    return found


def _text_of(part: Any, n: int) -> str:
    """Return the text of a part of a content, as OpenAI's clients send it."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    text = part.get("text") if isinstance(part, Mapping) else part
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        such = 'this model takes text alone, in parts such as {"type": "text", "text": "…"}'
        raise ValueError(f"message {n} has a part {part!r:.80}; {such}")
    return text


def rendered(template: str, messages: Any, special_tokens: Mapping[str, str], answer: bool = True) -> str:
    """Return the text of a chat, with the beginning of an answer; special tokens are variables of the template.

    Errors are those of :func:`checked_messages`, and a ValueError if the template is not Jinja2, refuses the messages or takes too
    many steps.
    """
    messages = checked_messages(messages, template)
    try:
        made = _environment(len(messages)).from_string(template)
        text: str = made.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=answer, **special_tokens
        )
    except Exception as error:  # whatever the template's own expressions raise, as Python or as Jinja2
        known = {RecursionError: "calls itself without end", MemoryError: "fills the memory"}
        known[_RefusedError] = f"refuses these messages: {error}"
        why = known.get(type(error), f"fails: {type(error).__name__}: {error}")
        raise ValueError(f"the chat template {why}") from None
    return text
