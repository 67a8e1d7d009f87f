# SPDX-License-Identifier: Apache-2.0
"""Messages that servers of two variants exchange, without their clients' doing (`--choreo-pair`).

Both servers are given one profile of the pair and one folder (`--choreo-keep`). What a client of
the writer names, `save_as="report"`, is saved with all that the profile needs before its call is
answered; a client of the reader, with the same API key, reads "report", and it is loaded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from hashlib import blake2b

from vllm.logger import init_logger

from vllm_choreo.api.adapters import base_model
from vllm_choreo.errors import ChoreoError, NameTakenError, UnknownKeptError
from vllm_choreo.repair.pair_rule import LenientPairRule, PairRule
from vllm_choreo.repair.session_rules import session_rule
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.sessions import OpenSession
from vllm_choreo.server.snapshot_folders import SnapshotFolders

logger = init_logger("vllm.choreo.server")

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class PairExchange:
    """Exchange of messages between this server and that of a variant of its model.

    Args:
        rule: how sessions that have no rule of their own read the other model's messages.
        model: this server's model, as its configuration names it.
        folders: tenants' folders of saved messages; None: adapters of one server exchange nothing.

    Raises:
        RepairError: the profile is of other models.
    """

    def __init__(self, rule: PairRule, model: str, folders: SnapshotFolders | None) -> None:
        rule.check_model(base_model(model))
        self.rule = LenientPairRule(rule.profile, rule.max_quality_loss, rule.ttft)
        self._is_writer = rule.is_written_by(base_model(model))
        self._folders = folders

    async def export(self, session: OpenSession, result: Result) -> None:
        """Save a message that the writer has encoded under a name; an error is logged."""
        if self._folders is None or not self._is_writer or not isinstance(result, Message):
            return
        name = result.id.partition("/")[2]
        if name.isdecimal() or result.generated_token_ids:
            return
        tenant, kept = session.tenant, _saved_name(name)
        try:
            async with self._folders.lock(tenant):
                folder = self._folders.folder(tenant, kept)
                folder.max_bytes = await asyncio.to_thread(self._folders.room, tenant, kept)
                with session.used() as choreography:
                    await choreography.save([result], folder, encodings=True, progress=False)
        except ChoreoError as error:
            logger.error("--choreo-pair: %s was not saved: %s", name, error)

    async def fetch(self, session: OpenSession, named: Iterable[str]) -> None:
        """Load messages that a reader's calls name and its session does not know.

        Raises:
            ChoreoError: there is such a message, and it does not fit.
        """
        if self._folders is None or self._is_writer:
            return
        for name in dict.fromkeys(named):
            if "/" in name or name.isdecimal() or _knows(session, name):
                continue
            async with self._folders.lock(session.tenant):
                if _knows(session, name):  # a call of the same time has loaded it
                    continue
                folder = self._folders.folder(session.tenant, _saved_name(name))
                try:
                    with session.used() as choreography:
                        await choreography.load(folder, on_mismatch="variant", progress=False)
                except (UnknownKeptError, NameTakenError):
                    continue  # the call says that there is none, or that it was freed


def exchange_of(
    path: str | None, model: str, folders: SnapshotFolders | None
) -> PairExchange | None:
    """Exchange that the operator's option asks for; None: it is not given.

    Raises:
        RepairError: the file is no profile, or one of other models.
    """
    if path is None:
        return None
    rule = session_rule({"pair": path}, "choreo")
    assert isinstance(rule, PairRule)
    return PairExchange(rule, model, folders)


def _knows(session: OpenSession, name: str) -> bool:
    return session.choreography.is_live(f"{session.id}/{name}")


def _saved_name(name: str) -> str:
    """Name of a message's folder, with a prefix that keeps it apart from names of clients."""
    if _PLAIN.fullmatch(name):
        return f"message.{name}"
    return f"message-{blake2b(name.encode(), digest_size=16).hexdigest()}"
