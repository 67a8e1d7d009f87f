# SPDX-License-Identifier: Apache-2.0
"""Messages that servers of variants exchange, without their clients' doing (`--choreo-pair`).

All servers are given the same profiles and one folder (`--choreo-keep`). A server writes for those
that read its model's messages by a profile, and reads those of models of which a profile is:

    a-to-b.json                   A writes, B reads
    a-to-b.json, a-to-c.json      A writes for B and C
    a-to-b.json, b-to-a.json      A writes, B reads and writes, A reads that

What a client of a writer names, `save_as="report"`, whether it is given or generated, is saved with
all that the profiles need before its call is answered; a client of a reader, with the same API key,
reads "report", and it is loaded. With `server.pair_content` the parts of chats that name no
messages are exchanged, too, by a digest of what they hold: in half of what an API key may save.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vllm.logger import init_logger

from vllm_choreo.api.adapters import base_model
from vllm_choreo.api.pair_rules import PairRules
from vllm_choreo.errors import ChoreoError, KeptError, NameTakenError, UnknownKeptError
from vllm_choreo.repair.pair_rule import LenientPairRule, PairRule
from vllm_choreo.repair.session_rules import session_rule
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.sessions import OpenSession
from vllm_choreo.server.snapshot_folders import SnapshotFolders

if TYPE_CHECKING:
    from vllm_choreo.semantics.session_options import RepairGiven

logger = init_logger("vllm.choreo.server")

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class PairExchange:
    """Exchange of messages between this server and those of variants of its model.

    Args:
        rules: how sessions that have no rule of their own read other models' messages.
        model: this server's model, as its configuration names it.
        folders: tenants' folders of saved messages; None: adapters of one server exchange nothing.
        exchanges_parts: parts of chats that name no messages are exchanged, too.

    Attributes:
        rule: the rules, as sessions take them.

    Raises:
        RepairError: no profile is of this model.
    """

    def __init__(
        self,
        rules: PairRules,
        model: str,
        folders: SnapshotFolders | None,
        exchanges_parts: bool = False,
    ) -> None:
        base = base_model(model)
        rules.check_model(base)
        # The session's form of the option is that of callers, who give a file or a folder.
        self.rule = cast("RepairGiven", rules)
        self._writes = rules.is_written_by(base)
        self._reads = rules.is_read_by(base)
        self._folders = folders
        self._exchanges_parts = exchanges_parts

    async def export(self, session: OpenSession, result: Result) -> None:
        """Save a message that a client of the writer has named; an error is logged."""
        if self._folders is None or not self._writes or not isinstance(result, Message):
            return
        name = result.id.partition("/")[2]
        if not name.isdecimal():
            await self._save(session, result, _saved_name(name), 1.0)

    async def export_part(self, session: OpenSession, message: Message, key: bytes) -> None:
        """Save a part of a chat for servers that find it by a digest; an error is logged.

        Parts have up to half of what a tenant may save, so that there is room for what is named.
        """
        if self._folders is not None and self._exchanges_parts and self._writes:
            await self._save(session, message, _part_name(key), 0.5)

    async def _save(self, session: OpenSession, message: Message, kept: str, share: float) -> None:
        assert self._folders is not None
        tenant = session.tenant
        try:
            async with self._folders.lock(tenant):
                folder = self._folders.folder(tenant, kept)
                room = await asyncio.to_thread(self._folders.room, tenant, kept, share)
                folder.max_bytes = room
                with session.used() as choreography:
                    await choreography.save([message], folder, encodings=True, progress=False)
        except ChoreoError as error:
            logger.error("--choreo-pair: %s was not saved: %s", message.id, error)

    async def fetch_part(
        self, session: OpenSession, key: bytes, token_ids: Sequence[int]
    ) -> Message | None:
        """Load a part of a chat that has these tokens; None: no server has saved it.

        Raises:
            ChoreoError: there is no room for it in the session.
        """
        if self._folders is None or not self._exchanges_parts or not self._reads:
            return None
        folder = self._folders.folder(session.tenant, _part_name(key))
        try:
            with session.used() as choreography:
                (found,) = await choreography.load(folder, on_mismatch="variant", progress=False)
                if found.token_ids == tuple(token_ids):
                    return found
                await choreography.free(found)
        except (UnknownKeptError, NameTakenError):
            pass  # there is none, or it was loaded before and given up: it is encoded here
        except KeptError as error:
            logger.error("--choreo-pair: a part of a chat was not loaded: %s", error)
        return None

    async def fetch(self, session: OpenSession, named: Iterable[str]) -> None:
        """Load messages that a reader's calls name and its session does not know.

        Raises:
            ChoreoError: there is such a message, and it does not fit.
        """
        if self._folders is None or not self._reads:
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
    path: str | None, model: str, folders: SnapshotFolders | None, exchanges_parts: bool = False
) -> PairExchange | None:
    """Exchange that the operator's option asks for; None: it is not given.

    Args:
        path: a profile, or a folder of profiles.
        model, folders, exchanges_parts: see `PairExchange`.

    Raises:
        RepairError: a file is no profile, or none is of this model.
    """
    if path is None:
        return None
    if Path(path).is_dir():
        rules = PairRules.in_folder(Path(path))
    else:
        rule = session_rule({"pair": path}, "choreo")
        assert isinstance(rule, PairRule)
        rules = PairRules([LenientPairRule(rule.profile)])
    return PairExchange(rules, model, folders, exchanges_parts)


def _knows(session: OpenSession, name: str) -> bool:
    return session.choreography.is_live(f"{session.id}/{name}")


def _saved_name(name: str) -> str:
    """Name of a message's folder, with a prefix that keeps it apart from names of clients."""
    if _PLAIN.fullmatch(name):
        return f"message.{name}"
    return f"message-{blake2b(name.encode(), digest_size=16).hexdigest()}"


def _part_name(key: bytes) -> str:
    """Name of the folder of a part of a chat."""
    return f"part-{key.hex()}"
