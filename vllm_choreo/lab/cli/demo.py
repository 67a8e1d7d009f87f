# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo demo`: two workflows, choreographed and as baseline, on one engine.

First, within seconds, one text and two readers of it both ways. Then a debate and a tree of
thoughts about short passages run in both modes, in turn, in one process. Before each run vLLM's
prefix cache is emptied: within a workflow the baseline has all the caching that vLLM offers, from
earlier runs it has nothing, and neither has the other mode. Every answer has a fixed number of
tokens, so both modes generate equally much.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import LocalEngine, start_engine, warm_up
from vllm_choreo.cli.numbers import positive
from vllm_choreo.lab.cli.first_comparison import WIDTH, compare_first, comparison_text
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts
from vllm_choreo.transcript.transcript import Step, Transcript

if TYPE_CHECKING:
    from tqdm import tqdm
    from vllm import LLM

MODES = ("choreo", "baseline")

ANSWER_TOKENS = 40  # of an answer in the debate, and of a candidate
VOTE_TOKENS = 8
DEBATE_ROUNDS = 3
NUM_CANDIDATES = 4

AGENTS = (
    "You are a careful reader. Answer from the text alone, in one sentence.",
    "You are a sceptic. Doubt the first answer that comes to mind, then answer in one sentence.",
    "You are a teacher. Answer in one sentence that a child understands.",
    "You are an editor. Answer in one sentence, as briefly as you can.",
)
VOTERS = (
    "You judge answers by whether they are true.",
    "You judge answers by whether they are complete.",
    "You judge answers by whether they are easy to understand.",
    "You judge answers by whether they agree with the text.",
)


@dataclass(frozen=True)
class DemoTask:
    """A workflow on a question about a passage."""

    workflow: str
    question: str


_LIGHTHOUSE = (
    "The lighthouse on the Isle of May was built in 1816 by Robert Stevenson. It replaced a coal "
    "beacon from 1636, the first permanent one in Scotland, which burned up to 400 tons of coal a "
    "year. The new tower looks like a castle and stands 24 metres high. Its light was electric "
    "from 1886 to 1924, when oil lamps took over again, because electricity cost too much. The "
    "last keepers left in 1989, and since then the light has been run from Edinburgh."
)
_BRIDGE = (
    "The village needs a new bridge. A wooden bridge costs 40,000 pounds, can be built in three "
    "months and lasts 20 years. A steel bridge costs 90,000 pounds, takes eight months and lasts "
    "60 years, but must be painted every ten years for 5,000 pounds. A stone bridge costs 160,000 "
    "pounds, takes two years and lasts 150 years without much care. The village has 100,000 pounds "
    "and its school is on the other side of the river."
)
_PENGUINS = (
    "Emperor penguins breed in the Antarctic winter. The female lays a single egg in May and goes "
    "to sea to feed. The male keeps the egg on his feet, under a fold of skin, for about 65 days, "
    "and eats nothing all that time. The males stand close together and take turns on the windy "
    "side of the group. When the chick hatches in July, the female comes back with food, and the "
    "male, who has lost almost half his weight, walks up to 100 kilometres to the sea."
)

TASKS = (
    DemoTask("debate", f"{_LIGHTHOUSE}\n\nWhy did the light go back to oil lamps in 1924?"),
    DemoTask("tree", f"{_BRIDGE}\n\nWhich bridge should the village build, and why?"),
    DemoTask("debate", f"{_PENGUINS}\n\nWho looks after the egg, and what does it cost him?"),
    DemoTask("tree", f"{_LIGHTHOUSE}\n\nExplain to a visitor why this lighthouse matters."),
    DemoTask("debate", f"{_BRIDGE}\n\nCan the village afford a stone bridge?"),
    DemoTask("tree", f"{_PENGUINS}\n\nWrite one sentence on how the males keep warm and alive."),
)


_NOTES = """
TTFT: time to first token, median over the calls after the workflow's first parallel step.
End to end: median over the tasks. Encoded: tokens whose keys and values were computed, generated
ones included. Both modes ran in turn, each from an empty prefix cache."""


def command(parser: argparse.ArgumentParser) -> Main:
    """Run two workflows both ways and compare times."""
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or name (default: the small test model)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="run N tasks only (default: all)"
    )
    return main


def main(args: argparse.Namespace) -> int:
    """Run the demo, print a table, write a picture, the numbers and the answers.

    Args:
        args: `model` (folder or name, or None for the small test model), `out` (folder for the
            results, a Path), `limit` (number of tasks, or None for all).

    Returns:
        The exit status, 0.
    """
    began = time.perf_counter()
    llm = start_engine(args.model, max_model_len=4096, forces_tokens=False)
    engine, tasks = LocalEngine(llm), TASKS[: args.limit]
    warm_up(engine, MODES)
    print(f"\n{comparison_text(compare_first(engine, TASKS[0].question, AGENTS[:2]))}\n")
    print(
        f"Both came within {time.perf_counter() - began:.0f} s of the start.\n\n"
        f"Now {_num_all(tasks)} calls of two workflows, both ways, from empty caches.\n"
        f"Results go to {args.out}.",
        flush=True,
    )
    runs = _run_all(llm, tasks)
    args.out.mkdir(parents=True, exist_ok=True)
    print(_table(runs))
    print(_NOTES)
    paths = [_write_numbers(runs, args.out), _write_answers(tasks, runs, args.out)]
    paths += _draw(runs, args.out)
    print(f"\nWritten to {args.out}: " + ", ".join(path.name for path in paths))
    print(f"Took {time.perf_counter() - began:.0f} s.")
    return 0


def _run_all(llm: LLM, tasks: Sequence[DemoTask]) -> list[dict[str, Transcript]]:
    """Run each task in both modes, which take turns at being the first."""
    runs: list[dict[str, Transcript]] = []
    began = time.perf_counter()
    with progress_bar(_num_all(tasks)) as bar:
        for i, task in enumerate(tasks):
            order = MODES if i % 2 == 0 else MODES[::-1]
            run = {}
            for mode in order:
                bar.set_description(f"{task.workflow} {i + 1}/{len(tasks)}, {mode:<8}")
                run[mode] = _run_task(llm, task, mode, lambda step: bar.update())
            _check_comparable(run)
            runs.append(run)
            _tell_progress(len(runs), len(tasks), time.perf_counter() - began)
    return runs


def _tell_progress(num_done: int, num_tasks: int, seconds: float) -> None:
    """Print a line where there is no terminal on which the bar would be seen."""
    if not sys.stderr.isatty():
        left = seconds / num_done * (num_tasks - num_done)
        print(f"{num_done} of {num_tasks} tasks, about {left:.0f} s left", flush=True)


def progress_bar(num_calls: int, file: TextIO | None = None) -> tqdm[Any]:
    """Bar of the calls, which fits a terminal of 80 columns and is as narrow as a narrower one.

    Args:
        num_calls: calls of all runs.
        file: where it is drawn; None: stderr.
    """
    from tqdm import tqdm

    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) - 1
    # Two redraws a second: a log that takes the place of a terminal grows slowly.
    return tqdm(total=num_calls, unit="call", leave=False, ncols=width, mininterval=0.5, file=file)


def _num_all(tasks: Sequence[DemoTask]) -> int:
    """Calls of all tasks, in all modes."""
    return sum(map(_num_calls, tasks)) * len(MODES)


def _num_calls(task: DemoTask) -> int:
    if task.workflow == "debate":
        return 2 + len(AGENTS) * (1 + DEBATE_ROUNDS)
    return 3 + 2 * len(VOTERS) + NUM_CANDIDATES + 1


def _run_task(llm: LLM, task: DemoTask, mode: str, on_step: Callable[[Step], None]) -> Transcript:
    from vllm import SamplingParams

    from vllm_choreo.api.choreography import Choreography

    llm.reset_prefix_cache()
    # Equally many tokens in both modes; the end of the turn stays in the text, to be cut there.
    fixed: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False, "seed": 0}
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, **fixed)
    varied = SamplingParams(temperature=0.7, max_tokens=ANSWER_TOKENS, **fixed)
    vote = SamplingParams(temperature=0.0, max_tokens=VOTE_TOKENS, **fixed)
    with Choreography(llm, mode=mode) as c:
        if task.workflow == "debate":
            return parallel_debate(
                c,
                task.question,
                agents=AGENTS,
                rounds=DEBATE_ROUNDS,
                sampling_params=greedy,
                on_step=on_step,
            )
        return tree_of_thoughts(
            c,
            task.question,
            candidates=NUM_CANDIDATES,
            voters=VOTERS,
            sampling_params=varied,
            vote_params=vote,
            on_step=on_step,
        )


def _check_comparable(run: dict[str, Transcript]) -> None:
    """Check that both modes made the same calls and generated equally much."""
    made = [
        [(step.stage, step.author, len(step.message.generated_token_ids)) for step in t.steps]
        for t in run.values()
    ]
    assert made[0] == made[1], "the modes did not generate the same number of tokens"


@dataclass(frozen=True)
class Row:
    """Sums and medians of one mode over the tasks of a workflow.

    Attributes:
        calls, encoded, reused, generated: sums over the tasks; the last three in tokens.
        ttft: median over `late_steps`, in seconds.
        seconds: median over the tasks, from a workflow's first call to its answer.
    """

    workflow: str
    mode: str
    calls: int
    encoded: int
    reused: int
    generated: int
    ttft: float
    seconds: float


def rows(runs: Sequence[dict[str, Transcript]]) -> list[Row]:
    """One row per workflow and mode, baseline before choreographed."""
    names = list(dict.fromkeys(run["choreo"].title for run in runs))
    return [
        _row(name, mode, [run[mode] for run in runs if run[mode].title == name])
        for name in names
        for mode in ("baseline", "choreo")
    ]


def _row(workflow: str, mode: str, transcripts: Sequence[Transcript]) -> Row:
    messages = [step.message for t in transcripts for step in t.steps]
    return Row(
        workflow=workflow,
        mode=mode,
        calls=len(messages),
        encoded=sum(m.usage.encoded_tokens for m in messages),
        reused=sum(m.usage.reused_tokens for m in messages),
        generated=sum(len(m.generated_token_ids) for m in messages),
        ttft=statistics.median(
            step.message.metrics.ttft for t in transcripts for step in late_steps(t)
        ),
        seconds=statistics.median(t.seconds for t in transcripts),
    )


def late_steps(transcript: Transcript) -> list[Step]:
    """The generating calls after the workflow's first parallel step: rounds >= 2, votes, answer."""
    decodes = transcript.decodes()
    return [step for step in decodes if step.stage != decodes[0].stage]


def _table(runs: Sequence[dict[str, Transcript]]) -> str:
    head = ("workflow", "mode", "calls", "encoded", "reused", "generated", "TTFT", "end to end")
    lines: list[tuple[str, ...]] = [head]
    table = rows(runs)
    for base, choreo in zip(table[::2], table[1::2], strict=True):
        lines += [_cells(base), _cells(choreo)]
        ratio = (
            f"{base.encoded / choreo.encoded:.1f}× less",
            "",
            "",
            f"{base.ttft / choreo.ttft:.1f}× faster",
            f"{base.seconds / choreo.seconds:.2f}× faster",
        )
        lines.append(("", "", "", *ratio))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    rule = "─" * max(len(line) for line in text)
    return "\n".join(["", text[0], rule, *text[1:], rule])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.workflow,
        row.mode,
        str(row.calls),
        f"{row.encoded:,}",
        f"{row.reused:,}",
        f"{row.generated:,}",
        f"{row.ttft * 1000:,.0f} ms",
        f"{row.seconds:.1f} s",
    )


def _write_numbers(runs: Sequence[dict[str, Transcript]], folder: Path) -> Path:
    """Write every call of every run, with the versions and the machine that it was measured on."""
    import torch
    import vllm

    machine = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, torch threads {torch.get_num_threads()}"
    )
    path = folder / "calls.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            "run workflow mode stage author reused_tokens encoded_tokens generated_tokens "
            "exact ttft_s latency_s vllm torch machine".split()
        )
        for i, run in enumerate(runs):
            for mode, transcript in run.items():
                for step in transcript.steps:
                    m = step.message
                    writer.writerow(
                        (
                            *(i, transcript.title, mode, step.stage, step.author),
                            *(m.usage.reused_tokens, m.usage.encoded_tokens),
                            *(len(m.generated_token_ids), m.usage.exact),
                            *(f"{m.metrics.ttft:.4f}", f"{m.metrics.latency:.4f}"),
                            *(vllm.__version__, torch.__version__, machine),
                        )
                    )
    return path


def _write_answers(
    tasks: Sequence[DemoTask], runs: Sequence[dict[str, Transcript]], folder: Path
) -> Path:
    """Write the answers of both modes beside each other."""
    path = folder / "answers.md"
    parts = []
    for task, run in zip(tasks, runs, strict=True):
        parts.append(f"## {run['choreo'].workflow}\n\n> " + task.question.replace("\n", "\n> "))
        for mode in MODES:
            parts.append(f"**{mode}**")
            parts += [f"- {_said(answer)}" for answer in run[mode].answers]
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _said(answer: str) -> str:
    """The answer up to the end of the turn; what a fixed length makes the model add is cut."""
    return " ".join(answer.partition("<|im_end|>")[0].split())


def _draw(runs: Sequence[dict[str, Transcript]], folder: Path) -> list[Path]:
    from vllm_choreo.lab.report.picture import draw_workflows

    first: dict[str, tuple[Transcript, Transcript]] = {}
    for run in runs:
        first.setdefault(run["choreo"].title, (run["choreo"], run["baseline"]))
    return draw_workflows(list(first.values()), folder)
