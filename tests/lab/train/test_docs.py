# SPDX-License-Identifier: Apache-2.0
"""docs/training.md on a shallow model: its commands in small, and what they leave behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import stop_engine
from tests.lab.train.packings import load
from vllm_choreo.cli import main as cli
from vllm_choreo.cli.engine import start_engine
from vllm_choreo.lab.cli import record
from vllm_choreo.lab.record.recording import Recording
from vllm_choreo.lab.train.examples import Example, examples_of
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.loss import text_logprobs
from vllm_choreo.lab.train.packing import pack
from vllm_choreo.trained_adapter import ModelIdentity, TrainedAdapter

DOCS = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
# Of the documentation, and what suits a test.
_SMALLER = {"limit": "10", "epochs": "1", "set": "key_values"}


@pytest.fixture(scope="module")
def llm(shallow_model_path: Path) -> Iterator[Any]:
    llm = start_engine(str(shallow_model_path), max_model_len=2048, max_logprobs=64)
    yield llm
    stop_engine(llm)


def commands(name: str) -> list[list[str]]:
    """The commands of the documentation, with smaller figures."""
    shells = "\n".join(re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)).replace("\\\n", " ")
    found = re.findall(rf"^vllm-choreo ({name} .*)$", shells, re.MULTILINE)
    return [_small(line.split("#")[0].split()) for line in found]


def _small(words: list[str]) -> list[str]:
    for i, word in enumerate(words[:-1]):
        words[i + 1] = _SMALLER.get(word.removeprefix("--"), words[i + 1])
    return words


@pytest.fixture(scope="module")
def folder(llm: Any, shallow_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first two commands were run."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(record, "start_engine", lambda *_, **__: llm)
        for name in ("record", "train"):
            assert cli.main([*commands(name)[0], "--model", str(shallow_model_path)]) == 0
    return folder


@pytest.mark.exhaustive
def test_what_the_commands_leave_behind(folder: Path, shallow_model_path: Path) -> None:
    recording, adapter = (
        Recording.load(folder / "recorded"),
        TrainedAdapter.load(folder / "adapter"),
    )
    assert adapter.base == recording.base == ModelIdentity.of(shallow_model_path)
    assert adapter.data["digest"] == recording.digest and adapter.data["train"] == 8
    assert (folder / "adapter" / "curves.png").exists()
    curve = adapter.curves["development"]
    assert curve[-1][0] == 2 and curve[-1][1] != curve[0][1] > 0


@pytest.mark.exhaustive
def test_what_was_recorded_is_what_the_text_says(folder: Path, shallow_model_path: Path) -> None:
    """The engine's likeliest tokens are those of the trainer's model, in order and in nats."""
    model = PackedModel(load(shallow_model_path))
    for example in examples_of(Recording.load(folder / "recorded"))["train"][:3]:
        _assert_likeliest(model, example)


@pytest.mark.exhaustive
def test_exact_mode_records_what_the_text_says(
    llm: Any, shallow_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0: the same tokens, and the same likeliest ones in nats."""
    monkeypatch.setattr(record, "start_engine", lambda *_, **__: llm)
    found = []
    for mode in ("baseline", "exact"):
        given = [
            "record",
            "document_qa",
            "--model",
            str(shallow_model_path),
            "--set",
            "fact_pairs",
            "--limit",
            "4",
            "--temperature",
        ]
        given += ["0", "--shares", "1", "1", "0", "--mode", mode, "--out", str(tmp_path / mode)]
        assert cli.main(given) == 0
        found.append(examples_of(Recording.load(tmp_path / mode)))
    for text, exact in zip(found[0]["train"], found[1]["train"], strict=True):
        assert [call.token_ids for call in text.calls] == [call.token_ids for call in exact.calls]
        assert text.teacher is not None and exact.teacher is not None
        torch.testing.assert_close(text.teacher.logprobs, exact.teacher.logprobs, rtol=0, atol=1e-3)


def _assert_likeliest(model: PackedModel, example: Example) -> None:
    teacher = example.teacher
    assert teacher is not None and teacher.token_ids.shape[1] == 64
    logprobs = text_logprobs(model, pack(example.calls))
    found = logprobs.gather(1, teacher.token_ids)
    torch.testing.assert_close(found, teacher.logprobs, rtol=0, atol=1e-3)
    torch.testing.assert_close(logprobs.topk(64).values, teacher.logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["record", "train", "run", "distil", "evaluate"])
def test_all_commands_are_understood(name: str) -> None:
    assert commands(name)
    for words in commands(name):
        args = cli._parser().parse_args(words)
        assert args.command == name
