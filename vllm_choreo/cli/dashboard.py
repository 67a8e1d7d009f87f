# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo dashboard`: the Grafana dashboard of a server's metrics."""

from __future__ import annotations

import argparse
import importlib.resources
import sys

from vllm_choreo.cli.commands import Main


def command(parser: argparse.ArgumentParser) -> Main:
    """Print the Grafana dashboard of a server's metrics, as JSON."""
    return main


def main(args: argparse.Namespace) -> int:
    """Print the dashboard as JSON, to be imported into Grafana; return the exit status, 0."""
    file = importlib.resources.files("vllm_choreo.server") / "dashboard.json"
    sys.stdout.write(file.read_text(encoding="utf-8"))
    return 0
