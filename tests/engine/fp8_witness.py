# SPDX-License-Identifier: Apache-2.0
"""Whether an engine with a KV cache in 8 bits reads and writes what it should, request by request.

Two encodings of one message may differ in 8 bits: kernels add in another order, a last bit of
float32 carries a number over the border between two bytes, and that is a step of an eighth (of a
quarter in E5M2). So there is no single truth for an answer of several calls. But there is one for
every request, given the bytes that it reads. When a request ends, and before its blocks are free,
the witness takes from the cache what lies there, byte by byte, and runs the model densely in
float32 over the numbers that they stand for, keys rotated to where they are seen, the request's own
tokens among them:

    read     log-probabilities are those of that pass
    stored   each byte that the request wrote is the number of that pass with its digits left out,
             to the error of float32: another byte is right only where the number lies at the border

Requests of the engine's own are witnessed like others: copies, patches, what was evicted, last
tokens. What a call has to read, of which parents and where, is compared with what the test says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from tests.engine.fp8_kernels import truncated
from tests.engine.oracle import Encoded, Oracle, Parent
from tests.engine.weighed_oracle import WeighedOracle
from tests.ops.cases import number_of
from vllm_choreo.testing.laws import largest

# Of log-probabilities, between the engine and the dense pass over what the engine has stored.
READ_TOLERANCE = 2e-3
# Of keys and values before they are stored, which are of size 1: engine and HuggingFace in float32.
# A step between two bytes is 300 times as large.
_STORED_ERROR = 3e-4
_FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Witnessed:
    """A request that has ended.

    Attributes:
        tokens: its own tokens that have keys and values.
        spans: `(message_id, start, stop, offset)` of each parent that it read.
        new_offset: position of the first own token.
        logprobs: float32 `[num_tokens, vocab_size]`, by the dense pass.
        is_again: whether it was preempted: then it had stored, and read, other bytes before.
    """

    tokens: tuple[int, ...]
    spans: tuple[tuple[str, int, int, int], ...]
    new_offset: int
    logprobs: torch.Tensor
    is_again: bool


# Keys and values of an encoding's tokens from `start` on, one row each, as they were stored.
@dataclass(frozen=True)
class _Version:
    start: int
    rows: torch.Tensor


@dataclass
class Witness:
    """Witness of all requests of an engine in this process, from `watching` on.

    Attributes:
        oracles: by number of the adapter; 0: the model alone.
        by_message: the call that made each message, by its id.
        by_request: all that clients asked for, by the ids of their requests.
        failures: what was wrong.
        num_stored: bytes that were compared; num_borders: those that were right at a border.
        num_kept: tokens of parents that were compared with what had been stored.
    """

    llm: Any
    oracles: Mapping[int, Oracle]
    by_message: dict[str, Witnessed] = field(default_factory=dict)
    by_request: dict[str, Witnessed] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_stored: int = 0
    num_borders: int = 0
    num_kept: int = 0

    def __post_init__(self) -> None:
        core = self.llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        runner = core.model_executor.driver_worker.worker.model_runner
        self._layers = list(runner.layers.values())
        self._starts: dict[str, int] = {}
        self._versions: dict[bytes, list[_Version]] = {}
        self._runs_ahead = self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        formats = [_FORMATS[layer.kv_cache_dtype] for layer in self._layers]
        self._format = formats[0]
        self._numbers = torch.tensor([number_of(byte, self._format) for byte in range(256)])

    @contextmanager
    def watching(self) -> Iterator[Witness]:
        """Witness, within the context, requests as they end; raises if one was wrong."""
        scheduler = self._scheduler
        for known in (self.by_message, self.by_request, self.failures, self._versions):
            known.clear()
        free, schedule = scheduler._free_request, scheduler.schedule

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._see(request)
            except Exception as error:  # it would end the engine, and hide what went wrong
                self.failures.append(f"{request.request_id}: {error!r}")
            return free(request, *args, **kwargs)

        def schedule_step(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._note_starts(output)
            return output

        scheduler._free_request, scheduler.schedule = free_request, schedule_step
        try:
            yield self
        finally:
            del scheduler._free_request, scheduler.schedule
        self.check()

    def check(self) -> None:
        """Raise AssertionError if something was wrong until now."""
        assert not self.failures, "\n".join(self.failures[:10])

    def stored(self, message_id: str) -> Encoded:
        """Resident keys and values of a message, as numbers, where they are stored."""
        (message,) = [m for m in self._scheduler.store.messages(None) if m.id == message_id]
        own = message.own
        return self._encoded(own, own.stored_position)

    def _note_starts(self, output: Any) -> None:
        """Note what requests that start, or start again, find computed."""
        cached = output.scheduled_cached_reqs
        self._starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._starts[request_id] = count

    # -- a request -------------------------------------------------------------------------------

    def _see(self, request: Any) -> None:
        call = self._scheduler.call_table.calls.get(request.request_id)
        start = self._starts.pop(request.request_id, None)
        if start is None:
            return  # it never ran
        if request.status.name == "FINISHED_ABORTED" and self._runs_ahead:
            return  # what its last step does is not known yet
        if call is None:
            base, parents, new_offset, own, weights = 0, [], 0, 0, None
            tokens = request.all_token_ids
        elif call.plan is None or not call.is_scheduled:
            return
        else:
            plan = call.plan
            base, new_offset, own = plan.base, plan.new_offset, call.own_position
            weights = plan.weights and (plan.weights.temperature, plan.weights.factor)
            parents = [
                Parent(self._encoded(encoding, position), p.offset, p.start, p.stop)
                for encoding, position, p in zip(
                    call.parents, call.stored_positions, plan.parents, strict=True
                )
            ]
            tokens = call.encoding.token_ids or request.all_token_ids[base:]
            for encoding, parent in zip(call.parents, parents, strict=True):
                self._check_kept(encoding, parent)
        stop = min(request.num_computed_tokens - base, len(tokens))
        seen, first = 0, max(0, start - base)
        if call is not None and call.run:
            seen, first = call.encoding.patch.start, call.run[0]
        if stop <= first:
            return
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        ids = [block.block_id for block in blocks]
        stored = self._gather(ids, base + seen, base + stop, own + seen, tokens[seen:stop])
        lora = request.lora_request
        oracle = self.oracles[lora.lora_int_id if lora else 0]
        encoded, computed = dense_pass(oracle, stored, parents, new_offset + seen, weights)
        self.num_requests += 1
        if call is not None and call.encoding.digest is not None:
            versions = self._versions.setdefault(call.encoding.digest, [])
            versions.append(_Version(seen, _rows(stored)))
        shift, name = new_offset - own, request.request_id
        self.compare(oracle, stored, computed, first - seen, shift, name)
        if call is not None and call.is_internal:
            return
        spans = (
            tuple((p.message_id, p.start, p.stop, p.offset) for p in plan.parents) if call else ()
        )
        witnessed = Witnessed(
            stored.token_ids, spans, new_offset, encoded.logprobs(), request.num_preemptions > 0
        )
        if call is not None:
            self.by_message[call.message.id] = witnessed
        # vLLM adds a random part to the ids of requests.
        self.by_request[request.request_id.rpartition("-")[0]] = witnessed

    def _check_kept(self, encoding: Any, parent: Parent) -> None:
        """Check that what is read is what was stored, to the bit, wherever it has been since.

        Encodings of one digest share blocks, and what is encoded again may be another version.
        """
        versions = self._versions.get(encoding.digest, ())
        found = _rows(parent.message)
        known, same = (torch.zeros(len(found), dtype=torch.bool) for _ in range(2))
        for version in versions:
            stop = min(version.start + len(version.rows), len(found))
            part = slice(version.start, stop)
            known[part] = True
            same[part] |= (version.rows[: stop - version.start] == found[part]).all(-1)
        read = slice(parent.start, parent.stop)
        self.num_kept += int(known[read].sum())
        if bool((known & ~same)[read].any()):
            self.failures.append(f"{encoding.message.id} holds other bytes than were stored")

    def compare(
        self,
        oracle: Oracle,
        stored: Encoded,
        computed: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        first: int,
        shift: int,
        name: str,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Compare what was written from token `first` on with what was to be stored.

        Args:
            shift: positions by which keys were computed beyond where they are stored.
            name: of the request, for failures.
            layers: layers that count; None: all.
        """
        for number in range(len(self._layers)) if layers is None else layers:
            layer = self._layers[number]
            keys, values = (part[number][:, first:] for part in computed)
            if oracle.layer_has_rope[number]:
                keys = oracle.rotate(keys, -shift, number)
            for what, numbers, bytes_, scale in (
                ("keys", keys, stored.keys[number], layer._k_scale_float),
                ("values", values, stored.values[number], layer._v_scale_float),
            ):
                found = bytes_[:, first:] / scale
                error = _STORED_ERROR * (1 + numbers.abs())
                low, middle, high = (
                    self._numbers[truncated(numbers + e, scale, self._format).long()]
                    for e in (-error, torch.zeros(()), error)
                )
                # Divided by the scale again, which takes a last bit.
                slack = 1e-6 * found.abs()
                wrong = (found < low - slack) | (found > high + slack)
                self.num_stored += found.numel()
                self.num_borders += int(((found - middle).abs() > slack).sum())
                if bool(wrong.any()):
                    token = int(wrong.nonzero()[0, 1]) + first
                    self.failures.append(
                        f"{name}: {int(wrong.sum())} of {found.numel()} {what} of "
                        f"layer {number} are stored otherwise, first of token {token}"
                    )
                    return

    # -- what lies in the cache ------------------------------------------------------------------

    def _encoded(self, encoding: Any, position: int) -> Encoded:
        tokens = encoding.token_ids[: encoding.num_encoded]
        blocks = [block.block_id for block in encoding.held_blocks]
        return self._gather(blocks, 0, len(tokens), position, tokens)

    def _gather(
        self, blocks: Sequence[int], start: int, stop: int, position: int, tokens: Sequence[int]
    ) -> Encoded:
        """Keys and values in slots `start … stop-1` of some blocks; the first is at `position`."""
        keys, values = [], []
        size = self._layers[0].kv_cache.shape[2]
        slots = torch.arange(start, stop)
        chosen, offsets = torch.tensor(blocks)[slots // size], slots % size
        for layer in self._layers:
            num_blocks, heads, _, double = layer.kv_cache.shape
            flat = layer.kv_cache.reshape(num_blocks, heads, size * double)
            half = size * double // 2
            key = flat[..., :half].unflatten(-1, (double // 2, size))[chosen, :, :, offsets]
            value = flat[..., half:].unflatten(-1, (size, double // 2))[chosen, :, offsets]
            keys.append(self._numbers[key.long()].transpose(0, 1) * layer._k_scale_float)
            values.append(self._numbers[value.long()].transpose(0, 1) * layer._v_scale_float)
        no_logits = torch.empty(0)
        return Encoded(tuple(tokens), position, tuple(keys), tuple(values), no_logits)

    # -- what a test saw ------------------------------------------------------------------------

    def check_message(self, message: Any) -> float:
        """Compare the log-probabilities of a call's answer with the dense pass.

        Returns:
            The largest difference.
        """
        num_header = message.num_tokens - len(message.generated_token_ids)
        seen = self.by_message[message.id]
        return self._check_answer(
            seen, message.generated_token_ids, message.logprobs, num_header, message.id
        )

    def check_output(self, output: Any) -> float:
        """Compare an ordinary request's; returns the largest difference."""
        seen, completion = self.by_request[output.request_id], output.outputs[0]
        num_header = len(output.prompt_token_ids)
        return self._check_answer(
            seen, completion.token_ids, completion.logprobs, num_header, output.request_id
        )

    def _check_answer(
        self, seen: Witnessed, tokens: Sequence[int], logprobs: Any, num_header: int, name: str
    ) -> float:
        self.check()
        rows = seen.logprobs[num_header - 1 :]
        assert len(tokens) == len(logprobs) and len(rows) >= len(tokens), name
        worst = 0.0
        for row, entries in zip(rows, logprobs, strict=False):
            found = {token: float(row[token]) for token in entries}
            worst = largest([worst, *(abs(found[t] - e.logprob) for t, e in entries.items())])
        if not seen.is_again:
            assert worst < READ_TOLERANCE, f"{name}: log-probabilities differ by {worst:.1e}"
        return worst


def _rows(encoded: Encoded) -> torch.Tensor:
    """Keys and values of all layers, `[num_tokens, numbers of a token]`."""
    parts = (*encoded.keys, *encoded.values)
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)


def dense_pass(
    oracle: Oracle,
    stored: Encoded,
    parents: Sequence[Parent],
    position: int,
    weights: Sequence[float] | None = None,
) -> tuple[Encoded, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Encode a message's tokens that attend to its own stored keys and values.

    Args:
        stored: the message, with keys that are rotated to `stored.position`.
        position: position of its first token.
        weights: temperature and factor of the parents but the first; None: they count alike.

    Returns:
        The message with its logits; keys and values of each layer as the pass computed them,
        `[num_kv_heads, num_tokens, head_size]`, keys at their positions.
    """
    given = [
        oracle.rotate(key, position - stored.position, layer)
        if oracle.layer_has_rope[layer]
        else key
        for layer, key in enumerate(stored.keys)
    ]
    gather, caches = oracle._gather, []

    def gather_given(read: Sequence[Parent]) -> transformers.DynamicCache:
        cache = gather(read)
        cache.__class__ = _GivenCache
        cache.given, cache.computed = (given, stored.values), {}
        caches.append(cache)
        return cache

    oracle._gather = gather_given  # type: ignore[method-assign]
    try:
        model: Any = WeighedOracle(oracle, *_as_ape(weights)) if weights else oracle
        encoded = model.encode(stored.token_ids, parents, position)
    finally:
        del oracle._gather
    computed = [caches[0].computed[layer] for layer in range(oracle.num_layers)]
    return encoded, ([key for key, _ in computed], [value for _, value in computed])


def _as_ape(weights: Sequence[float]) -> tuple[float, float]:
    """Temperature and scale: the factor of the engine is their product."""
    temperature, factor = weights
    return temperature, factor / temperature


class _GivenCache(transformers.DynamicCache):
    """Cache to which a layer's own keys and values are added as they are given, not as computed."""

    given: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
    computed: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.computed[layer] = keys[0], values[0]
        own = (part[layer][None] for part in self.given)
        found: tuple[torch.Tensor, torch.Tensor] = super().update(*own, layer, *args, **kwargs)
        return found
