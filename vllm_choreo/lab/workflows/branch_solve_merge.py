# SPDX-License-Identifier: Apache-2.0
"""Branch, solve, merge: a story with many concepts, from two stories with some of them each.

Saha et al., "Branch-Solve-Merge Improves Large Language Model Evaluation and Generation" (2023).
A first call divides the concepts into two groups. The stories are written in parallel, so neither
was encoded with the other. Choreographed, the merge reads them as they were written; in the variant
"baseline" they are first encoded again as text is, the second one after the first.

In the layout "paper" the merge is asked for before the stories, and the words are not said again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.lab.workflows.variants import (
    check_layout,
    check_variant,
    side_by_side,
    with_layout,
)
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

BRANCH = (
    "Divide these words into two groups of about the same size, each good for a story of its own: "
    "{}. Write one line for each group."
)
WRITE = "Write a short story that makes sense and uses all of these words: {}."
MERGE = "Merge both stories into one that makes sense and uses all of these words: {}."
MERGE_FIRST = "Merge the two stories into one that makes sense and uses all of their concepts."


def branch_solve_merge(
    c: Facade,
    concepts: Sequence[str],
    *,
    variant: str = "serial",
    layout: str = "standard",
    sampling_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Write one story; see `vllm_choreo.lab.workflows`. The answer is the merged story.

    Args:
        concepts: at least two words; `problems.grading.coverage` tells how many the story uses.
        variant: "baseline", "serial" or "parallel": see `variants`.
        layout: "standard" or "paper": see `variants`.

    Raises:
        ChoreoError: no such variant or layout, or fewer than two concepts.
    """
    check_variant(variant)
    check_layout(layout)
    if len(concepts) < 2:
        raise ChoreoError("must be two or more", parameter="concepts", value=list(concepts))
    inputs = {"concepts": list(concepts), "variant": variant, "sampling_params": sampling_params}
    c, chat, log = open_chat("branch_solve_merge", c, with_layout(inputs, layout), turns, on_step)
    before: list[Message] = []
    header = chat.user(MERGE.format(", ".join(concepts))) + chat.assistant()
    if layout == "paper":
        asked = c.prefill(chat.user(MERGE_FIRST), role="merge prompt")
        before, header = [log.add("task", "merge prompt", asked)], chat.answer_alone()
    groups = _branch(c, chat, log, concepts, sampling_params)
    stories = _solve(c, chat, log, groups, sampling_params)
    if variant == "baseline":
        stories = _as_text(c, log, before, *stories)
    first, second = stories
    answer = c.decode(
        header,
        **(side_by_side(variant, first, second, before) | {"role": "merge"}),
        sampling_params=sampling_params,
    )
    log.add("merge", "merge", answer)
    return log.finish([answer.generated_text])


def _branch(
    c: Facade, chat: ChatTurns, log: Transcript, concepts: Sequence[str], sampling_params: Sampling
) -> list[list[str]]:
    said = c.decode(
        chat.user(BRANCH.format(", ".join(concepts))) + chat.assistant("Group 1:"),
        role="branch",
        sampling_params=sampling_params,
    )
    return groups_of(log.add("branch", "branch", said).generated_text, concepts)


def groups_of(said: str, concepts: Sequence[str]) -> list[list[str]]:
    """The two groups into which an answer divides concepts.

    The first group ends where the answer says "group 2", else with its first line. A concept is in
    the group that names it first. One that no group names is added to the smaller group, so that
    every concept is in one; a group that is left empty gets the last one of the other.

    Args:
        said: the answer, from behind "Group 1:" on.
        concepts: at least two words.
    """
    parts = re.split(r"group\s*2\s*:?", said, maxsplit=1, flags=re.IGNORECASE)
    if len(parts) == 1:
        first, _, rest = said.strip().partition("\n")
        parts = [first, rest]
    texts = [part.lower() for part in parts]
    groups: list[list[str]] = [[], []]
    left: list[str] = []
    for concept in concepts:
        word = re.compile(rf"\b{re.escape(concept.lower())}\b")
        named = [number for number, text in enumerate(texts) if word.search(text)]
        (groups[named[0]] if named else left).append(concept)
    for concept in left:
        min(groups, key=len).append(concept)
    for group, other in (groups, groups[::-1]):
        if not group:
            group.append(other.pop())
    return groups


def _solve(
    c: Facade,
    chat: ChatTurns,
    log: Transcript,
    groups: Sequence[Sequence[str]],
    sampling_params: Sampling,
) -> list[Message]:
    calls = [
        {
            "header": chat.user(WRITE.format(", ".join(words)))
            + chat.assistant(f"Story {number}:"),
            "sampling_params": seeded(sampling_params, number),
        }
        for number, words in enumerate(groups, start=1)
    ]
    return log.add_all("solve", ["story 1", "story 2"], c.decode(calls, role="story"))


def _as_text(
    c: Facade, log: Transcript, before: Sequence[Message], first: Message, second: Message
) -> list[Message]:
    """Encode both stories again, as one text."""
    read = list(before)
    one = c.prefill(first.token_ids, parents=read, role="story")
    log.add("as text", "story 1", one)
    two = c.prefill(second.token_ids, parents=[*read, one], role="story")
    log.add("as text", "story 2", two)
    return [one, two]
