# SPDX-License-Identifier: Apache-2.0
"""Whatever two tenants send to any route of a server, at once and hanging up in between: a short
form of `make soak`, on the same requests in every run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.routes.probe import Calm, left_over, probe_tokens
from benchmarks.soak.routes.run import KEYS, SETTINGS, TEMPLATE
from benchmarks.soak.routes.sender import Sender
from benchmarks.soak.routes.tenant import Requests
from tests.server.serving import QUICK
from vllm_choreo.testing.server import Server, start_server

pytestmark = pytest.mark.exhaustive  # a server of its own

NUM_REQUESTS = 160  # of each sender: all, and once more with a new session


@pytest.fixture(scope="module")
def server(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = {**QUICK, "num_gpu_blocks_override": 256, "block_size": 32, "max_model_len": 1024}
    options |= {"chat_template": str(folder / "chat.jinja"), "choreo_keep": str(folder / "kept")}
    model = tiny_model_path("llama")
    with start_server(model, folder, settings=SETTINGS, keys=KEYS, **options) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    with server.client() as client:
        return client.get("/openapi.json").json()


def test_every_operation_is_asked_for(document: Any) -> None:
    asked = Requests(random.Random(0), document).operations
    described = {
        f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item
    }
    assert described - set(asked) == {"POST /scale_elastic_ep", "POST /v1/systemone"}


def test_nothing_that_is_sent_harms_another_tenant(server: Server, document: Any) -> None:
    before, calm = probe_tokens(server, KEYS[2]), Calm(server, KEYS[2])
    calm.start()
    senders = [Sender(server.base_url, KEYS[:2], document, seed) for seed in (1, 2, 3)]
    threads = [threading.Thread(target=s.run, args=(NUM_REQUESTS,)) for s in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calm.stop()
    for sender in senders:
        assert not sender.tally.problems, "\n".join(sender.tally.problems)
        assert sender.tally.num_requests == NUM_REQUESTS
    assert not calm.failures and calm.seconds["idle"], "the third tenant is served meanwhile"
    assert probe_tokens(server, KEYS[2]) == before
    assert not left_over(server)
    log = server.log.read_text(errors="replace")
    # Ours; vLLM logs a traceback where some of its routes refuse a request.
    assert "an error of the server" not in log and "in the background:" not in log
    assert not any(f"Bearer {key}" in log or f'"{key}"' in log for key in KEYS)
