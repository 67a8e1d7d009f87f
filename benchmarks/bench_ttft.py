# SPDX-License-Identifier: Apache-2.0
"""Time to first token in a parallel debate: choreography against vLLM's prefix caching.

    python -m benchmarks.bench_ttft [--reps 3] [--passes 2] [--answer-tokens 128]

One engine serves both modes, which take turns. Every generated token is forced to be the same in
both, so both read and write equally much. Before anything is timed, a chain of messages must give
the tokens that plain text gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import breakdown
from benchmarks.common import (
    command_line,
    empty_caches,
    forced,
    machine,
    machine_line,
    median,
    read_csv,
    set_environment,
    start_engine,
    table,
    with_spread,
    write_csv,
)

BAR = 12.0  # ratio of the medians of rounds 2 and 3, baseline / choreo
MODES = ("baseline", "choreo")
HEADERS = (1, 8, 24, 64, 256, 1024)  # tokens of the probes for the cost model

ROLES = (
    "You are a careful reader. Answer from the text alone.",
    "You are a sceptic. Doubt the first answer that comes to mind.",
    "You are a teacher. Explain so that a child understands.",
    "You are an editor. Answer as briefly as you can.",
)
QUESTION = (
    "The village needs a new bridge. A wooden bridge costs 40,000 pounds, can be built in three "
    "months and lasts 20 years. A steel bridge costs 90,000 pounds, takes eight months and lasts "
    "60 years, but must be painted every ten years for 5,000 pounds. The village has 100,000 "
    "pounds and its school is on the other side of the river.\n\nWhich bridge should it build?"
)


def main() -> int:
    args = _arguments()
    set_environment()
    import vllm_choreo

    vllm_choreo.register()
    llm = start_engine()
    _check_chain(llm)
    print("chain of messages = plain text: same greedy tokens", flush=True)
    _debate(llm, "choreo", args, 8)  # what is done once only shall not be timed
    _debate(llm, "baseline", args, 8)
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        rows += _pass(llm, number, args)
        steps += step_times(llm, number)
    parts = _where_it_goes(llm, args)
    record = {**machine(), "command": command_line("bench_ttft")}
    write_csv("ttft", rows, **record)
    write_csv("ttft_steps", steps, **record)
    write_csv("ttft_parts", parts, **record)
    print(section())
    return int(min(_ratios(rows).values()) < BAR)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=3, help="debates per mode and pass")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--agents", type=int, default=3, choices=(2, 3, 4))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=128)
    return parser.parse_args()


def _check_chain(llm: Any) -> None:
    """Law 1 on this engine: every message encoded with its predecessors equals the whole text."""
    if chain_tokens(llm, "choreo") != chain_tokens(llm, "baseline"):
        raise SystemExit("choreography and baseline differ where they must not: nothing timed")


def chain_tokens(llm: Any, mode: str) -> list[tuple[int, ...]]:
    """Two greedy answers, each after the whole history: the same in every mode that is right."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography
    from vllm_choreo.workflows.chat import assistant, system, user

    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    empty_caches(llm)
    with Choreography(llm, mode=mode) as c:
        role = c.prefill(system(ROLES[0]))
        task = c.prefill(user(QUESTION), parents=[role])
        history = [role, task]
        for _ in range(2):
            history.append(c.decode(assistant(), parents=list(history), sampling_params=greedy))
        return [message.token_ids for message in history]


def _debate(llm: Any, mode: str, args: argparse.Namespace, num_tokens: int) -> list[Any]:
    """The steps of one debate that generated text."""
    from vllm_choreo import Choreography
    from vllm_choreo.workflows.parallel_debate import parallel_debate

    empty_caches(llm)
    with Choreography(llm, mode=mode) as c:
        log = parallel_debate(
            c,
            QUESTION,
            agents=ROLES[: args.agents],
            rounds=args.rounds,
            sampling_params=forced(llm, num_tokens),
        )
    return log.decodes()


def _pass(llm: Any, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for rep in range(args.reps):
        texts = {}
        for mode in MODES if (rep + number) % 2 else MODES[::-1]:
            decodes = _debate(llm, mode, args, args.answer_tokens)
            texts[mode] = [step.message.token_ids for step in decodes]
            rows += [_row(number, rep, mode, step) for step in decodes]
        if texts["choreo"] != texts["baseline"]:
            raise SystemExit("the modes did not generate the same tokens: their times mean nothing")
        late = {m: median(_ttfts(rows, m, number, rep)) * 1e3 for m in MODES}
        print(f"pass {number} rep {rep}: {late}", flush=True)
    return rows


def _row(number: int, rep: int, mode: str, step: Any) -> dict[str, Any]:
    message = step.message
    generated = len(message.generated_token_ids)
    return {
        "pass": number,
        "rep": rep,
        "mode": mode,
        "stage": step.stage,
        "author": step.author,
        "ttft_s": round(message.metrics.ttft, 5),
        "latency_s": round(message.metrics.latency, 5),
        "reused_tokens": message.usage.reused_tokens,
        # Without the generated tokens: what had to be encoded before the first could be sampled.
        "prefilled_tokens": message.usage.encoded_tokens - generated,
        "generated_tokens": generated,
    }


def _ttfts(
    rows: Sequence[Mapping[str, Any]], mode: str, number: Any = None, rep: Any = None
) -> list[float]:
    """Seconds to first token of the calls after round 1."""
    return [
        float(row["ttft_s"])
        for row in rows
        if row["mode"] == mode
        and row["stage"] != "round 1"
        and number in (None, row["pass"])
        and rep in (None, row["rep"])
    ]


def _ratios(rows: Sequence[Mapping[str, Any]]) -> dict[Any, float]:
    """Per pass: median TTFT of the baseline / of choreography."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    return {
        number: median(_ttfts(rows, "baseline", number)) / median(_ttfts(rows, "choreo", number))
        for number in passes
    }


def step_times(
    llm: Any, number: int, repeats: int = 5, mode: str = "choreo"
) -> list[dict[str, Any]]:
    """Seconds to first token of one call with a header of so many tokens, and nothing to reuse."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rows = []
    for tokens in HEADERS:
        for repeat in range(repeats):
            empty_caches(llm)
            with Choreography(llm, mode=mode) as c:
                # Seeds of the text: no header is the beginning of another one.
                header = [1000 + repeat, *range(2000, 1999 + tokens)]
                message = c.decode(header, sampling_params=one)
            rows.append(
                {"pass": number, "header_tokens": tokens, "ttft_s": round(message.metrics.ttft, 5)}
            )
    return rows


def _where_it_goes(llm: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Parts of the time to first token after round 1, from runs that are not counted above."""
    from vllm_choreo import Choreography

    rows: list[dict[str, Any]] = []
    clock = breakdown.Clock()
    breakdown.install(clock, llm)
    step, results = llm.llm_engine.step, Choreography._results
    state = {"is_open": False, "mode": "", "call": 0}

    def timed_results(self: Any, calls: Any) -> Any:
        state.update(is_open=calls[0].is_decode, call=state["call"] + calls[0].is_decode)
        clock.open()
        return results(self, calls)

    def timed_step() -> Any:
        outputs = step()
        if outputs and state["is_open"]:
            state["is_open"] = False
            for part, ms in clock.close().items():
                rows.append({"mode": state["mode"], "round": state["call"], "part": part,
                             "ms": round(ms, 3), "steps": _in_words(clock.steps)})  # fmt: skip
        return outputs

    Choreography._results = timed_results  # type: ignore[method-assign]
    llm.llm_engine.step = timed_step
    try:
        for _ in range(2):
            for mode in MODES:
                state.update(mode=mode, call=0)
                _debate(llm, mode, args, min(args.answer_tokens, 128))
    finally:
        Choreography._results = results  # type: ignore[method-assign]
        llm.llm_engine.step = step
        clock.remove()
    return rows


def _in_words(steps: Sequence[tuple[int, int]]) -> str:
    return " + ".join(f"{tokens} tokens of {requests}" for tokens, requests in steps)


# -- the page ----------------------------------------------------------------------------------


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    rows = read_csv("ttft")
    if not rows:
        return ""
    ratios = _ratios(rows)
    verdict = "reached" if min(ratios.values()) >= BAR else "MISSED"
    return "\n\n".join(
        [
            "## Time to first token: parallel debate",
            f"Three agents, three rounds, answers of {rows[0]['generated_tokens']} tokens, one "
            "engine, modes in turn, every generated token forced to be the same. The baseline is "
            "vLLM's prefix caching on the same texts. Milliseconds: median [quartiles] over the "
            "calls of rounds 2 and 3. "
            f"Bar: ratio of medians at least {BAR:.0f}: {verdict}.",
            _main_table(rows, ratios),
            _cost_model(rows, read_csv("ttft_steps")),
            "One call without parents, by the length of its header:",
            _step_table(read_csv("ttft_steps")),
            "Where the time goes, in milliseconds, medians over the parallel calls of rounds 2 and "
            "3 (separate runs with timers in the engine; each part without the parts it calls):",
            _part_table(read_csv("ttft_parts")),
            machine_line(rows),
        ]
    )


def _main_table(rows: Sequence[Mapping[str, str]], ratios: Mapping[str, float]) -> str:
    lines = [
        (
            number,
            *(with_spread([1e3 * t for t in _ttfts(rows, mode, number)]) for mode in MODES),
            f"{ratio:.1f}",
        )
        for number, ratio in ratios.items()
    ]
    return table(("pass", "baseline", "choreographed", "ratio"), lines)


def _per_round(rows: Sequence[Mapping[str, str]], mode: str) -> float:
    """Tokens that the calls of one round after the first must prefill together."""
    late = [row for row in rows if row["mode"] == mode and row["stage"] != "round 1"]
    rounds = {(row["pass"], row["rep"], row["stage"]) for row in late}
    return sum(int(row["prefilled_tokens"]) for row in late) / len(rounds)


def _step_median(steps: Sequence[Mapping[str, str]], tokens: int) -> float:
    return median(float(s["ttft_s"]) for s in steps if int(s["header_tokens"]) == tokens)


def _cost_model(rows: Sequence[Mapping[str, str]], steps: Sequence[Mapping[str, str]]) -> str:
    base, choreo = (_per_round(rows, mode) for mode in MODES)
    seals = len({row["author"] for row in rows})
    small, large = _step_median(steps, 24), _step_median(steps, 1024)
    rate = 1024 / large
    expected = 1e3 * base / rate
    # Between the probes of 24 and 1024 tokens time grows in proportion to the tokens.
    slope = (large - small) / 1000
    ours = 1e3 * (small + max(0.0, choreo + seals - 24) * slope)
    return (
        f"Cost model: a round of the baseline must prefill {base:.0f} tokens in front of its first "
        f"tokens, which at the measured {rate:.0f} tokens/s take {expected:.0f} ms. Choreographed, "
        f"it is the headers, {choreo:.0f} tokens, and the last token of each of the {seals} "
        f"answers before: one step of {choreo + seals:.0f} tokens, {ours:.0f} ms by the table "
        f"below. Expected ratio: {expected / ours:.1f}."
    )


def _step_table(steps: Sequence[Mapping[str, str]]) -> str:
    lengths = list(dict.fromkeys(step["header_tokens"] for step in steps))
    lines = []
    for length in lengths:
        times = [1e3 * float(s["ttft_s"]) for s in steps if s["header_tokens"] == length]
        lines.append(
            (length, with_spread(times, ".1f"), f"{1e3 * int(length) / median(times):.0f}")
        )
    return table(("header tokens", "ms to first token", "tokens/s"), lines)


def _part_table(parts: Sequence[Mapping[str, str]]) -> str:
    late = [row for row in parts if int(row["round"]) > 1]
    names = list(dict.fromkeys(row["part"] for row in late))
    cells: dict[str, list[float]] = {}
    for name in names:
        cells[name] = [
            median(
                [float(r["ms"]) for r in late if r["mode"] == mode and r["part"] == name] or [0.0]
            )
            for mode in MODES
        ]
    names.sort(key=lambda name: -cells[name][1])
    lines = [(name, *(f"{ms:.1f}" for ms in cells[name])) for name in names]
    lines.append(("sum", *(f"{sum(c[i] for c in cells.values()):.1f}" for i in range(2))))
    steps = [sorted({r["steps"] for r in late if r["mode"] == mode}) for mode in MODES]
    lines.append(("model steps (tokens of requests)", *("; ".join(found) for found in steps)))
    return table(("part", "baseline", "choreographed"), lines)


if __name__ == "__main__":
    sys.exit(main())
