# SPDX-License-Identifier: Apache-2.0
"""All that the clients of the soak got, compared with HuggingFace's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.users import Notes, Seen
from vllm_choreo.testing.reference import Made, Reference, num_unlike_greedy


class Judge:
    """Encodes anew what was read, wherever it was read: see `vllm_choreo.testing.reference`."""

    def __init__(self, model: Path) -> None:
        self._reference = Reference(str(model))
        self._made: dict[str, Made] = {}

    def wrong_tokens(self, notes: Sequence[Notes]) -> int:
        """Generated tokens that are not greedy."""
        return sum(self._wrong_of(note) for note in notes)

    def _wrong_of(self, note: Notes) -> int:
        self._made.clear()
        wrong = sum(map(self._wrong, note.seen))
        for prompt, generated in note.texts:
            wrong += self._unlike(Made([*prompt, *generated]), len(prompt), generated)
        return wrong

    def _wrong(self, seen: Seen) -> int:
        message, generated = seen.message, seen.message.generated_token_ids
        num_header = message.num_tokens - len(generated)
        if seen.is_text:
            prompt = [token for parent, *_ in seen.parents for token in parent.token_ids]
            text = Made([*prompt, *message.token_ids])
            return self._unlike(text, len(prompt) + num_header, generated)
        parents = tuple(
            # A document was encoded alone; an answer was judged before.
            (self._made.get(parent.id) or Made(parent.token_ids), start, stop, offset)
            for parent, start, stop, offset in seen.parents
        )
        made = Made(message.token_ids, parents, seen.new_offset)
        self._made[message.id] = made
        return self._unlike(made, num_header, generated)

    def _unlike(self, made: Made, num_given: int, generated: Sequence[int]) -> int:
        logits = self._reference.logits(made)
        self._reference.forget()
        return num_unlike_greedy(logits, num_given, generated)
