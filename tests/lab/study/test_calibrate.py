# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo calibrate`, from recorded runs to a policy that a session takes, on one engine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.lab.notes import CHATML
from vllm_choreo import Choreography
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import RepairError
from vllm_choreo.lab.cli import run as run_command
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.bench import judge
from vllm_choreo.lab.study.calibrate import command as arguments
from vllm_choreo.lab.study.calibrate.measure import Replays
from vllm_choreo.lab.study.calibrate.repaired import policy_choice
from vllm_choreo.lab.study.evaluate.arms import arms_of
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT
from vllm_choreo.repair.policy import Policy
from vllm_choreo.trained_adapter import ModelIdentity

DOCS = (Path(__file__).parents[3] / "docs" / "repair.md").read_text(encoding="utf-8")


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(
        tiny_model_path("llama"),
        logits_processors=("vllm_choreo.engine.worker.forced:ForcedTokens",),
    )


@pytest.fixture
def model(tiny_model_path: Callable[[str], Path]) -> str:
    return str(tiny_model_path("llama"))


@pytest.fixture(autouse=True)
def _one_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a test take the module's engine instead of starting one each."""
    monkeypatch.setattr(arguments, "start_engine", lambda *_, **__: llm)
    monkeypatch.setattr(run_command, "start_engine", lambda *_, **__: llm)


def _task(llm: Any) -> Task:
    sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    inputs = {"question": "Who?", "candidates": 3, "voters": 2, "sampling_params": sampling}
    task = Task("one", "made", inputs, ())
    text = Arm(TEXT, "baseline")
    with text.open(llm) as c:
        return replace(task, recorded=text.run(c, "tree_of_thoughts", task))


def _policy(model: str, masks: Any) -> Policy:
    return Policy("tree_of_thoughts", ModelIdentity.of(model), 16, 16, masks, 0.5)


_NOTHING = {
    "candidate": {"question": ()},
    "ballot": {"question": ()},
    "finish": {"question": ()},
    "vote": {"question": (), "candidate": (), "ballot": ()},
    "answer": {"question": (), "candidate": (), "finish": ()},
}


@pytest.mark.exhaustive
def test_replays_say_what_the_judge_measures(llm: Any) -> None:
    """The same distance as of an evaluation's arms, and none if everything is repaired."""
    task = _task(llm)
    (judged,) = judge(
        llm, "tree_of_thoughts", [task], arms_of([], [], None, ["first:16"])[:3], measures_kl=True
    )
    replays = Replays(llm, task)
    plain, first, everything = (replays.measure(rule) for rule in (None, "first:16", "all"))
    assert sum(plain.kl) == pytest.approx(judged[CHOREOGRAPHED].kl, rel=1e-6)
    assert sum(first.kl) == pytest.approx(judged["repair first:16"].kl, rel=1e-6)
    assert sum(plain.kl) > 1e-3
    assert sum(everything.kl) == pytest.approx(0, abs=1e-5)
    assert sum(everything.same) == everything.num_tokens == plain.num_tokens
    encoded = [measured.num_encoded for measured in (plain, first, everything)]
    assert encoded == sorted(set(encoded))


def test_a_session_repairs_by_its_policy(llm: Any, model: str, tmp_path: Path) -> None:
    """Token for token what the same blocks given call by call do."""
    masks = {**_NOTHING, "vote": {"question": (), "candidate": (0,), "ballot": (0, 2)}}
    path, replays = tmp_path / "policy.json", Replays(llm, _task(llm))
    _policy(model, masks).save(path)
    by_file, by_call = replays.measure(str(path)), replays.measure(choose=policy_choice(masks))
    assert by_file.kl == by_call.kl and by_file.num_encoded == by_call.num_encoded
    plain = replays.measure()
    assert by_file.num_encoded > plain.num_encoded
    for call, before in zip(by_file.calls, plain.calls, strict=True):
        assert (call.message.usage.repaired_tokens > 0) == (call.role == "vote")
        assert before.message.usage.repaired_tokens == 0
        assert call.message.role == call.role


def test_what_a_policy_is_not_for(
    llm: Any, model: str, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(RepairError, match="calibrated with qwen3"):
        Choreography(llm, repair=_policy(str(tiny_model_path("qwen3")), _NOTHING))
    with pytest.raises(RepairError, match="nowhere"):
        Choreography(llm, repair=str(tmp_path / "nowhere.json"))
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    with Choreography(llm, repair=_policy(model, _NOTHING)) as c:
        task, other = c.prefill("Who?", role="question"), c.prefill("Where?")
        for parents, role in (([task], "judge"), ([task], None), ([task, other], "vote")):
            with pytest.raises(RepairError, match="calibrated on tree_of_thoughts"):
                c.decode("So", parents=parents, role=role, sampling_params=greedy)
        assert c.decode("So", parents=[task], role="vote", sampling_params=greedy)
        assert c.decode("So", parents=[other], repair="none", sampling_params=greedy)
        assert c.decode("So", parents=[other], mode="exact", sampling_params=greedy)
    with pytest.raises(Exception, match="a role is a name"):
        Choreography(llm).prefill("Who?", role="")


@pytest.mark.exhaustive
def test_the_command(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the documentation, on runs of its own; then a workflow with its policy."""
    block = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)[1]
    calibrate, run = (shlex.split(line) for line in block.replace("\\\n", "").splitlines())
    monkeypatch.chdir(tmp_path)
    small = ["--model", model, "--max-tokens", "20", *CHATML]
    least = '{"share": 0.02, "by": "random"}'
    easy = ["--target", "kl=10", "--repair", least, "--budget", "0.3", "--budget", "1"]
    assert cli.main([*calibrate[1:], *small, "--limit", "4", *easy]) == 0
    made = json.loads((tmp_path / "calibration" / "calibration.json").read_text())
    rungs = {rung["name"]: rung for rung in made["rungs"]}
    assert list(rungs) == ["none", least, "policy 30 %", "policy 100 %", "all"]
    assert made["chosen"] == "none" and not (tmp_path / "calibration" / "policy.json").exists()
    assert rungs["all"]["kl"] == pytest.approx(0, abs=1e-5) and rungs["none"]["kl"] > 1e-3
    assert rungs["all"]["agreement"] == 1 and rungs[least]["predicted"] > 0
    assert rungs["none"]["share"] == 0 < rungs["policy 30 %"]["share"] <= 0.3
    assert rungs["policy 30 %"]["kl"] < rungs["none"]["kl"]
    assert made["prediction_error"] > 0
    between = (rungs["none"]["kl"] + rungs["policy 100 %"]["kl"]) / 2
    hard = ["--target", f"kl={between}", "--repair", least, "--budget", "1"]
    assert cli.main([*calibrate[1:], *small, "--limit", "4", *hard]) == 0
    assert 'repair="calibration/policy.json"' in capsys.readouterr().out
    assert cli.main([*run[1:], *small, "--limit", "1"]) == 0
    page = (tmp_path / "calibration" / "index.html").read_text()
    assert page.count("<circle") == 3 * 4 and "http" not in page.replace("http-equiv", "")
    assert cli.main([*calibrate[1:], *small, "--limit", "2", "--target", "ttft=1e-9"]) == 1
    assert "encode everything anew" in capsys.readouterr().out


def test_recorded_runs(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(tmp_path / "runs")
    made = ["--limit", "2", "--max-tokens", "6", "--mode", "baseline", "--out", runs]
    assert cli.main(["run", "multi_qa", *made]) == 0
    quick = ["--model", model, "--repair", "first:4", "--budget", "0.5", "--target", "kl=1"]
    out = ["--out", str(tmp_path / "out")]
    assert cli.main(["calibrate", runs, *quick, *out]) == 0
    assert "first:4" in capsys.readouterr().out
    other = str(tmp_path / "other")
    assert cli.main(["run", "direct", *made[:-1], other]) == 0
    for said, given in (
        ("what shall be calibrated", []),
        ("what shall be calibrated", [runs, "--workflow", "multi_qa"]),
        ("one workflow", [runs, other]),
        ("2 runs or more", [runs, "--limit", "1"]),
        ("a share of the reused tokens", [runs, "--budget", "1.5"]),
        ("a target is kl=", [runs, "--target", "speed=3"]),
        ("a target is kl=", [runs, "--target", "agreement=3"]),
        ("a rule is", [runs, "--repair", "best"]),
    ):
        assert cli.main(["calibrate", *given, "--out", str(tmp_path / "no")]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
