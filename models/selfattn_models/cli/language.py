"""The commands ``selfattn generate``, ``chat`` and ``evaluate``: arguments, reading and printing; `models` computes."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import selfattn_models as models
from selfattn.cli import streams
from selfattn.cli.parser import EXIT_CODES, Command, Parser, UsageError, add_dtype, checked_seed, count
from selfattn.text import read_text
from selfattn_models import Answer, AnswerInterrupted
from selfattn_models._known_settings import REMOVED
from selfattn_models.cli.search import add_selection, check_options, evaluate_index, is_index

GENERATE_EPILOG = f"""\
examples:
  selfattn generate SmolLM2-135M-Instruct.Q4_1.gguf "Once upon a time"
  selfattn generate gpt2 "The sea was" --temperature 0.8 --top-p 0.95 --seed 7 --max-new-tokens 200
  selfattn train gpt book.txt --out mine && selfattn generate mine "It was"
  cat prompt.txt | selfattn generate model.gguf -
  selfattn generate gpt2 "The sea was" --json --logprobs 3 --logit-bias "Ġcalm=-100"
{EXIT_CODES}"""
CHAT_EPILOG = f"""\
Every line is a message; empty lines are ignored. Ctrl-C ends an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat.
If the lines come from a file or a pipe, Ctrl-C ends the chat at once. For typed lines, --sampling folder is the
default.

examples:
  selfattn chat SmolLM2-135M-Instruct.Q4_1.gguf
  selfattn chat model --system "You answer in rhymes." --temperature 0.7
  echo "What is the capital of France?" | selfattn chat model.gguf
{EXIT_CODES}"""
EVALUATE_EPILOG = f"""\
examples:
  selfattn evaluate SmolLM2-135M-Instruct.Q4_1.gguf book.txt
  selfattn evaluate gpt2 book.txt --window 512 --stride 256 --tokens 10000 --json
  selfattn evaluate tickets.index               how well a search finds texts by their halves, next to BM25
  selfattn evaluate tickets.index queries.csv   how well it finds the ids of queries
{EXIT_CODES}"""
MODEL = (
    "a .gguf file, or the folder of a language model, from Transformers (GPT-2, Llama, Mistral, Qwen2, "
    "Qwen3, Gemma 3, SmolLM3, Phi-3) or from selfattn train gpt"
)
LOADING = ("dtype", "precision", "cache_dtype")  # options of models.load
# argument name → (type, placeholder, help)
SAMPLING: dict[str, tuple[Any, str, str]] = {
    "max_new_tokens": (count, "N", "at most N new tokens (as the folder says, or {most})"),
    "temperature": (
        float,
        "T",
        "0 takes the most probable token; 1 draws with the model's probabilities (0, or as --sampling says)",
    ),
    "top_k": (count, "K", "draw from the K most probable tokens"),
    "top_p": (float, "P", "draw from the most probable tokens that together have probability P"),
    "min_p": (float, "P", "draw from tokens with at least P times the probability of the most probable one"),
    "repetition_penalty": (
        float,
        "X",
        "above 1, tokens that occur already are less probable (as the folder says, or 1)",
    ),
    "presence_penalty": (
        float,
        "X",
        "above 0, tokens that the answer has are less probable; from -2 to 2 (0)",
    ),
    "frequency_penalty": (float, "X", "the same, for each time that the answer has them (0)"),
}


def _add_generate(parser: Parser) -> None:
    _add_model(parser)
    text = "the text; - is standard input"
    parser.add_argument("prompt", metavar="PROMPT", type=streams.sentence, help=text)
    _add_sampling(parser, 100)


def _generate(options: argparse.Namespace) -> int:
    prompt = options.prompt
    if prompt == streams.DASH:
        prompt = read_text(streams.source(prompt))
        prompt = prompt.removesuffix("\n").removesuffix(
            "\r"
        )  # the last line end is the file's, not the text's
    out = streams.results()
    model = load(options)
    _print(model.generate(prompt, **_how(options)), out)
    return 130 if _interrupted(options) else 0


def _add_chat(parser: Parser) -> None:
    _add_model(parser)
    what = "a system message before all others"
    parser.add_argument("--system", metavar="TEXT", type=streams.sentence, help=what)
    _add_sampling(parser, 512)


def _chat(options: argparse.Namespace) -> int:
    out = streams.results()
    model = load(options)
    conversation = model.conversation(options.system)
    how = _how(options)
    seed = how.pop("rng")
    if (
        how["sampling"] is None
        and streams.is_terminal(sys.stdin)
        and not REMOVED.keys() & model.generation_config
    ):
        how["sampling"] = "folder"
    for turn, line in enumerate(_lines()):
        try:
            rng = None if seed is None else seed + turn
            _print(conversation.ask(line, **how, rng=rng), out)
        except ValueError as error:
            if not streams.is_terminal(sys.stdin):
                raise
            streams.tell(f"selfattn chat: {error}")
            continue
        if _interrupted(options) and not streams.is_terminal(sys.stdin):
            return 130
    return 0


def _lines() -> Iterator[str]:
    """Yield the messages: lines that are typed, or those of standard input."""
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


def _add_evaluate(parser: Parser) -> None:
    _add_model(parser, "; or an index, from selfattn index")
    text = "a UTF-8 file; - is standard input; of an index a table of 'query' and 'id', or nothing"
    parser.add_argument("text", metavar="TEXT", nargs="?", help=text)
    for name, what in (
        ("--window", "tokens that the model sees at once (its context)"),
        ("--stride", "tokens that each further window adds (half a window)"),
        ("--tokens", "use only the first N tokens of the text"),
    ):
        parser.add_argument(name, type=count, metavar="N", help=what)
    parser.add_argument("--json", action="store_true", help="print a line of JSON")
    add_selection(parser)


def _evaluate(options: argparse.Namespace) -> int:
    out = streams.results()
    check_options(options, "dtype", "precision", "window", "stride", "tokens")
    if is_index(options.model):
        return evaluate_index(options)
    if options.text is None:
        raise UsageError(f"{options.model} is no index, and a language model needs a TEXT")
    text = read_text(streams.source(options.text))
    model = load(options)
    found = model.evaluate(text, window=options.window, stride=options.stride, most_tokens=options.tokens)
    line = json.dumps({k: v if math.isfinite(v) else None for k, v in found.items()})  # JSON has no infinity
    if not options.json:
        line = f"perplexity {found['perplexity']:.6g}   mean -log p {found['mean_nll']:.4f} nats   "
        line += f"{found['tokens']} tokens predicted"
    print(line, file=out)
    return 0


GENERATE = Command("Continue a text with a language model.", GENERATE_EPILOG, _add_generate, _generate)
CHAT = Command("Talk with a language model that has a chat template.", CHAT_EPILOG, _add_chat, _chat)
EVALUATE = Command(
    "Compute the perplexity of a text, or how well an index is searched.",
    EVALUATE_EPILOG,
    _add_evaluate,
    _evaluate,
)


def load(options: argparse.Namespace) -> Any:
    """Load a language model; another model is a ValueError."""
    how = {name: value for name in LOADING if (value := getattr(options, name, None)) is not None}
    model = models.load(options.model, **how)
    if not hasattr(model, "generate"):
        raise ValueError(f"{options.model} holds a {type(model).__name__}, which is not a language model")
    return model


def _print(answer: Any, out: Any) -> None:
    """Print an answer as a line of JSON, or pieces of a text as they come."""
    if isinstance(answer, Answer):
        print(json.dumps(answer.to_dict()), flush=True, file=out)
        return
    try:
        for piece in answer:
            print(piece, end="", flush=True, file=out)
    except KeyboardInterrupt:  # during printing
        answer.close()
        warnings.warn(AnswerInterrupted("interrupted; the answer ends there"), stacklevel=2)
    print(flush=True, file=out)


def _interrupted(options: argparse.Namespace) -> bool:
    """Tell whether Ctrl-C has ended an answer."""
    return any(issubclass(category, AnswerInterrupted) for category in options.warned)


def _add_model(parser: Parser, other: str = "") -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help=MODEL + other)
    add_dtype(parser)
    what = "compute prompts with rows rounded to these numbers, where weights are quants of a .gguf file (float32)"
    parser.add_argument("--precision", choices=("float32", "int16", "int8"), help=what)


def _add_sampling(parser: Parser, most: int) -> None:
    what = "keep keys and values so while tokens are generated (float32)"
    parser.add_argument("--cache-dtype", choices=("float32", "float16", "bfloat16"), help=what)
    add = parser.add_argument_group("sampling").add_argument
    for name, (take, metavar, what) in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=take, metavar=metavar, help=what.format(most=most))
    what = "add X to the logit of a token, by id or as the tokenizer writes it; may be repeated"
    add("--logit-bias", type=_bias, metavar="TOKEN=X", action="append", help=what)
    add("--sampling", choices=("folder",), help="draw as the folder's generation_config.json says")
    what = "end the answer before this text; may be repeated"
    add("--stop", metavar="TEXT", action="append", type=streams.sentence, help=what)
    what = "draw the same tokens each time; message n of a chat has the seed N + n"
    add("--seed", type=int, metavar="N", help=what)
    add("--json", action="store_true", help="print lines of JSON: answers, why they end, counts of tokens")
    add("--logprobs", type=int, metavar="N", help="with --json: log p of new tokens, and of the N likeliest")


def _bias(text: str) -> tuple[int | str, float]:
    token, _, number = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if token:
            return int(token) if token.isdecimal() else token, float(number)
    raise argparse.ArgumentTypeError(f"must be a token, = and a number, not {text!r:.80}")


def _how(options: argparse.Namespace) -> dict[str, Any]:
    if options.logprobs is not None and not options.json:
        raise UsageError("--logprobs needs --json")
    how = {name: getattr(options, name) for name in (*SAMPLING, "sampling", "stop", "logprobs")}
    how["rng"] = None if options.seed is None else checked_seed(options.seed)
    how["logit_bias"] = dict(options.logit_bias or ())
    how["details"], how["stream"] = options.json, not options.json
    return how
