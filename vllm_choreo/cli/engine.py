# SPDX-License-Identifier: Apache-2.0
"""Engines of commands: one in this process, or a server.

The engine is quiet and tells the times that the page shows. A server is taken as it is.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.rules import rule_text
from vllm_choreo.repair.session_rules import runs_some_layers

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

    from vllm_choreo.client import ChoreoClient

DEFAULT_MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 16
# Of rules by layers: 450,000 tokens of a model of 576 hidden numbers.
HIDDEN_MEMORY_GIB = 1.0


class Engine(Protocol):
    """Engine or server that a workflow is run on."""

    def open(self, mode: str) -> AbstractContextManager[Facade]:
        """A session: a `Choreography`, or what makes its messages and frees them."""

    def sampling(self, **fields: object) -> SamplingParams | dict[str, Any]:
        """Sampling parameters as `open(mode).decode` takes them."""

    def facts(self, modes: Sequence[str]) -> dict[str, str]:
        """Facts about the engine, for the page."""


@dataclass(frozen=True)
class LocalEngine:
    """An engine in this process.

    Attributes:
        llm: engine of `start_engine`.
        options: further options of `Choreography` for choreographed runs: an adapter, a rule of
            repair. Text is the model's alone.
    """

    llm: LLM
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, mode: str) -> SessionFacade:
        from vllm_choreo.api.choreography import Choreography

        # Within a run the baseline has all the caching that vLLM offers; from earlier runs nothing.
        self.llm.reset_prefix_cache()
        return Choreography(self.llm, mode, **_of_mode(mode, self.options))

    @staticmethod
    def sampling(**fields: object) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(**fields)

    def facts(self, modes: Sequence[str]) -> dict[str, str]:
        import vllm

        facts = {"model": Path(self.llm.model_config.model).name, "vLLM": vllm.__version__}
        return facts | _facts_of(self.options)


@dataclass(frozen=True)
class RemoteEngine:
    """A server, which others may use at the same time. Needs neither vllm nor torch here.

    Attributes:
        base_url, api_key: arguments of `ChoreoClient`.
        options: same as those of `LocalEngine`; an adapter is a name that the server knows.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, mode: str) -> ChoreoClient:
        from vllm_choreo.client import ChoreoClient

        return ChoreoClient(self.base_url, self.api_key, mode, **_of_mode(mode, self.options))

    @staticmethod
    def sampling(**fields: object) -> dict[str, Any]:
        return fields

    def facts(self, modes: Sequence[str]) -> dict[str, str]:
        with self.open(modes[0]) as c:
            facts = {"model": str(c.stats()["model"]), "server": self.base_url}
        if "baseline" in modes:
            # It is the server's, and other clients' requests are in it: nobody may empty it.
            facts["prefix cache"] = "not emptied between runs: earlier text may be reused"
        return facts | _facts_of(self.options)


def _of_mode(mode: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    return options if mode == "choreo" else {}


def _facts_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Facts about the options of choreographed runs, for a page."""
    facts = {}
    if options.get("adapter") is not None:
        placement = options.get("placement")
        used = "" if placement is None else f", as {placement}"
        facts["adapter"] = getattr(options["adapter"], "name", options["adapter"]) + used
    if options.get("repair") is not None:
        repair = options["repair"]
        facts["repair"] = str(repair) if isinstance(repair, Path) else rule_text(repair)
    return facts


def memory_for(rules: Iterable[Any]) -> dict[str, Any]:
    """Options of `start_engine`: memory for hidden states, if one of the rules needs it.

    Args:
        rules: repair rules as `Choreography` takes them, a folder of profiles, or None.
    """
    if not any(map(_runs_some_layers, rules)):
        return {}
    return {"additional_config": {"choreo": {"hidden_memory_gib": HIDDEN_MEMORY_GIB}}}


def _runs_some_layers(rule: object) -> bool:
    is_folder = isinstance(rule, Path) and rule.is_dir()  # of profiles
    return is_folder or runs_some_layers(rule)


def set_up_process(kv_cache_gib: int) -> None:
    """Set up this process for an engine that runs in it, quietly, with the plugin.

    Args:
        kv_cache_gib: memory of the KV cache on a CPU, in GiB, unless the user's environment has it.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm_choreo

    vllm_choreo.register()


def start_engine(
    model: str | None,
    max_model_len: int,
    forces_tokens: bool = False,
    adapters: Sequence[Path] = (),
    **options: object,
) -> LLM:
    """Start a `vllm.LLM`.

    Args:
        model: folder or name; None: the small test model.
        max_model_len: the context, in tokens.
        forces_tokens: load the logits processor that replays need.
        adapters: folders of adapters that it will be asked for.
        options: further ones of `vllm.LLM`.

    Raises:
        AdapterError: one of the folders is no adapter.
        ChoreoError: vLLM does not start with this model.
    """
    from vllm_choreo.testing.models.embedded import model_folder

    folder = model_folder(model)
    print("Starting vLLM …", flush=True)
    set_up_process(kv_cache_gib=2)
    from vllm import LLM

    from vllm_choreo.engine.lora import engine_options

    processors = ["vllm_choreo.engine.worker.forced:ForcedTokens"] if forces_tokens else None
    try:
        return LLM(
            folder,
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            # Prompts are never cut into chunks: vLLM 0.32 on CPU ends the engine when a request
            # with a seed is (torch's CPU generator has no offset).
            max_num_batched_tokens=MAX_NUM_SEQS * max_model_len,
            enforce_eager=True,
            enable_prefix_caching=True,
            disable_log_stats=False,  # or the engine does not say how long calls wait
            logits_processors=processors,
            use_tqdm_on_load=False,
            seed=0,
            **engine_options(adapters),
            **options,
        )
    except ChoreoError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ChoreoError(f"vLLM does not start with {folder}: {reason}") from error


def stop_engine(llm: LLM) -> None:
    """End an engine of this process, so that another one can be started."""
    # vLLM's process groups are global: an engine that is collected later would take down those of
    # the engine that was started after it.
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def warm_up(engine: Engine, modes: Sequence[str]) -> None:
    """Make one short call in each mode: what is done once only shall not be timed."""
    for mode in modes:
        with engine.open(mode) as c:
            first_call(c, engine.sampling(max_tokens=4))


def first_call(c: Facade, params: SamplingParams | dict[str, Any]) -> None:
    """Make a short call that reads a message, for the engine to load what the session needs.

    Args:
        c: the session.
        params: sampling parameters, as its `decode` takes them.
    """
    doc = c.prefill("A document of a few words.")
    # A policy knows the calls of its workflow alone.
    repair = "none" if c.mode == "choreo" else None
    c.decode("Hello", parents=[doc], sampling_params=params, repair=repair)
