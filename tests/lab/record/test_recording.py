# SPDX-License-Identifier: Apache-2.0
"""Folders of recorded runs: no part tells of another, and nothing that is damaged is read."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab.notes import Notes
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.record.likeliest import Likeliest, likeliest_of
from vllm_choreo.lab.record.recording import FILE_NAME, PARTS, Recorder, Recording
from vllm_choreo.lab.workflows.document_qa import document_qa
from vllm_choreo.trained_adapter import ModelIdentity
from vllm_choreo.transcript.transcript import Step, Transcript

BASE = ModelIdentity("tiny", "ab", "cd")


def run(number: int, mode: str = "baseline") -> Transcript:
    return document_qa(Notes("yes", mode=mode), f"Question {number}?", ["one", "two"])


def record(folder: Path, problems: Sequence[Sequence[str]], **options: Any) -> Recorder:
    recorder = Recorder(folder, BASE, **options)
    for number, about in enumerate(problems):
        path = recorder.place(about)
        if not path.exists():
            recorder.save(path, run(number), about)
    return recorder


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    record(tmp_path, [[f"p{i}"] for i in range(20)])
    recording = Recording.load(tmp_path)
    assert (recording.base, recording.mode) == (BASE, "baseline")
    assert [len(recording.parts[part]) for part in PARTS] == [16, 2, 2]
    runs = [loaded for part in PARTS for loaded in recording.parts[part]]
    assert {loaded.problems for loaded in runs} == {(f"p{i}",) for i in range(20)}
    for loaded in runs:
        number = int(loaded.problems[0][1:])
        assert loaded.transcript.inputs["question"] == f"Question {number}?"
        assert loaded.likeliest is None


@pytest.mark.parametrize("seed", range(8))
def test_no_problem_is_in_two_parts(tmp_path: Path, seed: int) -> None:
    """Whatever comes again: single problems, and pairs of which one is known."""
    rng = random.Random(seed)
    recorder = Recorder(tmp_path, BASE, shares=(3, 1, 1))
    parts: dict[str, set[str]] = {}
    refused = 0
    for number in range(120):
        about = [f"p{rng.randrange(80)}" for _ in range(rng.choice((1, 1, 2)))]
        try:
            path = recorder.place(about)
        except ChoreoError as error:
            assert "several parts" in error.message
            refused += 1
            continue
        recorder.save(path, run(number), about)
        for problem in about:
            parts.setdefault(problem, set()).add(path.parent.name)
    assert refused and all(len(found) == 1 for found in parts.values())
    assert {len(listed) > 10 for listed in Recording.load(tmp_path).parts.values()} == {True}


def test_each_part_gets_its_share_whatever_the_order_is_cut_at(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, BASE, shares=(6, 3, 1))
    for done in range(1, 51):
        recorder.place([str(done)])
        counts = dict(zip(PARTS, recorder._counts, strict=True))
        wanted = {"train": 0.6 * done, "development": 0.3 * done, "test": 0.1 * done}
        assert all(abs(counts[part] - wanted[part]) < 1 for part in PARTS)


def test_an_interrupted_recording_goes_on(tmp_path: Path) -> None:
    problems = [[f"p{i % 7}"] for i in range(12)]
    record(tmp_path / "whole", problems)
    record(tmp_path / "cut", problems[:5])
    (tmp_path / "cut" / "train" / "00007.json.part").write_text("{")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").rglob("0*.json")}
    record(tmp_path / "cut", problems)
    whole, cut = (Recording.load(tmp_path / name) for name in ("whole", "cut"))
    assert {part: [(r.name, r.problems) for r in runs] for part, runs in whole.parts.items()} == {
        part: [(r.name, r.problems) for r in runs] for part, runs in cut.parts.items()
    }
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_another_recording_is_not_mixed_in(tmp_path: Path) -> None:
    record(tmp_path, [["a"]], settings={"temperature": 1.0})
    for change in (
        {"settings": {"temperature": 0.5}},
        {"mode": "exact", "settings": {"temperature": 1.0}},
        {"shares": (1, 1, 1), "settings": {"temperature": 1.0}},
    ):
        with pytest.raises(ChoreoError, match="recorded otherwise"):
            Recorder(tmp_path, BASE, **change)
    with pytest.raises(ChoreoError, match="recorded otherwise"):
        Recorder(tmp_path, replace(BASE, weights="xy"), settings={"temperature": 1.0})


@pytest.mark.parametrize("shares", [(1, 1), (1, 0, -1), (0, 0, 0)])
def test_shares_that_are_none(tmp_path: Path, shares: Any) -> None:
    with pytest.raises(ChoreoError, match="one share for each"):
        Recorder(tmp_path, BASE, shares=shares)


def test_a_run_in_another_mode_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, BASE)
    path = recorder.place(["a"])
    with pytest.raises(ChoreoError, match="mode baseline"):
        recorder.save(path, run(0, "choreo"), ["a"])
    assert not path.exists()


def _rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ChoreoError, match="give a folder of `vllm-choreo record`"):
        Recording.load(tmp_path)
    record(tmp_path, [[f"p{i}"] for i in range(10)])
    digest = Recording.load(tmp_path).digest
    (file,) = (tmp_path / "development").glob("*.json")
    content = file.read_text()
    for damage, said in (
        (lambda data: {**data, "format": 2}, "format 1"),
        (lambda data: {**data, "steps": 7}, "steps"),
        (lambda data: {**data, "problems": "p"}, "problems"),
        (
            lambda data: {**data, "likeliest": {"token_ids": [[1]], "logprobs": [[0.0]]}},
            "likeliest",
        ),
        (lambda data: {**data, "problems": ["p0"]}, "the same problem"),
    ):
        _rewrite(file, damage)
        with pytest.raises(ChoreoError, match=said):
            Recording.load(tmp_path)
        file.write_text(content)
    assert Recording.load(tmp_path).digest == digest
    _rewrite(file, lambda data: {**data, "seconds": 1.0})
    assert Recording.load(tmp_path).digest != digest
    _rewrite(tmp_path / FILE_NAME, lambda data: {**data, "format": 9})
    with pytest.raises(ChoreoError, match="format 9"):
        Recording.load(tmp_path)


def _with_logprobs(transcript: Transcript, rows: Any) -> Transcript:
    steps = [
        Step(s.stage, s.author, replace(s.message, logprobs=rows))
        if s.message.generated_token_ids
        else s
        for s in transcript.steps
    ]
    return replace(transcript, steps=steps)


def test_the_likeliest_tokens_survive_their_file(tmp_path: Path) -> None:
    """As vLLM reports them: in no order, the sampled one besides where it is none of them."""
    rows: list[dict[int, Any]] = [
        {5: -2.0, 9: -0.25, 7: -1.5},
        {9: -0.125, 3: -9.0, 5: -3.0, 7: -4.0},
        {1: -0.5, 2: -1.5, 4: -2.5},
    ]
    entries = [{t: SimpleNamespace(logprob=v) for t, v in row.items()} for row in rows]
    transcript = _with_logprobs(run(0), entries)
    expected = Likeliest(
        ((9, 7, 5), (9, 5, 7), (1, 2, 4)),
        ((-0.25, -1.5, -2.0), (-0.125, -3.0, -4.0), (-0.5, -1.5, -2.5)),
    )
    assert likeliest_of(transcript) == expected
    recorder = Recorder(tmp_path, BASE)
    recorder.save(recorder.place(["a"]), transcript, ["a"])
    (loaded,) = Recording.load(tmp_path).parts["train"]
    assert loaded.likeliest == expected
    assert likeliest_of(run(0)) is None
    assert Counter(map(len, expected.token_ids)) == {3: 3}
