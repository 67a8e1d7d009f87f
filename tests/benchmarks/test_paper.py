# SPDX-License-Identifier: Apache-2.0
"""The paper's tables: games in pairs, questions apart, and what cells say of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.record import read_numbers
from benchmarks.paper.dilemma import played
from benchmarks.paper.questions import WAYS, answered
from benchmarks.paper.stories import stories_of
from benchmarks.paper.tables import TABLES, TEXT, shift
from tests.lab.notes import Notes
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.problems import Problem
from vllm_choreo.lab.workflows.branch_solve_merge import branch_solve_merge
from vllm_choreo.lab.workflows.prisoners_dilemma import LEAKS


class Sessions:
    """Opens choreographies that take notes, and remembers them."""

    def __init__(self, *replies: str) -> None:
        self.replies = replies
        self.opened: list[Notes] = []

    def __call__(self, mode: str) -> AbstractContextManager[Any]:
        self.opened.append(Notes(*self.replies, mode=mode))
        return nullcontext(self.opened[-1])


def test_every_game_is_played_as_text_and_with_each_leak() -> None:
    rows = list(played(Sessions(), [{"rounds": 1}, {"rounds": 1}]))
    assert [(row["leak"], row["game"], row["first"]) for row in rows] == [
        (leak, game, first)
        for leak in (TEXT, *LEAKS)
        for game, first in enumerate(("Alice", "Bob"))
    ]
    assert {(row["bob"], row["predicted"]) for row in rows} == {("undecided", "")}
    asked = list(played(Sessions(), [{"rounds": 1, "predict": True}]))
    assert {row["predicted"] for row in asked} == {"undecided"}


def test_games_of_a_pair_have_the_same_plans_and_the_talk_is_free() -> None:
    sessions = Sessions("plan a", "plan b", "text")
    list(played(sessions, [{"rounds": 1}]))
    text, *others = sessions.opened
    assert text.mode == "baseline" and [c.mode for c in others] == ["choreo"] * len(LEAKS)
    assert text.batches[0] == 2, "plans are made as text alone"
    for c in others:
        assert c.replies == ["text"] or "plan a" not in c.replies
        assert c.batches == [1, 1, 2]


def _row(leak: str, game: int, bob: str, predicted: str = "defect") -> dict[str, str]:
    row = {"strategy": "none", "leak": leak, "game": str(game), "alice": "cooperate"}
    return {**row, "bob": bob, "predicted": predicted}


def test_a_shift_is_that_of_the_same_games() -> None:
    rows = [
        *(_row(TEXT, i, bob) for i, bob in enumerate(("cooperate", "cooperate", "defect"))),
        *(_row("both", i, bob) for i, bob in enumerate(("cooperate", "defect", "undecided"))),
    ]
    assert shift(rows, "both") == [0, -100, 0]
    (_, _, line) = TABLES["paper_prediction"].markdown(rows[:3]).splitlines()
    # Alice cooperates in all; all predict that she defects; Bob defects once, as one who defends.
    assert line.startswith("| none | text | 100.0 [100.0, 100.0] | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0]")
    assert "| 0.0 [0.0, 0.0] | 33.3 [" in line


def test_questions_are_judged_apart() -> None:
    anna = Problem("a", "Who?", ("Anna",), "trivia")
    rome = Problem("b", "Where?", ("Rome",), "trivia")
    for way in WAYS:
        engine = SimpleNamespace(open=Sessions("It is Rome."))
        (row,) = answered(engine, way, [(anna, rome)], {"layout": "paper"})
        assert row == {"variant": way[0], "pair": "a + b", "first": 0, "second": 1}
    rows = [{"data": "own", "variant": "serial", "first": "0", "second": "1"}] * 2
    (_, _, line) = TABLES["paper_questions"].markdown(rows).splitlines()
    assert line.startswith(
        "| own | serial | 2 | 0.0 [0.0, 0.0] | 100.0 [100.0, 100.0] | 0.0 [0.0, 0.0]"
    )


def _story(words: tuple[str, ...], story: str) -> Task:
    run = branch_solve_merge(Notes("a, b\nc, d", "one", "two", story), list(words))
    return Task("1", "made", {}, (Problem("1", "", words, "concepts"),), run)


def test_stories_have_a_winner_and_some_of_their_words() -> None:
    words = ("dog", "ball", "park", "tree")
    pair = (_story(words, "A dog in a park."), _story(words, "A dog, a ball, a park, a tree."))
    for winner, name in ((1, "choreo"), (2, "baseline"), (0, "tie")):
        verdict = {"id": "1", "winner": winner, "is_torn": winner == 0, "margin": 0.5}
        judged = {"pairs": [verdict]}
        (row,) = stories_of(("choreo", "baseline"), [pair], judged)
        assert (row["coverage_choreo"], row["coverage_baseline"]) == (0.5, 1.0)
        assert (row["winner"], row["is_torn"]) == (name, int(winner == 0))
        assert row["margin"] == 0.5
        (swapped,) = stories_of(("baseline", "choreo"), [pair[::-1]], judged)
        assert swapped["margin"] == -0.5 and swapped["coverage_choreo"] == 0.5
    written = {key: str(value) for key, value in row.items()} | {"judge": "j", "may_tie": "True"}
    (_, _, line) = TABLES["paper_stories"].markdown([written]).splitlines()
    assert line == "| j | 1 | 100.0 | 50.0 | 0.0 | 0.0 | 100.0 | 100.0 | 100.0 | +0.50 |"


@pytest.mark.parametrize("content", [None, "[]", '{"judge": "small"}', "judged"])
def test_a_folder_that_a_command_did_not_write_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "judged.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=r"judged\.json: .*vllm-choreo judge"):
        read_numbers(file, "vllm-choreo judge", "judge", "may_tie")
