# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo dashboard`: the Grafana dashboard of a server's metrics."""

from __future__ import annotations

import argparse
import importlib.resources
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `main` takes: nothing."""


def main(args: argparse.Namespace) -> int:
    """Print it as JSON, to be imported into Grafana; the exit status, 0."""
    file = importlib.resources.files("vllm_choreo.server") / "dashboard.json"
    sys.stdout.write(file.read_text(encoding="utf-8"))
    return 0
