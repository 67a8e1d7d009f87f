# SPDX-License-Identifier: Apache-2.0
"""All routes of a server by two tenants, with everything that may happen to its machine.

    python -m benchmarks.soak routes [--requests 20000] [--senders 6] [--seed 1]

A server lives several times. Each time a third tenant first measures a small call while nobody else
does anything, then while one sender sends whatever it can think of; then several do, while the
clock is set, the disk is full, and what was saved is damaged. Then one of the server's processes is
killed in the middle of it all. The next life begins with what was saved. What must hold: the
module `checks` of every answer; the fixed call's tokens; nothing is held at the end.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.soak.routes.machine import ROLES, Machine, forge, kill, processes
from benchmarks.soak.routes.probe import Calm, gauges, left_over, probe_tokens, quantile
from benchmarks.soak.routes.sender import Sender, Tally
from benchmarks.soak.routes.tables import TABLES
from vllm_choreo.testing.server import Server, start_server

KEYS = ("alpha", "beta", "gamma")
SETTINGS = {
    "hidden_memory_gib": 0.05,
    "host_memory_gib": 0.05,
    "tenant_share": 0.5,
    "server": {"max_kept_gib_per_tenant": 0.02, "max_messages_per_session": 2000, "page": True},
}
# Words of the tiny model's tokenizer, so that chats have a form.
TEMPLATE = "{% for m in messages %}t1 {{ m.role }} {{ m.content }} t2 {% endfor %}t3"
# Of the third tenant, in turns: calls while nobody else does anything, and calls under attack.
_TURNS, _TIMED_CALLS = 5, 50
# By how many seconds the clock is ahead: days forwards, a year back, past the end of 32 bits.
_CLOCKS = (2 * 86400, -400 * 86400, 2**31, 0)


def soak(num_requests: int, num_senders: int, seed: int) -> int:
    """Run all lives; 1 if anything was wrong."""
    from vllm_choreo.testing.models.tiny import make_tiny_model

    tally, lives, tokens = Tally(), [], None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, machine = make_tiny_model("llama", folder), Machine(folder)
        (folder / "chat.jinja").write_text(TEMPLATE)
        roles = [*ROLES, None]
        for number, role in enumerate(roles):
            with _server(model, folder, machine) as server:
                life = Life(server, machine, seed + 1000 * number, num_senders, tokens)
                row = life.run(num_requests // len(roles), role)
            tokens = life.tokens
            tally.add(life.tally)
            lives.append({"life": number + 1, **row})
            print(row, flush=True)
            for problem in life.tally.problems[:20]:
                print(f"problem: {problem}", file=sys.stderr, flush=True)
    write_csv("soak_lives", lives, **record())
    write_csv("soak_routes", _rows(tally), **record())
    print(as_text(TABLES.values()))
    return int(bool(tally.problems))


@contextmanager
def _server(model: Path, folder: Path, machine: Machine) -> Iterator[Server]:
    machine.set()
    has_saved = (machine.disk / "tenants.key").exists()
    with start_server(
        model,
        folder,
        settings=SETTINGS,
        keys=KEYS,
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Else it closes an idle connection while the next request is on its way.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            **machine.environment,
        },
        num_gpu_blocks_override=256,
        block_size=32,
        max_model_len=1024,
        chat_template=str(folder / "chat.jinja"),
        choreo_keep=str(machine.disk),
        choreo_load=str(machine.disk) if has_saved else None,
    ) as server:
        yield server


class Life:
    """One life of a server.

    Attributes:
        tokens: of the fixed call.
        tally: of all that was sent.
    """

    def __init__(
        self, server: Server, machine: Machine, seed: int, num_senders: int, tokens: Any
    ) -> None:
        self.tally = Tally()
        self.tokens = tokens
        self._server, self._machine = server, machine
        self._seed, self._num_senders = seed, num_senders
        self._is_ending = False
        with server.client() as client:
            self._document = client.get("/openapi.json").json()

    def run(self, num_requests: int, role: str | None) -> dict[str, Any]:
        """Send so many requests, then kill a role; a row of the results."""
        self._check_tokens("at the start")
        time.sleep(2.5)  # gauges are as old as that
        before = gauges(self._server)  # of what was saved, and was loaded at the start
        calm, memory = Calm(self._server, KEYS[2]), _memory(self._server)
        calm.start()
        for turn in range(1, _TURNS + 1):  # what else the machine does, both sides meet
            calm.wait_for("idle", turn * _TIMED_CALLS)
            calm.phase = "attack"
            self._send(1, num_requests, partial(calm.has_timed, "attack", turn * _TIMED_CALLS))
        calm.phase = "load"
        events = threading.Thread(target=self._events, daemon=True)
        events.start()
        self._send(self._num_senders, max(0, num_requests - self.tally.num_requests))
        self._machine.set()
        calm.stop()
        self.tally.problems += [f"the third tenant's call failed: {f}" for f in calm.failures]
        self._check_tokens("at the end")
        left = left_over(self._server, before)
        if left:
            self.tally.problems.append(f"left at the end: {left}")
        row = {
            "killed": role or "",
            "requests": self.tally.num_requests,
            **{
                f"p{share}_ms_{phase}": round(quantile(calm.seconds[phase], share / 100), 1)
                for phase in ("idle", "attack", "load")
                for share in (50, 99)
                if calm.seconds.get(phase)
            },
            "memory_mib": f"{memory} -> {_memory(self._server)}",
            "left": sum(left.values()),
            **self._killed(role),
        }
        return {**row, "problems": len(self.tally.problems)}

    def _send(
        self, num_senders: int, num_requests: int, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Several senders at once, so many requests in all."""
        self._seed += num_senders
        senders = [
            Sender(
                self._server.base_url,
                KEYS[:2],
                self._document,
                self._seed - number,
                lambda: self._is_ending,
            )
            for number in range(num_senders)
        ]
        threads = [
            threading.Thread(target=s.run, args=(-(-num_requests // num_senders), until))
            for s in senders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for sender in senders:
            self.tally.add(sender.tally)

    def _events(self) -> None:
        """What happens to the machine, one thing after another, until the load is over."""
        rng = random.Random(self._seed)
        for number in range(10**6):
            if self._is_ending:
                return
            ahead = _CLOCKS[number % len(_CLOCKS)]
            is_full = number % 3 == 2
            self._machine.set(ahead=ahead, is_full=is_full)
            time.sleep(2)
            forge(rng, self._machine.disk)

    def _killed(self, role: str | None) -> dict[str, Any]:
        """Kill a role under load: what is left of the server, and after how long."""
        if role is None:
            self._is_ending = True
            return {"seconds_to_end": "", "processes_left": ""}
        load = threading.Thread(target=self._send, args=(self._num_senders, 10**6))
        load.start()
        time.sleep(random.Random(self._seed).uniform(3, 6))
        self._is_ending = True
        rest, seconds = kill(self._server, role)
        load.join()
        if rest:
            self.tally.problems.append(f"processes outlive a killed {role}: {rest}")
        return {"seconds_to_end": round(seconds, 1), "processes_left": len(rest)}

    def _check_tokens(self, when: str) -> None:
        tokens = probe_tokens(self._server, KEYS[2])
        if self.tokens is None:
            self.tokens = tokens
        elif self.tokens != tokens:
            self.tally.problems.append(f"the fixed call's tokens changed {when}: {tokens}")


def _memory(server: Server) -> int:
    """MiB that all processes of the server have in memory."""
    pages = 0
    for pid in processes(server):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except FileNotFoundError:
            continue
    return pages // 256


def _rows(tally: Tally) -> list[dict[str, Any]]:
    """A row for each operation: how often it was asked for, and what it answered."""
    columns = ("200", "400", "404", "409", "413", "429", "hung up", "no answer")
    rows = []
    for operation, counts in sorted(tally.statuses.items()):
        others = {k: n for k, n in counts.items() if k not in columns}
        rows.append(
            {
                "operation": operation,
                "requests": sum(counts.values()),
                **{column: counts[column] for column in columns},
                "others": " ".join(f"{k}: {n}" for k, n in sorted(others.items())),
            }
        )
    return rows
