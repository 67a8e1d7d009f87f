# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo doctor` and `vllm-choreo inspect`, through the command line's own entry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

from vllm_choreo import Choreography
from vllm_choreo.cli import doctor
from vllm_choreo.cli.inspect import block_map
from vllm_choreo.cli.main import main


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(
            "glm4",
            "0-2       rotary, 16 dims, neighbours paired",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("smollm3", "1         no rotation", marks=pytest.mark.exhaustive),
        ("gpt_oss", "0         rotary, 32 dims, halves paired, window of 8, sinks"),
        pytest.param(
            "deepseek_v3",
            "0-2       rotary, 64 dims, neighbours paired",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_doctor_finds_the_positions_and_agrees_with_huggingface(
    name: str,
    row: str,
    tiny_model_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", str(tiny_model_path(name))]) == 0
    out = capsys.readouterr().out
    assert row in out
    assert out.count("8/8") == 7 and "WRONG" not in out
    assert f"Block size: {16 if name == 'deepseek_v3' else 32}" in out


@pytest.mark.exhaustive
def test_the_doctor_proves_states_by_texts(
    tiny_model_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_model_path("granite_hybrid"))
    assert main(["doctor", path]) == 0
    out = capsys.readouterr().out
    assert "2 of mamba2" in out and "Block size: 32" in out
    assert out.count("8/8") == 4 and "WRONG" not in out
    assert "Any order: with additional_config.choreo.composed_states, proven" in out
    assert "72,512 bytes in all layers" in out  # twice 36,256
    assert main(["inspect", "--model", path]) == 0
    assert "calls can begin at once behind: document role" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_doctor_proves_short_convolutions(
    tiny_model_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an option: vLLM's kernel for rotary embeddings would turn queries wrongly."""
    assert main(["doctor", str(tiny_model_path("lfm2"))]) == 0
    out = capsys.readouterr().out
    assert "2 of short_conv" in out and "0-1       rotary, 32 dims, halves paired" in out
    assert out.count("8/8") == 4 and "WRONG" not in out
    assert "2,048 bytes in all layers" in out


def test_the_doctor_notices_a_wrong_answer(
    tiny_model_path: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that turns queries by one position too many."""
    from vllm_choreo.engine.scheduler import call_table as calls

    right = calls.request_spans

    def wrong(plan: Any, *args: Any) -> Any:
        spans = right(plan, *args)
        deltas = tuple(delta + 1 for delta in spans.position_delta)
        return type(spans)(**{**vars(spans), "position_delta": deltas})

    monkeypatch.setattr(calls, "request_spans", wrong)
    assert main(["doctor", str(tiny_model_path("llama"))]) == 1
    captured = capsys.readouterr()
    assert "WRONG" in captured.out
    assert "do not use" in captured.err


def test_the_doctor_says_why_a_model_is_refused(
    tmp_path: Path, tiny_model_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=512, n_embd=128, n_layer=2, n_head=4, eos_token_id=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_model_path("llama")).save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path)]) == 1
    assert "cannot be choreographed" in capsys.readouterr().err


def test_layers_that_are_alike_make_one_row() -> None:
    all_seen = {"window": None, "sinks": False}
    rope = {"rope": True, "rotary_dim": 64, "is_neox": True, "longest_wavelength": 1e4, **all_seen}
    none = {"rope": False, "rotary_dim": 0, "is_neox": None, "longest_wavelength": None, **all_seen}
    kinds = [rope, rope, none, rope]
    layers = [{**kind, "layer": str(i), "max_error": i * 1e-6} for i, kind in enumerate(kinds)]
    rows = doctor.positions_table(layers).splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["0-1", "2", "3"]
    assert rows[0].split()[-1] == "1.0e-06"
    assert rows[1].split()[-2] == "-"


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_shows_a_small_example(
    tiny_model_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--model", str(tiny_model_path("llama"))]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert rows["note"].endswith("role document")
    assert rows["answer"].endswith("role question document")


def test_inspect_shows_what_a_session_wrote(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = engine_slot(tiny_model_path("llama"))
    with Choreography(llm) as c:
        doc = c.prefill([7] * 70, save_as="doc")
        gone = c.prefill([8] * 40, parents=[doc], save_as="gone")
        c.evict(gone)
        stats = c.stats()
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(stats))
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["doc"][1:3] == ["70", "0"] and "70/96" in rows["doc"]
    assert rows["gone"][1:4] == ["40", "-", "evicted"] and rows["gone"][-1] == "doc"
    assert "2 messages in 3 of" in out
    assert out.strip() == block_map(stats)


def test_inspect_tells_copies_from_their_originals(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    llm = engine_slot(tiny_model_path("llama"))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with Choreography(llm) as c:
        first = c.prefill([7] * 40, save_as="first")
        second = c.prefill([8] * 40, save_as="second")
        c.decode([9], parents=[first, second], mode="exact", sampling_params=params, save_as="end")
        text = block_map(c.stats())
    rows = [line.split("  ") for line in text.splitlines()]
    (copy,) = (row for row in rows if row[0].startswith("second (copy)"))
    assert copy[-1] == "first"
    assert [row[0] for row in rows].count("second") == 1
    assert "(copy): " in text.splitlines()[-1] + text.splitlines()[-2]


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": 3, "tokens": 4}'])
def test_inspect_refuses_other_files(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    for file in (path, tmp_path / "missing.json"):
        assert main(["inspect", str(file)]) == 1
        assert str(file) in capsys.readouterr().err
