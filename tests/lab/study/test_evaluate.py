# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo evaluate`, from the command line to the page, on one engine with adapters."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.adapters import Adapter
from tests.engine.oracle import Oracle
from tests.lab.train.packings import oracle_logprobs
from tests.transcript.test_page import browser, needs_chromium
from vllm_choreo import Choreography
from vllm_choreo.cli import main as cli
from vllm_choreo.lab.cli import run as run_command
from vllm_choreo.lab.cli.task import Task, transcript_json
from vllm_choreo.lab.problems import trivia
from vllm_choreo.lab.record.recording import Recorder, Recording
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.bench import judge
from vllm_choreo.lab.study.evaluate import command
from vllm_choreo.lab.study.evaluate.arms import arms_of
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT
from vllm_choreo.lab.train.packing import PackedCall, pack, pack_as_text
from vllm_choreo.lab.train.recorded import calls_of, check_recorded_as_text
from vllm_choreo.lab.workflows.direct import direct, question_of
from vllm_choreo.trained_adapter import PLACEMENTS, ModelIdentity, TrainedAdapter, uses_adapter
from vllm_choreo.transcript.transcript import Transcript

DOCS = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
_QUESTIONS = ["Who?", "Which colour has the shed?"]


@pytest.fixture(scope="module")
def adapter(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    return Adapter(tiny_model_path("llama"), tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(
        tiny_model_path("llama"),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        logits_processors=("vllm_choreo.engine.worker.forced:ForcedTokens",),
    )


@pytest.fixture
def _one_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a test take the module's engine instead of starting one each."""
    monkeypatch.setattr(command, "start_engine", lambda *_, **__: llm)


def _task(workflow: str = "multi_qa") -> Task:
    inputs: dict[str, Any] = {"questions": _QUESTIONS, "variant": "parallel"}
    if workflow == "parallel_debate":
        inputs = {"question": _QUESTIONS[0], "agents": 2, "rounds": 2}
    problems = tuple(trivia(len(inputs.get("questions", [0])), 0))
    return Task("one", "made", {**inputs, "sampling_params": _SAMPLING}, problems)


# -- the distance to the text --------------------------------------------------------------------


def _kl(text: torch.Tensor, other: torch.Tensor) -> float:
    """KL(text || other), summed over tokens, in float64."""
    text, other = text.double(), other.double()
    return float((text.exp() * (text - other)).sum())


def _said(logprobs: torch.Tensor, calls: Sequence[PackedCall]) -> torch.Tensor:
    """The rows that predict what was generated."""
    rows, start = [], 0
    for call in calls:
        stop = start + len(call.token_ids)
        rows += range(stop - call.num_generated - 1, stop - 1) if call.is_decode else ()
        start = stop
    return logprobs[rows]


@pytest.mark.parametrize("workflow", ["multi_qa", "parallel_debate"])
def test_the_distance_is_that_of_the_dense_oracle(
    llm: Any, adapter: Adapter, tiny_oracle: Callable[[str], Oracle], workflow: str
) -> None:
    """Of all arms: each call encoded by its own model, against the base model on one text."""
    task, base = _task(workflow), tiny_oracle("llama")
    arms = arms_of([adapter.placed(placement) for placement in PLACEMENTS], [], None)
    (judged,) = judge(llm, workflow, [task], arms, measures_kl=True)
    with arms[0].open(llm) as c:
        ran = arms[0].run(c, workflow, task)
    transcript = Transcript.from_json(json.loads(json.dumps(ran.to_json())))
    calls = calls_of(transcript)
    texts = list(pack_as_text(pack(calls)).calls)
    text = _said(oracle_logprobs(texts, [base] * len(texts)), texts)
    assert len(text) == sum(call.num_generated for call in calls) >= 6
    found = {name: one.kl for name, one in judged.items() if one.kl is not None}
    assert found[TEXT] == 0 and set(found) == {arm.name for arm in arms if not arm.is_direct}
    for arm in arms[1:]:
        if arm.is_direct:
            continue
        oracles = [
            adapter.oracle
            if arm.placement and uses_adapter(arm.placement, call.is_decode)
            else base
            for call in calls
        ]
        expected = _kl(text, _said(oracle_logprobs(calls, oracles), calls))
        assert expected > 1e-3, "or nothing was compared"
        assert found[arm.name] == pytest.approx(expected, rel=1e-3, abs=1e-5), arm
        assert judged[arm.name].num_tokens == len(text)


def test_a_recorded_run_is_what_is_measured(llm: Any) -> None:
    """What was drawn, at any temperature, and not what the text says now."""
    task, arms = _task(), arms_of([], [], None)[:2]
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    drawn = replace(task, inputs={**task.inputs, "sampling_params": sampling})
    with arms[0].open(llm) as c:
        recorded = arms[0].run(c, "multi_qa", drawn)
    kept = json.loads(json.dumps(recorded.to_json()))
    task = replace(task, recorded=Transcript.from_json(kept))
    (judged,) = judge(llm, "multi_qa", [task], arms, measures_kl=True)
    assert judged[CHOREOGRAPHED].num_tokens == 9
    assert judged[TEXT].answers != recorded.answers


def test_a_direct_call_is_the_question_alone(
    llm: Any, adapter: Adapter, tiny_oracle: Callable[[str], Oracle]
) -> None:
    """And with an adapter, every token of it is the adapter's."""
    task = _task()
    plain, distilled = arms_of([], [adapter.placed("decode")], None)[2:]
    for arm, oracle in ((plain, tiny_oracle("llama")), (distilled, adapter.oracle)):
        with arm.open(llm) as c:
            (step,) = arm.run(c, "multi_qa", task).steps
        assert all(question in step.message.text for question in _QUESTIONS)
        tokens, num = list(step.message.token_ids), len(step.message.generated_token_ids)
        likeliest = oracle.encode(tokens).logprobs().argmax(-1)[-num - 1 : -1]
        assert likeliest.tolist() == tokens[-num:]
    assert question_of("document_qa", {"documents": ["a", "b"], "question": "c"}) == "a\n\nb\n\nc"
    assert "tree, dog" in question_of("branch_solve_merge", {"concepts": ["tree", "dog"]})


@pytest.mark.exhaustive
def test_distilled_calls_are_those_of_the_direct_arm(
    llm: Any, tmp_path: Path, tiny_model_path: Callable[[str], Path]
) -> None:
    """The same prompt, and as its continuation the workflow's answer, token by token."""
    model, task = str(tiny_model_path("llama")), _task("parallel_debate")
    recorder = Recorder(tmp_path / "recorded", ModelIdentity.of(model), shares=(1, 0, 1))
    runs = []
    for question in ("Who?", "Where?"):
        asked = replace(task, inputs={**task.inputs, "question": question})
        text = Arm(TEXT, "baseline")
        with text.open(llm) as c:
            runs.append(text.run(c, "parallel_debate", asked))
        recorder.save(recorder.place([question]), runs[-1], [question])
    out = tmp_path / "direct"
    command = ["distil", str(tmp_path / "recorded"), "--model", model, "--out", str(out)]
    assert cli.main(command) == 0
    recording = Recording.load(out)
    (first,), (second,) = recording.parts["train"], recording.parts["test"]
    for made, run, question in zip((first, second), runs, ("Who?", "Where?"), strict=True):
        assert made.problems == (question,) and made.transcript.answers == run.answers[:1]
        with Choreography(llm) as c, Replay(c, made.transcript) as replay:
            said = direct(replay, question, sampling_params=_SAMPLING)
        assert said.answers == run.answers[:1]
        check_recorded_as_text(made.transcript)
    foreign = str(tiny_model_path("qwen3"))
    assert cli.main([*command[:2], "--model", foreign, "--out", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "no").exists()


# -- the command ---------------------------------------------------------------------------------


def evaluate(out: Path, *arguments: str) -> Any:
    """What a command leaves behind."""
    assert cli.main(["evaluate", *arguments, "--out", str(out)]) == 0
    return json.loads((out / "evaluation.json").read_text())


def _record(folder: Path, llm: Any, questions: Sequence[str], workflow: str = "direct") -> Path:
    """A folder as `vllm-choreo record` leaves it."""
    (folder / "test").mkdir(parents=True)
    for i, problem in enumerate(trivia(len(questions), 0)):
        inputs = {"question": questions[i], "sampling_params": _SAMPLING}
        asked = (replace(problem, question=questions[i]),)
        task = Task(f"{folder.name}/{i}", folder.name, inputs, asked)
        text = Arm(TEXT, "baseline")
        with text.open(llm) as c:
            transcript = text.run(c, workflow, task)
        data = json.dumps(transcript_json(task, transcript))
        (folder / "test" / f"{i:05}.json").write_text(data)
    return folder


@pytest.mark.usefixtures("_one_engine")
def test_arms_on_problems_of_their_own(
    tmp_path: Path, adapter: Adapter, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = [str(adapter.placed(placement)) for placement in ("prefill", "decode")]
    given = [word for path in adapters for word in ("--adapter", path)]
    given += ["--direct", str(adapter.placed("both")), "--max-tokens", "6", "--limit", "2"]
    made = evaluate(tmp_path, "--workflow", "multi_qa", *given)
    (one,) = made["sets"]
    names = [row["arm"] for row in one["rows"]]
    writer, reader, both = (
        f"+ {adapter.placed(name).name}" for name in ("prefill", "decode", "both")
    )
    assert names == [TEXT, CHOREOGRAPHED, writer, reader, "direct", f"direct {both}"]
    assert [row["placement"] for row in one["rows"]] == [
        None,
        None,
        "prefill",
        "decode",
        None,
        "both",
    ]
    assert len(one["problems"]) == 2 and set(one["problems"][0]["arms"]) == set(names)
    for row in one["rows"]:
        assert (row["kl"] is None) == row["arm"].startswith("direct")
        assert row["judged"] == row["problems"] == 2
    kl = {row["arm"]: row["kl"] for row in one["rows"]}
    for row in one["rows"][2:4]:
        closed = 1 - kl[row["arm"]] / kl[CHOREOGRAPHED]
        assert row["kl_gap_closed"] == pytest.approx(closed)
    rows = list(csv.DictReader((tmp_path / "evaluation.csv").open()))
    assert [row["arm"] for row in rows] == names
    assert float(rows[1]["kl"]) == one["rows"][1]["kl"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_one_engine")
def test_several_recordings_show_how_adapters_transfer(
    tmp_path: Path, llm: Any, adapter: Adapter, tiny_model_path: Callable[[str], Path]
) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(adapter.placed("decode"), folder)
    base = ModelIdentity.of(tiny_model_path("llama"))
    curves = {"train": [[1, 2.0], [2, 1.0]], "development": [[2, 1.5]]}
    TrainedAdapter("decode", base, "kl", curves=curves).save(folder)
    recordings = [
        _record(tmp_path / "one", llm, ["Who?", "<b>Where?</b>"], "parallel_debate"),
        _record(tmp_path / "two", llm, ["When?"], "iterative_debate"),
    ]
    out = tmp_path / "out"
    made = evaluate(out, *map(str, recordings), "--adapter", str(folder))
    assert [(one["name"], one["workflow"], len(one["problems"])) for one in made["sets"]] == [
        ("one", "parallel_debate", 2),
        ("two", "iterative_debate", 1),
    ]
    assert made["adapters"][0]["curves"] == curves and made["adapters"][0]["loss"] == "kl"
    page = (out / "index.html").read_text()
    assert "<h2>Transfer</h2>" in page and page.count("<polyline") == 2
    assert "&lt;b&gt;Where?" in page and "<b>Where?" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.exhaustive
@needs_chromium
@pytest.mark.usefixtures("_one_engine")
def test_the_page_in_a_browser(tmp_path: Path, llm: Any, adapter: Adapter) -> None:
    recorded = _record(tmp_path / "one", llm, ["Who?", "Where?"], "parallel_debate")
    evaluate(tmp_path, str(recorded), "--adapter", str(adapter.placed("both")), "--limit", "1")
    reader, _ = browser(tmp_path / "index.html")
    # Accuracy of four arms, KL of three: the direct call says something else.
    assert len(reader.classes("div", "arm")) == 4 + 3


def test_a_workflow_is_run_with_an_adapter(
    tmp_path: Path, llm: Any, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vllm-choreo run --adapter`: choreographed calls use it, text is the model's alone."""
    monkeypatch.setattr(run_command, "start_engine", lambda *_: llm)
    said: dict[str, dict[str, str]] = {}
    for placement in (None, "decode", "both"):
        used = ["--adapter", str(adapter.path), "--placement", placement] if placement else []
        out = tmp_path / str(placement)
        given = ["--mode", "both", "--max-tokens", "8", "--limit", "1", "--out", str(out)]
        assert cli.main(["run", "multi_qa", *given, *used]) == 0
        transcripts = [json.loads(path.read_text()) for path in out.glob("*.json")]
        said[str(placement)] = {made["mode"]: made["answers"][0] for made in transcripts}
    assert len({one["baseline"] for one in said.values()}) == 1
    assert len({one["choreo"] for one in said.values()}) == 3
    for wrong in (["--placement", "both"], ["--adapter", str(adapter.path), "--mode", "exact"]):
        assert cli.main(["run", "multi_qa", *wrong, "--out", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "no").exists()


def test_the_documentation(
    llm: Any, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its example runs in a folder with an adapter."""
    examples = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    (example,) = [text for text in examples if text.startswith("llm")]
    first, rest = example.split("\n", 1)
    assert first.startswith("llm = LLM(model, enable_lora=True, max_lora_rank=")
    shutil.copytree(adapter.placed("prefill"), tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"llm": llm, "Choreography": Choreography, "params": _SAMPLING}
    exec(compile(rest, "training.md", "exec"), scope)
    assert len(scope["answer"].generated_token_ids) == 6


# -- repair --------------------------------------------------------------------------------------

REPAIR = (Path(__file__).parents[3] / "docs" / "repair.md").read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_one_engine")
def test_what_repair_buys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation's command; all tokens repaired is the text, to rounding."""
    block = re.findall(r"```sh\n(.*?)```", REPAIR, re.DOTALL)[0]
    name, *given = shlex.split(block.replace("\\\n", ""))
    assert (name, given[0]) == ("vllm-choreo", "evaluate")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*given, "--limit", "1", "--max-tokens", "20"]) == 0
    made = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    (one,) = made["sets"]
    rows = {row["arm"]: row for row in one["rows"]}
    rules = [given[i + 1] for i, word in enumerate(given) if word == "--repair"]
    assert list(rows) == [TEXT, CHOREOGRAPHED, *(f"repair {rule}" for rule in rules), "direct"]
    assert rows["repair all"]["kl"] == pytest.approx(0, abs=1e-5)
    assert rows[CHOREOGRAPHED]["kl"] > 1e-3 and rows["repair first:4"]["kl"] > 1e-5
    names = [CHOREOGRAPHED, "repair first:4", "repair first:16", "repair all"]
    encoded = [rows[name]["encoded"] for name in names]
    assert encoded == sorted(set(encoded))
    assert all(row["ttft"] > 0 for row in rows.values())
    page = (tmp_path / "evaluation" / "index.html").read_text()
    assert page.count("<circle") == len(rows) - 1  # the direct call says something else
    assert "tokens encoded per problem" in page


@pytest.mark.usefixtures("_one_engine")
def test_the_question_once_more(tmp_path: Path) -> None:
    """Two arms that say something else than the text, and are judged by their answers alone."""
    given = ["--workflow", "parallel_debate", "--limit", "1", "--max-tokens", "4", "--restate"]
    (one,) = evaluate(tmp_path, *given)["sets"]
    rows = {row["arm"]: row for row in one["rows"]}
    again = [f"{TEXT}, restated", f"{CHOREOGRAPHED}, restated"]
    assert list(rows) == [TEXT, CHOREOGRAPHED, *again, "direct"]
    assert all(rows[name]["kl"] is None and rows[name]["accuracy"] is not None for name in again)
    assert rows[again[1]]["encoded"] > rows[CHOREOGRAPHED]["encoded"]
    assert rows[CHOREOGRAPHED]["kl"] is not None


def test_a_workflow_is_run_with_a_rule(
    tmp_path: Path, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "start_engine", lambda *_: llm)
    given = ["run", "multi_qa", "--mode", "both", "--max-tokens", "4", "--limit", "1"]
    assert cli.main([*given, "--repair", "first:3", "--out", str(tmp_path)]) == 0
    repaired = {}
    for path in tmp_path.glob("*.json"):
        made = json.loads(path.read_text())
        repaired[made["mode"]] = made["steps"][-1]["usage"]["repaired_tokens"]
    assert repaired["choreo"] > 0 == repaired["baseline"]
    assert "first:3" in (tmp_path / "index.html").read_text()


# -- what is refused -----------------------------------------------------------------------------


def _refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.main(["evaluate", *map(str, arguments)]) == 1
    said = capsys.readouterr().err.splitlines()  # an engine may say more
    (line,) = [row for row in said if row.startswith("vllm-choreo: ")]
    return line


def test_what_the_arguments_cannot_be(
    tmp_path: Path,
    adapter: Adapter,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before an engine is started, and before a folder is made."""
    monkeypatch.setattr(command, "start_engine", None)
    monkeypatch.chdir(tmp_path)
    multi_qa = ("--workflow", "multi_qa")
    writer, reader = adapter.placed("prefill"), adapter.placed("decode")
    (tmp_path / "again" / "empty").mkdir(parents=True)
    shutil.copytree(reader, tmp_path / "again" / reader.name)
    for said, arguments in (
        ("what shall be judged", ()),
        ("what shall be judged", ("folder", *multi_qa)),
        ("no runs in test/, which training has not seen", (tmp_path / "again" / "empty",)),
        ("leave out --max-tokens", ("folder", "--max-tokens", 3)),
        ("the sets of multi_qa are", (*multi_qa, "--set", "nothing")),
        ("No such file", (*multi_qa, "--data", tmp_path / "nowhere")),
        ("say --placement prefill, decode or both", (*multi_qa, "--adapter", adapter.path)),
        ("(repair=best)", (*multi_qa, "--repair", "best")),
        ("leave out --restate", (*multi_qa, "--restate")),
        ("runs belong to one call", (*multi_qa, "--repair", "[[[0, 3]], []]")),
        ("the one call of direct generates", (*multi_qa, "--direct", writer)),
        (
            "this name: rename one",
            (*multi_qa, "--adapter", reader, "--adapter", tmp_path / "again" / reader.name),
        ),
        (
            "no one question that a direct call",
            ("--workflow", "prisoners_dilemma", "--direct", reader),
        ),
    ):
        assert said in _refused(capsys, *arguments)
    assert not (tmp_path / "evaluation").exists()
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--workflow", "nobody"])
    assert "'nobody'" in capsys.readouterr().err


@pytest.mark.usefixtures("_one_engine")
def test_adapters_that_do_not_fit_and_unknown_workflows(
    tmp_path: Path,
    llm: Any,
    adapter: Adapter,
    tiny_model_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = _record(tmp_path / "one", llm, ["Who?", "What?"])
    foreign = adapter.placed("both", tiny_model_path("qwen3"))
    line = _refused(capsys, recorded, "--adapter", foreign, "--out", tmp_path / "out")
    assert "trained on" in line and not (tmp_path / "out" / "index.html").exists()
    file = recorded / "test" / "00000.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "workflow": "nobody"}))
    assert "a workflow that is not known" in _refused(capsys, recorded)


@pytest.mark.usefixtures("_one_engine")
def test_a_problem_that_does_not_fit_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [{"question": q, "answers": ["Anna"]} for q in ("Who?", "word " * 3000, "Where?")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--workflow", "iterative_debate", "--data", str(data), "--max-tokens", "2")
    out = tmp_path / "out"
    assert cli.main(["evaluate", *arguments, "--no-kl", "--out", str(out)]) == 1
    (line,) = [row for row in capsys.readouterr().err.splitlines() if "vllm-choreo:" in row]
    assert "questions/2" in line
    (one,) = json.loads((out / "evaluation.json").read_text())["sets"]
    assert [problem["id"] for problem in one["problems"]] == ["questions/1", "questions/3"]
    assert one["rows"][1]["kl"] is None
