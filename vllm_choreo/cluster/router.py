# SPDX-License-Identifier: Apache-2.0
"""Serve's routers of requests to engines and to ingresses, behind Serve's own interface.

A call is placed by what it reads before it is sent (`Fleet.place`), for what is missing on its
engine is made there first. So its request names the engine, and the router follows. What names none
goes to any. Ingresses are chosen by the tenant whose API key a request has: all that is a tenant's
is in one of them, and stays there while it lives.
"""

from __future__ import annotations

import hashlib
import pickle

from ray.actor import ActorHandle
from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from vllm_choreo.cluster.journal import places_of
from vllm_choreo.cluster.members import members_of


class PlacedRouter(RequestRouter):
    """Router of requests whose first argument is the id of a replica."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that a request names; any, which refuses it, if that has ended."""
        _back_off(pending_request)
        name = pending_request.args[0] if pending_request and pending_request.args else None
        named = [r for r in candidate_replicas if r.replica_id.unique_id == name]
        return [named or list(candidate_replicas)]

    def _tell(self) -> None:
        deployment = self._deployment_id
        ids = [replica.unique_id for replica in self.curr_replicas]
        members_of(deployment.app_name, deployment.name).update(ids)


class TenantRouter(RequestRouter):
    """Router of HTTP requests, by the API key that they have."""

    def initialize_state(self, keys: list[str]) -> None:
        """Take the digests of the server's API keys; none: all clients are one tenant."""
        self._keys = frozenset(keys)
        self._places: dict[str, str] = {}
        self._journal: ActorHandle | None = None

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The ingress that has the tenant, or is to have it."""
        _back_off(pending_request)
        key = _key_of(pending_request) if self._keys else ""
        key = key if key in self._keys else ""  # whoever has none is served by any one
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if self._places.get(key) not in replicas:
            if self._journal is None:
                self._journal = places_of(self.app_name)
            self._places[key] = await self._journal.place.remote(key, sorted(replicas))
        found = replicas.get(self._places[key])
        return [[found] if found is not None else []]


def _back_off(request: PendingRequest | None) -> None:
    """Have Serve wait before it asks again for a request whose replica did not take it."""
    if request is not None:
        request.routing_context.should_backoff = True


def key_digest(key: str) -> str:
    """Digest by which a router knows an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _key_of(request: PendingRequest | None) -> str:
    """Digest of the bearer token of an HTTP request, as Serve's proxy hands it over."""
    if request is None or not request.args or not isinstance(request.args[0], bytes):
        return ""
    headers = dict(pickle.loads(request.args[0]).asgi_scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key_digest(token) if scheme.lower() == "bearer" else ""
