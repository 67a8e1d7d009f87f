# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_choreo.cli.engine import DEFAULT_MAX_MODEL_LEN
from vllm_choreo.cli.numbers import positive


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the model of an engine in this process, its turns and its context."""
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or name (default: the small test model)"
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="template in Jinja that writes the turns (default: the model's own)",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        metavar="N",
        help=f"the engine's context, in tokens (default: {DEFAULT_MAX_MODEL_LEN})",
    )


def add_out(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    """Add an argument for the folder that a command writes."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help=f"{text} (default: %(default)s)",
    )
