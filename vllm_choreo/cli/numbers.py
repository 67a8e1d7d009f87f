# SPDX-License-Identifier: Apache-2.0
"""Whole numbers on the command line: types of arguments for argparse."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read an int of at least 1.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    return _whole(text, 1)


def natural(text: str) -> int:
    """Read an int of at least 0.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return value
