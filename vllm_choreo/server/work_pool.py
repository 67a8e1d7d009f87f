# SPDX-License-Identifier: Apache-2.0
"""Work that grows with what a tenant sends: off the event loop, and each tenant waits for itself.

    tenant A   [running] waiting waiting waiting …      one at a time of a tenant,
    tenant B   [running]                                a few of all tenants together,
    tenant C   waiting                                  the next one by turns

Threads of Python share the interpreter, so few of them run: what one tenant sends slows another's
event loop by a part, and never holds it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NUM_THREADS = 2
# After so long a thread that computes gives the interpreter to one that waits for it. By default it
# is ten times as much, and the event loop waits some times for each request that it serves.
_SWITCH_SECONDS = 0.0005


class WorkPool:
    """Threads for the work of all tenants of a server; used from its event loop.

    Args:
        num_threads: threads that run at a time.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        sys.setswitchinterval(min(_SWITCH_SECONDS, sys.getswitchinterval()))
        self._num_free = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="choreo-work")
        self._running: set[str] = set()
        # In the order of their turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[..., T], *args: object) -> T:
        """Run `work(*args)` when the tenant's turn has come; return or raise what it does.

        A caller that is cancelled gives its turn up; what runs already is run to its end.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._withdraw(tenant, turn)
            else:
                self._end(tenant)
            raise
        running = loop.run_in_executor(self._threads, lambda: work(*args))
        running.add_done_callback(lambda _: self._end(tenant))
        return await asyncio.shield(running)

    def _begin_next(self) -> None:
        for tenant in list(self._waiting):
            if not self._num_free:
                return
            if tenant in self._running:
                continue
            turns = self._waiting[tenant]
            self._num_free -= 1
            self._running.add(tenant)
            turns.popleft().set_result(None)
            if turns:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]

    def _end(self, tenant: str) -> None:
        self._num_free += 1
        self._running.discard(tenant)
        self._begin_next()

    def _withdraw(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]
