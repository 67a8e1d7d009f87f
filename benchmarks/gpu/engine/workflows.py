# SPDX-License-Identifier: Apache-2.0
"""Workflows on an engine of random weights: choreographed, and as text with a prefix cache."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine.options import options
from benchmarks.harness.probes import QUESTION, ROLES
from benchmarks.harness.stats import median
from benchmarks.harness.turns import in_turn

MODES = ("choreo", "baseline")
DEFAULT_SHAPE = "8b"
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
_VOCAB_SIZE = 49152  # of the embedded model, whose tokenizer this takes
# Calls that read the same documents, each in an order of its own, behind nothing in common.
_READERS, _DOCUMENTS, _DOCUMENT_TOKENS, _READ_ANSWER = 16, 4, 2000, 64


def rows(job: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Time every workflow in both modes: medians, least and most of the repetitions.

    The first one of each, which compiles what is not compiled yet, does not count.

    Args:
        job: shape of the model, tokens of an answer, repetitions, whether choreographed steps
            replay full CUDA graphs.
    """
    from vllm import LLM

    from benchmarks.harness.engine import empty_caches

    settings = {"full_cuda_graphs": True} if job["full_graphs"] else {}
    llm = LLM(
        str(_make_model(job["shape"], folder)),
        additional_config={"choreo": settings},
        **_options(job["shape"]),
    )
    of_engine = [job["shape"]] if job["shape"] != DEFAULT_SHAPE else []
    of_engine += ["full graphs"] if settings else []
    for name, workflow in _workflows(llm, job).items():
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(job["repeats"] + 1):
            for mode in in_turn(MODES, number):
                empty_caches(llm)
                found = workflow(mode)
                runs[mode] += [found] if number else []
        for mode, of_mode in runs.items():
            full_name = ", ".join([name, *of_engine])
            row: dict[str, Any] = {
                "workflow": full_name,
                "mode": mode,
                "repetitions": len(of_mode),
            }
            for column in of_mode[0]:
                values = [run[column] for run in of_mode]
                row[column] = round(median(values), 4)
                if column in ("ttft_ms", "seconds"):
                    row[f"{column}_low"] = round(min(values), 4)
                    row[f"{column}_high"] = round(max(values), 4)
            yield row


def _options(shape: str) -> dict[str, Any]:
    import torch

    is_cuda, is_tiny = torch.cuda.is_available(), shape == "tiny"
    return options(
        "all",
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=16384,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        disable_log_stats=False,
        **({"attention_backend": "TRITON_ATTN"} if is_cuda else {}),
        gpu_memory_utilization=0.1 if is_tiny else 0.85,
    )


def _make_model(shape: str, folder: Path) -> Path:
    """Write a configuration, and the embedded model's tokenizer; the weights are made up."""
    import transformers

    from vllm_choreo.testing.models.embedded import embedded_model

    config = transformers.LlamaConfig(
        **SHAPES[shape],
        vocab_size=_VOCAB_SIZE,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    config.save_pretrained(folder)
    for file in embedded_model(progress=False).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _workflows(llm: Any, job: Mapping[str, Any]) -> dict[str, Callable[[str], dict[str, float]]]:
    from vllm_choreo import Choreography
    from vllm_choreo.lab.workflows.iterative_debate import iterative_debate
    from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
    from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts

    long, short = _params(job["answer_tokens"]), _params(min(100, job["answer_tokens"]))
    of_paper: dict[str, Callable[[Any], Any]] = {
        "parallel debate": functools.partial(
            parallel_debate, question=QUESTION, agents=ROLES[:3], rounds=3, sampling_params=long
        ),
        "tree of thoughts": functools.partial(
            tree_of_thoughts, question=QUESTION, candidates=8, voters=4,
            sampling_params=long, vote_params=short,
        ),
        "iterative debate": functools.partial(
            iterative_debate, question=QUESTION, rounds=3,
            sampling_params=long, verdict_params=short,
        ),
    }  # fmt: skip

    def run(workflow: Callable[[Any], Any], mode: str) -> dict[str, float]:
        began = time.perf_counter()
        with Choreography(llm, mode=mode) as c:
            log = workflow(c)
        return _figures([s.message for s in log.decodes()], time.perf_counter() - began)

    found = {name: functools.partial(run, workflow) for name, workflow in of_paper.items()}
    size = 200 if job["shape"] == "tiny" else _DOCUMENT_TOKENS
    readers = f"{_READERS} readers of {_DOCUMENTS} x {size} tokens"
    return {**found, readers: functools.partial(_read, llm, size)}


def _read(llm: Any, num_tokens: int, mode: str) -> dict[str, float]:
    """Have many calls read the same documents, which are encoded before."""
    from vllm_choreo import Choreography

    with Choreography(llm, mode=mode) as c:
        texts = [
            [100 + (7 * i + 13 * number) % 40000 for i in range(num_tokens)]
            for number in range(_DOCUMENTS)
        ]
        documents = c.prefill([{"tokens": text} for text in texts])
        began = time.perf_counter()
        answers = c.decode(
            [
                {
                    "header": [300 + reader, 301, 302, 303],
                    "parents": [documents[(reader + i) % _DOCUMENTS] for i in range(_DOCUMENTS)],
                    "sampling_params": _params(_READ_ANSWER),
                }
                for reader in range(_READERS)
            ]
        )
        return _figures(answers, time.perf_counter() - began)


def _params(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, temperature=0.0
    )


def _figures(answers: list[Any], seconds: float) -> dict[str, float]:
    times = [answer.metrics for answer in answers]
    steps = [
        (t.latency - t.ttft) / max(1, len(answer.generated_token_ids) - 1)
        for t, answer in zip(times, answers, strict=True)
    ]
    return {
        "ttft_ms": 1e3 * sum(t.ttft for t in times) / len(times),
        "step_ms": 1e3 * median(steps),
        "seconds": seconds,
        "encoded_tokens": sum(answer.usage.encoded_tokens for answer in answers),
    }
