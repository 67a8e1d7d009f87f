# SPDX-License-Identifier: Apache-2.0
"""Document question answering: documents, encoded independently, and one answer from all of them.

Every document is encoded behind the instruction and sees no other one, so it can be kept and read
by whoever asks next. As text, each one sees those before it.

Pasted, the documents and the question are one turn of the user, as retrieval programs send them:
one text, to train on what cuts it into pieces (`vllm-choreo train --cut content`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from vllm_choreo.api.protocol import Facade
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.chat import Turns, open_chat
from vllm_choreo.lab.workflows.sampling import Sampling
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

INSTRUCTION = "Answer from the given facts."


def document_qa(
    c: Facade,
    question: str,
    documents: Sequence[str],
    *,
    opening: str = "",
    pasted: bool = False,
    shuffled: bool = False,
    sampling_params: Sampling = None,
    turns: Turns = None,
    on_step: Callable[[Step], None] | None = None,
) -> Transcript:
    """Ask one question about all documents; see `vllm_choreo.lab.workflows`. One answer.

    Args:
        question: question that is asked after the documents.
        documents: at least one.
        opening: how the answer begins, for models too small to find its form by themselves.
        pasted: documents and question are one turn.
        shuffled: documents come in an order that is drawn by the question.

    Raises:
        ChoreoError: no documents.
    """
    if not documents:
        raise ChoreoError("must be one or more", parameter="documents", value=list(documents))
    inputs: dict[str, object] = {"question": question, "documents": list(documents)}
    inputs |= {"opening": opening, "sampling_params": sampling_params}
    inputs |= {"pasted": True} if pasted else {}
    inputs |= {"shuffled": True} if shuffled else {}
    if shuffled:
        documents = random.Random(question).sample(documents, len(documents))
    c, chat, log = open_chat("document_qa", c, inputs, turns, on_step)
    instruction = log.add(
        "instruction", "instruction", c.prefill(chat.system(INSTRUCTION), role="instruction")
    )
    read: list[Message] = []
    if pasted:
        question = "\n\n".join([*documents, question])
    else:
        calls = [{"tokens": chat.user(text), "parents": [instruction]} for text in documents]
        names = [f"document {number}" for number in range(1, len(calls) + 1)]
        read = log.add_all("documents", names, c.prefill(calls, role="document"))
    answer = c.decode(
        chat.user(question) + chat.assistant(opening),
        parents=[instruction, *read],
        role="answer",
        sampling_params=sampling_params,
    )
    log.add("answer", "answer", answer)
    return log.finish([answer.generated_text])
