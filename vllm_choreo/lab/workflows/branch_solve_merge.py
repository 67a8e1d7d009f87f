# SPDX-License-Identifier: Apache-2.0
"""Branch, solve, merge: a story with many concepts, from two stories with half of them each.

Saha et al., "Branch-Solve-Merge Improves Large Language Model Evaluation and Generation" (2023).
The stories are written in parallel, so neither was encoded with the other. Choreographed, the merge
reads them as they were written; in the variant "baseline" they are first encoded again as text is,
the second one after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_choreo.api.protocol import Facade
from vllm_choreo.lab.workflows.chat import assistant, user
from vllm_choreo.lab.workflows.sampling import Sampling, seeded
from vllm_choreo.lab.workflows.variants import check_variant, layout
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

WRITE = "Write a short story that makes sense and uses all of these words: {}."
MERGE = "Merge both stories into one that makes sense and uses all of these words: {}."


def branch_solve_merge(
    c: Facade,
    concepts: Sequence[str],
    *,
    variant: str = "serial",
    sampling_params: Sampling = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Write one story; see `vllm_choreo.lab.workflows`. The answer is the merged story.

    Args:
        concepts: at least two words; `problems.grading.coverage` tells how many the story uses.
        variant: "baseline", "serial" or "parallel": see `variants`.

    Raises:
        ChoreoError: no such variant.
    """
    check_variant(variant)
    inputs = {"concepts": list(concepts), "variant": variant, "sampling_params": sampling_params}
    log = Transcript("branch_solve_merge", c.mode, inputs, on_step)
    stories = _solve(c, log, _branches(concepts), sampling_params)
    if variant == "baseline":
        stories = _as_text(c, log, *stories)
    answer = c.decode(
        user(MERGE.format(", ".join(concepts))) + assistant(),
        **(layout(variant, *stories) | {"role": "merge"}),
        sampling_params=sampling_params,
    )
    log.add("merge", "merge", answer)
    return log.finish([answer.generated_text])


def _branches(concepts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    half = (len(concepts) + 1) // 2
    return concepts[:half], concepts[half:]


def _solve(
    c: Facade, log: Transcript, branches: Sequence[Sequence[str]], sampling_params: Sampling
) -> list[Message]:
    calls = [
        {
            "header": user(WRITE.format(", ".join(words))) + assistant(f"Story {number}:"),
            "sampling_params": seeded(sampling_params, number),
        }
        for number, words in enumerate(branches, start=1)
    ]
    return log.add_all("solve", ["story 1", "story 2"], c.decode(calls, role="story"))


def _as_text(c: Facade, log: Transcript, first: Message, second: Message) -> list[Message]:
    """Encode both stories again, as one text."""
    one = log.add("as text", "story 1", c.prefill(first.token_ids, role="story"))
    two = log.add("as text", "story 2", c.prefill(second.token_ids, parents=[one], role="story"))
    return [one, two]
