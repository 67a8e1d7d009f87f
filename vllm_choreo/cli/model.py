# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo model`: the folder of the small test model, which is made if it is not there."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `main` takes."""
    parser.add_argument(
        "path", nargs="?", type=Path, metavar="PATH", help="folder to make (default: in the cache)"
    )


def main(args: argparse.Namespace) -> int:
    """Print the folder alone on standard output, for use in scripts; the exit status, 0."""
    from vllm_choreo.smallmodel.embedded import embedded_model

    print(embedded_model(args.path))
    return 0
