# SPDX-License-Identifier: Apache-2.0
"""A facade in front of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.semantics.call import Answers, content_name, is_list_of_calls
from vllm_choreo.semantics.call_methods import CallMethods
from vllm_choreo.semantics.call_options import Calls, Content, Named
from vllm_choreo.semantics.message import Message

Item = dict[str, Any]  # of a list of calls: what one is given, and its options


class FacadeWrapper(CallMethods):
    """A `Facade` that hands calls to `c`; subclasses change them, or what comes of them.

    Args:
        c: a facade, in any mode.
    """

    def __init__(self, c: Facade) -> None:
        self.mode = c.mode
        self._c = c

    def free(self, *messages: Named) -> None:
        """Free messages: `Choreography.free`."""
        self._c.free(*messages)

    def _called(self, kind: str, content: Content | Calls, options: Mapping[str, Any]) -> Answers:
        make = self._prefill if kind == "prefill" else self._decode
        if is_list_of_calls(content):
            return list(make([{**options, **item} for item in content]))
        return make([{**options, content_name(kind): content}])[0]

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        """Prefill a list of calls, in order; a single call comes as a list of one."""
        return self._c.prefill(calls)

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        """Decode a list of calls, in order; a single call comes as a list of one."""
        return self._c.decode(calls)


class SessionWrapper(FacadeWrapper):
    """Wrapper of a session, which ends with this one."""

    def __init__(self, c: SessionFacade) -> None:
        super().__init__(c)
        self._session = c

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._session.close()


if TYPE_CHECKING:
    _is_one: type[Facade] = FacadeWrapper
