# SPDX-License-Identifier: Apache-2.0
"""One checkout, measured: run as a file, with the checkout's folder as PYTHONPATH.

Reads a word per line, answers with a line of JSON. Uses nothing of the package but
`vllm_choreo.Choreography` and `register`, which all checkouts have in the same place, and imports
nothing of `benchmarks`, of which the checkout has its own.

    python -P child.py CHECKOUT MODEL ROUNDS ANSWER_TOKENS REQUESTS
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROLES = (
    "You are a careful reader. Answer from the text alone.",
    "You are a sceptic. Doubt the first answer that comes to mind.",
    "You are a teacher. Explain so that a child understands.",
)
QUESTION = (
    "The village needs a new bridge. A wooden bridge costs 40,000 pounds, can be built in three "
    "months and lasts 20 years. A steel bridge costs 90,000 pounds, takes eight months and lasts "
    "60 years, but must be painted every ten years for 5,000 pounds. The village has 100,000 "
    "pounds and its school is on the other side of the river.\n\nWhich bridge should it build?"
)
REVISE = "Read what all have said, and answer again. Say what convinced you."


def main() -> int:
    checkout, model, *numbers = sys.argv[1:]
    rounds, answer_tokens, num_requests = map(int, numbers)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm_choreo

    found = Path(vllm_choreo.__file__).resolve()
    assert found.is_relative_to(Path(checkout).resolve()), f"{found} is not of {checkout}"
    vllm_choreo.register()
    from vllm import LLM

    llm = LLM(
        model, dtype="float32", max_model_len=4096, max_num_seqs=16, block_size=32,
        enforce_eager=True, enable_prefix_caching=True, use_tqdm_on_load=False, seed=0,
    )  # fmt: skip
    answers: dict[str, Callable[[], Any]] = {
        "kernels": _kernels,
        "choreo": lambda: _debate(llm, "choreo", rounds, answer_tokens),
        "baseline": lambda: _debate(llm, "baseline", rounds, answer_tokens),
        "ordinary": lambda: _ordinary(llm, num_requests),
    }
    for line in sys.stdin:
        print(json.dumps({"answer": answers[json.loads(line)]()}), flush=True)
    return 0


def _kernels() -> bool:
    """Whether the C++ kernels are built: without them a checkout is many times slower."""
    try:
        import vllm_choreo._C  # noqa: F401
    except ImportError:
        return False
    return True


def _only(llm: Any, num_tokens: int) -> Any:
    """Sampling parameters by which every answer is the same token."""
    from vllm import SamplingParams

    token = llm.get_tokenizer().encode(" and", add_special_tokens=False)[0]
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, allowed_token_ids=[token]
    )


def _debate(llm: Any, mode: str, rounds: int, num_tokens: int) -> list[float]:
    """Seconds to first token of the calls after the first round of a parallel debate."""
    from vllm_choreo import Choreography

    def turn(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    assert llm.reset_prefix_cache()
    params = _only(llm, num_tokens)
    late: list[float] = []
    with Choreography(llm, mode=mode) as c:
        task, revise = c.prefill(turn("user", QUESTION)), c.prefill(turn("user", REVISE))
        roles = c.prefill([{"tokens": turn("system", role)} for role in ROLES])
        heard: list[Any] = []
        for number in range(rounds):
            calls = [
                {
                    "header": f"<|im_start|>assistant\nagent {i}: ",
                    "parents": [role, task, *heard, revise] if heard else [role, task],
                }
                for i, role in enumerate(roles, start=1)
            ]
            said = c.decode(calls, sampling_params=params)
            heard += said
            if number:
                late += [message.metrics.ttft for message in said]
    return late


def _ordinary(llm: Any, num_requests: int) -> float:
    """Tokens per second, read and written, of a batch of ordinary requests."""
    from vllm.inputs import TokensPrompt

    assert llm.reset_prefix_cache()
    lengths = [20 + 17 * i % 170 for i in range(num_requests)]
    prompts = [
        TokensPrompt(prompt_token_ids=[1000 + i, *range(2000, 1999 + length)])
        for i, length in enumerate(lengths)
    ]
    params = [_only(llm, 8 * (1 + i % 6)) for i in range(num_requests)]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    return (sum(lengths) + written) / seconds


if __name__ == "__main__":
    sys.exit(main())
