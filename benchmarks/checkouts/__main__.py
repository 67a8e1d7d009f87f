# SPDX-License-Identifier: Apache-2.0
"""This checkout against another one: time to first token of a parallel debate, ordinary requests.

    python -m benchmarks.checkouts --against DIR [--passes 6] [--turns 3]

DIR is a checkout of this repository whose kernels are built there (`python setup.py build_ext
--inplace`). Each pass starts a process per checkout; both are up at once and take turns, one debate
and one batch of ordinary requests each. Processes on one machine differ by a tenth either way:
hence many passes, and the gain over the baseline, which is measured within each process.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.checkouts.bars import FIGURES, OTHER, THIS, bars_reached
from benchmarks.checkouts.tables import TABLES
from benchmarks.harness.child import Child
from benchmarks.harness.record import BENCHMARKS, record, write_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import as_text
from benchmarks.harness.turns import in_turn

CHILD = Path(__file__).with_name("child.py")


def main() -> int:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        rows += _pass(number, args)
    write_csv("checkouts", rows, **record())
    print(as_text(TABLES.values()))
    return int(not bars_reached(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, metavar="DIR")
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3, help="of each checkout, per pass")
    parser.add_argument("--rounds", type=int, default=3, help="of the debate")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=12, help="ordinary ones, in a batch")
    parser.add_argument("--model", help="folder (default: the small test model)")
    args = parser.parse_args()
    if not (args.against / "vllm_choreo" / "__init__.py").exists():
        parser.error(f"--against: {args.against} is no checkout of this repository")
    if args.model is None:
        from vllm_choreo.testing.models.embedded import embedded_model

        args.model = str(embedded_model())
    return args


def _pass(number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    folders = {THIS: BENCHMARKS.parent, OTHER: args.against.resolve()}
    rows = []
    with contextlib.ExitStack() as stack:
        children = {
            name: stack.enter_context(_start(name, folder, args))
            for name, folder in folders.items()
        }
        for name, child in children.items():
            if not child.ask("kernels"):
                raise SystemExit(f"{name} has no kernels: build them there, see --help")
            for what in FIGURES:  # what is done once only shall not be timed
                child.ask(what)
        for turn in range(args.turns):
            for name in in_turn(list(children), number + turn):
                found = {what: children[name].ask(what) for what in FIGURES}
                rows.append(
                    {
                        "pass": number,
                        "turn": turn,
                        "checkout": name,
                        "ttft_s": round(median(found["choreo"]), 6),
                        "baseline_ttft_s": round(median(found["baseline"]), 6),
                        "tokens_per_s": round(found["ordinary"], 2),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def _start(name: str, folder: Path, args: argparse.Namespace) -> Child:
    numbers = (args.rounds, args.answer_tokens, args.requests)
    arguments = ["-P", str(CHILD), str(folder), args.model, *map(str, numbers)]
    environment = {"PYTHONPATH": str(folder), "VLLM_PLUGINS": "choreo"}
    return Child(name, arguments, environment, folder)


if __name__ == "__main__":
    sys.exit(main())
