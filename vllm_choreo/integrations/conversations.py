# SPDX-License-Identifier: Apache-2.0
"""Chats whose messages are messages of a session: which of them the server has, and what to encode.

A chat is rendered by the server, with the model's own template, into tokens. They are cut where
the template's rendering of the first messages ends:

    tokens   [system  ][document A ][document B ][question ][generation prompt]
    becomes   parents: found by their tokens, or encoded now  header: of the call that answers

The server's own cuts (`chat/`, for chats that name nothing) are made on the text, with marks, by a
tokenizer that tells the characters of tokens. A client has neither template nor tokenizer: it asks
for the tokens of the first messages, of one more, and so on. And it names what tokens cannot find,
an answer whose text was read back into others, by its id.

Cuts are verified on the tokens of the whole, and once more by the server when it has the request: a
template that renders a message differently by its place costs reuse, and never changes what the
model reads. Nothing here does input or output: generators yield what to ask the server, and are
sent its answers.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.integrations.answers import ChatAnswer

if TYPE_CHECKING:
    import httpx

MODES = ("choreo", "exact", "off")
# Of a message in a request: the choreography message that it is. Our clients add and remove it.
ID_KEY = "choreo_id"
# What a rendering depends on, beside the messages.
_TEMPLATE_KEYS = (
    *("model", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message"),
)
# With these the server has lost, or never had, what we named: all is encoded again.
_LOST = {"UnknownMessageError", "FreedMessageError", "UnknownSessionError", "EngineRestartedError"}


@dataclass(frozen=True)
class HttpRequest:
    """A request to the server.

    Attributes:
        method, path: the path begins at the server's root.
        body: JSON; None: none.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None = None


class Refused(Exception):
    """Error that the server answered to a `HttpRequest`.

    Attributes:
        error: error object of the answer's body.
        response: response of the HTTP client.
    """

    def __init__(self, error: Mapping[str, Any], response: httpx.Response) -> None:
        super().__init__(error.get("message", "refused"))
        self.error = error
        self.response = response


Asking = Generator[HttpRequest, Any, Any]


@dataclass(frozen=True)
class _Piece:
    """Rendered tokens that are to be one parent; `name`: that of the answer that they are."""

    tokens: tuple[int, ...]
    name: str | None = None


class Conversations:
    """Chats over one session of a server, which share the messages that they have in common.

    Args:
        mode: "choreo": every message is encoded for itself, and read in any order; "exact": as
            plain text would be, and answers are those of plain text; "off": requests are plain.
        session: id of a session that is open already; None: one is opened, in this mode.

    Attributes:
        encoded_tokens: tokens that the server ran for these chats, as its answers tell: those of
            messages, headers and answers; of plain requests what was not in the prefix cache.

    Raises:
        ChoreoError: no such mode.
    """

    def __init__(self, mode: str = "choreo", session: str | None = None) -> None:
        if mode not in MODES:
            raise ChoreoError(f"choose one of {', '.join(MODES)}", parameter="mode", value=mode)
        self.mode = mode
        self.session = session
        self.encoded_tokens = 0
        self._is_ours = session is None
        self._forget()

    def _forget(self) -> None:
        self._made: set[str] = set()  # names of messages that the server has, or is making
        self._answers: dict[str, ChatAnswer] = {}
        self._by_tokens: dict[tuple[int, ...], str] = {}  # answers
        self._lengths: set[int] = set()  # of answers, in tokens
        # How chat messages were rendered, by digest; longest first. See `_rendered`.
        self._renderings: dict[str, list[tuple[int, ...]]] = {}

    def is_ours(self, body: Mapping[str, Any]) -> bool:
        """Return whether to choreograph a chat request here: it names no parents itself."""
        xargs = body.get("vllm_xargs") or {}
        return self.mode != "off" and not any(key.startswith("choreo_") for key in xargs)

    def has_lost(self, error: Mapping[str, Any]) -> bool:
        """Return whether an error says that messages are gone; forget them if so."""
        is_lost = error.get("type") in _LOST
        if is_lost:
            self._forget()
            if self._is_ours:
                self.session = None
        return is_lost

    def prepare(self, body: Mapping[str, Any], is_cut: bool = True) -> Asking:
        """Prepare a chat request that names its parents.

        Args:
            body: body of a request to /v1/chat/completions.
            is_cut: cut the chat into parents; False: all of it is the header, for the server
                renders it otherwise.

        Returns:
            The body to send.

        Raises:
            Refused: the server refuses the request, or a message of it.
        """
        session = yield from self._open()
        messages = [{k: v for k, v in m.items() if k != ID_KEY} for m in body["messages"]]
        plain = {key: body[key] for key in _TEMPLATE_KEYS if body.get(key) is not None}
        plain["messages"] = messages
        named = [message.get(ID_KEY) for message in body["messages"]]
        pieces = (yield from self._pieces(plain, named)) if is_cut else []
        parents = yield from self._encode(session, pieces)
        xargs = {
            **(body.get("vllm_xargs") or {}),
            "choreo_session": session,
            "choreo_parents": parents,
            "choreo_prefix": [token for piece in pieces for token in piece.tokens],
            "choreo_save_as": f"a-{uuid.uuid4().hex}",
            "choreo_mode": self.mode,
        }
        return {**body, "messages": messages, "vllm_xargs": xargs, "return_token_ids": True}

    def answered(self, sent: Mapping[str, Any], answer: ChatAnswer) -> None:
        """Remember an answer.

        Args:
            sent: body of the request that it answers.
            answer: answer with its generated tokens.
        """
        self.encoded_tokens += answer.encoded_tokens
        xargs = sent.get("vllm_xargs") or {}
        is_ours = self.session is not None and xargs.get("choreo_session") == self.session
        if not (is_ours and answer.is_message and "choreo_prefix" in xargs):
            return
        name = xargs["choreo_save_as"]
        tokens = (*answer.header, *answer.tokens)
        self._answers[name] = answer
        self._by_tokens[tokens] = name
        self._lengths.add(len(tokens))

    def closing(self) -> Asking:
        """Close the session if we opened it."""
        session, self.session = self.session, None
        self._forget()
        if session is not None and self._is_ours:
            yield HttpRequest("DELETE", f"/v1/choreo/sessions/{session}")

    def _open(self) -> Asking:
        if self.session is None:
            opened = (yield HttpRequest("POST", "/v1/choreo/sessions", {"mode": self.mode}))["id"]
            if self.session is None:
                self.session = opened
            else:  # another thread was faster
                yield HttpRequest("DELETE", f"/v1/choreo/sessions/{opened}")
        return self.session

    # -- cutting -------------------------------------------------------------------------------

    def _pieces(self, plain: Mapping[str, Any], named: Sequence[str | None]) -> Asking:
        """Cut the beginning of the chat's rendering into messages that can be parents, in order."""
        whole = (yield HttpRequest("POST", "/tokenize", plain))["tokens"]
        pieces: list[_Piece] = []
        at = 0
        for index, message in enumerate(plain["messages"]):
            if not _is_text(message):
                return pieces  # tokens do not tell which picture they stand for
            tokens = yield from self._rendered(plain, index, whole, at)
            if tokens is None:  # it goes with the next one
                continue
            at += len(tokens)
            if message.get("role") == "assistant":
                pieces += self._as_answer(tokens, message, named[index])
            else:
                pieces.append(_Piece(tokens))
        # A header is not empty, so without a generation prompt it is the last piece.
        return pieces[:-1] if at == len(whole) else pieces

    def _rendered(
        self, plain: Mapping[str, Any], index: int, whole: Sequence[int], at: int
    ) -> Asking:
        """The tokens of a message, found in `whole` from `at` on; None: it has none of its own.

        They include those of messages right before it that have none of their own.
        """
        messages = plain["messages"]
        digest = _digest(messages[index])
        known = self._renderings.setdefault(digest, [])
        for tokens in known:
            if tuple(whole[at : at + len(tokens)]) == tokens:
                return tokens
        body = {**plain, "messages": messages[: index + 1], "add_generation_prompt": False}
        body.pop("continue_final_message", None)
        try:
            first = (yield HttpRequest("POST", "/tokenize", body))["tokens"]
        except Refused:  # templates may refuse part of a chat, such as one that ends with a call
            return None
        if len(first) <= at or list(whole[: len(first)]) != first:
            return None
        tokens = tuple(first[at:])
        known.append(tokens)
        known.sort(key=len, reverse=True)
        return tokens

    def _as_answer(
        self, tokens: tuple[int, ...], message: Mapping[str, Any], named: str | None
    ) -> Iterable[_Piece]:
        """Cut a turn of the assistant into its answer and what the template puts behind that."""
        for length in sorted(self._lengths, reverse=True):
            name = self._by_tokens.get(tokens[:length])
            if name is not None:
                return _answer_and_rest(name, tokens, length)
        name = (named or "").rpartition("/")[2]
        answer = self._answers.get(name)
        # Its text was read back into other tokens, as tool calls are. It is what was generated, so
        # that is read; in exact mode a plain request would have the other tokens.
        if self.mode == "choreo" and answer is not None and answer.is_told_by(message):
            end = answer.tokens[-1]
            if end in tokens:
                return _answer_and_rest(name, tokens, len(tokens) - tokens[::-1].index(end))
        return [_Piece(tokens)]

    # -- encoding ------------------------------------------------------------------------------

    def _encode(self, session: str, pieces: Sequence[_Piece]) -> Asking:
        """Have the server encode the pieces that it lacks, and return the names of all."""
        names: list[str] = []
        calls: dict[str, Any] = {}
        for piece in pieces:
            context = names if self.mode == "exact" else []
            name = piece.name or f"m-{_digest([context, piece.tokens])}"
            if piece.name is None and name not in self._made:
                calls[name] = {"type": "prefill", "save_as": name, "content": list(piece.tokens)}
                calls[name]["parents"] = list(context)
            names.append(name)
        while calls:
            body = {"calls": list(calls.values())}
            try:
                answer = yield HttpRequest("POST", f"/v1/choreo/sessions/{session}/messages", body)
            except Refused as refused:
                taken = str(refused.error.get("value")).rpartition("/")[2]
                if refused.error.get("type") != "NameTakenError" or taken not in calls:
                    raise
                # Another chat has it made, or is making it.
                self._made.add(taken)
                del calls[taken]
                continue
            self.encoded_tokens += sum(item["usage"]["encoded_tokens"] for item in answer["data"])
            self._made |= calls.keys()
            break
        return names


def _is_text(message: Mapping[str, Any]) -> bool:
    """Return whether a message of a chat has no pictures or other media."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)


def _answer_and_rest(name: str, tokens: tuple[int, ...], length: int) -> list[_Piece]:
    rest = tokens[length:]
    return [_Piece(tokens[:length], name)] + ([_Piece(rest)] if rest else [])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
