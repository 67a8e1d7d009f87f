# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo model`: the folder of a small test model, which is made if it is not there."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_choreo.cli.commands import Main
from vllm_choreo.errors import ChoreoError
from vllm_choreo.testing.models.sources import DEFAULT, SOURCES


def command(parser: argparse.ArgumentParser) -> Main:
    """Make a small test model (SmolLM2-135M-Instruct, or one by --name) and print its folder.

    A GGUF file of the user's own is converted likewise.
    """
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="folder to make (default: in the cache)"
    )
    sizes = ", ".join(
        f"{source.name} ({source.license}, {source.folder_bytes // 10**6} MB)"
        for source in SOURCES.values()
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--name", choices=list(SOURCES), default=DEFAULT, help=f"one of {sizes}; default: the first"
    )
    which.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="a GGUF file to convert instead, of an architecture that is known (docs/models.md)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to make, as PATH")
    return main


def main(args: argparse.Namespace) -> int:
    """Print the folder alone on standard output, for use in scripts; the exit status, 0.

    Raises:
        ChoreoError: no folder is named for a GGUF file, or two are.
    """
    from vllm_choreo.testing.models.embedded import embedded_model, gguf_model

    if args.path and args.out:
        raise ChoreoError("two folders are named: leave out PATH or --out")
    folder = args.path or args.out
    if args.gguf is None:
        print(embedded_model(folder, name=args.name))
    elif folder is None:
        raise ChoreoError("--gguf needs the folder to make: add --out DIR")
    else:
        print(gguf_model(args.gguf, folder))
    return 0
