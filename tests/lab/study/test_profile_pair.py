# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo profile-pair` on an engine with two adapters, and sessions with its profile."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from vllm import SamplingParams

from tests.engine.adapters import Adapter
from tests.engine.programs import GREEDY
from tests.lab.notes import CHATML
from vllm_choreo import Choreography
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import RepairError
from vllm_choreo.lab.cli import run as run_command
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.bench import judge
from vllm_choreo.lab.study.profile_pair import command as arguments
from vllm_choreo.lab.study.profile_pair.cell_arms import AdapterPair
from vllm_choreo.lab.study.profile_pair.profiling import PLAIN, Profiling, search
from vllm_choreo.lab.study.profile_pair.results import inputs_table
from vllm_choreo.lab.study.sets import HeldOutSet
from vllm_choreo.repair.pair import PairProfile
from vllm_choreo.trained_adapter import ModelIdentity, adapter_weights

DOCS = (Path(__file__).parents[3] / "docs" / "variants.md").read_text(encoding="utf-8")
MODEL = "llama"  # its name alone is asked for
NUM_LAYERS = 3  # of the tiny model


@pytest.fixture(scope="module")
def adapters(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [Adapter(tiny_model_path("llama"), folder, number) for number in (1, 2)]


@pytest.fixture
def llm(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    adapters: list[Adapter],
) -> Any:
    return engine_slot(
        tiny_model_path("llama"),
        logits_processors=("vllm_choreo.engine.worker.forced:ForcedTokens",),
        additional_config={"choreo": {"hidden_memory_gib": 2**-9}},
        enable_lora=True,
        max_loras=2,
    )


@pytest.fixture(autouse=True)
def _one_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a test take the module's engine instead of starting one each."""
    monkeypatch.setattr(arguments, "start_engine", lambda *_, **__: llm)
    monkeypatch.setattr(run_command, "start_engine", lambda *_, **__: llm)


def _problems(count: int = 2) -> HeldOutSet:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    inputs = {"questions": ("Who is it?", "Where is the key?"), "sampling_params": sampling}
    tasks = [Task(str(i), "made", inputs, ()) for i in range(count)]
    return HeldOutSet("made", "multi_qa", tuple(tasks))


def test_cells_are_arms_of_an_evaluation(llm: Any, adapters: list[Adapter]) -> None:
    """Of the model's own messages: the same distance as of a reader adapter with such a rule."""
    problems, reader = _problems(), adapters[0].path
    pair = AdapterPair(None, reader, MODEL)
    profiling = Profiling(llm, pair, problems, int)
    choices = [PLAIN, ((1, 3),), ((0, 1), (2, 3)), ((0, NUM_LAYERS),)]
    profiling.replay(choices)
    for task, number in zip(problems.tasks, range(2), strict=True):
        rules = {str(layers): {"layers": [list(one) for one in layers]} for layers in choices}
        arms = [Arm(name, "choreo", reader, "decode", repair=rules[name]) for name in rules]
        (judged,) = judge(llm, "multi_qa", [task], [pair.text, *arms], measures_kl=True)
        for layers in choices:
            found, expected = profiling.found[layers][number], judged[str(layers)]
            assert found.kl == pytest.approx(expected.kl, rel=1e-4, abs=1e-6)
            assert found.num_encoded == expected.num_encoded and found.num_tokens == 6
    assert profiling.found[PLAIN][0].kl > 1e-2
    assert profiling.found[choices[-1]][0].kl == pytest.approx(0, abs=1e-5)


def test_what_one_adapter_wrote_is_what_the_other_reads(llm: Any, adapters: list[Adapter]) -> None:
    """All messages of the pair's writer are encoded by it, those of its reader are not."""
    (task,) = _problems(1).tasks
    pair = AdapterPair(*(adapter.path for adapter in adapters), MODEL)
    plain = pair.arm(PLAIN)
    with plain.open(llm) as c:
        ran = plain.run(c, "multi_qa", task)
    first = ran.steps[0].message
    with Choreography(llm) as c:
        own = [c.prefill(first.token_ids, adapter=str(one.path)) for one in adapters]
        answers = [
            c.decode("So", parents=[message], adapter=str(adapters[1].path), sampling_params=GREEDY)
            for message in own
        ]
    with pair.arm(PLAIN).open(llm) as c:
        read = c.decode("So", parents=[c.prefill(first.token_ids)], sampling_params=GREEDY)
    same = [answer.generated_token_ids == read.generated_token_ids for answer in answers]
    values = [answer.logprobs for answer in answers]
    assert same[0] and (values[0] != values[1] or not same[1])


def test_the_search_goes_from_coarse_to_fine(llm: Any, adapters: list[Adapter]) -> None:
    profiling = Profiling(llm, AdapterPair(None, adapters[1].path, MODEL), _problems(1), int)
    search(profiling, NUM_LAYERS)
    cells = {cell.layers: cell for cell in profiling.cells()}
    assert {((0, 1),), ((1, 3),), ((0, 3),)} <= cells.keys()
    assert cells[PLAIN].quality_loss == 1 and cells[(0, 3),].quality_loss < 1e-4
    assert all(cell.accuracy is None for cell in cells.values()), "none was asked for answers"
    profiling.answer([PLAIN, ((0, 3),)])
    assert [row["arm"] for row in profiling.rows()] == ["text", "choreographed", "0–3"]


def test_problems_side_by_side_are_those_one_after_the_other(
    llm: Any, adapters: list[Adapter]
) -> None:
    """Also where they do not fill the last row of them."""
    pair, layers = AdapterPair(adapters[0].path, adapters[1].path, MODEL), ((1, 3),)
    counted: list[int] = []
    apart, beside = (
        Profiling(llm, pair, _problems(3), counted.append, num_together=num) for num in (1, 2)
    )
    for one in (apart, beside):
        one.answer([PLAIN, layers])
    assert counted == 6 * [1] + 2 * [2, 1] + 6 * [1] + 2 * [2, 1]  # begun and replayed; answered
    for choice in (PLAIN, layers):
        for one, other in zip(apart.answered[choice], beside.answered[choice], strict=True):
            assert one.answers == other.answers
            assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled") / "pair"


@pytest.fixture
def profiled(folder: Path, adapters: list[Adapter], tiny_model_path: Callable[[str], Path]) -> Path:
    """The folder of the command, run once."""
    if not folder.exists():
        asked = [*(str(adapter.path) for adapter in adapters), "--layer-map"]
        small = ["--workflow", "multi_qa", "--limit", "3", "--max-tokens", "5"]
        model = ["--model", str(tiny_model_path("llama")), *CHATML]
        assert cli.main(["profile-pair", *asked, *small, *model, "--out", str(folder)]) in (0, 1)
    return folder


def test_a_session_reads_by_its_profile(llm: Any, adapters: list[Adapter], profiled: Path) -> None:
    made = json.loads((profiled / "profile.json").read_text())
    profile = PairProfile.from_json(json.loads((profiled / "pair.json").read_text()))
    assert profile.writer == adapter_weights(adapters[0].path)
    assert profile.num_layers == NUM_LAYERS and profile.num_read > 0
    assert len(made["layer_map"]["gains"]) == NUM_LAYERS
    assert [one["name"] for one in made["sets"]][1].endswith("kept back")
    for one in made["sets"]:
        cells = {json.dumps(cell["layers"]): cell for cell in one["inputs"]}
        plain, own = cells["[]"], cells[json.dumps([[0, NUM_LAYERS]])]
        assert len(plain["kl"]) == one["rows"][0]["problems"] and min(plain["kl"]) > 0
        assert set(plain["closed"]) == {0.0} and min(own["closed"]) > 0.99
    assert "third quartile" in inputs_table(made["sets"])
    page = (profiled / "index.html").read_text()
    assert page.count("<rect") == NUM_LAYERS * (NUM_LAYERS + 1) / 2
    assert "http" not in page.replace("http-equiv", "")

    profile = replace(profile, chosen=((1, 3),))
    writer, reader = (str(adapter.path) for adapter in adapters)
    with Choreography(llm, repair=profile) as c:
        docs = [c.prefill(text, adapter=writer) for text in ("Anna is here.", "Bert is there.")]
        by_profile = c.decode("So", parents=docs, adapter=reader, sampling_params=GREEDY)
        by_hand = c.decode(
            "So", parents=docs, adapter=reader, layers=(1, 3), sampling_params=GREEDY
        )
        assert by_profile.logprobs == by_hand.logprobs
        assert by_profile.usage.repaired_tokens == by_hand.usage.repaired_tokens > 0
        assert c.decode("So", parents=docs, adapter=writer).usage.repaired_tokens == 0
        with pytest.raises(RepairError, match="neither of the pair"):
            c.decode("So", parents=docs, sampling_params=GREEDY)
        assert c.stats()["layers_chosen"] == {"1–3": {"profile": 1}}

        def read(layers: Any) -> Any:
            call: dict[str, Any] = {"adapter": reader, "sampling_params": GREEDY}
            return c.decode("So", parents=docs, layers=layers, **call)

        in_words = {"auto": (1, 3), "reuse": (), "encode": (0, NUM_LAYERS)}
        for word, ranges in in_words.items():
            assert read(word).logprobs == read(ranges).logprobs
        assert c.stats()["layers_chosen"] == {"1–3": {"profile": 2}}
        with pytest.raises(RepairError, match='"reuse", "encode" or "auto"'):
            read("some")
        with Choreography(llm) as plain:
            doc = plain.prefill("Anna is here.", adapter=writer)
            with pytest.raises(RepairError, match="open the session with"):
                plain.decode("So", parents=[doc], adapter=reader, layers="auto")
            assert plain.decode("So", parents=[doc], layers="encode").usage.repaired_tokens


@pytest.mark.exhaustive
def test_given_layers_alone_are_tried(
    adapters: list[Adapter],
    tmp_path: Path,
    tiny_model_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["profile-pair", *(str(adapter.path) for adapter in adapters)]
    command += ["--workflow", "multi_qa", "--limit", "2", "--max-tokens", "5"]
    command += ["--model", str(tiny_model_path("llama")), *CHATML, "--out", str(tmp_path)]
    given = ["--layers", "[1, 3]", "--layers", "[[0, 1], [2, 3]]"]
    assert cli.main([*command, *given]) in (0, 1)
    sets = json.loads((tmp_path / "profile.json").read_text())["sets"]
    arms = ["text", "choreographed", "1–3", "0–1, 2–3", "0–3"]
    assert [[row["arm"] for row in one["rows"]] for one in sets] == [arms] * 2
    for wrong in (
        ["--layers", "[3]"],
        ["--layers", "7-24"],
        ["--layers", "[]"],
        [*given, "--layer-map"],
    ):
        assert cli.main([*command, *wrong]) == 1
        assert "layer" in capsys.readouterr().err


def test_more_is_reused_when_calls_wait(llm: Any, adapters: list[Adapter], profiled: Path) -> None:
    """Sixteen calls at once: the first has no other before it, the last fifteen."""
    profile = PairProfile.from_json(json.loads((profiled / "pair.json").read_text()))
    cells = [
        replace(cell, ttft=0.1 * (1 + cell.num_layers))
        for cell in profile.cells
        if cell.layers in (PLAIN, ((0, 3),))
    ]
    profile = replace(profile, cells=tuple(cells), num_read=10.0)
    rule = {"pair": profile, "max_quality_loss": 2, "ttft": 1.0}
    writer, reader = (str(adapter.path) for adapter in adapters)
    with Choreography(llm, repair=rule) as c:
        doc = c.prefill(list(range(5, 15)), adapter=writer)
        call = {"header": "So", "parents": [doc], "adapter": reader, "sampling_params": GREEDY}
        found = c.decode([call] * 16)
        # 0.4 s each: two come within a second; then 0.1 s each.
        assert [m.usage.repaired_tokens for m in found] == [10, 10, *[0] * 14]
        assert c.stats()["layers_chosen"] == {
            "0–3": {"best": 2},
            "none": {"load": 8, "late": 6},
        }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "none"], "a folder of an adapter is needed"),
        (["none", "none", "--workflow", "multi_qa"], "the same"),
        (["none", "A"], "what shall be judged"),
        (["none", "A", "--workflow", "multi_qa", "--limit", "1"], "2 or more"),
        (["none", "A", "--workflow", "multi_qa", "--target", "speed=1"], "a target is loss="),
        (["none", "A", "--workflow", "multi_qa", "--together", "2"], "only with --layers"),
        (["none", "R", "--workflow", "multi_qa"], "--placement both"),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    said: str,
    adapters: list[Adapter],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {"A": str(adapters[0].path), "R": str(adapters[0].placed("decode"))}
    given = [folders.get(argument, argument) for argument in arguments]
    assert cli.main(["profile-pair", *given, "--out", str(tmp_path / "no")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.exhaustive
def test_whole_models(
    tiny_model_path: Callable[[str], Path],
    engine_slot: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cells are those of the same change as an adapter: the variant is the base with it merged."""
    base = tiny_model_path("llama")
    adapter = Adapter(base, tmp_path, 3)
    merged = tmp_path / "merged"
    shutil.copytree(base, merged)
    adapter.oracle.model.save_pretrained(merged)
    options = {
        "logits_processors": ("vllm_choreo.engine.worker.forced:ForcedTokens",),
        "additional_config": {"choreo": {"hidden_memory_gib": 2**-9}},
    }

    def start(model: str, *_: Any, **__: Any) -> Any:
        return engine_slot(Path(model), **options)

    monkeypatch.setattr(arguments, "start_engine", start)
    monkeypatch.setattr(arguments, "stop_engine", lambda llm: None)
    small = ["--workflow", "multi_qa", "--limit", "2", "--max-tokens", "5", *CHATML, "--out"]
    out = tmp_path / "models"
    assert cli.main(["profile-pair", str(base), str(merged), *small, str(out)]) in (0, 1)
    assert not list(out.glob("writer-*"))
    profile = PairProfile.from_json(json.loads((out / "pair.json").read_text()))
    assert profile.reader is None and profile.writer == ModelIdentity.of(base).weights
    assert profile.model == ModelIdentity.of(merged)
    cells = {cell.layers: cell for cell in profile.cells}
    assert cells[PLAIN].kl > 1e-3 and cells[((0, NUM_LAYERS),)].kl < 1e-5

    llm = engine_slot(base, enable_lora=True, max_loras=1, **options)
    monkeypatch.setattr(arguments, "start_engine", lambda *_, **__: llm)
    by_adapter = ["profile-pair", "none", str(adapter.path), "--model", str(base)]
    assert cli.main([*by_adapter, *small, str(tmp_path / "adapter")]) in (0, 1)
    data = json.loads((tmp_path / "adapter" / "pair.json").read_text())
    for cell in PairProfile.from_json(data).cells:
        if cell.layers in cells:
            assert cells[cell.layers].kl == pytest.approx(cell.kl, rel=2e-2, abs=1e-5)


@pytest.mark.exhaustive
def test_the_documented_commands(
    adapters: list[Adapter],
    tiny_model_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)[0]
    (command,) = (shlex.split(line) for line in block.replace("\\\n", "").splitlines())
    monkeypatch.chdir(tmp_path)
    for adapter, name in zip(adapters, command[2:4], strict=True):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(adapter.path)
    model = ["--model", str(tiny_model_path("llama")), "--max-tokens", "6", *CHATML]
    assert cli.main([*command[1:], *model, "--limit", "4"]) in (0, 1)
    assert "pair/index.html" in capsys.readouterr().out
    assert (tmp_path / "pair" / "pair.json").exists()
