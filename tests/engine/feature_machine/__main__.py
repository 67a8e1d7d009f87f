# SPDX-License-Identifier: Apache-2.0
"""Random programs across features for as long as you like.

    python -m tests.engine.feature_machine --minutes 60 --workers 2
    python -m tests.engine.feature_machine --configuration tight --seeds 0:500
    python -m tests.engine.feature_machine --configuration tight --seeds 17 --show
    python -m tests.engine.feature_machine --configuration on-v2 --seeds 0:100

Exit status 1: a program failed. What failed is printed as a test, shrunk.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from tests.engine.feature_machine.configurations import CONFIGURATIONS, ON_V2
from tests.engine.feature_machine.generator import program_of

if TYPE_CHECKING:
    from tests.engine.feature_machine.soak import Failure, Tally

# Read when vLLM and OpenMP are imported, in all processes.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # else n-grams give torch two threads, which wait for each other
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else what counts ranks is compiled for batches of every size
}

_GROUPS = {"all": [*CONFIGURATIONS], "on-v2": [*ON_V2]}


def main() -> int:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from tests.engine.feature_machine.soak import soak

    arguments = _arguments()
    names = _names(arguments.configuration)
    first, last = _seeds(arguments.seeds)
    if arguments.show:
        for name in names:
            print(program_of(name, first).as_test(f"{name}_{first}"))
        return 0
    start = time.monotonic()
    tallies: list[Tally] = []
    shown: set[str] = set()
    found = soak(
        names,
        first,
        last,
        arguments.minutes,
        arguments.workers,
        arguments.shrink_seconds,
        arguments.ignore,
    )
    for tally in found:
        tallies.append(tally)
        for failure in tally.failures:
            _print_failure(failure, is_new=failure.law not in shown)
            shown.add(failure.law)
        _print_progress(tallies, time.monotonic() - start)
    _print_table(tallies)
    return int(any(tally.failures for tally in tallies))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configuration",
        nargs="+",
        default=["all"],
        choices=[*_GROUPS, *CONFIGURATIONS, *ON_V2],
        help="those on model runner V2 (on-v2) run by themselves",
    )
    parser.add_argument("--seeds", default="0:", help="FIRST:LAST, FIRST: without an end, or one")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument(
        "--shrink-seconds", type=float, default=120.0, help="for each kind of failure; 0: as it is"
    )
    parser.add_argument(
        "--ignore", nargs="+", default=[], help="parts of the names of failures that are known"
    )
    parser.add_argument("--show", action="store_true", help="print the program of a seed")
    return parser.parse_args()


def _names(chosen: list[str]) -> list[str]:
    names = [name for part in chosen for name in _GROUPS.get(part, [part])]
    if 0 < len(set(names) & set(ON_V2)) < len(set(names)):
        raise SystemExit("a process has engines on model runner V2, or others: choose either")
    return names


def _seeds(text: str) -> tuple[int, int | None]:
    first, colon, last = text.partition(":")
    if not colon:
        return int(first), int(first) + 1
    return int(first or 0), int(last) if last else None


def _print_failure(failure: Failure, is_new: bool) -> None:
    """Print which program failed, and of the first that broke a law all there is to know."""
    print(f"\n{failure.configuration}, seed {failure.seed}: {failure.law}", flush=True)
    if is_new:
        print(failure.detail)
        print(failure.where)
        print(failure.test, flush=True)


def _print_progress(tallies: list[Tally], seconds: float) -> None:
    num_programs = sum(tally.counts["programs"] for tally in tallies)
    num_failures = sum(len(tally.failures) for tally in tallies)
    print(f"{seconds:.0f} s: {num_programs} programs, {num_failures} failures", flush=True)


def _print_table(tallies: list[Tally]) -> None:
    columns = ("programs", "calls", "steps", "ordinary", "saves", "loads", "aborted")
    print(f"\n{'':<12}" + "".join(f"{column:>10}" for column in columns) + "   seconds  failures")
    for name in dict.fromkeys(tally.configuration for tally in tallies):
        own = [tally for tally in tallies if tally.configuration == name]
        counts = sum((tally.counts for tally in own), Counter[str]())
        numbers = "".join(f"{counts[column]:>10}" for column in columns)
        seconds, failures = sum(t.seconds for t in own), sum(len(t.failures) for t in own)
        print(f"{name:<12}{numbers}{seconds:>10.0f}{failures:>10}")
    counts = sum((tally.counts for tally in tallies), Counter[str]())
    for kind in sorted(key for key in counts if key not in columns):
        print(f"  {kind}: {counts[kind]}")
    laws = Counter(failure.law for tally in tallies for failure in tally.failures)
    for law, number in laws.most_common():
        of = [f for tally in tallies for f in tally.failures if f.law == law]
        seeds = ", ".join(f"{f.configuration} {f.seed}" for f in of[:6])
        print(f"  FAILED {number}: {law} ({seeds})")


if __name__ == "__main__":
    sys.exit(main())
