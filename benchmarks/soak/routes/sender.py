# SPDX-License-Identifier: Apache-2.0
"""Sends requests of two tenants one after the other, hangs up on some, and checks each answer."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.soak.routes.checks import Checks
from benchmarks.soak.routes.tenant import Request, Requests, Tenant

_ROTATION = 150  # requests after which both begin anew, or their sessions grow without end


@dataclass
class Tally:
    """
    Attributes:
        statuses: how often each was answered, by operation; "hung up" and "no answer" beside.
        problems: what was wrong, with the request and the answer.
        seconds: of each answer that was read.
    """

    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for operation, counts in other.statuses.items():
            self.statuses[operation].update(counts)
        self.problems += other.problems
        self.seconds += other.seconds

    @property
    def num_requests(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())


class Sender:
    """
    Args:
        base_url: of the server.
        keys: of the two tenants.
        document: the server's own description.
        seed: of all that is sent.
        is_ending: whether the server is meant to go away: then a broken connection, or 503, is
            what a client sees.
    """

    def __init__(
        self,
        base_url: str,
        keys: tuple[str, str],
        document: Mapping[str, Any],
        seed: int,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tally = Tally()
        self._base_url = base_url
        self._rng = random.Random(seed)
        self._requests = Requests(self._rng, document)
        self._checks = Checks(document)
        self._is_ending = is_ending
        self._tenants = [Tenant(key, f"zq{key.title()}Mark{seed}") for key in keys]

    def run(self, num_requests: int, until: Callable[[], bool] = lambda: False) -> Tally:
        """Send so many, or until that is true, or until the server has gone."""
        client = httpx.Client(base_url=self._base_url, timeout=120)
        with client:
            for number in range(num_requests):
                if until() or self._is_ending():
                    break
                if number % _ROTATION == 0 and not self._rotate(client, is_first=not number):
                    return self.tally
                self._send(client)
            if not self._is_ending():
                self._rotate(client, is_last=True)
        return self.tally

    def _rotate(
        self, client: httpx.Client, *, is_first: bool = False, is_last: bool = False
    ) -> bool:
        """Leave nothing of what was made so far; whether the server is there."""
        try:
            for tenant in self._tenants:
                if not is_first:
                    tenant.end(client)
                if not is_last:
                    tenant.begin(client)
        except (httpx.HTTPError, ValueError) as error:
            if not self._is_ending():
                self.tally.problems.append(f"a tenant could not begin: {error!r}")
            return False
        return True

    def _send(self, client: httpx.Client) -> None:
        tenant, other = self._rng.sample(self._tenants, 2)
        request = self._requests.draw(tenant, other)
        counts, begun = self.tally.statuses[request.operation], time.perf_counter()
        try:
            if request.stops_after is not None:
                self._hang_up(request, tenant)
                counts["hung up"] += 1
                return
            headers = {**request.headers, "Authorization": f"Bearer {tenant.key}"}
            answer = client.request(
                request.method, request.path, content=request.content, headers=headers
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            counts["no answer"] += 1
            # What cannot be sent is no fault of the server's.
            if not self._is_ending() and not isinstance(error, httpx.InvalidURL):
                self._note(f"no answer: {error!r}", request)
            return
        self.tally.seconds.append(time.perf_counter() - begun)
        counts[str(answer.status_code)] += 1
        for problem in self._checks.problems(request, answer, other):
            if not (answer.status_code == 503 and self._is_ending()):
                self._note(problem, request, answer)
        if request.operation == "POST /v1/choreo/sessions" and answer.status_code == 200:
            tenant.spare.append(answer.json()["id"])

    def _note(self, problem: str, request: Request, answer: httpx.Response | None = None) -> None:
        told = "" if answer is None else f" -> {answer.status_code} {answer.text[:400]}"
        sent = (request.content or b"").decode(errors="replace")[:600]
        self.tally.problems.append(f"{problem}: {request.method} {request.path} {sent}{told}")

    def _hang_up(self, request: Request, tenant: Tenant) -> None:
        """Read so many bytes of the answer, then reset the connection."""
        address, content = urlsplit(self._base_url), request.content or b""
        lines = [f"{request.method} {request.path} HTTP/1.1", f"Host: {address.netloc}"]
        headers = {**request.headers, "Authorization": f"Bearer {tenant.key}"}
        headers["Content-Length"] = str(len(content))
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n"
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(head + content)
            connection.settimeout(5)
            try:
                num_left = request.stops_after or 0
                while num_left > 0 and (chunk := connection.recv(num_left)):
                    num_left -= len(chunk)
            except TimeoutError:
                pass  # a call that takes long, and is hung up on all the same
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
