# SPDX-License-Identifier: Apache-2.0
"""Seconds to encode messages, to save them, and to load them, on one engine.

encode   as the messages are made: each is a call of its own, all in one list
save     recipes, keys and values, into a local folder
load     into another session, when no copy is left in the engine; files as the system has them,
         mostly in memory
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import draw_tokens, empty_caches

MESSAGE_TOKENS = 1000


def measure(llm: Any, num_tokens: int, message_tokens: int, turns: int) -> list[dict[str, Any]]:
    """One row for each turn.

    Args:
        num_tokens: of all messages together.
        message_tokens: of each.
    """
    folder = Path(tempfile.mkdtemp(prefix="choreo-keep-"))
    try:
        return [_turn(llm, num_tokens, message_tokens, turn, folder) for turn in range(turns)]
    finally:
        shutil.rmtree(folder)


def _turn(
    llm: Any, num_tokens: int, message_tokens: int, turn: int, folder: Path
) -> dict[str, Any]:
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    starts = range(turn * num_tokens, (turn + 1) * num_tokens, message_tokens)
    calls = [{"tokens": draw_tokens(start, message_tokens)} for start in starts]
    with Choreography(llm) as c:
        began = time.perf_counter()
        messages = c.prefill(calls)
        encoded = time.perf_counter()
        kept = c.save(messages, folder, encodings=True, progress=False)
        saved = time.perf_counter()
        wanted = c.decode([5], parents=messages[:2], sampling_params=greedy)
    empty_caches(llm)
    with Choreography(llm) as c:
        began_load = time.perf_counter()
        loaded = c.load(folder, progress=False)
        done = time.perf_counter()
        found = c.decode([5], parents=loaded[:2], sampling_params=greedy)
    if _said(found) != _said(wanted) or found.usage.encoded_tokens != found.num_tokens:
        raise SystemExit("what was loaded is not what was saved: nothing is timed")
    row = {
        "tokens": num_tokens,
        "messages": len(messages),
        "turn": turn,
        "megabytes": round(kept.bytes / 1e6, 1),
        "encode_s": round(encoded - began, 4),
        "save_s": round(saved - encoded, 4),
        "load_s": round(done - began_load, 4),
    }
    print(row, flush=True)
    return row


def _said(answer: Any) -> Any:
    return [[(t, p.logprob) for t, p in at.items()] for at in answer.logprobs]
