"""The commands ``selfattn generate``, ``chat`` and ``evaluate``: language models from the command line.

Parses arguments, reads and prints; what is computed lives in `models`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from selfattn.cli import streams
from selfattn.cli.numbers import count
from selfattn.cli.parser import Parser
from selfattn.training.triplets import read_text

EXIT_CODES = """
exit codes:
  0  done      1  something is wrong with a file or a number; the message says what      2  wrong usage
  130  interrupted      141  the reader of the output went away
"""
GENERATE_EPILOG = (
    """\
examples:
  selfattn generate SmolLM2-135M-Instruct.Q4_1.gguf "Once upon a time"
  selfattn generate gpt2 "The sea was" --temperature 0.8 --top-p 0.95 --seed 7 --max-new-tokens 200
  selfattn train gpt book.txt --out mine && selfattn generate mine "It was"
  cat prompt.txt | selfattn generate model.gguf -
"""
    + EXIT_CODES
)
CHAT_EPILOG = (
    """\
Every line is a message; an empty one ends nothing. Ctrl-C ends an answer, and at the prompt, as Ctrl-D does, the chat.
Where lines come from a file or a pipe it ends the chat at once.

examples:
  selfattn chat SmolLM2-135M-Instruct.Q4_1.gguf
  selfattn chat model --system "You answer in rhymes." --temperature 0.7
  echo "What is the capital of France?" | selfattn chat model.gguf
"""
    + EXIT_CODES
)
EVALUATE_EPILOG = (
    """\
examples:
  selfattn evaluate SmolLM2-135M-Instruct.Q4_1.gguf book.txt
  selfattn evaluate gpt2 book.txt --window 512 --stride 256 --tokens 10000 --json
"""
    + EXIT_CODES
)
MODEL = (
    "a .gguf file, or the folder of a language model: what Transformers wrote (GPT-2, Llama, Mistral, Qwen2), or selfattn train gpt; "
    "needs selfattn[models]"
)


def main(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands and return its exit code."""
    parser, run = COMMANDS[command]
    options = parser().parse_args(arguments)
    options.interrupted = False

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        from selfattn.models import AnswerInterrupted

        if issubclass(category, AnswerInterrupted):
            options.interrupted = True
        streams.tell(f"selfattn {command}: {message}")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = show
            code = run(options)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        return streams.fail(f"selfattn {command}", error)
    goes_on = command == "chat" and streams.is_terminal(sys.stdin)
    return 130 if options.interrupted and not goes_on else code


# --------------------------------------------------------------------------------------------------- the commands


def _generate_parser() -> Parser:
    parser = _parser("generate", "Go on from a text with a language model.", GENERATE_EPILOG)
    parser.add_argument(
        "prompt", metavar="PROMPT", type=streams.sentence, help="the text; - is standard input"
    )
    _add_sampling(parser, 100)
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        type=streams.sentence,
        help="end before this text; may be repeated",
    )
    return parser


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt
    if prompt == streams.DASH:
        prompt = read_text(streams.source(prompt))
    out = streams.results()
    model = load(options.model, options.dtype)
    _print(model.generate(prompt, **_how(options), stop=options.stop, stream=True), out)
    return 0


def _chat_parser() -> Parser:
    parser = _parser("chat", "Talk with a language model that has a chat template.", CHAT_EPILOG)
    parser.add_argument(
        "--system", metavar="TEXT", type=streams.sentence, help="a message of the system before all others"
    )
    _add_sampling(parser, 512)
    return parser


def _chat(options: argparse.Namespace) -> int:
    out = streams.results()
    model = load(options.model, options.dtype)
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    how = _how(options)
    seed = how.pop("rng")
    for turn, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        try:
            rng = None if seed is None else seed + turn
            answer = _print(model.chat(messages, **how, rng=rng, stream=True), out)
        except ValueError as error:
            if not streams.is_terminal(sys.stdin):
                raise
            streams.tell(f"selfattn chat: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
        if options.interrupted and not streams.is_terminal(sys.stdin):
            break
    return 0


def _lines() -> Iterator[str]:
    """Give out the messages: lines that are typed, or those of standard input."""
    if not streams.is_terminal(sys.stdin):
        yield from streams.lines()
        return
    with contextlib.suppress(ImportError):  # some Pythons lack it
        import readline  # noqa: F401 - input() then edits the line

    shown = sys.stdout if streams.is_terminal(sys.stdout) else sys.stderr  # answers may go into a file
    while True:
        try:
            with contextlib.redirect_stdout(shown):
                line = input("> ")
        except EOFError:
            print(file=shown)
            return
        if line.strip():
            yield line


def _evaluate_parser() -> Parser:
    parser = _parser("evaluate", "Compute the perplexity of a text.", EVALUATE_EPILOG)
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 file; - is standard input")
    parser.add_argument(
        "--window", type=count, metavar="N", help="tokens that the model sees at once (its context)"
    )
    parser.add_argument(
        "--stride", type=count, metavar="N", help="tokens that each further window adds (half a window)"
    )
    parser.add_argument("--tokens", type=count, metavar="N", help="only the first N tokens of the text")
    parser.add_argument("--json", action="store_true", help="print a line of JSON")
    return parser


def _evaluate(options: argparse.Namespace) -> int:
    out = streams.results()
    text = read_text(streams.source(options.text))
    model = load(options.model, options.dtype)
    found = model.evaluate(text, window=options.window, stride=options.stride, most_tokens=options.tokens)
    if options.json:
        # JSON has no infinity.
        print(json.dumps({k: v if math.isfinite(v) else None for k, v in found.items()}), file=out)
    else:
        print(
            f"perplexity {found['perplexity']:.6g}   mean -log p {found['mean_nll']:.4f} nats   {found['tokens']} tokens predicted",
            file=out,
        )
    return 0


COMMANDS: dict[str, tuple[Callable[[], Parser], Callable[[argparse.Namespace], int]]] = {
    "generate": (_generate_parser, _generate),
    "chat": (_chat_parser, _chat),
    "evaluate": (_evaluate_parser, _evaluate),
}

# ---------------------------------------------------------------------------------------------------------- shared


def load(path: Path, dtype: str | None) -> Any:
    """Load a language model.

    Raises
    ------
    ValueError
        It is another model.
    """
    from selfattn import models  # with what the extra brings

    model = models.load(path, dtype=dtype)
    if not hasattr(model, "generate"):
        raise ValueError(f"{path} holds a {type(model).__name__}, which is no language model")
    return model


def _print(pieces: Iterator[str], out: Any) -> str:
    """Print pieces of a text as they come; return it whole."""
    from selfattn.models import AnswerInterrupted

    found = []
    try:
        for piece in pieces:
            found.append(piece)
            print(piece, end="", flush=True, file=out)
    except KeyboardInterrupt:  # while it was printed
        warnings.warn(AnswerInterrupted("interrupted; the answer ends there"), stacklevel=2)
    print(flush=True, file=out)
    return "".join(found)


def _parser(command: str, description: str, epilog: str) -> Parser:
    parser = Parser(prog=f"selfattn {command}", description=description, epilog=epilog)
    parser.add_argument("model", metavar="MODEL", type=Path, help=MODEL)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "int8"),
        help="compute with weights rounded to it; default: as they are stored",
    )
    return parser


def _add_sampling(parser: Parser, most: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", type=count, default=most, metavar="N", help=f"at most so many ({most})"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (the default); 1 draws as the model says",
    )
    group.add_argument("--top-k", type=count, metavar="K", help="draw from the likeliest K tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens of probability P together"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1, tokens that are there are less likely",
    )
    group.add_argument("--seed", type=int, metavar="N", help="draw the same tokens each time")


def _how(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "top_k": options.top_k,
        "top_p": options.top_p, "repetition_penalty": options.repetition_penalty, "rng": options.seed,
    }  # fmt: skip
