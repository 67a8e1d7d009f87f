# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of a SmolLM model (Llama architecture) as a folder that `transformers` loads.

Needs the packages gguf, numpy, safetensors, tokenizers and tqdm only; neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from tqdm import tqdm

# Names in GGUF and in the Llama classes of transformers; {} is the layer.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}

_PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "tqdm")

_ROUND_TRIP_TEXTS = (
    "<|im_start|>user\nWhat is 1234 + 5678?<|im_end|>\n",
    "Ein  Beispiel mit\tUmlauten: äöü, 你好, 🙂\n\n  indented",
    "def f(x):\n    return x**2  # 3.14159",
)


class ConversionError(RuntimeError):
    """The GGUF file cannot be converted, or what was written does not read back the same."""


def check_packages() -> None:
    """Raise `ConversionError` with what to install if a package is missing (imports none)."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConversionError(
            f"Making the model folder needs {', '.join(missing)}: "
            f"run `{sys.executable} -m pip install {' '.join(missing)}`."
        )


def convert(gguf_file: Path, folder: Path, progress: bool = True) -> None:
    """Write a model folder from a Llama-architecture GGUF file and verify it.

    Args:
        gguf_file: GGUF file with a byte-level BPE tokenizer of SmolLM's kind.
        folder: an existing empty folder.
        progress: show a progress bar on standard error.

    Raises:
        ConversionError: a package is missing, another architecture, or what was written does not
            read back the same.
    """
    check_packages()
    import gguf
    import safetensors.numpy
    from tqdm import tqdm

    reader = gguf.GGUFReader(gguf_file)
    fields = _Fields(reader)
    config = _config(fields)
    num_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    with tqdm(
        total=2 * num_bytes, unit="B", unit_scale=True, desc="Converting", disable=not progress
    ) as bar:
        weights = _weights(reader, config, bar)
        safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(config))
        _write_tokenizer(fields, folder)
        bar.set_description("Verifying")
        _verify_weights(weights, folder / "model.safetensors", bar)
        _verify_tokenizer(fields, folder / "tokenizer.json")
    # safetensors makes files that only their owner can read.
    os.chmod(folder / "model.safetensors", (folder / "config.json").stat().st_mode)


class _Fields:
    """The metadata of a GGUF file by key."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        field = self._fields.get(key)
        if field is None:
            raise ConversionError(f"The GGUF file has no {key}: not a Llama model of this kind.")
        return field.contents()


def _config(fields: _Fields) -> dict[str, Any]:
    """`config.json` of `LlamaForCausalLM`."""
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ConversionError("Only GGUF files of SmolLM models (Llama architecture) are read.")
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores float32; seven digits give back the number that was meant (1e-05).
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        # <|im_end|> ends an answer of the chat template.
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """No sampling settings: vLLM would silently make them the defaults of every request."""
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _weights(
    reader: gguf.GGUFReader, config: dict[str, Any], bar: tqdm[Any]
) -> dict[str, np.ndarray]:
    """All tensors as float32 under the names of transformers, `[out_features, in_features]`."""
    import gguf
    import numpy as np

    weights = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = value.astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            value = _unpermute(value, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            value = _unpermute(value, config["num_key_value_heads"])
        weights[_transformers_name(tensor.name)] = np.ascontiguousarray(value)
        bar.update(4 * int(tensor.n_elements))
    return weights


def _transformers_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_TENSORS:
        raise ConversionError(f"Unknown tensor {name}: not a Llama model of this kind.")
    return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a query or key projection `[num_heads * head_size, in]` in NeoX order.

    GGUF stores the rows of each head interleaved (row 2i is rotated with row 2i + 1);
    transformers and vLLM rotate row i with row i + head_size / 2.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(fields: _Fields, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`: byte-level BPE that splits off every digit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in _control_ids(fields)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _control_ids(fields: _Fields) -> list[int]:
    """Ids of the control tokens (GGUF token type 3)."""
    return [i for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- verification ----


def _verify_weights(weights: dict[str, np.ndarray], file: Path, bar: tqdm[Any]) -> None:
    """Read the weights back from the disk and compare every bit of them."""
    import numpy as np
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as stored:
        if set(stored.keys()) != set(weights):
            raise ConversionError(f"{file} lacks tensors. The disk may be failing; try again.")
        for name, expected in weights.items():
            if not np.array_equal(stored.get_tensor(name), expected):
                raise ConversionError(f"{name} reads back changed. The disk may be failing.")
            bar.update(expected.nbytes)


def _verify_tokenizer(fields: _Fields, file: Path) -> None:
    """Every token keeps its id, control tokens stay whole, and text survives the round trip."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokens = fields["tokenizer.ggml.tokens"]
    same_ids = tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}
    whole = all(tokenizer.encode(tokens[i]).ids == [i] for i in _control_ids(fields))
    lossless = all(
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
        for text in _ROUND_TRIP_TEXTS
    )
    if not (same_ids and whole and lossless):
        raise ConversionError(
            "The tokenizer does not give back its own text. Reinstall `tokenizers` and try again."
        )
