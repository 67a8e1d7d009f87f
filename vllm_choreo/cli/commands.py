# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `vllm-choreo`, found by entry points (docs/commands.md).

    [project.entry-points."vllm_choreo.commands"]
    doctor = "vllm_choreo.cli.doctor:command"

An entry point names a function that is given the parser of its subcommand, adds arguments, and
returns what runs it. The first paragraph of its docstring is the subcommand's help. Its module
imports what a run needs when it runs, and no sooner.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint, entry_points

GROUP = "vllm_choreo.commands"

# Given the parsed arguments; returns the exit status.
Main = Callable[[argparse.Namespace], int]

# Packages that no extra of ours brings.
_ENGINE = "install vllm==0.32.0 (GPU), or the CPU build with `make setup` in the repository"
_INSTALL = {"torch": _ENGINE, "vllm": _ENGINE, "fsspec": "run `pip install fsspec`"}
_OF_EXTRA = re.compile(r"([\w.-]+).*extra == ['\"]([\w.-]+)['\"]")


def find_commands() -> dict[str, EntryPoint]:
    """Return the installed subcommands by their names, sorted; none is loaded.

    Of two with one name ours is taken.
    """
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, _is_ours(point)))
    return {point.name: point for point in points}


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("vllm_choreo.")


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], point: EntryPoint
) -> None:
    """Load a subcommand and add its parser, which sets `main` and `point` among its arguments."""
    command = point.load()
    text = " ".join(command.__doc__.partition("\n\n")[0].split()).rstrip(".")
    text = text[0].lower() + text[1:]
    parser = commands.add_parser(point.name, help=text, description=text)
    parser.set_defaults(main=command(parser), point=point)


def install_advice(package: str | None, distribution: Distribution | None) -> str | None:
    """Say how to install a package that a subcommand lacks; None: nobody has asked for it.

    Args:
        package: the name under which it is imported.
        distribution: the one whose subcommand it is; an extra of it may bring the package.
    """
    if package in _INSTALL:
        return _INSTALL[package]
    for requirement in (distribution and distribution.requires) or ():
        found = _OF_EXTRA.match(requirement)
        if distribution and found and found[1] == package:
            return f"run `pip install '{distribution.name}[{found[2]}]'`"
    return None
