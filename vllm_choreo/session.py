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
    UnsupportedOptionError,
)
from vllm_choreo.message import Call, Message
from vllm_choreo.params import ChoreoParams, ParentSpan, check_span

_ITEM_KEYS = frozenset(
    ("tokens", "header", "parents", "offsets", "new_offset", "sampling_params", "save_as")
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
    """

    def __init__(self, tokenizer: Any, model_config: Any) -> None:
        self.id = secrets.token_hex(16)
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

    def plan(self, kind: str, tokens: Any, shared: Mapping[str, Any]) -> tuple[list[Call], bool]:
        """Validate a call, or a list of calls; reserve nothing unless all of it is right.

        Args:
            kind: "prefill" or "decode".
            tokens: text, token ids, or a list of dicts.
            shared: the other arguments of the call by name; None means not given.

        Returns:
            The calls, and whether a list was asked for.

        Raises:
            ChoreoError: the first reason why a call is refused.
        """
        self._check_open()
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
        """One dict of a list, checked and completed with the shared sampling parameters."""
        if not isinstance(item, Mapping):
            raise ChoreoError("a parallel list holds dicts alone", parameter="tokens", value=item)
        for key, value in shared.items():
            if key != "sampling_params" and value is not None:
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
        full["tokens"] = full.pop("header") if "header" in item else full["tokens"]
        return full

    def _call(self, kind: str, item: Mapping[str, Any]) -> Call:
        token_ids, text = self._tokens(kind, item["tokens"])
        message_id = self._new_id(item.get("save_as"))
        params = ChoreoParams(
            parents=self._parents(item.get("parents"), message_id),
            offsets=item.get("offsets"),
            new_offset=item.get("new_offset"),
            save_as=message_id,
            kind=kind,
            session=self.id,
        )
        sampling_params = self._sampling_params(kind, item.get("sampling_params"))
        self._check_length(params.parents, len(token_ids))
        return Call(text, token_ids, params, sampling_params)

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

    def _parent(self, parent: Any, message_id: str) -> ParentSpan:
        start = stop = None
        named = parent
        if isinstance(parent, Sequence) and not isinstance(parent, str):
            if len(parent) != 3:
                raise ChoreoError(
                    "a parent is a message, an id, or (message, start, stop)",
                    parameter="parents",
                    value=parent,
                )
            named, start, stop = parent
        parent_id = self._resolve("parents", named)
        if parent_id == message_id:
            raise CyclicParentsError(
                "a call cannot be its own parent", parameter="parents", value=parent_id
            )
        entry = self._entry("parents", parent_id)
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
        total = num_new
        for span in parents:
            entry = self._entries[span.id]
            if isinstance(entry, Message):
                stop = entry.num_tokens if span.stop is None else span.stop
                total += stop - (span.start or 0)
        limit = self._model_config.max_model_len
        if total >= limit:
            raise TooLongError(
                f"{total} tokens of parents and new message do not fit into a context of {limit}; "
                "list fewer parents, or start the engine with a larger max_model_len",
                parameter="parents",
                value=f"{len(parents)} parents, {num_new} new tokens",
            )

    def _sampling_params(self, kind: str, given: Any) -> Any:
        if kind == "prefill":
            if given is not None:
                raise UnsupportedOptionError(
                    "prefill samples nothing: leave sampling_params out, or call decode",
                    parameter="sampling_params",
                    value=given,
                )
            return None
        from vllm import SamplingParams

        if given is None:
            return SamplingParams(**self._model_config.get_diff_sampling_param())
        if not isinstance(given, SamplingParams):
            raise UnsupportedOptionError(
                "sampling_params must be vllm.SamplingParams; beam search does not make one "
                "message per call",
                parameter="sampling_params",
                value=given,
            )
        _check_options(given)
        return given

    def _check_open(self) -> None:
        if self.closed:
            raise FreedMessageError(
                "the session is closed and its messages are freed; open another Choreography",
                parameter="session",
                value=self.id,
            )


def _check_options(sampling_params: Any) -> None:
    """Refuse the options that do not make one message of known tokens."""
    no_logprobs = "parents are not computed again and have no logprobs: use llm.generate on text"
    refused = {
        "n": (sampling_params.n != 1, "each call makes one message: list the call n times"),
        "prompt_logprobs": (
            sampling_params.prompt_logprobs is not None,
            no_logprobs,
        ),
        "prompt_logprob_token_ids": (
            sampling_params.prompt_logprob_token_ids is not None,
            no_logprobs,
        ),
        "extra_args": (
            "choreo" in (sampling_params.extra_args or {}),
            "name the parents in the call, not in extra_args['choreo']",
        ),
    }
    for parameter, (is_refused, advice) in refused.items():
        if is_refused:
            raise UnsupportedOptionError(
                advice, parameter=parameter, value=getattr(sampling_params, parameter)
            )
