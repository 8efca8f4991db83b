"""Numbers as arguments of commands: what is none, or out of range, is wrong usage."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """Take a whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r:.80}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def rate(text: str) -> float:
    """Take a finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r:.80}") from None
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {text}")
    return number
