# SPDX-License-Identifier: Apache-2.0
"""How choreography scales with the tokens that calls share, and with the calls that share them.

    python -m benchmarks.bench_scaling [--long] [--passes 2]

Time to first token, decode throughput and KV memory, against two baselines: the messages after a
role prompt of each reader's own, so that the texts share no prefix, and, harder, the messages as a
common prefix that vLLM has cached. One engine serves all sides, which take turns; every generated
token is forced to be the same. Before anything is timed, log-probabilities are compared where all
sides mean the same.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import scaling_page
from benchmarks.common import (
    BLOCK_SIZE,
    command_line,
    forced,
    kv_block_bytes,
    machine,
    only_token,
    set_environment,
    set_shared_reading,
    start_engine,
    write_csv,
)
from benchmarks.steps import StepWatch, multiply_rate, read_bandwidth
from benchmarks.stock_prefix import StockPrefix

MESSAGE_TOKENS = 500
DECODE_CONTEXT = 4000
# That vLLM prefills in a step: its default, 4096, is slower for the text on this kind of machine
# (830 tokens/s, against 1,500 with 512 to 2,048; the larger temporaries are mapped anew).
CHUNK_TOKENS = 2048
DECODE_TOKENS = 12
READERS = (1, 2, 4, 8, 16, 32)
ROLE_TOKENS, HEADER_TOKENS = 24, 8
TOLERANCE = 1e-3  # of log-probabilities in float32
FIRST_TOKEN_SIDES = ("choreo", "prefix", "text")
DECODE_SIDES = ("grouped", "own orders", "ungrouped", "prefix", "no context")


def main() -> int:
    args = _arguments()
    set_environment(kv_cache_gib=10 if args.long else 5)
    import vllm_choreo

    vllm_choreo.register()
    longest = max(args.tokens)
    # Each message is padded to whole blocks; role, header and answer come on top.
    room = longest // MESSAGE_TOKENS * (-MESSAGE_TOKENS % BLOCK_SIZE) + 512
    # The model's weights are of no matter here, so it may read further than it was trained to.
    options: dict[str, Any] = {
        "max_model_len": longest + room,
        "max_num_seqs": 2 * max(READERS),
        "max_num_batched_tokens": CHUNK_TOKENS,
        "hf_overrides": {"max_position_embeddings": longest + room},
    }
    stock = StockPrefix(**options) if args.long else None
    bench = _Bench(start_engine(**options), stock, longest)
    bench.check_outputs()
    first, decode = [], []
    for number in range(1, args.passes + 1):
        first += _first_tokens(bench, number, args)
        decode += _decodes(bench, number, args)
    if stock:
        stock.close()
    record = {**machine(), "command": command_line("bench_scaling")}
    write_csv("scaling_first_token", first, **record)
    write_csv("scaling_decode", decode, **record)
    write_csv("scaling_machine", [bench.speeds()], **record)
    print(section())
    return int(not scaling_page.bars_reached(decode))


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    return scaling_page.section()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="more of all, and stock vLLM")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="of what takes no long prefill; per pass")
    parser.add_argument("--tokens", type=int, nargs="+", help="shared, with one reader")
    parser.add_argument("--reader-tokens", type=int, help="shared, with several readers")
    args = parser.parse_args()
    args.tokens = args.tokens or [500, 1000, 2000, 4000, 8000, *([16000] if args.long else [])]
    args.reader_tokens = args.reader_tokens or (2000 if args.long else 500)
    args.repeats = args.repeats or (9 if args.long else 2)
    return args


class _Bench:
    """The engine with the shared messages, encoded once; texts of their own for all readers."""

    def __init__(self, llm: Any, stock: StockPrefix | None, num_tokens: int) -> None:
        from vllm_choreo import Choreography

        self.llm = llm
        self.stock = stock
        self.choreo, self.text = Choreography(llm), Choreography(llm, mode="baseline")
        self._texts = itertools.count()
        self.messages: list[Any] = []
        self.plain: list[Any] = []
        for start in range(0, num_tokens, MESSAGE_TOKENS):
            tokens = [1000 + (start + i) * 7919 % 40000 for i in range(MESSAGE_TOKENS)]
            # With all before as parents, so that the messages in this order mean what text means.
            self.messages.append(self.choreo.prefill(tokens, parents=list(self.messages)))
            self.plain.append(self.text.prefill(tokens))

    def own_tokens(self, num_tokens: int) -> list[int]:
        """Tokens that no other text begins with."""
        number = next(self._texts)
        return [1000 + number % 40000, 1000 + number // 40000, *range(500, 498 + num_tokens)]

    def shared(self, side: str, num_tokens: int) -> list[Any]:
        """The first `num_tokens` shared tokens, in as many messages as that takes."""
        messages = self.plain if side in ("prefix", "text") else self.messages
        return messages[: num_tokens // MESSAGE_TOKENS]

    # -- outputs -----------------------------------------------------------------------------

    def check_outputs(self, num_readers: int = 3) -> None:
        """Where all sides mean the same, the model must say the same."""
        headers = [self.own_tokens(HEADER_TOKENS) for _ in range(num_readers)]
        found = {}
        for side in ("prefix", "grouped", "ungrouped"):
            self._switch(side)
            c = self.text if side == "prefix" else self.choreo
            calls = [{"header": h, "parents": self.shared(side, DECODE_CONTEXT)} for h in headers]
            params = forced(self.llm, DECODE_TOKENS, logprobs=1)
            answers = c.decode(calls, sampling_params=params)
            c.free(*answers)
            found[side] = [_logprobs(answer, only_token(self.llm)) for answer in answers]
        if self.stock:
            found["stock"] = self.stock.logprobs(self.prefix(), headers, DECODE_TOKENS)
        wanted = found.pop("prefix")
        for side, logprobs in found.items():
            pairs = zip(itertools.chain(*logprobs), itertools.chain(*wanted), strict=True)
            worst = max(abs(ours - theirs) for ours, theirs in pairs)
            print(f"{side}: log-probabilities within {worst:.1e} of the prefix's", flush=True)
            if worst > TOLERANCE:
                raise SystemExit(f"{side} differs from the prefix by {worst}: nothing timed")

    def prefix(self) -> list[int]:
        """The messages that are read while decoding, as text."""
        shared = self.shared("prefix", DECODE_CONTEXT)
        return [token for message in shared for token in message.token_ids]

    def _switch(self, side: str) -> None:
        set_shared_reading(self.llm, side != "ungrouped")

    # -- what is timed -----------------------------------------------------------------------

    def first_token(self, side: str, num_tokens: int, num_readers: int) -> dict[str, Any]:
        """Readers with a role of their own: seconds from their submission to first tokens.

        Choreographed, the roles are encoded first, in a step of their own, which is counted.
        """
        self._switch(side)
        c = self.choreo if side == "choreo" else self.text
        shared = self.shared(side, num_tokens)
        if side == "prefix":  # whatever else vLLM cached meanwhile, this it has
            c.free(c.decode([7], parents=shared, sampling_params=forced(self.llm, 1)))
        roles = c.prefill([{"tokens": self.own_tokens(ROLE_TOKENS)} for _ in range(num_readers)])
        calls = [
            {
                "header": self.own_tokens(HEADER_TOKENS),
                "parents": [*shared, role] if side == "prefix" else [role, *shared],
            }
            for role in roles
        ]
        # So many that the first reader still runs when the last one's text has been prefilled.
        num_new = 3 + num_readers * num_tokens // CHUNK_TOKENS
        with StepWatch(self.llm) as watch:
            answers = c.decode(calls, sampling_params=forced(self.llm, num_new))
        c.free(*answers, *roles)
        before = max(role.metrics.ttft for role in roles)
        times = sorted(before + answer.metrics.ttft for answer in answers)
        reused = min(answer.usage.reused_tokens for answer in answers)
        expected = {"choreo": num_tokens + ROLE_TOKENS, "text": 0}
        expected["prefix"] = num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if reused != expected[side]:
            raise SystemExit(f"{side}: {reused} tokens came from the cache, not {expected[side]}")
        return {
            "median_s": round(times[len(times) // 2], 5),
            "last_s": round(times[-1], 5),
            "blocks": self._blocks(watch, side, len(shared)),
        }

    def decode(self, side: str, num_readers: int) -> list[float]:
        """Seconds of each decode step of the readers."""
        if side == "stock":
            assert self.stock is not None
            headers = [self.own_tokens(HEADER_TOKENS) for _ in range(num_readers)]
            return self.stock.step_seconds(self.prefix(), headers, DECODE_TOKENS)
        self._switch(side)
        c = self.text if side == "prefix" else self.choreo
        shared = [] if side == "no context" else self.shared(side, DECODE_CONTEXT)
        calls = []
        for i in range(num_readers):
            turn = i % len(shared) if side == "own orders" else 0
            parents = [*shared[turn:], *shared[:turn]]
            calls.append({"header": self.own_tokens(HEADER_TOKENS), "parents": parents})
        with StepWatch(self.llm) as watch:
            answers = c.decode(calls, sampling_params=forced(self.llm, DECODE_TOKENS))
        c.free(*answers)
        texts = {answer.generated_token_ids for answer in answers}
        if texts != {(only_token(self.llm),) * DECODE_TOKENS}:
            raise SystemExit(f"{side}: other tokens than were forced")
        return watch.decode_seconds(num_readers)

    def _blocks(self, watch: StepWatch, side: str, num_read: int) -> int:
        """Blocks that the readers use: messages that lie there unread do not count."""
        is_text = side in ("prefix", "text")
        num_idle = len(self.messages) - (0 if is_text else num_read)
        return watch.peak_blocks() - num_idle * -(-MESSAGE_TOKENS // BLOCK_SIZE)

    def speeds(self) -> dict[str, Any]:
        """Of this machine and model, for the cost models."""
        from vllm_choreo.smallmodel.embedded import embedded_model

        # From the file, since vLLM packs the weights of linear layers away.
        weights = _num_weights(embedded_model())
        config = self.llm.model_config.hf_text_config
        layer_kv = DECODE_CONTEXT * kv_block_bytes(self.llm) // BLOCK_SIZE
        return {
            "memory_bytes_per_s": round(read_bandwidth(1 << 30)),
            "cache_bytes_per_s": round(read_bandwidth(layer_kv // config.num_hidden_layers)),
            "flops": round(multiply_rate()),
            "weight_bytes": 4 * weights,
            "layer_weights": weights - config.vocab_size * config.hidden_size,
            "attention_width": config.num_hidden_layers * config.hidden_size,
            "block_bytes": kv_block_bytes(self.llm),
            "block_size": BLOCK_SIZE,
        }


def _num_weights(model: Path) -> int:
    """Of a model on disk; embedding and lm_head of the embedded one are the same tensor."""
    from safetensors import safe_open

    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return total


def _logprobs(answer: Any, token: int) -> list[float]:
    """Of the forced token, step by step, as the model gave them before anything was forced."""
    return [entries[token].logprob for entries in answer.logprobs]


def _first_tokens(bench: _Bench, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    points = [(tokens, 1) for tokens in args.tokens]
    readers = READERS if args.long else READERS[:-1]  # as text, 32 readers take long
    points += [(args.reader_tokens, n) for n in readers if (args.reader_tokens, n) not in points]
    rows = []
    for num_tokens, num_readers in points:

        def measure(side: str, point: tuple[int, int] = (num_tokens, num_readers)) -> Any:
            return bench.first_token(side, *point)

        for repeat, side, found in _in_turn(FIRST_TOKEN_SIDES, number, args.repeats, measure):
            rows.append(
                {
                    "pass": number,
                    "repeat": repeat,
                    "side": side,
                    "tokens": num_tokens,
                    "readers": num_readers,
                    **found,
                }
            )
        print(
            f"pass {number}, {num_readers} readers of {num_tokens} tokens, to the first token: "
            f"{_in_words(rows, 'median_s')}",
            flush=True,
        )
    return rows


def _decodes(bench: _Bench, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for num_readers in READERS:

        def measure(side: str, num_readers: int = num_readers) -> Any:
            return bench.decode(side, num_readers)

        sides = (*DECODE_SIDES, "stock") if bench.stock else DECODE_SIDES
        repeats = max(1, args.repeats // 3)
        for repeat, side, steps in _in_turn(sides, number, repeats, measure):
            rows += [
                {
                    "pass": number,
                    "repeat": repeat,
                    "side": side,
                    "readers": num_readers,
                    "step_s": round(seconds, 6),
                }
                for seconds in steps
            ]
        print(
            f"pass {number}, decode, {num_readers} readers: {_in_words(rows, 'step_s')}", flush=True
        )
    return rows


def _in_turn(
    sides: Sequence[str], number: int, repeats: int, measure: Callable[[str], Any]
) -> list[tuple[int, str, Any]]:
    """(repeat, side, result); the order changes every time, and `text` runs but once."""
    found = []
    for repeat in range(repeats):
        for side in sides if (number + repeat) % 2 else sides[::-1]:
            if side != "text" or repeat == 0:
                found.append((repeat, side, measure(side)))
    return found


def _in_words(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """The last value of each side."""
    last = {row["side"]: row[column] for row in rows}
    return ", ".join(f"{side} {1e3 * seconds:.0f} ms" for side, seconds in last.items())


if __name__ == "__main__":
    sys.exit(main())
