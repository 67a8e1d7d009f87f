# SPDX-License-Identifier: Apache-2.0
"""Commands on a model that writes no ChatML: what is encoded is what its own template writes.

With Llama 3's template, whose texts begin with a token of their own, on one engine with adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat.chat_templates import FAMILIES
from tests.engine.adapters import Adapter
from tests.engine.byte_model import make_family_model
from vllm_choreo.cli import main as cli
from vllm_choreo.lab.cli import record
from vllm_choreo.lab.record.recording import Recording
from vllm_choreo.lab.study.calibrate import command as calibrate
from vllm_choreo.lab.study.evaluate import command as evaluate
from vllm_choreo.lab.study.profile_pair import command as profile_pair
from vllm_choreo.lab.train.packing import pack, pack_as_text
from vllm_choreo.lab.train.recorded import calls_of
from vllm_choreo.transcript.transcript import Transcript

FAMILY = FAMILIES["llama3"]
_SMALL = ["--limit", "3", "--max-tokens", "4"]
_TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", re.DOTALL)
_ASKS = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("llama3"), FAMILY)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [Adapter(model, folder, number) for number in (1, 2)]


@pytest.fixture(autouse=True)
def _one_engine(
    engine_slot: Callable[..., Any],
    model: Path,
    adapters: list[Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands of a test take the module's engine instead of starting one each."""
    llm = engine_slot(
        model,
        logits_processors=("vllm_choreo.engine.worker.forced:ForcedTokens",),
        additional_config={"choreo": {"hidden_memory_gib": 2**-7}},
        enable_lora=True,
        max_logprobs=64,
        max_loras=2,
    )
    for module in (record, evaluate, calibrate, profile_pair):
        monkeypatch.setattr(module, "start_engine", lambda *_, **__: llm)


def check_is_as_written(transcript: Transcript, tokenizer: Any) -> int:
    """Each answer's prompt is what the template writes for the turns that it has.

    Returns:
        How many prompts were compared: the template strips answers, so those behind one are not.
    """
    num_compared = 0
    for call in pack_as_text(pack(calls_of(transcript))).calls:
        prompt = list(call.token_ids[: len(call.token_ids) - call.num_generated])
        text = tokenizer.decode(prompt)
        assert "<|im_" not in text and text.startswith(FAMILY.bos)
        turns = _TURN.findall(text)
        if "assistant" in {role for role, _ in turns} or _ASKS not in text:
            continue
        chat = [{"role": role, "content": content} for role, content in turns]
        written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        if turns[0][0] != "system":  # the turn with dates that the template writes unasked
            written = FAMILY.bos + written[written.index("<|start_header_id|>user") :]
        expected = tokenizer.encode(written, add_special_tokens=False)
        assert prompt[: len(expected)] == expected  # behind it an answer may be begun
        num_compared += 1
    return num_compared


@pytest.mark.parametrize("workflow", ["multi_qa", "tree_of_thoughts"])
def test_recorded_runs_are_as_the_template_writes_them(
    workflow: str, model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """And studies of them know text from what differs from it."""
    recorded = tmp_path / "recorded"
    given = [workflow, "--model", str(model), *_SMALL, "--shares", "0.34", "0.33", "0.33"]
    assert cli.main(["record", *given, "--out", str(recorded)]) == 0
    runs = [run for part in Recording.load(recorded).parts.values() for run in part]
    assert len(runs) == 3
    for run in runs:
        assert check_is_as_written(run.transcript, tokenizer) >= 1
    judged = tmp_path / "judged"
    assert cli.main(["evaluate", str(recorded), "--out", str(judged), "--repair", "all"]) == 0
    (one,) = json.loads((judged / "evaluation.json").read_text())["sets"]
    rows = {row["arm"]: row for row in one["rows"]}
    assert rows["repair all"]["kl"] == pytest.approx(0, abs=1e-5)
    assert rows["choreographed"]["kl"] > 1e-3


def test_runs_are_calibrated(model: Path, tmp_path: Path) -> None:
    given = ["--workflow", "multi_qa", "--model", str(model), *_SMALL, "--target", "kl=10"]
    assert cli.main(["calibrate", *given, "--budget", "0.5", "--out", str(tmp_path)]) == 0
    rungs = {r["name"]: r for r in json.loads((tmp_path / "calibration.json").read_text())["rungs"]}
    assert rungs["all"]["kl"] == pytest.approx(0, abs=1e-5) and rungs["none"]["kl"] > 1e-3


@pytest.mark.exhaustive
def test_a_pair_is_profiled(model: Path, adapters: list[Adapter], tmp_path: Path) -> None:
    pair = [str(adapter.path) for adapter in adapters]
    given = ["--workflow", "multi_qa", "--model", str(model), *_SMALL, "--out", str(tmp_path)]
    assert cli.main(["profile-pair", *pair, *given]) in (0, 1)  # 1: no layers are worth it
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    for one in json.loads((tmp_path / "profile.json").read_text())["sets"]:
        cells = {json.dumps(cell["layers"]): cell for cell in one["inputs"]}
        assert min(cells["[]"]["kl"]) > 1e-3, "the writer's keys are not the reader's"
        assert max(cells[json.dumps([[0, num_layers]])]["kl"]) == pytest.approx(0, abs=1e-5)
