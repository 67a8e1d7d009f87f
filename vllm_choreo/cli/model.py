# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo model`: the folder of a small test model, which is made if it is not there."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_choreo.cli.commands import Main
from vllm_choreo.testing.models.sources import DEFAULT, SOURCES


def command(parser: argparse.ArgumentParser) -> Main:
    """Make a small test model (SmolLM2-135M-Instruct, or one by --name) and print its folder."""
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="folder to make (default: in the cache)"
    )
    sizes = ", ".join(
        f"{source.name} ({source.license}, {source.folder_bytes // 10**6} MB)"
        for source in SOURCES.values()
    )
    parser.add_argument(
        "--name", choices=list(SOURCES), default=DEFAULT, help=f"one of {sizes}; default: the first"
    )
    return main


def main(args: argparse.Namespace) -> int:
    """Print the folder alone on standard output, for use in scripts; the exit status, 0."""
    from vllm_choreo.testing.models.embedded import embedded_model

    print(embedded_model(args.path, name=args.name))
    return 0
