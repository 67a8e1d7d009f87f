# SPDX-License-Identifier: Apache-2.0
"""What tokens do to any state, against the recurrences one token at a time, in float64."""

from __future__ import annotations

import torch

from vllm_choreo.engine.worker.state_transitions import Decays, DeltaRules, FollowedTokens

HEADS, KEY, VALUE = 3, 8, 5
CPU = torch.device("cpu")


def _one_by_one(
    memory: torch.Tensor, keys: torch.Tensor, decays: torch.Tensor, betas: torch.Tensor
) -> torch.Tensor:
    """The delta rule without values: what is left of a memory `[HEADS, KEY, VALUE]`."""
    found = memory.double()
    for k, decay, beta in zip(
        keys.double().unbind(1), decays.double().unbind(1), betas.double().unbind(1), strict=True
    ):
        found = decay.exp()[:, None, None] * found
        seen = torch.einsum("hk,hkv->hv", k, found)
        found = found - torch.einsum("hk,hv->hkv", beta[:, None] * k, seen)
    return found


def test_delta_rules_in_parts_and_batches() -> None:
    """Prompts in chunks, single tokens of several requests, and rows of nobody between them."""
    generator = torch.Generator().manual_seed(0)
    rules = DeltaRules(4, HEADS, KEY, CPU)
    for state in range(4):
        rules.reset(state)
    done: dict[int, list[tuple[torch.Tensor, ...]]] = {1: [], 2: [], 3: []}
    for steps in (
        [(1, 0, 150), (2, 151, 152), (3, 160, 161)],
        [(3, 0, 70), (1, 70, 71), (2, 71, 72)],
        [(2, 3, 4)],
    ):
        num_rows = max(stop for *_, stop in steps) + 2
        keys = torch.randn(HEADS, num_rows, KEY, generator=generator)
        keys = keys / keys.norm(dim=-1, keepdim=True)
        decays = -0.02 * torch.rand(HEADS, num_rows, generator=generator)
        betas = torch.rand(HEADS, num_rows, generator=generator)
        states, starts, stops = zip(*steps, strict=True)
        rules.follow(FollowedTokens(states, starts, stops), keys, decays, betas)
        for state, start, stop in steps:
            rows = slice(start, stop)
            done[state].append((keys[:, rows], decays[:, rows], betas[:, rows]))
    for state, parts in done.items():
        memory = torch.randn(HEADS, KEY, VALUE, generator=generator)
        expected = memory
        for part in parts:
            expected = _one_by_one(expected, *part)
        torch.testing.assert_close(
            rules.applied(state, memory).double(), expected.double(), rtol=0, atol=3e-6
        )
    assert torch.equal(rules.tensor[0], torch.eye(KEY).expand(HEADS, -1, -1))


def test_decays_are_products_of_gates() -> None:
    generator = torch.Generator().manual_seed(1)
    decays = Decays(3, HEADS, CPU)
    logs = -torch.rand(9, HEADS, generator=generator)
    decays.follow(FollowedTokens((2, 1), (0, 5), (4, 9)), logs)
    decays.follow(FollowedTokens((1,), (4,), (5,)), logs)
    memory = torch.randn(HEADS, VALUE, KEY, generator=generator)
    for state, rows in ((0, logs[:0]), (1, logs[4:]), (2, logs[:4])):
        expected = memory.double()
        for row in rows.double():
            expected = row.exp()[:, None, None] * expected
        torch.testing.assert_close(
            decays.applied(state, memory).double(), expected, rtol=0, atol=1e-6
        )
    decays.reset(1)
    assert torch.equal(decays.applied(1, memory), memory)
