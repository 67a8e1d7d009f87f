# SPDX-License-Identifier: Apache-2.0
"""The same debate on engines as they are run today: MLA, and keys and values in 8 bits.

    python -m benchmarks.ttft.engines [--reps 2] [--passes 2] [--engines dense MLA]

Models have random weights and one shape (24 layers, hidden size 576), so what differs is their
attention. Each engine is a process that serves both modes, which take turns; every generated token
is forced to be the same. Before anything is timed, a chain of messages must give the tokens that
plain text gives; with 8 bits, by which padding rounds keys otherwise, one of whole blocks. vLLM
keeps 8 bits on CPUs with AVX-512 alone: elsewhere both modes of FP8 run by our operation
(`eight_bits.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.child import Child, serve
from benchmarks.harness.engine import set_environment, start_choreo_engine
from benchmarks.harness.probes import block_chain_tokens, chain_tokens
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.ttft import eight_bits
from benchmarks.ttft.bars import MODES, bar_of_engines_reached
from benchmarks.ttft.debate import add_arguments, debates, run_debate
from benchmarks.ttft.tables import ENGINE_TABLES

# Name: form of the model, dtype of its cache.
ENGINES = {"dense": ("dense", "auto"), "MLA": ("mla", "auto"), "FP8": ("dense", "fp8")}
_MODULE = "benchmarks.ttft.engines"  # which runs as __main__, too
_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 9,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.engines:
            form, kv_cache_dtype = ENGINES[name]
            model = _make_model(form, Path(folder))
            with Child.of(_MODULE, str(model), kv_cache_dtype) as child:
                found = child.ask({key: getattr(args, key) for key in _ASKED})
            rows += [{"engine": name, **row} for row in found]
    write_csv("ttft_engines", rows, **record())
    print(as_text(ENGINE_TABLES.values()))
    return int(not bar_of_engines_reached(rows))


_ASKED = ("reps", "passes", "agents", "rounds", "answer_tokens")


def _make_model(form: str, folder: Path) -> Path:
    """Write a model of random weights that has the embedded model's tokenizer; its folder."""
    import transformers

    from vllm_choreo.testing.models.embedded import embedded_model
    from vllm_choreo.testing.models.tiny import make_tiny_model

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config: transformers.PretrainedConfig
    if form == "mla":
        config = transformers.DeepseekV3Config(
            **_SHAPE,
            num_key_value_heads=_SHAPE["num_attention_heads"],
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=_SHAPE["num_hidden_layers"],  # no experts
            num_mtp_layers=0,
            rope_parameters=rope,
        )
    else:
        config = transformers.LlamaConfig(**_SHAPE, num_key_value_heads=3, rope_parameters=rope)
    path = folder / form
    if not path.exists():
        make_tiny_model(form, folder, config=config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(embedded_model()))
        tokenizer.save_pretrained(path)
    return path


def _check_chain(llm: Any, is_rounded: bool) -> None:
    """Check that messages encoded behind one another give what their text gives."""
    said = block_chain_tokens if is_rounded else chain_tokens
    is_same = len({tuple(said(llm, {"mode": mode})) for mode in MODES}) == 1
    if not is_same:
        raise SystemExit("choreography and baseline differ where they must not: nothing timed")


def child(model: str, kv_cache_dtype: str) -> None:
    """Start an engine, then run the debates that are asked for."""
    replaces_kernels = kv_cache_dtype != "auto" and not eight_bits.has_kernels()
    if replaces_kernels:
        set_environment()
        eight_bits.store_by_torch()
    llm = start_choreo_engine(
        model=model,
        # MLA has blocks of 16 tokens on CPUs.
        block_size=None,
        kv_cache_dtype=kv_cache_dtype,
    )
    if replaces_kernels:
        eight_bits.attend_by_ours(llm)

    def answer(question: dict[str, Any]) -> list[dict[str, Any]]:
        args = argparse.Namespace(**question)
        _check_chain(llm, is_rounded=kv_cache_dtype != "auto")
        for mode in MODES:
            run_debate(llm, mode, args, 8)  # what is done once only shall not be timed
        return [row for number in range(1, args.passes + 1) for row in debates(llm, number, args)]

    serve(answer)


if __name__ == "__main__":
    sys.exit(main())
