# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs ordinary requests: vLLM with it, without it, and at its own block size.

    python -m benchmarks.bench_ordinary [--turns 5] [--passes 2]

The plugin must be absent from its rivals, so each side is a process. All of them are up at once
and take turns, one batch each; whoever is not at turn sleeps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import (
    BLOCK_SIZE,
    command_line,
    empty_caches,
    machine,
    machine_line,
    median,
    read_csv,
    run_child,
    scheduler_of,
    set_environment,
    start_engine,
    table,
    with_spread,
    write_csv,
)

BAR = 0.98  # throughput with the plugin / without it, at the same block size
# Name: block size (None: vLLM's own choice), VLLM_PLUGINS.
SIDES: dict[str, tuple[int | None, str]] = {
    "plugin": (BLOCK_SIZE, "choreo"),
    "stock": (BLOCK_SIZE, ""),
    "stock, default blocks": (None, ""),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="batches per side and pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # we are a child
    args = parser.parse_args()
    set_environment()
    if args.side:
        return _serve(args)
    rows = [row for n in range(1, args.passes + 1) for row in _pass(n, args)]
    write_csv("ordinary", rows, **machine(), command=command_line("bench_ordinary"))
    print(section())
    return int(min(_ratios(rows, "stock").values()) < BAR)


# -- one side --------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    """Start an engine, then run the batch once per line on stdin and answer with a line."""
    from vllm.inputs import TokensPrompt

    block_size, plugins = SIDES[args.side]
    llm = start_engine(block_size, disable_log_stats=True)
    uses_plugin = type(scheduler_of(llm)).__module__.startswith("vllm_choreo")
    assert uses_plugin == bool(plugins), "the plugin is where it should not be, or is missing"
    prompts, params = _batch(llm, args.requests)
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    for _ in sys.stdin:
        empty_caches(llm)
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answer = {
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "prompt_tokens": sum(map(len, prompts)),
            "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        }
        print(json.dumps(answer), flush=True)
    return 0


def _batch(llm: Any, num_requests: int) -> tuple[list[list[int]], list[Any]]:
    """Questions about passages, of 20 to 190 tokens, with answers of 8 to 48 tokens."""
    from vllm import SamplingParams

    from vllm_choreo.cli.demo import AGENTS, TASKS
    from vllm_choreo.workflows.chat import assistant, system, user

    prompts, params = [], []
    for i in range(num_requests):
        question = TASKS[i % len(TASKS)].question
        if i % 3 == 2:
            question = question.rpartition("\n\n")[2]
        text = system(AGENTS[i % len(AGENTS)]) + user(question) + assistant()
        prompts.append(llm.get_tokenizer().encode(text, add_special_tokens=False))
        params.append(SamplingParams(temperature=0.0, max_tokens=8 * (1 + i % 6), ignore_eos=True))
    return prompts, params


# -- the comparison ------------------------------------------------------------------------------


def _pass(number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    children = {side: _start(side, args) for side in SIDES}
    try:
        expected = {side: _take_turn(child)["tokens"] for side, child in children.items()}
        if expected["plugin"] != expected["stock"]:
            raise SystemExit("plugin and stock vLLM generate different tokens: nothing timed")
        rows = []
        for turn in range(args.turns):
            order = list(SIDES) if turn % 2 == 0 else list(SIDES)[::-1]
            for side in order:
                answer = _take_turn(children[side])
                if answer["tokens"] != expected[side]:
                    raise SystemExit(f"{side} generated other tokens than before")
                rows.append(_row(number, turn, side, answer, expected["stock"]))
                print(f"pass {number} turn {turn} {side}: {answer['seconds']:.2f} s", flush=True)
        return rows
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _start(side: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    arguments = ["-m", "benchmarks.bench_ordinary", "--side", side]
    arguments += ["--requests", str(args.requests)]
    child = run_child(arguments, VLLM_PLUGINS=SIDES[side][1])
    _take_turn(child)  # warm
    return child


def _take_turn(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):  # vLLM may print, too
            return json.loads(line)
    raise SystemExit(f"a side ended with status {child.wait()}")


def _row(
    number: int, turn: int, side: str, answer: Mapping[str, Any], stock: Sequence[Any]
) -> dict[str, Any]:
    generated = sum(map(len, answer["tokens"]))
    total = generated + answer["prompt_tokens"]
    return {
        "pass": number,
        "turn": turn,
        "side": side,
        "block_size": answer["block_size"],
        "seconds": round(answer["seconds"], 4),
        "prompt_tokens": answer["prompt_tokens"],
        "generated_tokens": generated,
        "longest_answer": max(map(len, answer["tokens"])),
        "tokens_per_s": round(total / answer["seconds"], 2),
        "same_tokens_as_stock": sum(a == b for a, b in zip(answer["tokens"], stock, strict=True)),
        "requests": len(stock),
    }


def _rates(rows: Sequence[Mapping[str, Any]], side: str, number: Any) -> list[float]:
    return [
        float(row["tokens_per_s"]) for row in rows if row["side"] == side and row["pass"] == number
    ]


def _ratios(rows: Sequence[Mapping[str, Any]], rival: str) -> dict[Any, float]:
    """Per pass: median over the turns of (with the plugin / the rival in the same turn)."""
    return {
        number: median(
            ours / theirs
            for ours, theirs in zip(
                _rates(rows, "plugin", number), _rates(rows, rival, number), strict=True
            )
        )
        for number in dict.fromkeys(row["pass"] for row in rows)
    }


# -- the page ------------------------------------------------------------------------------------


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV file."""
    rows = read_csv("ordinary")
    if not rows:
        return ""
    same = _ratios(rows, "stock")
    default = _ratios(rows, "stock, default blocks")
    verdict = "reached" if min(same.values()) >= BAR else "MISSED"
    blocks = {row["side"]: row["block_size"] for row in rows}
    lines = [
        (
            number,
            *(with_spread(_rates(rows, side, number), ".1f") for side in SIDES),
            f"{same[number]:.3f}",
            f"{default[number]:.3f}",
        )
        for number in same
    ]
    head = ["pass", *(f"{side} ({size})" for side, size in blocks.items())]
    return "\n\n".join(
        [
            "## Ordinary requests: what the plugin costs them",
            f"A batch of {rows[0]['requests']} requests ({rows[0]['prompt_tokens']} prompt tokens, "
            f"{rows[0]['generated_tokens']} generated), in tokens per second, both kinds together: "
            "median [quartiles]; block size in brackets; ratios are medians over turns. Without "
            "the plugin no code of it is loaded. "
            f"Bar: ratio at the same block size at least {BAR}: {verdict}.",
            table([*head, "plugin / stock", "plugin / default"], lines),
            _agreement(rows),
            "Cost model: an ordinary batch runs vLLM's own kernels; the plugin adds per model step "
            "a look-up of each request and per layer one test, some microseconds beside a step of "
            f"{_step_ms(rows):.0f} ms, so the expected ratio is 1.",
            machine_line(rows),
        ]
    )


def _step_ms(rows: Sequence[Mapping[str, str]]) -> float:
    """Mean milliseconds of a step: the longest answer takes one step per token."""
    seconds = median(float(row["seconds"]) for row in rows if row["side"] == "stock")
    return 1e3 * seconds / int(rows[0]["longest_answer"])


def _agreement(rows: Sequence[Mapping[str, str]]) -> str:
    other = next(row for row in rows if row["side"] == "stock, default blocks")
    return (
        "Outputs: with the plugin every token is that of stock vLLM at the same block size. At the "
        f"default block size {other['same_tokens_as_stock']} of {other['requests']} answers are "
        "the same (its kernel adds in another order)."
    )


if __name__ == "__main__":
    sys.exit(main())
