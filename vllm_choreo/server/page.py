# SPDX-License-Identifier: Apache-2.0
"""A session as one HTML page: its messages, who read whom, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.page import Shown, ShownProblem, page_html
from vllm_choreo.transcript.transcript import Step, Transcript

# A browser draws as many; of a larger session the latest are shown.
MAX_MESSAGES = 2_000
_EMPTY = "<!DOCTYPE html><title>No messages</title><p>The session holds no messages.</p>\n"


def session_page(
    session: str,
    mode: str,
    model: str,
    messages: Sequence[Message],
    engines: Mapping[str, int | None] | None = None,
) -> str:
    """HTML page of a session.

    Args:
        session: its id.
        mode: mode of the session.
        model: the name under which the model is served.
        messages: complete messages of the session, in the order in which they were named.
        engines: engine on which the call of each message ran, by the message's id; None: there is
            one engine.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    shown = messages[-MAX_MESSAGES:]
    if not shown:
        return _EMPTY
    levels = _levels(shown)
    # One band of the graph per level; a message stands to the right of all that it reads.
    ordered = sorted(shown, key=lambda message: levels[message.id])
    start = min(message.metrics.submitted for message in shown)
    read = {parent.id for message in shown for parent in message.parents}
    transcript = Transcript(
        workflow="session",
        mode=mode,
        steps=[Step(f"level {levels[m.id]}", _author(m, engines or {}), m) for m in ordered],
        answers=tuple(m.generated_text for m in ordered if m.generated_text and m.id not in read),
        seconds=max(m.metrics.submitted + m.metrics.latency for m in shown) - start,
        start=start,
    )
    note = "What was generated and nobody read yet stands beside."
    if len(shown) < len(messages):
        note += f" Shown are the latest {len(shown)} of {len(messages)} messages."
    problem = ShownProblem(session, note, (), [Shown(transcript.to_json())])
    return page_html("session", [problem], {"id": session, "model": model, "mode": mode})


def _author(message: Message, engines: Mapping[str, int | None]) -> str:
    """The name of a message, and of several engines the one on which its call ran."""
    name, engine = message.id.partition("/")[2], engines.get(message.id)
    return name if engine is None else f"{name}, engine {engine}"


def _levels(messages: Sequence[Message]) -> dict[str, int]:
    """How many messages stand one after the other before each; parents come before children."""
    levels: dict[str, int] = {}
    for message in messages:
        above = [levels[parent.id] for parent in message.parents if parent.id in levels]
        levels[message.id] = max(above, default=-1) + 1
    return levels
