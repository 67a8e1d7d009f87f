# SPDX-License-Identifier: Apache-2.0
"""What loading takes of a prefill in which some layers are encoded anew, by the context's length.

    python -m benchmarks.variants.loading [--tokens 500 1000 2000 3500] [--layers '[7, 18]']

Figure 16 of DroidSpeak. A document's keys, values and hidden states are loaded from a local folder,
whose files the system has in memory, then a call reads it behind another message, for which these
layers are encoded anew; against the text without a cache. Writer and reader are one model: times do
not depend on weights. Were all of the loading done while layers are encoded, no more could be saved
than it takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import draw_tokens, empty_caches, start_choreo_engine
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.variants.load import QUESTION_TOKENS
from benchmarks.variants.tables import LOADING, TABLES

_SIDES = ("text", "loaded")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 1000, 2000, 3500])
    parser.add_argument(
        "--layers", type=json.loads, default=[7, 18], help="first, and the one behind the last"
    )
    parser.add_argument("--turns", type=int, default=5, help="of each length, after a first one")
    args = parser.parse_args()
    memory = {"choreo": {"hidden_memory_gib": 2.0}}
    llm = start_choreo_engine(4, max_num_batched_tokens=2048, additional_config=memory)
    rows = []
    for turn in range(args.turns + 1):
        for num_tokens in args.tokens:
            row = _turn(llm, num_tokens, args.layers, turn)
            if turn:  # what is done once only shall not be timed
                rows.append(row)
                print(row, flush=True)
    write_csv(LOADING, rows, **record())
    print(as_text([TABLES[LOADING]]))
    return 0


def _turn(llm: Any, num_tokens: int, layers: list[int], turn: int) -> dict[str, Any]:
    """A row: seconds of both sides, which take turns; what is loaded answers as what was saved."""
    from vllm_choreo import Choreography

    # None is the beginning of another: no two of these starts are equal.
    document = draw_tokens((turn * 8 + 1) * num_tokens, num_tokens)
    row: dict[str, Any] = {"tokens": num_tokens, "layers": json.dumps(layers), "turn": turn}
    with tempfile.TemporaryDirectory() as folder:
        with Choreography(llm) as c:
            head = c.prefill(tokens=_head())
            message = c.prefill(tokens=document, keep_hidden=[layers[0]])
            # Before there is a copy of the message with these layers, which would be kept, too.
            kept = c.save([message], folder, encodings=True, progress=False)
            wanted = _ask(c, [head, message], {"layers": [layers]})
        row["megabytes"] = round(kept.bytes / 1e6, 1)
        for side in _SIDES if turn % 2 else _SIDES[::-1]:
            empty_caches(llm)
            if side == "text":
                row["text_s"] = _encode(llm, document)
            else:
                row["load_s"], row["layers_s"], found = _load(llm, Path(folder), layers)
                if found != wanted:
                    raise SystemExit("what was loaded is not what was saved: nothing is timed")
    return row


def _encode(llm: Any, document: list[int]) -> float:
    from vllm_choreo import Choreography

    with Choreography(llm, mode="baseline") as c:
        parents = [c.prefill(tokens=_head()), c.prefill(tokens=document)]
        began = time.perf_counter()
        _ask(c, parents, None)
        return round(time.perf_counter() - began, 5)


def _load(llm: Any, folder: Path, layers: list[int]) -> tuple[float, float, Any]:
    """Seconds of the load, then of the call; and what it answers."""
    from vllm_choreo import Choreography

    with Choreography(llm) as c:
        head = c.prefill(tokens=_head())
        began = time.perf_counter()
        (message,) = c.load(folder, progress=False)
        loaded = time.perf_counter()
        answer = _ask(c, [head, message], {"layers": [layers]})
        done = time.perf_counter()
    return round(loaded - began, 5), round(done - loaded, 5), answer


def _head() -> list[int]:
    """What the call reads before the document, so that this has to be encoded anew at all."""
    return draw_tokens(35_000, QUESTION_TOKENS)


def _ask(c: Any, parents: list[Any], repair: Any) -> list[dict[int, float]]:
    """The first token of an answer, by its log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=1)
    question = draw_tokens(30_000, QUESTION_TOKENS)
    answer = c.decode(question, parents=parents, repair=repair, sampling_params=params)
    if repair is not None and answer.usage.repaired_tokens < parents[-1].num_tokens:
        raise SystemExit("the layers are not encoded anew: nothing is timed")
    return [{token: one.logprob for token, one in at.items()} for at in answer.logprobs]


if __name__ == "__main__":
    sys.exit(main())
