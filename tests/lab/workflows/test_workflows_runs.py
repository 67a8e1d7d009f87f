# SPDX-License-Identifier: Apache-2.0
"""What runs of workflows leave: transcripts as JSON, replays, the demo's picture and table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.lab.notes import Notes
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.lab.workflows.direct import direct
from vllm_choreo.lab.workflows.multi_qa import multi_qa
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.prisoners_dilemma import prisoners_dilemma
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts
from vllm_choreo.transcript.transcript import Transcript


def test_a_transcript_survives_its_file(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=7)
    log = tree_of_thoughts(
        Notes("é", "\u2028"), "How?", candidates=2, voters=("x",), sampling_params=params
    )
    log.save(tmp_path / "run.json")
    loaded = Transcript.load(tmp_path / "run.json")
    assert loaded.to_json() == log.to_json()
    assert loaded.answers == log.answers and loaded.seconds == log.seconds
    assert loaded.title == "tree of thoughts"
    data = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert data["workflow"] == "tree_of_thoughts" and data["mode"] == "choreo"
    again = SamplingParams(**data["inputs"].pop("sampling_params"))
    assert again == params
    assert data["inputs"] == {
        "question": "How?", "candidates": 2, "voters": ["x"], "restate": False, "vote_params": None,
    }  # fmt: skip
    steps = data["steps"]
    assert [step["kind"] for step in steps] == ["prefill"] * 4 + ["decode"] * 4
    assert steps[1]["parents"] == [[steps[0]["id"], None, None]]


def test_times_count_from_the_transcripts_start() -> None:
    log = direct(Notes(), "Why?")
    assert log.start > 0
    (step,) = log.to_json()["steps"]
    # The notes were submitted at 0 on the clock.
    assert step["metrics"] == {
        "submitted": -log.start, "waiting": None, "ttft": 0.0, "latency": 0.0,
    }  # fmt: skip


def test_another_format_is_refused() -> None:
    data = direct(Notes(), "Why?").to_json()
    with pytest.raises(ValueError, match="format 1"):
        Transcript.from_json({**data, "format": 2})


@pytest.mark.parametrize("through_json", [False, True])
def test_a_replay_generates_what_was_recorded(through_json: bool) -> None:
    log = prisoners_dilemma(Notes(*"ABCDEFGH"), leak="none")
    if through_json:
        log = Transcript.from_json(json.loads(json.dumps(log.to_json())))
    notes = Notes("something else", mode="baseline")
    params = SamplingParams(temperature=2.0, max_tokens=99, stop=["B"], logprobs=3, seed=1)
    with Replay(notes, log) as c:
        again = prisoners_dilemma(c, leak="none", sampling_params=params)
    assert again.mode == "baseline"
    assert [s.message.token_ids for s in again.steps] == [s.message.token_ids for s in log.steps]
    for given in notes.sampling.values():
        assert (given.max_tokens, given.stop, given.logprobs) == (1, [], 3)
        assert given.ignore_eos


def test_a_variant_that_reads_otherwise_can_be_replayed() -> None:
    log = multi_qa(Notes("both"), ["a", "b"], variant="baseline")
    with Replay(Notes(), log) as c:
        assert multi_qa(c, ["a", "b"], variant="parallel").answers == ("both",)


def _other_header(c: Any) -> None:
    direct(c, "How?")


def _too_many(c: Any) -> None:
    direct(c, "Why?")
    direct(c, "Why?")


def _too_few(c: Any) -> None:
    pass


def _other_kind(c: Any) -> None:
    c.prefill("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (_other_header, "call 1 was not this decode"),
        (_other_kind, "call 1 was not this prefill"),
        (_too_many, "more than the 1 recorded"),
        (_too_few, "ended 1 calls before"),
    ],
)
def test_another_program_is_refused(program: Any, reason: str) -> None:
    log = direct(Notes("Because."), "Why?")
    notes = Notes()
    with pytest.raises(ChoreoError, match=reason), Replay(notes, log) as c:
        program(c)
    assert notes.count <= 1, "refused before it is submitted"


def test_an_engine_that_does_not_force_is_found_out() -> None:
    class Deaf(Notes):
        def _reply(self, params: Any) -> str:
            return "No."

    log = direct(Notes("Because."), "Why?")
    with pytest.raises(ChoreoError, match="logits_processors"), Replay(Deaf(), log) as c:
        direct(c, "Why?")


# -- picture and table of the demo -----------------------------------------------------------------


def test_the_picture_shows_every_message_once(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    from vllm_choreo.lab.report.picture import draw_workflows

    runs = [parallel_debate(Notes(), "Why <&?", agents=["A", "B"], rounds=2) for _ in range(2)]
    trees = [tree_of_thoughts(Notes(), "How?", voters=["x", "y"], candidates=2) for _ in range(2)]
    svg, png = draw_workflows([(runs[0], runs[1]), (trees[0], trees[1])], tmp_path)
    assert (svg.name, png.name) == ("workflows.svg", "workflows.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    # matplotlib writes the text of a path as a comment before it.
    text = svg.read_text()
    for author, times in (("candidate 2", 1), ("voter 1", 2), ("agent 2", 3), ("ballot", 1)):
        assert text.count(f"<!-- {author} -->") == times


def test_the_table_compares_what_was_measured() -> None:
    from vllm_choreo.lab.cli.demo import late_steps, rows

    def run(mode: str) -> Transcript:
        log = parallel_debate(Notes(), "Why?", agents=["A", "B"], rounds=2)
        log.mode, log.seconds = mode, {"choreo": 1.0, "baseline": 2.0}[mode]
        return log

    runs = [{mode: run(mode) for mode in ("choreo", "baseline")} for _ in range(2)]
    assert {step.stage for step in late_steps(runs[0]["choreo"])} == {"round 2"}
    base, choreo = rows(runs)
    encoded = sum(s.message.num_tokens for run in runs for s in run["baseline"].steps)
    assert (base.mode, base.calls, base.encoded, base.generated) == ("baseline", 16, encoded, 8)
    assert (base.seconds, choreo.seconds) == (2.0, 1.0)


def test_runs_of_different_length_are_not_compared() -> None:
    from vllm_choreo.lab.cli.demo import _check_comparable

    one, two = (parallel_debate(Notes(), "Why?", agents=["A"], rounds=rounds) for rounds in (1, 2))
    _check_comparable({"choreo": one, "baseline": one})
    with pytest.raises(AssertionError, match="same number"):
        _check_comparable({"choreo": one, "baseline": two})
