# SPDX-License-Identifier: Apache-2.0
"""The options of a call, as callers write them. No torch, no vllm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from vllm_choreo.repair.rules import Rule

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest


class HasId(Protocol):
    """A handle of a message: a `Message`, or a call that is pending."""

    @property
    def id(self) -> str: ...


Content = str | Sequence[int]  # the new tokens: text, or token ids
Named = str | HasId  # a message, by its handle, its id or its `save_as` name
Parent = Named | tuple[Named, int | None, int | None]  # whole, or `(message, start, stop)`


class ReadOptions(TypedDict, total=False):
    """The options of a call, as keyword arguments and as keys of a dict; None: not given.

    Attributes:
        parents: the messages that the new one attends to: each a `Message`, a pending call, an id,
            a `save_as` name, or `(message, start, stop)`.
        offsets: the position at which each parent is seen; None in place of one: after the parent
            before it; omitted: all of them so, the first from 0.
        new_offset: the position of the first new token; omitted: after the last parent.
        save_as: a name for the message; its id is `session/name`.
        mode: "choreo" or "exact"; omitted: that of the session.
        deny: messages of which the call may read no trace (docs/exactness.md).
        adapter: the LoRA adapter that encodes the new tokens and generates: in process a folder or
            a `vllm.lora.request.LoRARequest`, over HTTP a name that the server knows. Omitted: the
            session's, if its placement has such calls use it; the name of the model: none.
            Parents are read as they were encoded.
        repair: tokens of the parents that are encoded anew in the call's own context: a rule
            ("first:32"), or runs (docs/repair.md). Omitted: that of the session; "none": none.
        layers: `(first, stop)`, or several of these: repair every token of the parents in these
            layers alone, short for `repair={"layers": …}`. In words: "reuse", as they are stored,
            or `()`; "encode", all of them; "auto", those that the profile of the session's pair
            chooses (docs/variants.md).
        keep_hidden: layers from which on later calls may repair the new message by layers; omitted:
            that from which on the session repairs, if it does so by layers.
        role: role of the new message in its workflow, such as "vote"; policies of repair go by it.
        multi_modal_data: pictures of the new tokens, as in vLLM's prompts: `{"image": picture}`, or
            a list of pictures, one for each placeholder of the model's (such as `<image>`) in
            their order; PIL images or arrays, over HTTP also addresses (`data:`, `https:`).
    """

    parents: Sequence[Parent] | None
    offsets: Sequence[int | None] | None
    new_offset: int | None
    save_as: str | None
    mode: str | None
    deny: Sequence[Named] | None
    adapter: str | Path | LoRARequest | None
    repair: str | Mapping[str, Any] | Sequence[Any] | Rule | None
    layers: Sequence[int | Sequence[int]] | str | None
    keep_hidden: Sequence[int] | None
    role: str | None
    multi_modal_data: Mapping[str, Any] | None


class DecodeOptions(ReadOptions, total=False):
    """Options of a call that generates.

    Attributes:
        sampling_params: `vllm.SamplingParams`; over HTTP also a dict of their fields. In a list of
            calls each makes `n` messages, which follow one another in the answer: vLLM's seeds
            are counted on, and `save_as="a"` names them "a.0", "a.1" and so on.
    """

    sampling_params: SamplingParams | Mapping[str, Any] | None


class Call(DecodeOptions, total=False):
    """One call of a list: the new tokens under one of the first three keys, and its options.

    Attributes:
        header: text or token ids after which is generated.
        tokens: text or token ids that are encoded, and nothing else; `decode` takes them for a
            header.
        copy_of: a message, or `(message, start, stop)`, whose tokens are encoded anew; only
            `submit_all` takes it.
    """

    header: Content
    tokens: Content
    copy_of: Parent


# A type checker knows the keys of a list that is written out; what is built up is a list of dicts.
Calls = Sequence[Call | Mapping[str, Any]]
