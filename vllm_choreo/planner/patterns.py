# SPDX-License-Identifier: Apache-2.0
"""Common workflows as graphs: the paper's five, and its trading desk (Helium, section 7).

Each function returns operators for `build`, to which a program may add its own. Inputs are
placeholders, named in each docstring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_choreo.planner.logical import ops
from vllm_choreo.planner.logical.op import Op
from vllm_choreo.planner.logical.ops import Msg

Sampling = Mapping[str, Any] | None


def map_reduce(roles: Sequence[str], *, sampling: Sampling = None) -> Op:
    """Ask experts at once, then sum up. Inputs: `context`, `question`."""
    task = _task()
    answers = [
        ops.llm([Msg("system", role), Msg("user", task)], sampling=sampling, name=f"expert_{i}")
        for i, role in enumerate(roles, 1)
    ]
    return ops.llm(
        [
            Msg("system", "You weigh the answers of experts and give one final answer."),
            Msg("user", ops.concat(task, *_signed("Expert", answers), sep="\n\n")),
        ],
        sampling=sampling,
        name="summary",
    )


def debate(roles: Sequence[str], *, rounds: int = 2, sampling: Sampling = None) -> list[Op]:
    """Ask agents, who revise after reading the others. Inputs: `context`, `question`."""
    task = _task()
    answers: list[Op] = []
    for number in range(1, rounds + 1):
        others = [_signed("Agent", answers, without=i) for i in range(len(roles))]
        revise = "Read the other answers, then give your own again."
        answers = [
            ops.llm(
                [
                    Msg("system", role),
                    Msg("user", task),
                    *(
                        [
                            Msg("assistant", answers[i]),
                            Msg("user", ops.concat(*others[i], revise, sep="\n\n")),
                        ]
                        if answers
                        else []
                    ),
                ],
                sampling=sampling,
                name=f"agent_{i + 1}_round_{number}",
            )
            for i, role in enumerate(roles)
        ]
    return answers


def reflection(critics: Sequence[str], *, in_turn: bool = False, sampling: Sampling = None) -> Op:
    """Ask an expert, who revises after critics' comments. Inputs: `context`, `question`.

    Args:
        critics: system prompts, one for each critic.
        in_turn: critics come one after the other and read those before, and the expert sums up.
        sampling: sampling parameters of all calls.
    """
    task = _task()
    expert = Msg("system", "You are an expert in finance who answers questions about a report.")
    draft = ops.llm([expert, Msg("user", task)], sampling=sampling, name="draft")
    comments: list[Op] = []
    for i, critic in enumerate(critics, 1):
        before = _signed("Critic", comments) if in_turn else []
        parts: list[Op | str] = [task, draft, *before, "What is wrong with this answer?"]
        turn = [Msg("system", critic), Msg("user", ops.concat(*parts, sep="\n\n"))]
        comments.append(ops.llm(turn, sampling=sampling, name=f"critic_{i}"))
    last = "Sum up what holds, and give your final answer." if in_turn else "Revise your answer."
    revise = ops.concat(*_signed("Critic", comments), last, sep="\n\n")
    turns = [expert, Msg("user", task), Msg("assistant", draft), Msg("user", revise)]
    return ops.llm(turns, sampling=sampling, name="revision")


def iterative_refinement(num_chunks: int, *, sampling: Sampling = None) -> Op:
    """Grow a summary chunk by chunk. Inputs: `chunk_1`, `chunk_2` and so on."""
    role = Msg("system", "You summarise reviews of a product. Keep what the summary has already.")
    summary: Op | None = None
    for number in range(1, num_chunks + 1):
        chunk = ops.placeholder(f"chunk_{number}")
        parts = [chunk] if summary is None else ["Summary so far:", summary, "New reviews:", chunk]
        prompt = Msg("user", ops.concat(*parts, sep="\n\n"))
        summary = ops.llm([role, prompt], sampling=sampling, name=f"summary_{number}")
    assert summary is not None, "at least one chunk"
    return summary


def parallel_chains(roles: Sequence[str], num_chunks: int, *, sampling: Sampling = None) -> Op:
    """Report from experts' notes on each chunk. Inputs: `chunk_1`, `chunk_2` and so on."""
    insights: list[Op] = []
    for i, role in enumerate(roles, 1):
        notes: list[Op] = []
        for number in range(1, num_chunks + 1):
            chunk = ops.placeholder(f"chunk_{number}")
            turns = [Msg("system", role), Msg("user", chunk)]
            name = f"expert_{i}_chunk_{number}"
            notes.append(ops.llm(turns, sampling=sampling, name=name))
        insights += notes
    return ops.llm(
        [
            Msg("system", "You write one coherent report from the notes of experts."),
            Msg("user", ops.concat(*_signed("Note", insights), sep="\n\n")),
        ],
        sampling=sampling,
        name="report",
    )


# -- a trading desk --------------------------------------------------------------------------------

ANALYSTS = ("market", "social", "news", "fundamentals")
PAPER_DOCUMENTS = {"market": 2, "social": 3, "news": 4, "fundamentals": 5}
RISKS = ("risky", "neutral", "safe")


def trading(
    traders: Sequence[str],
    *,
    rounds: int = 2,
    documents: Mapping[str, int] | None = None,
    sampling: Sampling = None,
) -> Op:
    """Run analysts, a researchers' debate, traders with risk managers, and a fund manager.

    Inputs: `ticker`, and a document for each analyst: `market`, `social`, `news`, `fundamentals`;
    with several documents `market_1`, `market_2` and so on.

    Args:
        traders: system prompts, one for each trader.
        rounds: rounds of each debate.
        documents: number of documents of each analyst, who extracts what matters from each, and
            then sums up; `PAPER_DOCUMENTS` are 2 to 5, as in the paper. None: one, and no summary.
        sampling: sampling parameters of all calls.
    """
    ticker = ops.placeholder("ticker")
    counts = documents or {}
    reports = [_analyst(kind, counts.get(kind, 1), sampling) for kind in ANALYSTS]
    findings = ops.concat(ops.fmt("Stock: {}", ticker), *_signed("Report", reports), sep="\n\n")
    thesis = _research(findings, rounds, sampling)
    decisions = [
        _chain(i, trader, findings, thesis, rounds, sampling) for i, trader in enumerate(traders, 1)
    ]
    return ops.llm(
        [
            Msg(
                "system",
                "You are the fund manager. Weigh the proposals, then say buy, hold or sell.",
            ),
            Msg("user", ops.concat(thesis, *_signed("Proposal", decisions), sep="\n\n")),
        ],
        sampling=sampling,
        name="fund_manager",
    )


def _analyst(kind: str, num_documents: int, sampling: Sampling) -> Op:
    """Let an analyst report on a document, or extract from several and sum up."""
    role = f"You are the {kind} analyst. Summarise what matters to an investor in these documents."
    if num_documents == 1:
        turns = [Msg("system", role), Msg("user", ops.placeholder(kind))]
        return ops.llm(turns, sampling=sampling, name=f"analyst_{kind}")
    found = []
    for i in range(1, num_documents + 1):
        turns = [Msg("system", role), Msg("user", ops.placeholder(f"{kind}_{i}"))]
        found.append(ops.llm(turns, sampling=sampling, name=f"extract_{kind}_{i}"))
    summary = ops.concat(*_signed("Extract", found), "Sum up.", sep="\n\n")
    turns = [Msg("system", role), Msg("user", summary)]
    return ops.llm(turns, sampling=sampling, name=f"analyst_{kind}")


def _research(findings: Op, rounds: int, sampling: Sampling) -> Op:
    """Let two researchers argue and a manager conclude."""
    said: list[Op] = []
    for number in range(1, rounds + 1):
        for side in ("bull", "bear"):
            role = f"You are the {side} researcher. Argue your side of this stock from the reports."
            so_far = ops.concat(findings, *_signed("Said", said), sep="\n\n")
            turns = [Msg("system", role), Msg("user", so_far)]
            said.append(ops.llm(turns, sampling=sampling, name=f"{side}_{number}"))
    role = "You are the research manager. Conclude this debate with a thesis."
    debated = ops.concat(findings, *_signed("Said", said), sep="\n\n")
    turns = [Msg("system", role), Msg("user", debated)]
    return ops.llm(turns, sampling=sampling, name="research_manager")


def _chain(
    number: int, trader: str, findings: Op, thesis: Op, rounds: int, sampling: Sampling
) -> Op:
    """Let a trader propose, risk managers debate that, and the trader decide."""
    basis = ops.concat(findings, thesis, sep="\n\nThesis: ")
    turns = [Msg("system", trader), Msg("user", basis)]
    proposal = ops.llm(turns, sampling=sampling, name=f"trader_{number}")
    said: list[Op] = []
    for turn in range(1, rounds + 1):
        before = list(said)
        for risk in RISKS:
            role = f"You are the {risk} risk manager. Judge this proposal from your point of view."
            seen = ops.concat("Proposal:", proposal, *_signed("Said", before), sep="\n\n")
            asked = [Msg("system", role), Msg("user", seen)]
            said.append(ops.llm(asked, sampling=sampling, name=f"{risk}_{number}_{turn}"))
    debated = ops.concat(*_signed("Risk", said), "Decide.", sep="\n\n")
    more = [Msg("assistant", proposal), Msg("user", debated)]
    return ops.llm([*turns, *more], sampling=sampling, name=f"decision_{number}")


def _task() -> Op:
    context, question = ops.placeholder("context"), ops.placeholder("question")
    return ops.fmt("{}\n\nQuestion: {}", context, question)


def _signed(who: str, answers: Sequence[Op], without: int = -1) -> list[Op]:
    """Answers, each behind its author and number; `without` leaves one out, counted from 0."""
    return [
        ops.fmt("{} {}: {}", who, str(i), answer)
        for i, answer in enumerate(answers, 1)
        if i != without + 1
    ]
