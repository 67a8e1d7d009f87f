# SPDX-License-Identifier: Apache-2.0
"""The short form of the benchmarks, then the tables of pages from their CSV files.

python -m benchmarks            about a quarter of an hour on 2 idle cores
python -m benchmarks ttft       some of them
python -m benchmarks --page     measure nothing; fill the tables of RESULTS.md and of pages in docs/
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.harness.record import BENCHMARKS, PAGES, RESULTS
from benchmarks.harness.tables import filled
from benchmarks.tables import TABLES

_WORKFLOWS = "benchmarks.workflows --questions 1 --answer-tokens 6 --verdict-tokens 2"
# Each in a process of its own: engines leave global state behind.
COMMANDS: dict[str, tuple[str, ...]] = {
    "workflows": (_WORKFLOWS,),
    "processes": (f"{_WORKFLOWS} --processes --passes 1",),
    "sweep": (
        "benchmarks.sweep --sizes 2 8 --candidate-tokens 12 --vote-tokens 4 --final-tokens 4",
    ),
    "scaling": ("benchmarks.scaling --tokens 500 2000 4000",),
    "policies": ("benchmarks.policies",),
    "mixed": ("benchmarks.mixed",),
    "server": ("benchmarks.mixed.over_http",),
    "soak": ("benchmarks.soak load",),
    "quality": ("benchmarks.quality --limit 16 --questions 2",),
    "shared": ("benchmarks.attention.shared_reading --rounds 3",),
    "pml": ("benchmarks.pml --documents 1000 --in-flight 1 --turns 2 --limit 4",),
    "keep": ("benchmarks.keep --turns 3",),
    "frontier": ("benchmarks.frontier --problems 2 --tasks look-up votes",),
    "rivals": ("benchmarks.planner.rivals --workflow debate --queries 2 --turns 1",),
    "workers": ("benchmarks.planner.workers --queries 2 --turns 1 --answer-tokens 8",),
    "moves": ("benchmarks.planner.moves --tokens 16 64 256 --turns 3",),
    "on_ramps": ("benchmarks.on_ramps --tokens 1000 --turns 2",),
    "inside": (
        "benchmarks.inside --turns 2",
        "benchmarks.inside.attack --tokens 8",
    ),
    "settings": (
        "benchmarks.rivals permuted --orders 4 --max-tokens 8",
        "benchmarks.rivals multidoc --requests 6 --max-tokens 8",
        "benchmarks.rivals agents --rounds 1 --max-tokens 32",
    ),
    "kinds": ("benchmarks.attention.kinds --rounds 5 --passes 1",),
    "ttft": ("benchmarks.ttft --reps 1",),
    "ordinary": ("benchmarks.ordinary --turns 2",),
    "states": (
        "benchmarks.states --turns 8 --passes 1",
        "benchmarks.states.orders --passes 1 --turns 1 --judged 2",
    ),
    "memory": ("benchmarks.memory",),
    "session": ("benchmarks.memory.long_session",),
    "attention": tuple(
        f"benchmarks.attention --rounds 7 --csv {RESULTS}/span_attention_{number}.csv"
        for number in (1, 2)
    ),
}

# Only if they are named: their bars are for full lengths, they show in more breadth what others
# show, or they take long.
_BROADER = ("processes", "sweep", "scaling", "ttft", "policies", "mixed", "server", "quality")
_LONG = (
    "memory", "session", "soak", "frontier", "rivals", "settings", "inside", "workers", "moves",
    "states",
)  # fmt: skip
_ASKED_FOR = (*_BROADER, *_LONG)
_DEFAULT = [name for name in COMMANDS if name not in _ASKED_FOR]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], metavar="name")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    missed = []
    if not args.page:
        RESULTS.mkdir(exist_ok=True)
        missed = [name for name in args.names or _DEFAULT if not _run(name)]
    write_pages()
    print(f"Written: {', '.join(str(page.relative_to(BENCHMARKS.parent)) for page in PAGES)}")
    if missed:
        print(f"Failed, or below the bar: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def _run(name: str) -> bool:
    """Run a benchmark; whether it met its bar."""
    passed = True
    for command in COMMANDS[name]:
        began = time.perf_counter()
        print(f"== python -m {command}", flush=True)
        status = subprocess.run([sys.executable, "-m", *command.split()], cwd=BENCHMARKS.parent)
        print(f"== status {status.returncode}, {time.perf_counter() - began:.0f} s", flush=True)
        passed &= status.returncode == 0
    return passed


def write_pages() -> None:
    """Fill the tables of all pages from the CSV files; their sentences stay as they are."""
    for page in PAGES:
        page.write_text(filled(page.read_text(), TABLES))


if __name__ == "__main__":
    sys.exit(main())
