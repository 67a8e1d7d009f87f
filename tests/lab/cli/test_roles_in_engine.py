# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo run --role`: a workflow whose roles are played by adapters, on a real engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import Adapter
from tests.engine.engines import stop_engine
from tests.quick import NUM_LAYERS
from tests.repository.pages import ROOT, blocks_of
from vllm_choreo.cli import main as cli
from vllm_choreo.lab.cli import run as command
from vllm_choreo.lab.cli.roles import players_of
from vllm_choreo.repair.pair import Cell, PairProfile
from vllm_choreo.trained_adapter import ModelIdentity, adapter_weights

LAYERS = ((1, NUM_LAYERS),)


def documented() -> list[list[str]]:
    """Commands of the page that name roles."""
    found = [
        text for language, text in blocks_of(ROOT / "docs" / "variants.md") if "--role" in text
    ]
    return [shlex.split(text)[1:] for text in found]


def test_documented_commands_are_understood() -> None:
    assert len(documented()) == 2
    for words in documented():
        players = players_of(cli._parser().parse_args(words))
        assert players, words


@pytest.fixture
def _engine_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the engine that the command has started, as its process would."""
    started: list[Any] = []
    start = command.start_engine

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(command, "start_engine", noted)
    yield
    for llm in started:
        stop_engine(llm)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_engine_ends")
def test_documents_are_written_by_one_adapter_and_read_by_another(
    shallow_model_path: Path, tmp_path: Path
) -> None:
    writer, reader = (Adapter(shallow_model_path, tmp_path, number).path for number in (1, 2))
    cells = (Cell(LAYERS, 0.1, 0.1, 9.0, 0.1),)
    base = ModelIdentity.of(shallow_model_path)
    weights = adapter_weights(writer), adapter_weights(reader)
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    PairProfile(base, *weights, NUM_LAYERS, 9.0, cells, "", LAYERS).save(pairs / "one.json")
    given = ["run", "document_qa", "--model", str(shallow_model_path), "--limit", "1"]
    given += ["--role", f"document={writer}", "--role", f"answer={reader}", "--max-tokens", "4"]
    given += ["--repair", str(pairs), "--out", str(tmp_path / "out")]
    assert cli.main(given) == 0
    transcript = json.loads((tmp_path / "out" / "transcript.json").read_text())
    *read, answer = transcript["steps"]
    assert sum(step["num_tokens"] for step in read) == answer["usage"]["repaired_tokens"] > 0
    assert all(not step["usage"]["repaired_tokens"] for step in read)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "document: adapter-1; answer: adapter-2" in page
