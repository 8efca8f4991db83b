"""Every operation of the catalogue: its bits do not depend on the number of threads."""

import pytest
from operations import OPERATIONS, ROW_OPERATIONS, Draw, drawn, rows, same

import selfattn as sa


class Large(Draw):
    """Draws arrays that are large enough for several threads."""

    def size(self, choices):
        return max(choices)


PREPARED = {name: each.prepare for name, each in OPERATIONS.items() if not each.random}
PREPARED |= {
    f"{name} of large arrays {n}": lambda name=name, n=n: rows(Large(n), name)
    for name in ROW_OPERATIONS
    for n in range(5)
}
PREPARED |= {f"drawn {n}": lambda n=n: drawn(Draw(n, 3)) for n in range(40)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PREPARED)
def test_bits_do_not_depend_on_threads(name, threads_restored):
    sa.set_num_threads(1)
    expected = PREPARED[name]()[0]()
    for threads in (2, 7):
        sa.set_num_threads(threads)
        assert same(PREPARED[name]()[0](), expected), threads
