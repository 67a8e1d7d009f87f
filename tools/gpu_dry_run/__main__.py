# SPDX-License-Identifier: Apache-2.0
"""Run what an engine on an NVIDIA GPU runs, without one.

    make gpu-dry-run
    make gpu-dry-run ARGS="configurations --gpu h100 b200 --model gpt-oss"
    make gpu-dry-run ARGS="engines --case float32"

`configurations` resolves engines of real models for six GPUs, without choreography and with it.
`engines` starts tiny models on a device double: probe, graphs, steps of every kind, held to the
laws of choreography. Each GPU and engine is a process of its own. Exit status 1: a fault that is
not known (`tools/gpu_dry_run/faults.py`), or one that is and was not found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_dry_run.engine import CASES
from tools.gpu_dry_run.faults import judge
from tools.gpu_dry_run.gpus import GPUS
from tools.gpu_dry_run.models import MODELS

_PARTS = ("configurations", "engines")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Finding:
    """What one process found in one place.

    Attributes:
        place: "configuration GPU MODEL" or "engine CASE".
        says: what was seen there.
        faults: what is wrong.
        seams: stand-ins for CUDA-only code that were met, and how often.
    """

    place: str
    says: str
    faults: Sequence[str] = ()
    seams: dict[str, int] = field(default_factory=dict)


def main() -> int:
    arguments = _arguments()
    if arguments.child is not None:
        for finding in _look(arguments.child, arguments.model):
            print(json.dumps(vars(finding)), flush=True)
        return 0
    children = []
    if "configurations" in arguments.parts:
        children += [("configurations", gpu) for gpu in arguments.gpu]
    if "engines" in arguments.parts:
        children += [("engines", case) for case in arguments.case]
    findings = [finding for part, name in children for finding in _ask(part, name, arguments.model)]
    return _tell(findings)


def _look(child: Sequence[str], models: Sequence[str]) -> Iterator[Finding]:
    """Look in this process, which pretends a GPU."""
    from tools.gpu_dry_run.pretended import pretend
    from tools.gpu_dry_run.seams import SEAMS

    part, name = child
    if part == "configurations":
        from tools.gpu_dry_run.configurations import compare

        for found in compare(name, models, pretend(GPUS[name])):
            says = f"vLLM: {found.without}\n    choreographed: {found.choreographed}"
            yield Finding(found.key, says, tuple(found.faults()), dict(SEAMS))
    else:
        from tools.gpu_dry_run import engine

        double = pretend(CASES[name].pretended, **engine.environment(name))
        report = engine.run(name, double)
        yield Finding(f"engine {name}", str(report), tuple(report.faults), dict(SEAMS))


def _ask(part: str, name: str, models: Sequence[str]) -> list[Finding]:
    """Have another process look."""
    command = [sys.executable, "-m", "tools.gpu_dry_run", "--child", part, name]
    ended = subprocess.run(
        [*command, "--model", *models], cwd=_ROOT, capture_output=True, text=True
    )
    findings = []
    for line in ended.stdout.splitlines():
        if line.startswith('{"place"'):
            findings.append(Finding(**json.loads(line)))
            print(f"{findings[-1].place}\n    {findings[-1].says}", flush=True)
    if ended.returncode:
        said = " ".join(ended.stderr.strip().splitlines()[-3:])
        findings.append(Finding(f"{part} {name}", "ended early", (said,)))
    return findings


def _tell(findings: Sequence[Finding]) -> int:
    """Print the verdict; returns the exit status."""
    found = [(finding.place, fault) for finding in findings for fault in finding.faults]
    verdict = judge(found, [finding.place for finding in findings])
    seams: Counter[str] = Counter()
    for finding in findings:
        seams.update(finding.seams.keys())
    _print_list("CUDA-only code met, for which something else stood in", sorted(seams))
    _print_list("known faults", verdict.known)
    _print_list("mended", verdict.mended)
    _print_list("FAULTS", verdict.new)
    print(f"{len(findings)} places, {len(verdict.known)} known faults, {len(verdict.new)} new ones")
    return int(not verdict.is_good)


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"{title}:")
    for line in lines:
        print(f"  {line}")


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        prog="make gpu-dry-run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", default=[*_PARTS], metavar="PART")
    parser.add_argument("--gpu", nargs="+", default=[*GPUS], choices=GPUS, metavar="GPU")
    parser.add_argument("--model", nargs="+", default=[*MODELS], choices=MODELS, metavar="MODEL")
    parser.add_argument("--case", nargs="+", default=[*CASES], choices=CASES, metavar="CASE")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(_PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose of {', '.join(_PARTS)}")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
