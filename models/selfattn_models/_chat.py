"""Chats as text: messages are checked, and the template of a model renders them, in a process of its own.

A template comes with a model, and so from anybody: `_chat_renderer.py`, the program of that process, says what it may.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfattn.engine import import_extra

ROLES = ("system", "user", "assistant", "tool", "developer", "function")
LIBRARIES = ("jinja2", "markupsafe")
SECONDS = 2  # of one rendering
PROGRAM = f"import sys; sys.path += sys.argv[1:]; from _chat_renderer import main; main({SECONDS})"
# The bytes of a template and its messages, and of an answer: of a character JSON has at most 6.
MOST_IN, MOST_OUT = 32_000_000, 61_000_000


class TemplateProcess:
    """The process in which chat templates run.

    It starts with :meth:`start`, or with the first text, and ends with this object, with the program, or with a
    template that takes too long; the next text then starts a new one. A copy of this object, and a fork of the
    program, start a process of their own.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        _processes.add(self)

    def __reduce__(self) -> Any:
        return TemplateProcess, ()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, unless it runs; an ImportError says what to install.

        An OSError says that there is no Python to run, as in a frozen program, which would start itself.
        """
        process = self._process
        if process is None or process.poll() is not None:
            self._stop()
            if not sys.executable or hasattr(sys, "frozen"):
                raise OSError("chat templates run in a process of Python, and this program names no Python")
            specs = [importlib.util.find_spec(name) or import_extra(name).__spec__ for name in LIBRARIES]
            folders = [*(Path(str(spec.origin)).parents[1] for spec in specs), Path(__file__).parent]
            # Isolated: it sees these folders and Python's own. A session of its own does not get the terminal's Ctrl-C.
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", PROGRAM, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
            )
            self._end = weakref.finalize(self, _end, process)
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process = None
            self._end()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text of a template; a ValueError says why there is none."""
        request = _to_json({"template": template, "variables": variables})
        with self._lock:
            process, begin = self.start(), time.monotonic()
            try:
                found = _exchange(process, request)
            except BaseException:  # Ctrl-C: the answer would be that to the next request
                self._stop()
                raise
            if not found.endswith(b"\n"):
                self._stop()
                late = time.monotonic() - begin >= SECONDS
                why = f"takes more than {SECONDS} seconds" if late else "ended its process"
                raise ValueError(f"the chat template {why}")
        answer: dict[str, str] = json.loads(found)
        if "why" in answer:
            raise ValueError(f"the chat template {answer['why']}")
        return answer["text"]

    def _forget(self) -> None:
        """Leave the process to the program of which this one is a fork."""
        process, self._lock = self._process, threading.Lock()
        if process is not None:
            self._end.detach()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()  # or the process would not end with that program
            process.stdout.close()
            process.returncode, self._process = 0, None


_processes: weakref.WeakSet[TemplateProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_processes):
        each._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes its pipes and waits for it
        process.kill()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytearray:
    """Write a request, and read the answer, a line; it is cut off if the process ends, or writes too much."""
    assert process.stdin is not None and process.stdout is not None
    rest, found = memoryview(request), bytearray()
    try:
        while rest:
            rest = rest[process.stdin.write(rest) :]
    except BrokenPipeError:
        return found
    while not found.endswith(b"\n") and len(found) < MOST_OUT:
        piece = process.stdout.read(2**16)
        if not piece:
            break
        found += piece
    return found


def _to_json(request: Mapping[str, Any]) -> bytes:
    """Return a request as a line."""
    try:
        line = json.dumps(request, ensure_ascii=False, default=_plain) + "\n"
    except RecursionError:
        raise ValueError("the messages are nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"the messages cannot be given to the chat template: {error}") from None
    found = line.encode("utf-8", "surrogatepass")
    if len(found) > MOST_IN:
        raise ValueError(
            f"the messages and the chat template have {len(found)} bytes; {MOST_IN} are too many"
        )
    return found


def _plain(value: Any) -> Any:
    """Return what JSON takes in place of a mapping, or of a number or array of NumPy."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no {type(value).__name__}")


def checked_messages(messages: Any, template: str, in_parts: Callable[[], bool]) -> list[dict[str, Any]]:
    """Return the messages of a chat, whose contents are texts; or parts of type "text", if ``in_parts()``.

    A message that calls tools need have no content. A TypeError if they are not a str or a list of dicts, or a content
    is neither text nor parts; a ValueError if there are none, if a role is neither usual nor named by the template, or
    if a part of a content is not text.
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
        if "content" not in message and not (message.get("tool_calls") or message.get("function_call")):
            raise ValueError(f"message {n} has no content")
        role, content = message["role"], message.get("content")
        if role not in ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
            raise ValueError(f"message {n} has the role {role!r:.80}; usual roles are {', '.join(ROLES)}")
        if isinstance(content, list | tuple):
            texts = [_text_of(part, n) for part in content]
            content = [{"type": "text", "text": text} for text in texts] if in_parts() else "\n".join(texts)
        elif not isinstance(content, str | None):  # None, as with calls of tools, is for the template
            raise TypeError(f"message {n} has the content {content!r:.80}, neither a str nor a list of parts")
        found.append({**message, "content": content} if "content" in message else dict(message))
    return found


def _text_of(part: Any, n: int) -> str:
    """Return the text of a part of a content, as OpenAI's clients send it."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    text = part.get("text") if isinstance(part, Mapping) else part
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        such = 'this model takes text alone, in parts such as {"type": "text", "text": "…"}'
        raise ValueError(f"message {n} has a part {part!r:.80}; {such}")
    return text


def rendered(
    template: str,
    messages: Any,
    special_tokens: Mapping[str, str],
    answer: bool = True,
    process: TemplateProcess | None = None,
    more: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a chat, with the beginning of an answer; special tokens are variables of the template.

    ``more`` variables may be given, such as ``tools``. ``process`` renders it; by default one that ends then. Errors
    are those of :func:`checked_messages`, and a ValueError if the template is not Jinja2, refuses the messages, or
    takes too much time or memory.
    """
    if not isinstance(more, Mapping | None):
        raise TypeError(f"chat_template_kwargs must be a dict of the template's variables, not {more!r:.80}")
    if taken := {"messages", "add_generation_prompt"} & {*(more or ())}:
        raise ValueError(f"chat_template_kwargs has {min(taken)!r}, which the call itself gives the template")
    process = process or TemplateProcess()
    variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": answer}
    variables |= special_tokens

    def in_parts() -> bool:
        """Find out whether the template takes the parts of a content, or would write them as a list."""
        sign = "selfattn"
        probe = [{"role": "user", "content": [{"type": "text", "text": sign}]}]
        try:
            text = process.render(template, variables | {"messages": probe})
        except ValueError:  # it takes texts alone, or has other rules
            return False
        return sign in text and f"'{sign}'" not in text and f'"{sign}"' not in text

    variables |= {"messages": checked_messages(messages, template, in_parts), **(more or {})}
    return process.render(template, variables)
