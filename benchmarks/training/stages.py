# SPDX-License-Identifier: Apache-2.0
"""Recordings, adapters and evaluations, each made once by `vllm-choreo` in a folder of its own.

A stage that was killed goes on when it is asked for again; one that is there is left alone.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Task(NamedTuple):
    """What is recorded.

    Attributes:
        asked: arguments of `vllm-choreo record`; greedily, as it is judged, unless they differ.
        num_problems: of all parts.
        shares: of training, development and test.
        measures_kl: when judged, which takes as long again as the answers.
    """

    asked: tuple[str, ...]
    num_problems: int = 660
    shares: tuple[float, float, float] = (0.64, 0.04, 0.32)
    measures_kl: bool = True


def _look_ups(name: str) -> Task:
    return Task(("document_qa", "--set", name))


# Where much is generated a run teaches more, and takes longer: of these there are fewer.
TASKS = {
    "key_values": _look_ups("key_values"),
    "sentence_facts": _look_ups("sentence_facts"),
    "reports": _look_ups("reports"),
    "fact_pairs": _look_ups("fact_pairs"),
    "list_pairs": Task(
        ("document_qa", "--set", "list_pairs", "--max-tokens", "60"), 320, (0.3, 0.03, 0.67)
    ),
    "multi_qa": Task(("multi_qa", "--set", "stated_numbers")),
    "stories": Task(("branch_solve_merge", "--max-tokens", "40"), 320, (0.3, 0.03, 0.67), False),
    # What Bob is told is not what Alice is to learn from him.
    "games": Task(
        (
            *("prisoners_dilemma", "--strategies", "none", "always defect", "--max-tokens", "24"),
            *("--short-tokens", "8", "--temperature", "1"),
        ),
        70,
        (0.9, 0.1, 0.0),
    ),
    "debates": Task(
        (
            *("parallel_debate", "--set", "stated_numbers", "--agents", "3", "--rounds", "2"),
            *("--max-tokens", "12"),
        )
    ),
    # Candidates differ by chance alone; a vote is a blank and a number.
    "votes": Task(
        (
            *("tree_of_thoughts", "--candidates", "3", "--voters", "2", "--max-tokens", "24"),
            *("--short-tokens", "2", "--temperature", "0.7"),
        ),
        200,
        (0.3, 0.04, 0.66),
    ),
}
# As docs/training.md has it for the small test model.
TRAINING = tuple("--rank 16 --learning-rate 1e-3 --dropout 0 --evaluations 2".split())
_TOGETHER = 8  # problems judged side by side
_DONE = "seconds.json"


def adapter_name(task: str, placement: str, epochs: int = 1) -> str:
    """Of the folder of an adapter, and of its arm in an evaluation."""
    return f"{task}-{placement}" + (f"-{epochs}-epochs" if epochs > 1 else "")


class Stages:
    """Stages of one model in one folder.

    Args:
        work: folder that all of them have folders in.
        model: folder or name of the model; None: the small test model.
    """

    def __init__(self, work: Path, model: str | None = None) -> None:
        self._work = work
        self._model = ("--model", model) if model else ()

    def record(self, name: str) -> Path:
        """The recording of a task."""
        task = TASKS[name]
        workflow, *own = task.asked
        limit, shares = ("--limit", str(task.num_problems)), ("--shares", *map(str, task.shares))
        return self._once(
            name, "record", workflow, *limit, "--temperature", "0", *shares, *own, *self._model
        )

    def mixture(self, tasks: Sequence[str]) -> Path:
        """A recording of as many runs as one task has, drawn from several in equal parts."""
        work = self._work
        out = work / "mixture"
        if (out / _DONE).exists():
            return out
        for part in ("train", "development"):
            (out / part).mkdir(parents=True, exist_ok=True)
            for number, task in enumerate(tasks):
                runs = sorted((work / task / part).glob("*.json"))
                for path in runs[number :: len(tasks)]:
                    shutil.copyfile(path, out / part / f"{task}-{path.name}")
        shutil.copyfile(work / tasks[0] / "record.json", out / "record.json")
        (out / _DONE).write_text(json.dumps(0))
        return out

    def train(self, recorded: Path, placement: str, epochs: int = 1) -> Path:
        """An adapter."""
        placed, length = ("--placement", placement), ("--epochs", str(epochs))
        return self._train(adapter_name(recorded.name, placement, epochs), recorded, placed, length)

    def control(self, recorded: Path) -> Path:
        """An adapter that gives the text's answers in one direct call, without the workflow."""
        runs = self._once(f"{recorded.name}-as-direct", "distil", str(recorded), *self._model)
        name = adapter_name(recorded.name, "direct")
        return self._train(
            name, runs, ("--placement", "decode"), ("--loss", "ce"), ("--epochs", "1")
        )

    def evaluate(
        self, recorded: Path, adapters: Sequence[Path], controls: Sequence[Path] = ()
    ) -> list[dict[str, Any]]:
        """One row per arm on the problems that a recording has kept back."""
        first = f"-{adapters[0].name}" if len(adapters) == 1 else ""
        name = f"on-{recorded.name}-{len(adapters)}{first}{'-direct' if controls else ''}"
        worn = [word for adapter in adapters for word in ("--adapter", str(adapter))]
        worn += [word for adapter in controls for word in ("--direct", str(adapter))]
        kl = () if TASKS[recorded.name].measures_kl else ("--no-kl",)
        how = ("--together", str(_TOGETHER), *kl, *self._model)
        out = self._once(name, "evaluate", str(recorded), *worn, *how)
        with (out / "evaluation.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [{**row, "arm": row["arm"].removeprefix("+ ")} for row in rows]

    def seconds(self, name: str) -> float | None:
        """That a stage took, a killed one in its last part; None: there is no such stage."""
        done = self._work / name / _DONE
        if not done.exists():
            return None
        found: float = json.loads(done.read_text())
        return found

    def _train(self, name: str, runs: Path, *options: tuple[str, ...]) -> Path:
        words = [word for option in options for word in option]
        return self._once(name, "train", str(runs), *words, *TRAINING, *self._model)

    def _once(self, name: str, command: str, *arguments: str) -> Path:
        """The folder of a stage, which is run unless it is there.

        Raises:
            CalledProcessError: the command failed.
        """
        out = self._work / name
        if (out / _DONE).exists():
            return out
        program = Path(sys.executable).with_name("vllm-choreo")
        words = [str(program), command, *arguments, "--out", str(out)]
        print(f"== vllm-choreo {command} {' '.join(arguments[:3])} ... {name}", flush=True)
        began = time.perf_counter()
        subprocess.run(words, check=True)
        (out / _DONE).write_text(json.dumps(round(time.perf_counter() - began)))
        return out


def merged(rows: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Rows of which the new ones replace those of the same model, set and arm, set by set.

    An arm is compared with the text of its own run, so those of several runs may stand in a table.
    """
    arms = {(row["model"], row["set"], row["arm"]): row for row in (*rows, *new)}
    sets = dict.fromkeys((model, name) for model, name, _ in arms)
    return [row for one in sets for row in arms.values() if (row["model"], row["set"]) == one]
