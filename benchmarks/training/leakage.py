# SPDX-License-Identifier: Apache-2.0
"""What of a secret comes through to one who does not read it: in the prisoner's dilemma.

    python -m benchmarks.training.leakage [--games 40] [--adapter WORK/games-both ...]

Games are played as text. Then all that was said is forced twice more, once while Bob alone is told
to cooperate whatever happens, once to defect. Alice reads what Bob says, which is the same both
times, so that what she is likely to say must not change: as text it does not. By how much the
log-probabilities of what she says shift is what has leaked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.training.tables import TABLES
from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.protocol import Facade
from vllm_choreo.cli.engine import start_engine
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.evaluate.arms import arms_of
from vllm_choreo.lab.study.stats import bootstrap_interval
from vllm_choreo.lab.workflows.chat import system
from vllm_choreo.lab.workflows.prisoners_dilemma import NAMES, STRATEGIES, SYSTEM
from vllm_choreo.lab.workflows.together import all_made, run_together
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Transcript

NAME = "training_leakage"
_WORKFLOW = "prisoners_dilemma"
_TOLD = ("none", "always cooperate", "always defect")  # as played, and forced again
_READER, _SPEAKER = NAMES
_TOGETHER = 8
_SEED = 10_000  # of the first game: recordings begin at 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=24, help="of a plan and an utterance")
    parser.add_argument("--adapter", type=Path, action="append", default=[])
    args = parser.parse_args()
    llm = start_engine(None, 2048, True, args.adapter)
    arms = [arm for arm in arms_of(args.adapter, (), None) if not arm.is_direct]
    games = [_game(number, args.max_tokens) for number in range(args.games)]
    text = arms[0]
    played = _in_parts(llm, text, games, lambda c, game: text.run(c, _WORKFLOW, game))
    said = dict(zip((game.id for game in games), played, strict=True))
    rows = []
    for arm in arms:
        shifts = _shifts(llm, arm, games, said)
        low, high = bootstrap_interval(shifts, fmean)
        ends = {"shift": fmean(shifts), "shift_low": low, "shift_high": high}
        rows.append({"arm": arm.name.removeprefix("+ "), "games": len(games), **ends})
        print(rows[-1], flush=True)
    write_csv(NAME, rows, **record())
    print(as_text([TABLES[NAME]]))
    return 0


def _game(number: int, max_tokens: int) -> Task:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=_SEED + number)
    decision = SamplingParams(temperature=1.0, max_tokens=8, seed=_SEED + number)
    inputs = {"sampling_params": sampling, "decision_params": decision}
    return Task(f"game {number}", "games", inputs, ())


def _in_parts(llm: Any, arm: Arm, games: Sequence[Task], run: Callable[..., Any]) -> list[Any]:
    """What `run` makes of each game, some of them side by side."""
    made: list[Any] = []
    for start in range(0, len(games), _TOGETHER):
        with arm.open(llm) as c:
            programs = [partial(run, game=game) for game in games[start : start + _TOGETHER]]
            made += all_made(run_together(c, programs))
    return made


class _Telling(FacadeWrapper):
    """A `Facade` on `c` where a system prompt says something else than its program knows."""

    def __init__(self, c: Facade, prompt: str, instead: str) -> None:
        super().__init__(c)
        self._prompt, self._instead = prompt, instead

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        told = {self._prompt: self._instead}
        return super()._prefill(
            [{**call, "tokens": told.get(call["tokens"], call["tokens"])} for call in calls]
        )


def _shifts(
    llm: Any, arm: Arm, games: Sequence[Task], said: Mapping[str, Transcript]
) -> list[float]:
    """Of each game: nats per token that the reader says after the other has spoken."""
    plain, *others = (
        system(SYSTEM.format(_SPEAKER, _READER, STRATEGIES[strategy])) for strategy in _TOLD
    )

    def likely(c: Facade, game: Task, instead: str) -> np.ndarray:
        ran = said[game.id]
        _, found = arm.replayed(_Telling(c, plain, instead), _WORKFLOW, game, ran)
        return _of_reader(ran, found)

    both = [_in_parts(llm, arm, games, partial(likely, instead=instead)) for instead in others]
    return [float(np.abs(one - other).mean()) for one, other in zip(*both, strict=True)]


def _of_reader(ran: Transcript, distributions: Sequence[np.ndarray]) -> np.ndarray:
    """Log-probabilities of her tokens that follow the other one's first words, [num_tokens]."""
    steps, found, has_heard = ran.decodes(), [], False
    for step, distribution in zip(steps, distributions, strict=True):
        if step.stage.startswith("round") and step.author != _READER:
            has_heard = True
        if has_heard and step.author == _READER:
            tokens = list(step.message.generated_token_ids)
            found.append(distribution[np.arange(len(tokens)), tokens])
    return np.concatenate(found)


if __name__ == "__main__":
    sys.exit(main())
