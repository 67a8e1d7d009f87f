# SPDX-License-Identifier: Apache-2.0
"""Arguments that studies have: problems of their own, and a target."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_choreo.lab.cli.options import WORKFLOWS


def add_problems(parser: argparse.ArgumentParser, text: str) -> None:
    """Add arguments for a workflow in place of recorded runs, and its problems.

    Args:
        text: how the workflow is run then, for the help.
    """
    add = parser.add_argument
    add("--workflow", choices=tuple(WORKFLOWS), help=f"instead: this one, {text}")
    add("--set", metavar="NAME", help="which problems are made, as of `vllm-choreo record`")
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help="problems as JSON lines (default: some made from the seed)",
    )


def add_target(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    """Add an argument for what is to be reached, which `text` tells."""
    parser.add_argument(
        "--target", default=default, metavar="NAME=VALUE", help=f"{text} (default: %(default)s)"
    )
