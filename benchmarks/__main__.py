"""selfattn timed in turns with other libraries, and as a share of the machine's limit.

``python -m benchmarks attention --help``, in a clone of the repository, lists the options of a program. The limit of
products is the CPU's multiply-adds in registers; that of a call that reads more than it computes, a loop that only
reads. ``vs NAME`` is NAME's time divided by selfattn's. Exit code: 0; 1 if results differ or selfattn failed; 2 for
wrong usage.
"""

import sys
from importlib import import_module

from benchmarks import table
from selfattn.cli import streams
from selfattn.cli.parser import Parser

PROGRAMS = ("attention", "layers", "models", "search")


def main(arguments=None):
    """Run a benchmark and return its exit code."""
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    programs = parser.add_subparsers(dest="program", required=True, metavar="PROGRAM")
    modules = {name: import_module(f"benchmarks.{name}") for name in PROGRAMS}
    for name, module in modules.items():
        about = module.__doc__
        each = programs.add_parser(name, help=about.partition("\n")[0], description=about)
        table.add_options(each, module.SUITES, module.PEERS)
        module.add_options(each)
    options = parser.parse_args(arguments)
    try:
        return table.run(modules[options.program].rows(options), options)
    except (OSError, ValueError, RuntimeError) as error:
        return streams.fail(f"{parser.prog} {options.program}", error)


if __name__ == "__main__":
    sys.exit(main())
