# SPDX-License-Identifier: Apache-2.0
"""The engines on which programs run: every option meets every other one on one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.engine.offloading import OFFLOADING
from tests.engine.pictured import OPTIONS as PICTURE_OPTIONS
from tests.engine.scheduling import asynchronous_scheduling
from vllm_choreo.testing.models.pictured import PICTURED_MODELS
from vllm_choreo.testing.models.tiny import HYBRID_MODELS

# Floats of a token in the tiny models, 3 layers of 2 heads, keys and values of 32 floats; with MLA
# of one row of 576.
_TOKEN_FLOATS, _LATENT_FLOATS = 3 * 2 * 64, 3 * 576
HIDDEN_ROW = 128 * 4  # bytes of a token in a layer
# Of the largest picture that programs show, in Idefics3: five tiles, with their masks.
PICTURE_BYTES = 5 * 56 * 56 * (3 * 4 + 8) + 8

# What engines may have, by the names of `Configuration.options`.
OPTIONS = (
    "adapters",  # LoRA
    "async",  # a step is planned before the one before it was sampled
    "chunks",  # steps of few tokens, and long prompts in parts
    "drafter",  # a draft model
    "drafts",  # n-gram speculation
    "few",  # two requests run at a time
    "fp8",  # keys and values in 8 bits
    "hidden",  # memory for hidden states
    "host",  # host memory
    "in_place",  # keys are rotated, not queries
    "offload",  # a KV connector, which stores and loads ordinary requests alone
    "priority",
    "share",  # of a tenant, of the pool
    "window",  # sliding windows
)
# vLLM takes no n-grams with asynchronous scheduling; there is one drafter at a time. Keys in 8 bits
# stay where they are.
IMPOSSIBLE = frozenset({("async", "drafts"), ("drafter", "drafts"), ("fp8", "in_place")})


@dataclass(frozen=True)
class Configuration:
    """
    Attributes:
        name: by which a program names it.
        options: of `OPTIONS`.
        num_blocks: of the pool; one of them is vLLM's own.
        host_blocks, hidden_rows: of "host", and of "hidden" (of one layer).
        model: of `TINY_MODELS` or `HYBRID_MODELS`.
        begins_full: whether programs begin with repaired calls in a pool that is full of messages,
            some of which share blocks.
        kv_cache_dtype: vLLM's option, of "fp8".
        num_groups: KV cache groups that the model's layers are; above 1, layers with windows have
            blocks of their own.
        composes: whether states are composed, of messages in any order.
        num_held_pictures: pictures of messages for which there is memory, if the model takes any;
            None: for all.
        is_v2: whether the engine has vLLM's model runner V2, which takes a process of its own.
    """

    name: str
    options: frozenset[str]
    num_blocks: int
    host_blocks: int = 8
    hidden_rows: int = 640
    model: str = "llama"
    begins_full: bool = False
    kv_cache_dtype: str = "auto"
    num_groups: int = 1
    composes: bool = False
    num_held_pictures: int | None = None
    is_v2: bool = False

    def __contains__(self, option: str) -> bool:
        return option in self.options

    @property
    def has_mla(self) -> bool:
        return self.model.startswith("deepseek")

    @property
    def block_size(self) -> int:
        return 16 if self.has_mla else 32

    @property
    def block_bytes(self) -> int:
        num_bytes = 1 if "fp8" in self else 4
        of_token = _LATENT_FLOATS if self.has_mla else _TOKEN_FLOATS
        return num_bytes * self.block_size * of_token // self.num_groups

    @property
    def max_model_len(self) -> int:
        return self.block_size * self.num_whole_blocks

    @property
    def num_whole_blocks(self) -> int:
        """Blocks that there are for each group, if each has as many."""
        return (self.num_blocks - 1) // self.num_groups

    @property
    def has_states(self) -> bool:
        """True if the model keeps states in place of keys."""
        return self.model in HYBRID_MODELS

    @property
    def has_pictures(self) -> bool:
        """True if the model takes pictures."""
        return self.model in PICTURED_MODELS

    @property
    def reads_chains(self) -> bool:
        """True if the engine reads chains alone: then all calls are in exact mode."""
        return self.has_states and not self.composes

    @property
    def speculates(self) -> bool:
        """True if runs of one token are refused, which vLLM would pad."""
        return "drafts" in self or "drafter" in self

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_rows * HIDDEN_ROW if "hidden" in self else 0

    @property
    def num_adapters(self) -> int:
        return 2 if "adapters" in self else 0

    def engine_options(self, model_path: Path) -> dict[str, Any]:
        """For vLLM's `LLM`; a drafter is the model itself, and always right."""
        choreo: dict[str, Any] = {"pinned_share": 0.3}
        if "host" in self:
            choreo["host_memory_gib"] = (self.host_blocks + 0.5) * self.block_bytes / 2**30
        if "hidden" in self:
            choreo["hidden_memory_gib"] = self.hidden_bytes / 2**30
        if "in_place" in self:
            choreo["reposition"] = "in_place"
        if self.has_states:
            choreo["tokens_per_state"] = 32 if self.composes else 128
            choreo["composed_states"] = self.composes
        if "share" in self:
            choreo["tenant_share"] = 0.3
        if self.num_held_pictures is not None:
            choreo["picture_memory_gib"] = (self.num_held_pictures + 0.5) * PICTURE_BYTES / 2**30
        if self.num_groups > 1:
            choreo["window_groups"] = True
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_blocks,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 2 if "few" in self else 8,
            "additional_config": {"choreo": choreo},
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        if self.has_pictures:
            options |= PICTURE_OPTIONS
        if "adapters" in self:
            options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        if "chunks" in self:
            options |= {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 20}
        if "drafts" in self:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        if "drafter" in self:
            options["speculative_config"] = {
                "method": "draft_model",
                "model": str(model_path),
                "num_speculative_tokens": 3,
            }
        if "offload" in self:
            options["kv_transfer_config"] = OFFLOADING
        if "priority" in self:
            options["scheduling_policy"] = "priority"
        return options


def _grouped(name: str, options: str, num_blocks: int, **sizes: Any) -> Configuration:
    return Configuration(name, frozenset(options.split()), num_blocks, num_groups=3, **sizes)


def _of_model(name: str, options: str, num_blocks: int, **sizes: Any) -> Configuration:
    return Configuration(name, frozenset(options.split()), num_blocks, **sizes)


def _made(name: str, options: str, num_blocks: int, **sizes: Any) -> Configuration:
    model = "gemma3" if "window" in options and "adapters" not in options else "llama"
    if "window" in options and "adapters" in options:
        model = "mistral_window"
    return Configuration(name, frozenset(options.split()), num_blocks, model=model, **sizes)


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        _made("host", "host", 17, host_blocks=10),
        _made("hidden", "hidden host priority few", 21, host_blocks=6),
        _made("drafts", "drafts hidden host share in_place", 21, host_blocks=12),
        _made("share", "share host hidden async few", 21, host_blocks=12),
        _made("adapters", "adapters host share chunks priority in_place", 17),
        _made("windows", "window hidden adapters in_place async few", 19),
        _made("async", "async host priority chunks window in_place", 15, host_blocks=5),
        _made("chunks", "chunks few hidden share window drafts priority", 19, hidden_rows=320),
        _made("tight", "adapters drafts host hidden chunks", 13, host_blocks=4, hidden_rows=256),
        _made("crowd", "host share window hidden", 29, host_blocks=3),
        _made("twins", "host", 21, host_blocks=40, begins_full=True),
        _of_model("latent", "host hidden chunks priority", 41, host_blocks=12, model="deepseek_v3"),
        _of_model("moved", "in_place drafts share host few", 37, model="deepseek_v2"),
        _of_model("pictures", "hidden host priority chunks share", 25, model="idefics3"),
        _of_model(
            *("pictures ahead", "drafts in_place few host", 19),
            model="idefics3",
            num_held_pictures=3,
        ),
        _of_model("pictures async", "async share few", 17, model="idefics3"),
        _of_model("rows", "host priority chunks in_place", 19, model="paddleocr_vl_pictured"),
        _of_model("states", "host priority", 21, model="granite_hybrid"),
        _of_model("chains", "async chunks few", 17, model="granite_hybrid"),
        _of_model("composed", "host priority chunks", 21, model="granite_hybrid", composes=True),
        _of_model("composed ahead", "async few in_place", 17, model="lfm2", composes=True),
        _made("drafter", "drafter offload adapters host hidden priority chunks", 19),
        _made("offload", "offload in_place share window few async", 19),
        _made("stored", "drafts offload host", 17),
        _made("ahead", "drafter offload in_place share window few", 19),
        _made("bytes", "fp8 host hidden drafts few share", 19, kv_cache_dtype="fp8"),
        _made(
            "bytes seen near",
            "fp8 window async priority hidden host",
            17,
            kv_cache_dtype="fp8_e5m2",
        ),
        _made(
            "bytes by adapters",
            "fp8 adapters chunks host share hidden drafter offload",
            17,
            kv_cache_dtype="fp8_e4m3",
        ),
        _grouped("groups", "window share priority host hidden", 43, host_blocks=24, model="gemma3"),
        _grouped("groups ahead", "window async chunks few offload hidden", 37, model="gpt_oss"),
    )
}

# Their kernels run in Triton's interpreter: a program takes seconds.
ON_V2 = {
    configuration.name: configuration
    for configuration in (
        _made("v2", "async drafter host hidden priority chunks", 19, is_v2=True),
        _made("v2 in place", "async drafter in_place window share few", 19, is_v2=True),
        _made("v2 adapters", "async drafter adapters host share chunks", 19, is_v2=True),
    )
}


def configuration_of(name: str) -> Configuration:
    return {**CONFIGURATIONS, **ON_V2}[name]


def unmet(configurations: Mapping[str, Configuration]) -> set[tuple[str, str]]:
    """Pairs of options that no engine has together."""
    pairs = set(combinations(OPTIONS, 2)) - IMPOSSIBLE
    return {
        pair for pair in pairs if not any(set(pair) <= c.options for c in configurations.values())
    }


@contextmanager
def scheduling_of(configuration: Configuration) -> Iterator[None]:
    """Within, engines are asynchronous if it is: vLLM turns that off on CPU, where it works."""
    if "async" not in configuration:
        yield
        return
    with asynchronous_scheduling():
        yield
