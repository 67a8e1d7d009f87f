# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-choreo`. Parses arguments only; each subcommand imports what it needs."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.resources
import sys
from collections.abc import Sequence
from pathlib import Path

# How to get the packages that vllm-choreo does not install by itself.
_ENGINE = "install vllm==0.32.0 (GPU), or the CPU build with `make setup` in the repository"
_INSTALL = {
    "torch": _ENGINE,
    "vllm": _ENGINE,
    "httpx": "run `pip install httpx`",
    "matplotlib": "run `pip install matplotlib`",
    "tqdm": "run `pip install tqdm`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit status: 0 when all is well, 1 when the subcommand says why not, 130 on Ctrl-C.
    """
    args = _parser().parse_args(argv)
    # Not imported at the top: `--help` must answer at once.
    from vllm_choreo.errors import ChoreoError
    from vllm_choreo.smallmodel.embedded import EmbeddedModelError

    try:
        if args.command == "model":
            return _model(args)
        if args.command == "dashboard":
            return _dashboard()
        return int(importlib.import_module(args.module).main(args) or 0)
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


def _model(args: argparse.Namespace) -> int:
    """Print the folder of the embedded model, alone on standard output, for use in scripts."""
    from vllm_choreo.smallmodel.embedded import embedded_model

    print(embedded_model(args.path))
    return 0


def _dashboard() -> int:
    """Print the Grafana dashboard of a server, to be imported into Grafana."""
    file = importlib.resources.files("vllm_choreo.server") / "dashboard.json"
    sys.stdout.write(file.read_text(encoding="utf-8"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-choreo", description="Choreographed LLM workflows on vLLM: reuse any message."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_model(commands)
    _add_demo(commands)
    _add_run(commands)
    _add_doctor(commands)
    _add_inspect(commands)
    text = "print the Grafana dashboard of a server's metrics, as JSON"
    commands.add_parser("dashboard", help=text, description=text)
    return parser


def _version() -> str:
    try:
        return f"vllm-choreo {importlib.metadata.version('vllm-choreo')}"
    except importlib.metadata.PackageNotFoundError:
        return "vllm-choreo (not installed)"


_Commands = argparse._SubParsersAction  # the only name that argparse has for it


def _add_model(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "make the small test model (SmolLM2-135M-Instruct, 540 MB) and print its folder"
    parser = commands.add_parser("model", help=text, description=text)
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="folder to make (default: in the cache)"
    )


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "run two workflows both ways and compare times"
    parser = commands.add_parser("demo", help=text, description=text)
    parser.set_defaults(module="vllm_choreo.cli.demo")
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or name (default: the small test model)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="run N tasks only (default: all)"
    )


def _add_run(commands: _Commands[argparse.ArgumentParser]) -> None:
    from vllm_choreo.cli.run.options import add_arguments

    text = "run a workflow on problems; write transcripts and a page that shows them"
    parser = commands.add_parser("run", help=text, description=text)
    parser.set_defaults(module="vllm_choreo.cli.run.command")
    add_arguments(parser)


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "check on this machine that choreography is right for a model (against HuggingFace)"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.set_defaults(module="vllm_choreo.cli.doctor")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model folder or name (default: the small test model)",
    )


def _add_inspect(commands: _Commands[argparse.ArgumentParser]) -> None:
    text = "show messages, their blocks and who shares them"
    parser = commands.add_parser("inspect", help=text, description=text)
    parser.set_defaults(module="vllm_choreo.cli.inspect")
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="JSON written by json.dump(c.stats(), file) (default: run a few calls on a model)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or name (default: the small test model)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
