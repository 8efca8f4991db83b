"""What a model says to the core, and what a package of models builds on.

It is the one module of selfattn that such a package needs besides public names.

Submodules: `transformer` (settings and arrays), `weights` (rounded weights and quants), `rope` (rotary angles),
`decoder`, `sampling`. This module has what these and every model share: checks of arguments, products, the core's
search, `disk`: files that appear whole or not at all.
"""

from selfattn import _disk as disk
from selfattn._check import (
    Array,
    Entries,
    as_array,
    check_number,
    check_rows,
    check_size,
    if_missing,
    is_float,
    one_of,
    quoted,
    warn,
)
from selfattn._core import _checksum as checksum
from selfattn._core import _search as search_rows
from selfattn._docs import copy_doc
from selfattn._extras import bar, import_extra
from selfattn.functional._products import linear, linear_backward
from selfattn.functional._similarity import SIMILARITIES, pairwise_similarities, similarities, unit_rows

__all__ = [
    "SIMILARITIES",
    "Array",
    "Entries",
    "as_array",
    "bar",
    "check_number",
    "check_rows",
    "check_size",
    "checksum",
    "copy_doc",
    "disk",
    "if_missing",
    "import_extra",
    "is_float",
    "linear",
    "linear_backward",
    "one_of",
    "pairwise_similarities",
    "quoted",
    "search_rows",
    "similarities",
    "unit_rows",
    "warn",
]
