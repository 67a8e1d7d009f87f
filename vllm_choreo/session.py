# SPDX-License-Identifier: Apache-2.0
"""A tenant's session on the client's side: which messages there are, and which calls are legal.

`plan` turns what the caller wrote into `Call`s, or refuses all of them before any is submitted.
Both facades (`Choreography`, `AsyncChoreography`) and both modes share it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.errors import (
    ChoreoError,
    CyclicParentsError,
    EmptyTokensError,
    FreedMessageError,
    NameTakenError,
    ParentFailedError,
    TooLongError,
    UnknownMessageError,
)
from vllm_choreo.exact import check_text_offsets
from vllm_choreo.message import Call, Message
from vllm_choreo.options import checked_sampling_params
from vllm_choreo.params import ChoreoParams, ParentSpan, check_span
from vllm_choreo.plan import resolve_span
from vllm_choreo.provenance import Trace, trace_of

CALL_MODES = ("choreo", "exact")
# With a list of calls, these may be given once for all of them.
_FOR_ALL = ("sampling_params", "mode", "deny")
_ITEM_KEYS = frozenset(
    ("tokens", "header", "parents", "offsets", "new_offset", "save_as", *_FOR_ALL)
)
# "/" separates session and name, "#" marks drafts, and plain numbers are the ids that we choose.
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class _Freed:
    """What is left of a message that was freed: its id stays taken, for ids are never reused."""


class Session:
    """The messages of one session and the rules for the next call.

    Args:
        tokenizer: the model's; text is tokenised without special tokens added.
        model_config: vLLM's, for the vocabulary, the context length and the sampling defaults.
        mode: of calls that name none; in "baseline" every call is text, whatever it names.
    """

    def __init__(self, tokenizer: Any, model_config: Any, mode: str = "choreo") -> None:
        self.id = secrets.token_hex(16)
        self.mode = mode
        self.closed = False
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._count = 0
        # id -> its state: a Call while it is generated, then a Message or the error, then _Freed.
        self._entries: dict[str, Call | Message | ChoreoError | _Freed] = {}

    # -- the life of an entry ----------------------------------------------------------------

    def started(self, calls: Iterable[Call]) -> None:
        """Reserve the ids of planned calls."""
        for call in calls:
            self._entries[call.id] = call

    def finished(self, call: Call, result: Message | ChoreoError) -> None:
        """Record how a call ended. One that ended after the session was closed leaves no trace."""
        if not self.closed:
            self._entries[call.id] = result

    def messages(self) -> dict[str, Message]:
        """The live messages by id."""
        return {key: entry for key, entry in self._entries.items() if isinstance(entry, Message)}

    def live_ids(self, messages: Iterable[Any]) -> list[str]:
        """The ids of complete messages, for free and evict.

        Raises:
            UnknownMessageError, FreedMessageError, ParentFailedError: as for a parent.
            ChoreoError: the message is still being generated.
        """
        self._check_open()
        ids = []
        for message in messages:
            message_id = self._resolve("messages", message)
            if isinstance(self._entry("messages", message_id), Call):
                raise ChoreoError(
                    "the message is still being generated: await it first",
                    parameter="messages",
                    value=message_id,
                )
            ids.append(message_id)
        return ids

    def freed(self, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            self._entries[message_id] = _Freed()

    def close(self) -> bool:
        """Forget everything; False if that was done before."""
        was_open, self.closed = not self.closed, True
        self._entries.clear()
        return was_open

    # -- planning ----------------------------------------------------------------------------

    def plan(
        self, kind: str, tokens: Any, shared: Mapping[str, Any], denied: Sequence[str] = ()
    ) -> tuple[list[Call], bool]:
        """Validate a call, or a list of calls; reserve nothing unless all of it is right.

        Args:
            kind: "prefill" or "decode".
            tokens: text, token ids, or a list of dicts.
            shared: the other arguments of the call by name; None means not given.
            denied: ids of messages that are denied to every call, besides those in `shared`.

        Returns:
            The calls, and whether a list was asked for.

        Raises:
            ChoreoError: the first reason why a call is refused.
        """
        self._check_open()
        shared = {**shared, "deny": (*denied, *self.denied(shared.get("deny")))}
        many = isinstance(tokens, Sequence) and bool(tokens) and isinstance(tokens[0], Mapping)
        if many:
            items = [self._item(item, shared) for item in tokens]
        else:
            items = [{**shared, "tokens": tokens}]
        count = self._count
        try:
            calls = [self._call(kind, item) for item in items]
            self._check_names(calls)
        except ChoreoError:
            self._count = count
            raise
        self.started(calls)
        return calls, many

    def _item(self, item: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
        """One dict of a list, checked and completed with what is given for all of them."""
        if not isinstance(item, Mapping):
            raise ChoreoError("a parallel list holds dicts alone", parameter="tokens", value=item)
        for key, value in shared.items():
            if key not in _FOR_ALL and value is not None:
                raise ChoreoError(
                    f"with a list of calls, give {key} in each dict", parameter=key, value=value
                )
        for key in item:
            if key not in _ITEM_KEYS:
                raise ChoreoError(
                    f"unknown key; the keys are {', '.join(sorted(_ITEM_KEYS))}",
                    parameter=str(key),
                    value=item[key],
                )
        if ("tokens" in item) == ("header" in item):
            raise ChoreoError(
                "each dict needs either tokens or header", parameter="tokens", value=dict(item)
            )
        full = {**shared, **item}
        full["deny"] = (*shared["deny"], *self.denied(item.get("deny")))
        full["tokens"] = full.pop("header") if "header" in item else full["tokens"]
        return full

    def _call(self, kind: str, item: Mapping[str, Any]) -> Call:
        message_id = self._new_id(item.get("save_as"))
        copied = item.get("copy_of")
        copy_of = None if copied is None else self._parent(copied, message_id, "message")
        if copy_of is None:
            token_ids, text = self._tokens(kind, item["tokens"])
        else:
            token_ids, text = self._copied(copy_of)
        params = ChoreoParams(
            parents=self._parents(item.get("parents"), message_id),
            offsets=item.get("offsets"),
            new_offset=item.get("new_offset"),
            save_as=message_id,
            kind=kind,
            session=self.id,
            exact=self._mode(item.get("mode")) == "exact",
            deny=tuple(dict.fromkeys(item["deny"])),
            copy_of=copy_of and copy_of.id,
        )
        sampling_params = checked_sampling_params(
            kind, item.get("sampling_params"), self._model_config
        )
        self._check_length(params.parents, len(token_ids))
        self._check_offsets(params)
        return Call(text, token_ids, params, sampling_params, self._trace(params))

    def _mode(self, given: Any) -> str:
        if given is None or (given in CALL_MODES and self.mode == "baseline"):
            return self.mode
        if given not in CALL_MODES:
            raise ChoreoError(
                f"the mode of a call is one of {CALL_MODES}; baseline is that of a whole session",
                parameter="mode",
                value=given,
            )
        return str(given)

    def _copied(self, span: ParentSpan) -> tuple[tuple[int, ...], str]:
        """The token ids of a message that is to be encoded anew, or of a part, and their text."""
        self.live_ids([span.id])
        message = self._entries[span.id]
        assert isinstance(message, Message)
        start, stop = resolve_span(span.start, span.stop, message.num_tokens, span.id)
        token_ids = message.token_ids[start:stop]
        is_whole = len(token_ids) == message.num_tokens
        return token_ids, message.text if is_whole else self._tokenizer.decode(token_ids)

    def denied(self, given: Any) -> tuple[str, ...]:
        """The ids of messages that are to be denied; freed ones are accepted.

        Raises:
            ChoreoError: no list.
            UnknownMessageError: no such message was ever made in this session.
        """
        if given is None:
            return ()
        if isinstance(given, (str, Message)) or not isinstance(given, Sequence):
            raise ChoreoError("deny must be a list of messages", parameter="deny", value=given)
        self._check_open()
        ids = tuple(self._resolve("deny", named) for named in given)
        for message_id in ids:
            if message_id not in self._entries:
                raise UnknownMessageError(
                    "no message of this session; make it before you deny it",
                    parameter="deny",
                    value=message_id,
                )
        return ids

    def _trace(self, params: ChoreoParams) -> Trace:
        """What the message will carry traces of.

        Raises:
            DeniedMessageError: traces of a message that is denied to the call.
        """
        assert params.save_as is not None
        is_text = self.mode == "baseline"
        parents = [self._entry("parents", span.id).trace for span in params.parents]
        origin = self._entry("message", params.copy_of).trace if params.copy_of else None
        trace = trace_of(params.save_as, parents, is_text or params.exact, origin)
        trace.check(params.deny)
        return trace.as_text() if is_text else trace

    def _tokens(self, kind: str, tokens: Any) -> tuple[tuple[int, ...], str]:
        """The token ids of text or ids, and their text."""
        name = "header" if kind == "decode" else "tokens"
        if isinstance(tokens, str):
            ids = tuple(self._tokenizer.encode(tokens, add_special_tokens=False))
            text = tokens
        elif isinstance(tokens, Sequence) and not isinstance(tokens, (bytes, bytearray)):
            ids = tuple(tokens)
            vocab_size = self._model_config.get_vocab_size()
            for token in ids:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ChoreoError(
                        f"a token id is an int from 0 to {vocab_size - 1}; for parallel calls "
                        "give a list of dicts",
                        parameter=name,
                        value=token,
                    )
            text = self._tokenizer.decode(ids)
        else:
            raise ChoreoError(
                f"{name} must be text, token ids, or a list of dicts", parameter=name, value=tokens
            )
        if not ids:
            raise EmptyTokensError(
                "a message needs at least one token; leave the call out if there is nothing to say",
                parameter=name,
                value=tokens,
            )
        return ids, text

    def _new_id(self, save_as: Any) -> str:
        if save_as is None:
            self._count += 1
            return f"{self.id}/{self._count - 1}"
        if not isinstance(save_as, str) or not _NAME.fullmatch(save_as):
            raise ChoreoError(
                "save_as is a name of 1 to 128 letters, digits and _ . : - that is no plain number",
                parameter="save_as",
                value=save_as,
            )
        return f"{self.id}/{save_as}"

    def _check_names(self, calls: Sequence[Call]) -> None:
        seen: set[str] = set()
        for call in calls:
            entry = self._entries.get(call.id)
            # The name of a failed call may be used again: there is no message of that name.
            taken = entry is not None and not isinstance(entry, ChoreoError)
            if taken or call.id in seen:
                raise NameTakenError(
                    "a message of this name exists, or existed: choose another name",
                    parameter="save_as",
                    value=call.id.partition("/")[2],
                )
            seen.add(call.id)

    # -- parents -----------------------------------------------------------------------------

    def _parents(self, parents: Any, message_id: str) -> tuple[ParentSpan, ...]:
        if parents is None:
            return ()
        if isinstance(parents, (str, Message)) or not isinstance(parents, Sequence):
            raise ChoreoError(
                "parents must be a list of messages", parameter="parents", value=parents
            )
        return tuple(self._parent(parent, message_id) for parent in parents)

    def _parent(self, parent: Any, message_id: str, parameter: str = "parents") -> ParentSpan:
        start = stop = None
        named = parent
        if isinstance(parent, Sequence) and not isinstance(parent, str):
            if len(parent) != 3:
                raise ChoreoError(
                    "a parent is a message, an id, or (message, start, stop)",
                    parameter=parameter,
                    value=parent,
                )
            named, start, stop = parent
        parent_id = self._resolve(parameter, named)
        if parent_id == message_id:
            raise CyclicParentsError(
                "a call cannot be its own parent", parameter=parameter, value=parent_id
            )
        entry = self._entry(parameter, parent_id)
        check_span(start, stop, entry.num_tokens if isinstance(entry, Message) else None, parent)
        return ParentSpan(parent_id, start, stop)

    def _resolve(self, parameter: str, named: Any) -> str:
        """The id of a message, of a pending call, of an id, or of a `save_as` name."""
        named = named if isinstance(named, str) else getattr(named, "id", None)
        if not isinstance(named, str):
            raise ChoreoError(
                "a message is named by its Message or its id", parameter=parameter, value=named
            )
        return named if "/" in named else f"{self.id}/{named}"

    def _entry(self, parameter: str, message_id: str) -> Call | Message:
        """The live entry of an id."""
        entry = self._entries.get(message_id)
        if isinstance(entry, (Call, Message)):
            return entry
        if isinstance(entry, ChoreoError):
            raise ParentFailedError(
                f"the call that should have made this message failed ({entry}); call it again",
                parameter=parameter,
                value=message_id,
            )
        if isinstance(entry, _Freed):
            raise FreedMessageError(
                "the message was freed; free messages after their last use",
                parameter=parameter,
                value=message_id,
            )
        raise UnknownMessageError(
            "no message of this session; the calls of one list do not see one another, and "
            "messages of other sessions are out of reach",
            parameter=parameter,
            value=message_id,
        )

    # -- limits and options ------------------------------------------------------------------

    def _check_length(self, parents: Sequence[ParentSpan], num_new: int) -> None:
        """Refuse what cannot fit whatever the engine does; it knows the exact limit itself."""
        total = num_new + sum(self._lengths(parents))
        limit = self._model_config.max_model_len
        if total >= limit:
            raise TooLongError(
                f"{total} tokens of parents and new message do not fit into a context of {limit}; "
                "list fewer parents, or start the engine with a larger max_model_len",
                parameter="parents",
                value=f"{len(parents)} parents, {num_new} new tokens",
            )

    def _check_offsets(self, params: ChoreoParams) -> None:
        """In exact mode; where a parent's length is not known yet, the engine checks."""
        lengths = self._lengths(params.parents)
        if params.exact and len(lengths) == len(params.parents):
            check_text_offsets(lengths, params.offsets, params.new_offset)

    def _lengths(self, parents: Sequence[ParentSpan]) -> list[int]:
        """Of the parents that are complete, in tokens."""
        spans = [(span, self._entries[span.id]) for span in parents]
        return [
            (entry.num_tokens if span.stop is None else span.stop) - (span.start or 0)
            for span, entry in spans
            if isinstance(entry, Message)
        ]

    def _check_open(self) -> None:
        if self.closed:
            raise FreedMessageError(
                "the session is closed and its messages are freed; open another Choreography",
                parameter="session",
                value=self.id,
            )
