# SPDX-License-Identifier: Apache-2.0
"""What the engines of a fleet answer, as one."""

from __future__ import annotations

from vllm_choreo.api.fleet import added_stats


def test_statistics_of_engines_are_added_but_for_sizes() -> None:
    of_engine = {"num_blocks": 3, "num_blocks_by_group": [2, 1], "messages": [{"id": "m"}]}
    sizes = {"block_size": 32, "block_bytes": 4096, "state_bytes": 70, "windows": [None, 20]}
    found = added_stats({0: {**of_engine, **sizes}, 2: {**of_engine, **sizes}})
    messages = [{"id": "m", "engine": engine} for engine in (0, 2)]
    assert found == {
        **sizes,
        "num_blocks": 6,
        "num_blocks_by_group": [4, 2],
        "messages": messages,
    }
