# SPDX-License-Identifier: Apache-2.0
"""`prefill` and `decode` as all facades have them, once for type checkers and for readers.

Text or token ids make a `Message`, a list of calls a list of them. How calls are run, each facade
says itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, overload

from vllm_choreo.semantics.call import Answers
from vllm_choreo.semantics.call_options import Calls, Content, DecodeOptions, ReadOptions
from vllm_choreo.semantics.message import Message


class CallMethods:
    """`prefill` and `decode` of a facade."""

    def _called(self, kind: str, content: Content | Calls, options: Mapping[str, Any]) -> Answers:
        """Run `prefill(content, **options)`, or `decode`, by its name."""
        raise NotImplementedError

    @overload
    def prefill(self, tokens: Content, **options: Unpack[ReadOptions]) -> Message: ...

    @overload
    def prefill(self, tokens: Calls, **options: Unpack[ReadOptions]) -> list[Message]: ...

    def prefill(
        self, tokens: Content | Calls, **options: Unpack[ReadOptions]
    ) -> Message | list[Message]:
        """Encode a message, or a list of them; sample nothing.

        Args:
            tokens: text, token ids, or a list of dicts.
            options: `parents`, `offsets`, `new_offset`, `save_as`, `mode`, `deny`, `adapter`,
                `repair`: see `vllm_choreo.semantics.call_options.ReadOptions`.

        Returns:
            A `Message`, or a list of them.

        Raises:
            DeniedMessageError: a parent carries traces of a message that is denied.
            ChoreoError: which parameter is wrong, and what to do instead.
        """
        return self._called("prefill", tokens, options)

    @overload
    def decode(self, header: Content, **options: Unpack[DecodeOptions]) -> Message: ...

    @overload
    def decode(self, header: Calls, **options: Unpack[DecodeOptions]) -> list[Message]: ...

    def decode(
        self, header: Content | Calls, **options: Unpack[DecodeOptions]
    ) -> Message | list[Message]:
        """Encode a header and generate after it; the message is both. Or run a list of such calls.

        Otherwise as `prefill`. `header` must not be empty. The option `sampling_params` are
        `vllm.SamplingParams`, the model's defaults if omitted; with a list, they, `mode`, `adapter`
        and `repair` are those of the items that have none of their own, and `deny` is added to that
        of each.
        """
        return self._called("decode", header, options)


class AsyncCallMethods:
    """`prefill` and `decode` of a facade whose calls may overlap."""

    async def _called(
        self, kind: str, content: Content | Calls, options: Mapping[str, Any]
    ) -> Answers:
        """Run `prefill(content, **options)`, or `decode`, by its name."""
        raise NotImplementedError

    @overload
    async def prefill(self, tokens: Content, **options: Unpack[ReadOptions]) -> Message: ...

    @overload
    async def prefill(self, tokens: Calls, **options: Unpack[ReadOptions]) -> list[Message]: ...

    async def prefill(
        self, tokens: Content | Calls, **options: Unpack[ReadOptions]
    ) -> Message | list[Message]:
        """Encode a message, or a list of them: `Choreography.prefill`."""
        return await self._called("prefill", tokens, options)

    @overload
    async def decode(self, header: Content, **options: Unpack[DecodeOptions]) -> Message: ...

    @overload
    async def decode(self, header: Calls, **options: Unpack[DecodeOptions]) -> list[Message]: ...

    async def decode(
        self, header: Content | Calls, **options: Unpack[DecodeOptions]
    ) -> Message | list[Message]:
        """Encode a header and generate, or run a list of such calls: `Choreography.decode`."""
        return await self._called("decode", header, options)
