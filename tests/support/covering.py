"""A few cases in which any two choices occur together, where all cases would be too many."""

import itertools

import numpy as np
from inputs import OPTIONS


def covering(**axes):
    """Return dicts with one value of each axis; any two values of two axes occur together in one dict."""
    rng = np.random.default_rng(0)
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }

    def newly_met(one, chosen):
        pairs = (sorted((one, other), key=lambda place: names.index(place[0])) for other in chosen.items())
        return sum(tuple(pair) in missing for pair in pairs)

    found = []
    while missing:
        chosen = dict(min(missing))
        for name in rng.permutation([name for name in names if name not in chosen]).tolist():
            most = rng.permutation(len(axes[name])).tolist()
            chosen[name] = max(most, key=lambda i, name=name: newly_met((name, i), chosen))
        missing -= set(itertools.combinations([(name, chosen[name]) for name in names], 2))
        found.append({name: axes[name][chosen[name]] for name in names})
    return found


ALONE = [(name,) for name in OPTIONS]
OTHERS = ("softcap", "alibi_slopes", "sinks", "key_lengths", "scale", "dropout")
TOGETHER = [
    tuple(name for name in case.values() if name is not None)
    for case in covering(
        mask=[None, "bool_mask", "float_mask"],
        diagonal=[None, "is_causal", "lower_right"],
        window=[None, "window", "left_window"],
        **{name: [None, name] for name in OTHERS},
    )
]
assert set().union(*TOGETHER) == set(OPTIONS) - {"plain"}
SETS_OF_OPTIONS = ALONE + TOGETHER  # each option alone, and sets in which any two occur together
