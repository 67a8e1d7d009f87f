# SPDX-License-Identifier: Apache-2.0
"""Stand-in for Arctic Inference, which vLLM's suffix decoding drafts with: the same, and slower.

Drafts are what followed the longest suffix of a request's tokens, in itself or in answers before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace


class SuffixDecodingCache:
    """Of vLLM's proposer, `vllm.v1.spec_decode.suffix_decoding`."""

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1) -> None:
        self._depth = max_tree_depth
        self._texts: dict[str, list[int]] = {}
        self.active_requests: set[str] = set()

    @property
    def cached_requests(self) -> set[str]:
        """Ids of all requests that were seen."""
        return set(self._texts)

    def start_request(self, req_id: str, prompt_token_ids: Sequence[int]) -> None:
        """Begin with the prompt of a request."""
        self._texts[req_id] = list(map(int, prompt_token_ids))
        self.active_requests.add(req_id)

    def stop_request(self, req_id: str) -> None:
        """End a request, whose text goes on to serve others."""
        self.active_requests.discard(req_id)

    def evict_cached_response(self, req_id: str) -> None:
        """Forget the text of a request."""
        del self._texts[req_id]

    def add_active_response(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Go on with what was sampled."""
        self._texts[req_id] += map(int, token_ids)

    def speculate(
        self, req_id: str, context: Sequence[int], *, max_spec_tokens: int, **_: object
    ) -> SimpleNamespace:
        """Draft what followed the longest suffix of `context`, an earlier one of its own first."""
        pattern = list(map(int, context))[-self._depth :]
        own = self._texts[req_id]
        others = [text for other, text in self._texts.items() if other != req_id]
        for length in range(min(len(pattern), 8), 0, -1):
            suffix = pattern[-length:]
            for text in (own[:-1], *others):
                for end in range(len(text) - 1, length - 1, -1):
                    if text[end - length : end] == suffix:
                        return SimpleNamespace(token_ids=text[end : end + max_spec_tokens])
        return SimpleNamespace(token_ids=[])


@contextmanager
def installed() -> Iterator[None]:
    """Within, vLLM finds the stand-in."""
    package, module = ModuleType("arctic_inference"), ModuleType("arctic_inference.suffix_decoding")
    package.__spec__ = ModuleSpec("arctic_inference", None)
    module.SuffixDecodingCache = SuffixDecodingCache  # type: ignore[attr-defined]
    names = {"arctic_inference": package, "arctic_inference.suffix_decoding": module}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
