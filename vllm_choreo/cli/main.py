# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-choreo`: a file for each subcommand, with its arguments and its `main`."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Protocol

from vllm_choreo.cli import (
    dashboard,
    demo,
    distil,
    doctor,
    explain,
    inspect,
    keep,
    model,
    pml,
    record,
    train,
)
from vllm_choreo.cli.calibrate import arguments as calibrate
from vllm_choreo.cli.evaluate import command as evaluate
from vllm_choreo.cli.profile_pair import arguments as profile_pair
from vllm_choreo.cli.run import command as run


class Command(Protocol):
    """A module with one subcommand. It imports what it needs when it runs, and no sooner."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of `main` to the parser."""

    def main(self, args: argparse.Namespace) -> int:
        """Run the subcommand; return the exit status."""


_COMMANDS: dict[str, tuple[Command, str]] = {
    "model": (
        model,
        "make a small test model (SmolLM2-135M-Instruct, or one by --name) and print its folder",
    ),
    "demo": (demo, "run two workflows both ways and compare times"),
    "run": (run, "run a workflow on problems; write transcripts and a page that shows them"),
    "record": (record, "run a workflow on many problems as text, for training"),
    "train": (train, "train an adapter on recorded runs, so that choreography answers as text"),
    "distil": (distil, "recorded runs as direct calls with their answers, a control to train"),
    "evaluate": (evaluate, "judge choreography and adapters against the text; a page of it"),
    "calibrate": (calibrate, "what repair buys on your own runs, and a policy that buys enough"),
    "profile-pair": (
        profile_pair,
        "which layers one adapter encodes anew of what another has encoded; a profile that says so",
    ),
    "pml": (pml, "prompts from schemas of reusable modules: check, show, encode and run files"),
    "keep": (keep, "encode texts and save them, load them, see what a folder of them holds"),
    "doctor": (
        doctor,
        "check on this machine that choreography is right for a model (against HuggingFace)",
    ),
    "explain": (explain, "what of recorded chats would be reused, and where answers may differ"),
    "inspect": (inspect, "show messages, their blocks and who shares them"),
    "dashboard": (dashboard, "print the Grafana dashboard of a server's metrics, as JSON"),
}

# How to get the packages that vllm-choreo does not install by itself.
_ENGINE = "install vllm==0.32.0 (GPU), or the CPU build with `make setup` in the repository"
_INSTALL = {
    "torch": _ENGINE,
    "vllm": _ENGINE,
    "httpx": "run `pip install httpx`",
    "msgspec": "run `pip install msgspec`",
    "peft": "run `pip install 'vllm-choreo[train]'`",
    "matplotlib": "run `pip install matplotlib`",
    "tqdm": "run `pip install tqdm`",
    "fsspec": "run `pip install fsspec`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit status: 0 when all is well, 1 when the subcommand says why not, 130 on Ctrl-C.
    """
    args = _parser().parse_args(argv)
    from vllm_choreo.errors import ChoreoError
    from vllm_choreo.smallmodel.embedded import EmbeddedModelError

    try:
        return int(args.main(args) or 0)
    except (EmbeddedModelError, ChoreoError) as error:
        print(f"vllm-choreo: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in _INSTALL:
            raise
        print(f"vllm-choreo: {error.name} is missing: {_INSTALL[error.name]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-choreo", description="Choreographed LLM workflows on vLLM: reuse any message."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (command, text) in _COMMANDS.items():
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(main=command.main)
        command.add_arguments(added)
    return parser


def _version() -> str:
    try:
        return f"vllm-choreo {importlib.metadata.version('vllm-choreo')}"
    except importlib.metadata.PackageNotFoundError:
        return "vllm-choreo (not installed)"


if __name__ == "__main__":
    sys.exit(main())
