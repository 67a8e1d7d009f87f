# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo judge`: pairs of runs, and a judge on a real socket who may prefer a place."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.lab.notes import Notes
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.report import Result, save_transcript
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.problems import Problem
from vllm_choreo.lab.study.judge.asking import Comparison, verdict_of
from vllm_choreo.lab.study.judge.command import command, pairs_of, win_rates
from vllm_choreo.lab.workflows.direct import direct


@contextmanager
def judging(
    answer: Callable[[str], str],
    given_status: int = 200,
    is_silent: bool = False,
    odds: Callable[[str], tuple[float, float]] | None = None,
) -> Iterator[tuple[str, list[Any]]]:
    """The address of a judge that answers prompts, and the requests that it got.

    `odds`: the log-probabilities of A and B that it tells; `is_silent`: it refuses to tell any.
    """
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers.get("Authorization"), body))
            said = answer(body["messages"][0]["content"])
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": said}}
            if odds is not None:
                told = zip("AB", odds(body["messages"][0]["content"]), strict=True)
                likeliest = [{"token": token, "logprob": logprob} for token, logprob in told]
                choice["logprobs"] = {"content": [{"top_logprobs": likeliest}]}
            content = {"choices": [choice]}
            status = 400 if is_silent and "logprobs" in body else given_status
            data = json.dumps(content if status == 200 else {"detail": "no"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def save_run(folder: Path, mode: str, answers: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, answer in answers.items():
        problem = Problem(name, f"{name}?", ("right",), "trivia")
        task = Task(name, "made", {"question": problem.question}, (problem,))
        run = direct(Notes(answer, mode=mode), problem.question)
        save_transcript(Result(task, run, None), folder / f"{name}-{mode}.json")


def judge(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    main = command(parser)
    return main(parser.parse_args([*arguments, "--judge-model", "j", "--api-key", "k"]))


def prefers_right(prompt: str) -> str:
    """A judge who knows, and does not care for places."""
    first, second = prompt.split("# Answer A\n")[1].split("# Answer B\n")
    second = second.split("\n\nWhich")[0]
    if ("right" in first) == ("right" in second):
        return "TIE. Both are alike."
    return "A, of course" if "right" in first else "**B** is better"


def test_an_answer_wins_if_it_is_preferred_in_both_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "runs", "choreo", {"one": "wrong", "two": "right", "three": "right"})
    save_run(tmp_path / "runs", "baseline", {"one": "right", "two": "right", "three": "right"})
    with judging(prefers_right) as (url, seen):
        assert judge(str(tmp_path / "runs"), "--judge", url, "--out", str(tmp_path / "out")) == 0
    found = json.loads((tmp_path / "out" / "judged.json").read_text())
    assert found["runs"] == ["baseline", "choreo"]
    assert {row["id"]: row["winner"] for row in found["pairs"]} == {"one": 1, "two": 0, "three": 0}
    assert found["first_wins"][0] == pytest.approx(1 / 3) and found["second_wins"] == [0, 0, 0]
    assert found["ties"][0] == pytest.approx(2 / 3)
    assert len(seen) == 6 and {path for path, _, _ in seen} == {"/v1/chat/completions"}
    assert all(key == "Bearer k" and body["model"] == "j" for _, key, body in seen)
    assert all(body["temperature"] == 0 for _, _, body in seen)
    shown = capsys.readouterr().out
    assert "3 pairs, judged by j; in 0 of them" in shown and "baseline wins  33.3" in shown


def test_a_judge_that_tells_no_log_probabilities_is_asked_without(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", "choreo", {"one": "right"})
    save_run(tmp_path / "runs", "baseline", {"one": "wrong"})
    with judging(prefers_right, is_silent=True) as (url, seen):
        judge(str(tmp_path / "runs"), "--judge", url, "--out", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "judged.json").read_text())
    assert ["logprobs" in body for _, _, body in seen] == [True, False, True, False]
    assert found["second_wins"][0] == 1 and "first_preferred" not in found
    assert found["pairs"][0]["margin"] is None


def test_a_judge_is_offered_ties_or_is_not(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", "choreo", {"one": "right"})
    save_run(tmp_path / "runs", "baseline", {"one": "wrong"})
    given = (str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--judge")
    for options, end in (((), "Begin with A, B or TIE."), (("--no-tie",), "Begin with A or B.")):
        with judging(prefers_right) as (url, seen):
            judge(*given, url, *options)
        assert all(body["messages"][0]["content"].endswith(end) for _, _, body in seen)
        found = json.loads((tmp_path / "out" / "judged.json").read_text())
        assert found["may_tie"] is not bool(options) and found["second_wins"][0] == 1


def test_a_judge_who_prefers_a_place_finds_ties_alone(tmp_path: Path) -> None:
    for folder, mode, answer in (("a", "choreo", "right"), ("b", "choreo", "wrong")):
        save_run(tmp_path / folder, mode, {"one": answer, "two": answer})
    with judging(lambda prompt: "A") as (url, _):
        folders = [str(tmp_path / "a"), str(tmp_path / "b")]
        judge(*folders, "--judge", url, "--out", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "judged.json").read_text())
    assert [row["winner"] for row in found["pairs"]] == [0, 0] and found["ties"] == [1, 1, 1]
    assert all(row["is_torn"] for row in found["pairs"])
    assert found["runs"] == [f"{tmp_path / name}, choreo" for name in ("a", "b")]


def test_log_probabilities_tell_what_a_love_of_places_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first place is worth 2 nats to this judge, and the right answer half a nat."""

    def odds(prompt: str) -> tuple[float, float]:
        first = prompt.split("# Answer A\n")[1].split("# Answer B\n")[0]
        return (-0.1, -2.6) if "right" in first else (-0.1, -1.6)

    save_run(tmp_path / "runs", "choreo", {"one": "right"})
    save_run(tmp_path / "runs", "baseline", {"one": "wrong"})
    with judging(lambda prompt: "A", odds=odds) as (url, _):
        judge(str(tmp_path / "runs"), "--judge", url, "--out", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "judged.json").read_text())
    assert found["ties"] == [1, 1, 1] and found["first_preferred"] == [0, 0, 0]
    assert found["pairs"][0]["margin"] == pytest.approx(1.5 - 2.5)  # the baseline is the first
    assert "baseline is likelier    0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("A", "A"),
        (" b.", "B"),
        ("**B** has a plot", "B"),
        ("TIE", "tie"),
        ("It is a tie", "tie"),
        ("Answer A is a good one", "A"),
        ("a) it is short", "A"),
        ("Neither", None),
        ("Both Answers", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_first_that_is_named(said: str, verdict: str | None) -> None:
    assert verdict_of(said) == verdict


@pytest.mark.parametrize(
    ("ahead", "behind", "winner", "torn"),
    [
        ("A", "B", 1, False),
        ("B", "A", 2, False),
        ("A", "A", 0, True),
        ("tie", "A", 0, False),
        (None, "B", 0, False),
        (None, None, 0, False),
    ],
)
def test_a_comparison_counts_both_places(ahead: Any, behind: Any, winner: int, torn: bool) -> None:
    found = Comparison(ahead, behind, ("", ""))
    assert (found.winner, found.is_torn) == (winner, torn)


def test_rates_sum_to_one() -> None:
    rates = win_rates([{"winner": w} for w in (1, 1, 2, 0)])
    assert [rates[name][0] for name in ("first_wins", "second_wins", "ties")] == [0.5, 0.25, 0.25]
    assert all(low <= rate <= high for rate, low, high in rates.values())
    assert "first_preferred" not in rates
    rates = win_rates([{"winner": 0, "margin": m} for m in (0.0, 0.0, 2.0, -0.1, None)])
    assert rates["first_preferred"][0] == 0.5, "neither is likelier in two of four"


def test_runs_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    save_run(tmp_path / "one", "choreo", {"one": "x"})
    save_run(tmp_path / "two", "choreo", {"two": "x"})
    with pytest.raises(ChoreoError, match="transcripts of two runs"):
        pairs_of([tmp_path / "one"])
    with pytest.raises(ChoreoError, match="on other problems"):
        pairs_of([tmp_path / "one", tmp_path / "two"])
    with pytest.raises(ChoreoError, match="two folders"):
        pairs_of([tmp_path] * 3)


def test_a_judge_that_fails_is_named(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", "choreo", {"one": "wrong"})
    save_run(tmp_path / "runs", "baseline", {"one": "right"})
    given = (str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--judge")
    with (
        judging(str, given_status=500) as (url, _),
        pytest.raises(ChoreoError, match="server failed"),
    ):
        judge(*given, url)
    with pytest.raises(ChoreoError, match="address of a server"):
        judge(*given, "nowhere")
