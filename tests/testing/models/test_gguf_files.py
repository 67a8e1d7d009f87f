# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo model --gguf`: each known architecture comes back from a GGUF file as it was."""

from __future__ import annotations

import json
import logging
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.testing.models.gguf_of import MERGES, VOCAB, write_model
from vllm_choreo.cli import main as cli
from vllm_choreo.testing.models import convert as gguf_convert
from vllm_choreo.testing.models.embedded import gguf_model
from vllm_choreo.testing.models.fetch import EmbeddedModelError

pytest.importorskip("gguf")

DOCS = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "rms_norm_eps": 1e-5,
}
# Name: class of the configuration, what differs from the sizes above, tokenizer.
_CASES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any], str]] = {
    "llama, digits": (transformers.LlamaConfig, {"tie_word_embeddings": True}, "smollm"),
    "llama, untied": (transformers.LlamaConfig, {"tie_word_embeddings": False}, "llama-bpe"),
    "qwen2, untied": (transformers.Qwen2Config, {"tie_word_embeddings": False}, "qwen2"),
    "qwen2, tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}, "qwen2"),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}, "qwen2"),
}


def _model(name: str) -> transformers.PreTrainedModel:
    """A small model whose every weight, norms and biases included, is random."""
    kind, differing, _ = _CASES[name]
    model = transformers.AutoModelForCausalLM.from_config(kind(**_SIZES, **differing))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.eval()


def _write(path: Path, name: str, **options: Any) -> transformers.PreTrainedModel:
    model = _model(name)
    write_model(path, model, _CASES[name][2], **options)
    return model


@pytest.mark.parametrize("name", _CASES)
def test_a_model_comes_back_as_it_was(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _write(tmp_path / "model.gguf", name)
    folder = tmp_path / "model"
    (block,) = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)
    program, *command = shlex.split(block)
    assert program == "vllm-choreo"
    names = {"FILE": str(tmp_path / "model.gguf"), "DIR": str(folder)}
    assert cli.main([names.get(word, word) for word in command]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    found, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys"))
    for key in (*_SIZES, "head_dim", "tie_word_embeddings", "hidden_act"):
        wanted = getattr(expected.config, key, None)
        assert getattr(found.config, key, None) == wanted or key == "head_dim", key
    ids = torch.randint(0, len(VOCAB), (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=0, atol=0)


def test_nothing_is_said_against_the_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "model.gguf", "qwen2, tied")
    folder = gguf_model(tmp_path / "model.gguf", tmp_path / "model", progress=False)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab |= {f"word {i}": i for i in range(len(vocab), 100_001)}  # small ones are not looked at
    file.write_text(json.dumps(content))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert transformers.AutoTokenizer.from_pretrained(folder).encode("42 shed")
    assert not caplog.records


def test_large_models_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "_MAX_FILE_BYTES", 50_000)
    expected = _write(tmp_path / "model.gguf", "qwen2, untied")
    folder = gguf_model(tmp_path / "model.gguf", tmp_path / "model", progress=False)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in expected.parameters())
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def _texts() -> list[str]:
    rng = random.Random(0)
    pieces = [" the", "the", "'s", "'S", "ab", " 12", "1234", "\n\n", "\r\n", " \n", "  ", "\t"]
    pieces += ["ä", "a\u0308", "你好", "🙂", "!?", " (x)", "_", "<tool_call>", "<|im_end|>", "٣٤"]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(300)]


def test_qwens_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", "qwen2, tied")
    folder = gguf_model(tmp_path / "model.gguf", tmp_path / "model", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    oracle = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(VOCAB)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
    )
    oracle.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    oracle.add_tokens(["<tool_call>"])
    for text in _texts():
        assert tokenizer(text).input_ids == oracle(text).input_ids, text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == (
        "ab"
    )


def test_llama_3_begins_texts_and_takes_three_digits(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", "llama, untied")
    folder = gguf_model(tmp_path / "model.gguf", tmp_path / "model", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("123412").input_ids)
    assert tokens == ["<|endoftext|>", "123", "4", "12"]


# ---- errors ----


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "model"
    with pytest.raises(EmbeddedModelError, match="No such file"):
        gguf_model(file, folder, progress=False)
    file.write_bytes(b"no model at all" * 10)
    with pytest.raises(EmbeddedModelError, match="is no GGUF file, or not whole"):
        gguf_model(file, folder, progress=False)
    _write(file, "qwen2, tied")
    file.write_bytes(file.read_bytes()[:-9000])
    with pytest.raises(EmbeddedModelError, match="is no GGUF file, or not whole"):
        gguf_model(file, folder, progress=False)
    _write(file, "llama, digits", scaling="yarn")
    with pytest.raises(EmbeddedModelError, match=r"scaled \(yarn\)"):
        gguf_model(file, folder, progress=False)
    _write(file, "llama, digits", rotary_dim=8)
    with pytest.raises(EmbeddedModelError, match="rotate 8 of 16 numbers"):
        gguf_model(file, folder, progress=False)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".model.lock", "model.gguf"]


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    model = _model("qwen2, tied")
    model.config.model_type = "llama"  # whose projections have no bias
    write_model(tmp_path / "model.gguf", model, "smollm")
    with pytest.raises(EmbeddedModelError, match=r"Unknown tensor blk\.0\.attn_.\.bias"):
        gguf_model(tmp_path / "model.gguf", tmp_path / "model", progress=False)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    model = _model("qwen2, tied")
    model.config.model_type = "falcon"
    write_model(tmp_path / "model.gguf", model, "qwen2")
    with pytest.raises(EmbeddedModelError, match=r"falcon with tokenizer qwen2 are not read"):
        gguf_model(tmp_path / "model.gguf", tmp_path / "model", progress=False)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--gguf", "x.gguf"], "add --out DIR"),
        (["here", "--out", "there"], "leave out PATH or --out"),
    ],
)
def test_the_folder_is_named_once(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["model", *arguments]) == 1
    assert advice in capsys.readouterr().err


def test_another_file_does_not_replace_a_model(tmp_path: Path) -> None:
    for name, case in (("a.gguf", "qwen2, tied"), ("b.gguf", "qwen3")):
        _write(tmp_path / name, case)
    folder = gguf_model(tmp_path / "a.gguf", tmp_path / "model", progress=False)
    assert gguf_model(tmp_path / "a.gguf", folder, progress=False) == folder
    with pytest.raises(EmbeddedModelError, match=r"holds the model a\.gguf"):
        gguf_model(tmp_path / "b.gguf", folder, progress=False)
