# SPDX-License-Identifier: Apache-2.0
"""Facades without an engine: what they answer is a digest of the text that a call reads."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message, Metrics, Usage


class Said:
    """A call as it reached the facade."""

    def __init__(self, kind: str, text: str, parents: list[str], header: str, mode: str) -> None:
        self.kind, self.text, self.parents, self.header, self.mode = (
            kind, text, parents, header, mode
        )  # fmt: skip

    @property
    def prompt(self) -> str:
        """All that the call reads, as text."""
        return "".join(self.parents) + self.header


class DigestFacade:
    """A facade whose answers depend on the text of the prompt, and, if sampled, on their number.

    Args:
        mode: "baseline", "exact" or "choreo".
        fails: raises for a prompt that is to be refused.
        length: characters of an answer, by the prompt.
    """

    model = "digest"

    def __init__(
        self,
        mode: str = "choreo",
        fails: Callable[[str, int], None] | None = None,
        length: Callable[[str], int] = lambda prompt: 6 + len(prompt) % 7,
    ) -> None:
        self.mode = mode
        self.calls: list[Said] = []
        self.waves: list[int] = []
        self.freed: set[str] = set()
        self.pinned: set[str] = set()
        self._fails = fails
        self._length = length
        self._numbers = itertools.count()

    def prefill(self, tokens: Any, **options: Any) -> Any:
        if isinstance(tokens, str):
            return self._message("prefill", tokens, options)
        return [self._message("prefill", item["tokens"], item) for item in tokens]

    def decode(self, header: Any, **options: Any) -> Any:
        if isinstance(header, str):
            return self._message("decode", header, options)
        self.waves.append(len(header))
        results: list[Any] = []
        for item in header:
            try:
                results.append(self._message("decode", item["header"], item))
            except ChoreoError as error:
                results.append(error)
        for result in results:
            if isinstance(result, ChoreoError):
                result.results = results
                raise result
        return results

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def free(self, *messages: Any) -> None:
        for message in messages:
            assert message.id not in self.freed, "freed twice"
            self.freed.add(message.id)

    def pin(self, *messages: Any, ttl: float = 0.0) -> None:
        self.pinned |= {message.id for message in messages}

    @property
    def decodes(self) -> list[Said]:
        return [said for said in self.calls if said.kind == "decode"]

    def _message(self, kind: str, given: str, options: Any) -> Message:
        texts, parents = [], options.get("parents") or ()
        for parent in parents:
            message, *span = parent if isinstance(parent, tuple) else (parent,)
            assert message.id not in self.freed, "a freed message is read"
            texts.append(message.text[slice(*span)] if span else message.text)
        said = Said(kind, given, texts, given, options.get("mode") or self.mode)
        number = next(self._numbers)
        generated = ""
        if kind == "decode":
            assert given, "a header is empty"
            if self._fails:
                self._fails(said.prompt, number)
            sampling = options["sampling_params"]
            salt = f"#{number}" if sampling.get("temperature") else ""
            digest = hashlib.sha256((said.prompt + salt).encode()).hexdigest()
            generated = digest[: self._length(said.prompt)]
        self.calls.append(said)
        text = given + generated + ("$" if generated else "")  # "$" stands for the end token
        return Message(
            id=f"digest/{number}",
            text=text,
            token_ids=tuple(map(ord, text)),
            num_tokens=len(text),
            position=0,
            parents=(),
            generated_text=generated,
            generated_token_ids=tuple(map(ord, text[len(given) :])),
            logprobs=None,
            finish_reason="stop" if generated else None,
            usage=Usage(True, sum(map(len, texts)), 0, len(text)),
            metrics=Metrics(0.0, None, 0.0, 0.0),
        )


class AsyncDigestFacade(DigestFacade):
    """The same with coroutines; answers come in an order that is not that of the calls."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.running = self.most = 0

    async def prefill(self, tokens: Any, **options: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().prefill(tokens, **options)

    async def decode(self, header: Any, **options: Any) -> Any:  # type: ignore[override]
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(1 + len(header) % 5):
            await asyncio.sleep(0)
        try:
            return super().decode(header, **options)
        finally:
            self.running -= 1

    async def free(self, *messages: Any) -> None:  # type: ignore[override]
        super().free(*messages)

    async def pin(self, *messages: Any, ttl: float = 0.0) -> None:  # type: ignore[override]
        super().pin(*messages)
