# SPDX-License-Identifier: Apache-2.0
"""Two nodes of Ray's, of which one is killed with its engine and whatever else was there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.cluster.conftest import GREEDY, serving
from vllm_choreo.client.failures import ServerError

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]  # processes of their own

_WORDS = [" ".join(f"t{(7 * i + j) % 400 + 20}" for i in range(40)) for j in range(4)]
_LONG = {**GREEDY, "max_tokens": 100}


def test_a_session_outlives_a_node(tiny_model_path: Callable[[str], Path], processes: None) -> None:
    from ray.cluster_utils import Cluster

    has_room = {"num_cpus": 4, "resources": {"engines": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=has_room)
    try:
        second = cluster.add_node(**has_room)
        with serving(tiny_model_path("llama"), address=cluster.address) as start:
            fleet = start(engines=2, resources={"engines": 1})
            with fleet.client() as c:
                facts = c.prefill([{"tokens": text} for text in _WORDS])
                calls = [{"header": "t5 t6", "parents": facts[: n + 1]} for n in range(4)]
                before = [m.generated_token_ids for m in c.decode(calls, sampling_params=_LONG)]
                with ThreadPoolExecutor(1) as thread:
                    under_way = thread.submit(c.decode, calls, sampling_params=_LONG)
                    cluster.remove_node(second, allow_graceful=False)
                    error = under_way.exception()
                if error is None:
                    found = [m.generated_token_ids for m in under_way.result()]
                    assert found == before
                else:  # an ingress on that node takes the connection with it, and no more
                    assert isinstance(error, ServerError)
                cluster.add_node(**has_room)
                fleet.wait_for("engine", 2)
                again = c.decode(calls, sampling_params=_LONG)
                assert [m.generated_token_ids for m in again] == before
    finally:
        cluster.shutdown()
