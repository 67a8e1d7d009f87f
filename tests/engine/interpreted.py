# SPDX-License-Identifier: Apache-2.0
"""The way of a request on a GPU, run on CPU: `python -m tests.engine.interpreted MODEL JSON`.

Triton's interpreter runs the kernels of vLLM's model runner V2, of its Triton attention and ours.
vLLM believes that Triton has a CPU backend; everything else is the real thing. The JSON chooses:

    runner    "v1" or "v2" (vLLM's default on GPUs)
    backend   "ChoreoTritonBackend", or null for that of the CPU; "ChoreoTritonMLABackend"
    is_async  plan each step before the one before it has been sampled (vLLM's default on GPUs)
    settings  additional_config["choreo"]
    seeds     of random choreographies, compared with the dense oracle
    pictures  whether the model is given some
    flash     whether prefills count as long that are none, for FlashAttention in plain PyTorch

CUDA graphs are chosen as on a GPU, and not replayed: of a full graph the batch runs eagerly, of a
piecewise one with rows of padding. The last line printed is JSON: for each step whether it read
spans, and which graph was chosen.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32]
# Of a prompt in a step: few, since its attention is interpreted.
CHUNK = 64


def pretend_triton_for_cpu() -> None:
    """Before vLLM is imported: Triton has a CPU backend, and runs in its interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # Inductor would look for Triton's compiler
    import torch
    from triton.backends import Backend, backends
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver

    class HostDriver(DriverBase):
        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> None:
            return None

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> None:
            return None

    backends["cpu"] = Backend(compiler=backends["nvidia"].compiler, driver=HostDriver)
    driver.set_active(HostDriver())
    # vLLM's Triton attention asks for it when it stores keys and values.
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.set_num_threads(1)


def start(model_path: str, choices: dict[str, Any]) -> Any:
    """The engine, and its runner."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(choices["runner"] == "v2"))
    import vllm_choreo

    vllm_choreo.register()
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tests.engine.engines import start_engine
    from tests.engine.pictured import OPTIONS as PICTURE_OPTIONS
    from vllm_choreo.engine.plugin import configure_after
    from vllm_choreo.engine.worker.cpu_worker import ChoreoCPUWorker
    from vllm_choreo.testing.latents import store_latents

    if choices["backend"]:
        path = f"vllm_choreo.engine.worker.gpu_backends.{choices['backend']}"
        ChoreoCPUWorker.backends = {
            AttentionBackendEnum.CPU_ATTN: path,
            AttentionBackendEnum.CPU_MLA: path,
        }
        # The kernel by which MLA stores rows on GPUs, and which vLLM has compiled.
        _custom_ops.concat_and_cache_mla = store_latents
    if choices.get("flash"):
        use_flash_attention()
    platform = type(current_platform)
    configure = platform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        configure(vllm_config)
        vllm_config.scheduler_config.async_scheduling = choices["is_async"]
        configure_after(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.get_global_graph_pool = classmethod(lambda cls: None)
    llm = start_engine(
        model_path,
        additional_config={"choreo": choices["settings"]},
        num_gpu_blocks_override=choices.get("num_blocks", 256),
        **(PICTURE_OPTIONS if choices.get("pictures") else {"max_num_batched_tokens": CHUNK}),
    )
    core = llm.llm_engine.engine_core.engine_core
    return llm, core.model_executor.driver_worker.worker.model_runner


def use_flash_attention() -> None:
    """Give the layers of `ChoreoTritonBackend` a FlashAttention, for short prefills, too."""
    from tests.ops.flash import flash_attention
    from vllm_choreo.engine.worker.gpu_backends import ChoreoTritonImpl
    from vllm_choreo.ops import flash_prefills

    ChoreoTritonImpl.flash_attention = lambda self: flash_attention
    flash_prefills.MIN_QUERIES, flash_prefills.MIN_SPAN_TOKENS = 3, 1


def choose_graphs(runner: Any) -> list[str]:
    """Have CUDA graphs chosen as on a GPU. Returns the modes chosen, which grows."""
    from vllm.config import CUDAGraphMode

    compilation = runner.vllm_config.compilation_config
    compilation.cudagraph_capture_sizes = CAPTURE_SIZES
    compilation.max_cudagraph_capture_size = CAPTURE_SIZES[-1]
    both = CUDAGraphMode.FULL_AND_PIECEWISE
    if runner.vllm_config.use_v2_model_runner:
        manager = type(runner.cudagraph_manager)
        runner.cudagraph_manager = manager(runner.vllm_config, runner.device, both, 1)
        runner.cudagraph_manager._graphs_captured = True
    else:
        runner.cudagraph_dispatcher.initialize_cudagraph_keys(both)
    modes: list[str] = []
    dispatch = runner.graphs.dispatch

    def record(*args: Any, **kwargs: Any) -> Any:
        chosen = dispatch(*args, **kwargs)
        if isinstance(chosen, tuple):  # V1: the batch runs eagerly, padded as for the graph
            modes.append(chosen[0].name)
            return chosen
        modes.append(chosen.cg_mode.name)
        if chosen.cg_mode != CUDAGraphMode.FULL:
            return chosen
        num_reqs, num_tokens = args[:2]
        none = CUDAGraphMode.NONE
        return dataclasses.replace(chosen, cg_mode=none, num_tokens=num_tokens, num_reqs=num_reqs)

    runner.graphs.dispatch = record
    return modes


def watch(batcher: Any, modes: list[str]) -> list[tuple[bool, str, int]]:
    """Per step: whether it reads spans, the graph that was chosen for it, and how many of its
    requests FlashAttention runs.
    """
    steps: list[tuple[bool, str, int]] = []
    plan = batcher.batch

    def batch(step: Any, always: bool = False) -> Any:
        found = plan(step, always)
        if always:  # a run of some layers, before the step
            return found
        assert step.device_seq_lens.tolist() == step.seq_lens.tolist(), "the host knows the lengths"
        sent = batcher._sent_table(step.request_ids, 0)
        for r, request_id in enumerate(step.request_ids):
            spans = batcher._requests.get(request_id)
            num_parents = spans.base // batcher.block_size if spans else 0
            assert sent[r, :num_parents].tolist() == step.block_table[r, :num_parents].tolist()
        prefills = found and found[0].prefills
        taken = len(step.request_ids) - prefills.first_request if prefills else 0
        steps.append((found is not None, modes[-1], taken))
        return found

    batcher.batch = batch
    return steps


def check_ordinary(llm: Any, oracle: Any) -> None:
    """Ordinary requests, among them one that is prefilled in chunks, are as the oracle's."""
    import random

    from vllm import SamplingParams

    from tests.engine.oracle import TIE, random_tokens

    rng = random.Random(5)
    prompts = [random_tokens(rng, n) for n in (20, CHUNK + 4, 3)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        logits = oracle.plain_logits(tokens)
        for i in range(len(prompt), len(tokens)):
            assert logits[i - 1].max() - logits[i - 1][tokens[i]] < TIE


def check_readers(llm: Any, oracle: Any) -> None:
    """Calls that read the same messages for many steps: while one is prefilled in chunks the
    others generate, then all of them do, so that plans are kept, and made anew.
    """
    import random

    from vllm import SamplingParams

    from tests.engine.oracle import assert_greedy, random_tokens, whole
    from vllm_choreo import Choreography

    rng = random.Random(9)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Choreography(llm) as c:
        docs = [(c.prefill(t), oracle.encode(t)) for t in (random_tokens(rng, n) for n in (40, 33))]
        calls, seen = [], []
        for num_header, offsets in ((2, (0, 60)), (5, (31, 31)), (CHUNK + 24, (100, 7))):
            header = random_tokens(rng, num_header)
            parents = [message for message, _ in docs]
            place = {"offsets": list(offsets), "new_offset": 150}
            calls.append({"header": header, "parents": parents, **place})
            seen.append([whole(e, o) for (_, e), o in zip(docs, offsets, strict=True)])
        answers = c.decode(calls, sampling_params=params)
        for answer, parents in zip(answers, seen, strict=True):
            assert_greedy(answer, oracle, parents, 150)


def check_layers(llm: Any, oracle: Any) -> None:
    """Hidden states are kept where a graph would be chosen, and parents repaired from them on."""
    import random

    from vllm import SamplingParams

    from tests.engine.layer_oracle import LayerOracle
    from tests.engine.oracle import assert_greedy, random_tokens, whole
    from vllm_choreo import Choreography

    rng, layered = random.Random(2), LayerOracle(oracle)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with Choreography(llm) as c:
        docs = [c.prefill(random_tokens(rng, n), keep_hidden=[1]) for n in (21, 33)]
        docs.append(c.decode([5, 6], sampling_params=params, keep_hidden=[1]))
        parents, offset = [], 0
        for doc in docs:
            parents.append(whole(layered.encode(doc.token_ids), offset))
            offset += doc.num_tokens
        answer = c.decode([7, 8], parents=docs, layers=(1, 3), sampling_params=params)
        assert_greedy(answer, oracle, layered.repair(parents, [range(1, 3)]), offset)


def check_eviction(llm: Any, model_path: str) -> int:
    """Messages that do not fit go to host memory and come back. Returns how many came back."""
    import random

    from vllm import SamplingParams

    from tests.engine.oracle import Oracle, assert_greedy, random_tokens, whole
    from vllm_choreo import Choreography
    from vllm_choreo.engine.utility import call

    rng, oracle = random.Random(1), Oracle(model_path)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with Choreography(llm) as c:
        docs = []
        for _ in range(40):
            tokens = random_tokens(rng, rng.randrange(40, 96))
            docs.append((c.prefill(tokens), oracle.encode(tokens)))
        for _ in range(12):
            chosen = rng.sample(docs, 3)
            offsets = [rng.randrange(300) for _ in chosen]
            answer = c.decode(
                random_tokens(rng, 3),
                parents=[message for message, _ in chosen],
                offsets=offsets,
                new_offset=300,
                sampling_params=params,
            )
            seen = [whole(e, o) for (_, e), o in zip(chosen, offsets, strict=True)]
            assert_greedy(answer, oracle, seen, 300)
    restored: int = call(llm, "totals")["restored_messages_total"]
    return restored


def check_choreographies(llm: Any, model_path: str, choices: dict[str, Any]) -> None:
    """Ordinary requests, calls with many readers, by layers, and at random are as the oracle's."""
    from tests.engine.choreographies import Draw, check, draw_choreography
    from tests.engine.oracle import Oracle
    from vllm_choreo import Choreography

    oracle = Oracle(model_path)
    check_ordinary(llm, oracle)
    check_readers(llm, oracle)
    if choices["settings"].get("hidden_memory_gib"):
        check_layers(llm, oracle)
    draw = Draw(num_batches=3, max_tokens=4, max_length=40)
    for seed in choices["seeds"]:
        with Choreography(llm) as c:
            check(c, oracle, draw_choreography(seed, draw))


def check_chains(llm: Any, model_path: str) -> None:
    """Calls behind chains, several in a batch and prefilled in chunks, are as the text.

    So are ordinary requests.
    """
    import random
    from pathlib import Path

    from vllm import SamplingParams

    from tests.engine.oracle import TIE, random_tokens
    from tests.engine.text_oracle import TextOracle
    from vllm_choreo import Choreography

    rng, oracle = random.Random(4), TextOracle(Path(model_path))
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2)
    with Choreography(llm) as c:
        first = c.prefill(random_tokens(rng, 40))
        others = [c.prefill(random_tokens(rng, n), parents=[first]) for n in (33, 1)]
        headers = [random_tokens(rng, n) for n in (1, CHUNK + 24)]
        calls = [
            {"header": header, "parents": [first, other]}
            for header, other in zip(headers, others, strict=True)
        ]
        for _ in range(2):
            answers = c.decode(calls, sampling_params=params)
            for header, other, answer in zip(headers, others, answers, strict=True):
                oracle.check([*first.token_ids, *other.token_ids, *header], answer)
    prompt = random_tokens(rng, 20)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = [*prompt, *output.outputs[0].token_ids]
    found = oracle.logprobs(tokens)
    for at in range(len(prompt), len(tokens)):
        assert found[at - 1].max() - found[at - 1][tokens[at]] < TIE


def check_any_order(llm: Any, model_path: str, seeds: Sequence[int]) -> None:
    """Random choreographies whose states are composed are as the oracle's."""
    from tests.engine.choreographies import Draw, check, draw_choreography
    from tests.engine.state_oracle import StateOracle
    from vllm_choreo import Choreography

    draw = Draw(num_batches=3, max_tokens=4, max_length=40, has_parts=False)
    for seed in seeds:
        with Choreography(llm) as c:
            check(c, StateOracle(model_path), draw_choreography(seed, draw))


def check_pictures(llm: Any, model_path: str, seeds: Sequence[int]) -> None:
    """Laws of messages with pictures hold, and random choreographies are as the oracle's."""
    from pathlib import Path

    from tests.engine.choreographies import check, side_by_side
    from tests.engine.pictured import PictureOracle, check_picture_laws, draw_pictured
    from vllm_choreo import Choreography

    oracle = PictureOracle(Path(model_path))
    check_picture_laws(llm, oracle)
    for first in range(0, len(seeds), 4):
        of_four = seeds[first : first + 4]
        drawn = [draw_pictured(seed, oracle.placeholder, not oracle.has_rows) for seed in of_four]
        with Choreography(llm) as c:
            check(c, oracle, side_by_side(drawn))


def main(model_path: str, choices: dict[str, Any]) -> dict[str, Any]:
    llm, runner = start(model_path, choices)
    from tests.engine.engines import stop_engine

    steps = watch(runner.batcher, choose_graphs(runner))
    if choices.get("pictures"):
        check_pictures(llm, model_path, choices["seeds"])
    elif runner.states is None:
        check_choreographies(llm, model_path, choices)
    else:
        check_chains(llm, model_path)
        check_any_order(llm, model_path, choices["seeds"])
    report: dict[str, Any] = {
        "runner": type(runner).__name__,
        "scheduler": type(llm.llm_engine.engine_core.engine_core.scheduler).__name__,
        "impls": sorted({type(layer.impl).__name__ for layer in runner.layers.values()}),
        "steps": steps,
    }
    if choices["settings"].get("host_memory_gib"):
        report["restored"] = check_eviction(llm, model_path)
    stop_engine(llm)
    return report


if __name__ == "__main__":
    pretend_triton_for_cpu()
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
