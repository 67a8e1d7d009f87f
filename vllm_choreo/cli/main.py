# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-choreo`: its subcommands are those that `commands` finds."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from vllm_choreo.cli.commands import add_command, find_commands, install_advice


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit status: 0 when all is well, 1 when the subcommand says why not, 130 on Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    from vllm_choreo.errors import ChoreoError
    from vllm_choreo.testing.models.embedded import EmbeddedModelError

    try:
        return int(args.main(args) or 0)
    except (EmbeddedModelError, ChoreoError) as error:
        print(f"vllm-choreo: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        advice = install_advice(error.name, args.point.dist)
        if advice is None:
            raise
        print(f"vllm-choreo: {error.name} is missing: {advice}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Parser of a command line; it has the subcommand that is named first, or else all."""
    parser = argparse.ArgumentParser(
        prog="vllm-choreo", description="Choreographed LLM workflows on vLLM: reuse any message."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    found = find_commands()
    if not found:
        parser.epilog = "No command is installed: run `pip install .`, or `make setup`, once more."
    if argv and argv[0] in found:
        add_command(commands, found[argv[0]])
        return parser
    for name, point in found.items():
        try:
            add_command(commands, point)
        except Exception as error:  # another package's: the others are to be seen
            commands.add_parser(name, help=f"(cannot be loaded: {error})")
    return parser


def _version() -> str:
    try:
        return f"vllm-choreo {importlib.metadata.version('vllm-choreo')}"
    except importlib.metadata.PackageNotFoundError:
        return "vllm-choreo (not installed)"


if __name__ == "__main__":
    sys.exit(main())
