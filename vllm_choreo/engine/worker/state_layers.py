# SPDX-License-Identifier: Apache-2.0
"""Layers that have a state in place of keys and values, and the states of all requests.

vLLM would keep them in the blocks of keys and values, which it enlarges to the size of a state.
Here they are tensors of their own: a state has a number, and under it a part of every layer.

    layer.kv_cache   (convolution [num_states, ...], recurrence [num_states, ...], ...)

Where states are composed, what messages do to them lies under the same numbers
(`composed_layers.py`).

To vLLM's metadata builders the number of a request's state is its block table, of one column, as
where vLLM keeps no prefixes (`mamba_cache_mode` "none").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from vllm_choreo.engine.worker.block_bytes import bytes_of, tensor_of
from vllm_choreo.engine.worker.composed_layers import ComposedLayer, transition_bytes
from vllm_choreo.engine.worker.host_blocks import HostBlocks
from vllm_choreo.engine.worker.state_transitions import FollowedTokens
from vllm_choreo.engine.worker.tensors import to_device
from vllm_choreo.memory_changes import StateStart

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StateBatch(NamedTuple):
    """Batch of a step, as layers with states need it.

    Attributes:
        request_ids: ids of the requests, in the order of the batch; further rows are padding.
        query_start_loc, host_query_start_loc: int32 `[num_reqs + 1]`, on the device and in host
            memory.
        seq_lens, host_seq_lens: int32 `[num_reqs]`, tokens of the virtual sequences after this
            step, likewise.
        is_prefilling: bool `[num_reqs]`, in host memory: whether tokens of the prompt are run.
    """

    request_ids: Sequence[str]
    query_start_loc: torch.Tensor
    host_query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    host_seq_lens: torch.Tensor
    is_prefilling: torch.Tensor


class StateLayers:
    """The layers with states of a model.

    Args:
        specs: vLLM's specifications of their states, by layer; one at least.
        is_composed: whether states are composed of messages in any order.

    Attributes:
        composed: the same layers, where states are composed; empty where they are not.
        errors: how far composed states were from those of the text when the engine started, by
            layer, relative to the greatest entry; empty, likewise.

    Raises:
        UnsupportedModelError: those of a layer cannot be.
    """

    def __init__(
        self,
        specs: Mapping[str, MambaSpec],
        vllm_config: VllmConfig,
        device: torch.device,
        is_composed: bool = False,
    ) -> None:
        self.specs = dict(specs)
        self.device = device
        self._vllm_config = vllm_config
        layers = get_layers_from_vllm_config(vllm_config, MambaBase)
        self._layers = {name: layers[name] for name in specs}
        self._more_bytes = {
            name: transition_bytes(name, layer) if is_composed else 0
            for name, layer in self._layers.items()
        }
        self._is_composed = is_composed
        self.composed: list[ComposedLayer] = []
        self.errors: dict[str, float] = {}
        self._calls: set[str] = set()  # requests whose tokens are followed
        self._states: dict[str, int] = {}  # numbers, by request
        self._builders: list[tuple[list[str], AttentionMetadataBuilder]] = []
        self._in_host: HostBlocks | None = None
        self.num_states = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, in all layers of this worker."""
        return sum(map(self._state_bytes, self.specs))

    def _state_bytes(self, name: str) -> int:
        """Bytes of one state of a layer, with what is kept beside it."""
        return self.specs[name].state_content_size_bytes + self._more_bytes[name]

    def describe(self) -> list[dict[str, object]]:
        """Kind and size of each layer's state, as plain data."""
        return [
            {
                "layer": name,
                "state": spec.mamba_type.name.lower(),
                "state_bytes": self._state_bytes(name),
                "composition_error": self.errors.get(name),
            }
            for name, spec in self.specs.items()
        ]

    def allocate(self, num_states: int) -> None:
        """Make room for states, all zeros, and prepare vLLM's metadata builders and kernels."""
        self.num_states = num_states
        by_kind: dict[tuple[type[AttentionMetadataBuilder], MambaSpec], list[str]] = {}
        for name, spec in self.specs.items():
            layer = self._layers[name]
            layer.kv_cache = tuple(
                torch.zeros(num_states, *shape, dtype=dtype, device=self.device)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            builder = layer.get_attn_backend().get_builder_cls()
            by_kind.setdefault((builder, spec), []).append(name)
        self._builders = [
            (names, builder(spec, names, self._vllm_config, self.device))
            for (builder, spec), names in by_kind.items()
        ]
        if self._is_composed:
            self.composed = [ComposedLayer(name, layer) for name, layer in self._layers.items()]
        groups = [KVCacheGroupSpec(names, spec) for (_, spec), names in by_kind.items()]
        initialize_mamba_ssu_backend(
            self._vllm_config.mamba_config, KVCacheConfig(num_states, [], groups)
        )

    def update(
        self, started: Mapping[str, int], finished: Iterable[str], calls: Collection[str] = ()
    ) -> None:
        """Take in the states of requests that start, or start again; drop those that ended.

        Args:
            calls: those of them that are calls.
        """
        for request_id in finished:
            self._states.pop(request_id, None)
            self._calls.discard(request_id)
        self._states.update(started)
        self._calls.update(calls)

    def allocate_in_host(self, num_states: int) -> None:
        """Make room in host memory for the states of evicted messages."""
        self._in_host = HostBlocks(self._tensors, num_states) if num_states else None

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """All that lies under the numbers of states, `[num_states, ...]` each."""
        tensors = [states for layer in self._layers.values() for states in layer.kv_cache]
        return tensors + [states for layer in self.composed for states in layer.kept]

    def shape(self) -> list[tuple[str, list[int]]]:
        """Dtype and shape of each tensor of a state."""
        return [(str(t.dtype).removeprefix("torch."), list(t.shape[1:])) for t in self._tensors]

    def read(self, number: int, tensors: range) -> bytes:
        """Bytes of some tensors of a state, one after the other."""
        return b"".join(bytes_of(tensor[number]) for tensor in self._tensors[_slice(tensors)])

    def write(self, data: bytes | memoryview, number: int, tensors: range) -> None:
        """Put the bytes of some tensors of a state where `read` finds them."""
        rest = tensor_of(data)
        for tensor in self._tensors[_slice(tensors)]:
            target = tensor[number]
            size = target.numel() * target.element_size()
            target.copy_(rest[:size].view(target.dtype).view(target.shape))
            rest = rest[size:]

    def copy_in_host(
        self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]
    ) -> None:
        """Copy states to host memory, then back, see `HostBlocks.copy`."""
        if self._in_host is not None:
            self._in_host.copy(saves, loads)

    def start(self, starts: Sequence[StateStart]) -> None:
        """Begin states; none of them is what another one begins with."""
        if self._is_composed:
            for layer in self.composed:
                for start in starts:
                    layer.begin(start.target, *layer.composed(start.behind, start.composed))
            return
        copies = [(start.behind, start.target) for start in starts if start.behind is not None]
        if not copies:
            return
        sources, targets = to_device(torch.tensor(copies).t(), self.device)
        for layer in self._layers.values():
            for states in layer.kv_cache:
                states[targets] = states[sources]

    def metadata(self, batch: StateBatch) -> dict[str, object]:
        """Attention metadata of a batch, by layer."""
        numbers = [self._states.get(request_id, 0) for request_id in batch.request_ids]
        is_call = [request_id in self._calls for request_id in batch.request_ids]
        self._follow(batch, numbers, is_call)
        return self._metadata(batch, numbers)

    def _follow(
        self, batch: StateBatch, numbers: Sequence[int], is_followed: Sequence[bool]
    ) -> None:
        """Have layers follow the tokens of some requests of the batch that runs next."""
        if not self.composed:
            return
        edges = batch.host_query_start_loc.tolist()
        rows = [
            (number, start, stop)
            for number, start, stop, is_one in zip(
                numbers, edges, edges[1:], is_followed, strict=False
            )
            if is_one and start < stop
        ]
        states, starts, stops = zip(*rows, strict=True) if rows else ((), (), ())
        for layer in self.composed:
            layer.follow(FollowedTokens(states, starts, stops))

    def text_metadata(self, state: int, start: int, num_tokens: int) -> dict[str, object]:
        """Build attention metadata of tokens of one text, which are followed.

        Args:
            state: the state of the text.
            start: tokens of it that were run before; 0: it begins.
            num_tokens: one token behind others is run as generated ones are.
        """
        edges = torch.tensor([0, num_tokens], dtype=torch.int32)
        length = torch.tensor([start + num_tokens], dtype=torch.int32)
        is_prefilling = torch.tensor([not start or num_tokens > 1])
        on_device = to_device(edges, self.device), to_device(length, self.device)
        batch = StateBatch([], on_device[0], edges, on_device[1], length, is_prefilling)
        self.follow_text(state, num_tokens)
        return self._metadata(batch, [state])

    def follow_text(self, state: int, num_tokens: int) -> None:
        """Have layers follow the only text that runs next."""
        for layer in self.composed:
            layer.follow(FollowedTokens((state,), (0,), (num_tokens,)))

    def alone_metadata(self, num_tokens: int) -> dict[str, object]:
        """Attention metadata of `num_tokens` texts of one token each, in states of nobody yet."""
        assert num_tokens < self.num_states, "each has a state"
        starts = torch.arange(num_tokens + 1, dtype=torch.int32)
        lengths = torch.ones(num_tokens, dtype=torch.int32)
        on_device = (to_device(starts, self.device), to_device(lengths, self.device))
        batch = StateBatch(
            [], on_device[0], starts, on_device[1], lengths, torch.ones_like(lengths).bool()
        )
        self._follow(batch, [], [])
        return self._metadata(batch, list(range(1, num_tokens + 1)))

    def _metadata(self, batch: StateBatch, numbers: Sequence[int]) -> dict[str, object]:
        num_reqs = len(batch.host_seq_lens)
        table = torch.zeros(num_reqs, 1, dtype=torch.int32)  # padding: state 0, which is nobody's
        table[: len(numbers), 0] = torch.tensor(numbers, dtype=torch.int32)
        num_tokens = int(batch.host_query_start_loc[-1])
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.host_query_start_loc,
            seq_lens=batch.seq_lens,
            seq_lens_cpu_upper_bound=batch.host_seq_lens,
            num_reqs=num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=int(batch.host_query_start_loc.diff().max()),
            max_seq_len=int(batch.host_seq_lens.max()),
            block_table_tensor=to_device(table, self.device),
            slot_mapping=torch.empty(
                0, dtype=torch.int64, device=self.device
            ),  # they have no slots
            is_prefilling=batch.is_prefilling,
        )
        found: dict[str, object] = {}
        for names, builder in self._builders:
            found |= dict.fromkeys(names, builder.build(0, common))
        return found


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)
