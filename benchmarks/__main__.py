"""``python -m benchmarks NAME``, in a clone of the repository; ``NAME --help`` lists the options."""

import sys
from argparse import REMAINDER
from collections.abc import Sequence
from importlib import import_module

from selfattn.cli.parser import Parser

COMMANDS = {
    "layers": "TransformerEncoder and Linear, forward and backward",
    "gpt": "a training step of a small GPT",
    "embedding": "a training step of the tutorial's embedding model, one sentence, many",
    "encoder": "a pretrained sentence encoder, texts in and embeddings out",
    "generation": "a language model of a GGUF file, prompts and answers",
    "perplexity": "of GGUF files, compared with llama.cpp and with float32",
    "weights": "products of decoding with the quants of a GGUF file, compared with reading them",
    "shares": "each job beside the limit that binds it, by part of the work, one thread and all",
    "ragged": "packed sequences of many lengths",
    "blocks": "block masks and a window",
    "search": "the best of a million vectors, float32 and int8, against faiss and usearch",
    "long": "long sequences: time and memory of a pass",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code."""
    epilog = "names:\n" + "\n".join(f"  {name:12}{what}" for name, what in COMMANDS.items())
    parser = Parser(prog="python -m benchmarks", description=__doc__, epilog=epilog)
    parser.add_argument("name", choices=COMMANDS, metavar="NAME", help="which one, see below")
    parser.add_argument("options", nargs=REMAINDER, help="its own options")
    given = parser.parse_args(arguments)
    module = import_module(f"benchmarks.{given.name}")
    return int(module.main(given.options, prog=f"python -m benchmarks {given.name}"))


if __name__ == "__main__":
    sys.exit(main())
