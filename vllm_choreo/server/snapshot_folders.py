# SPDX-License-Identifier: Apache-2.0
"""The operator's folder of saved messages: where tenants save, and what a server loads first.

    DIR/tenants.key              the secret by which tenants are told apart, the same in every run;
                                 the key of what is saved is made from it, see `snapshot/keys.py`
    DIR/<tenant>/<name>/         what a tenant has saved under a name: see `snapshot/storage.py`

A tenant says a name and never a path, and its folder is named after itself alone: so no request
reaches what another one has saved.
"""

from __future__ import annotations

import asyncio
import re
import secrets

from vllm.logger import init_logger

from vllm_choreo.config import ServerConfig
from vllm_choreo.errors import ChoreoError, LimitError, UnknownSessionError
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.server import tenants
from vllm_choreo.server.sessions import Sessions
from vllm_choreo.snapshot.keys import key_of_file, key_of_secret
from vllm_choreo.snapshot.manifest import checked_manifest, data_files
from vllm_choreo.snapshot.storage import SnapshotFolder

logger = init_logger("vllm.choreo.server")

_KEY_FILE = "tenants.key"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_TENANT = re.compile(r"[0-9a-f]{64}")
_BYTES_PER_GIB = 2**30


class SnapshotFolders:
    """Folders of an operator in which each tenant keeps messages under names.

    Args:
        uri: the operator's folder: a path, or a URL of fsspec's.
        option: command-line option that named it.
        config: how much a tenant may save.

    Attributes:
        keep_key: key that tells what was saved here from what others wrote; None: not known yet.
    """

    def __init__(self, uri: str, option: str, config: ServerConfig) -> None:
        self.keep_key: bytes | None = None
        self._uri = uri.rstrip("/")
        self._option = option
        self._config = config
        self._root = SnapshotFolder(self._uri)
        self._locks: dict[str, asyncio.Lock] = {}

    def folder(self, tenant: str, name: str) -> SnapshotFolder:
        """Folder of what a tenant has saved, or will save, under a name.

        Raises:
            ChoreoError: no such name is allowed.
        """
        if not _NAME.fullmatch(name):
            raise ChoreoError(
                "on a server messages are saved under a name of 1 to 128 letters, digits and "
                "_ . - that does not begin with a dot; where that is, its operator decides",
                parameter="uri",
                value=name,
            )
        return SnapshotFolder(f"{self._uri}/{tenant}/{name}", label=name, keep_key=self.keep_key)

    def lock(self, tenant: str) -> asyncio.Lock:
        """Lock of a tenant's saves: two at once would both find the same room."""
        return self._locks.setdefault(tenant, asyncio.Lock())

    def names(self, tenant: str) -> list[str]:
        """Names under which a tenant has saved."""
        return SnapshotFolder(f"{self._uri}/{tenant}", label="").names()

    def sizes(self, tenant: str) -> dict[str, int]:
        """Bytes that each name of a tenant takes.

        All that lies there counts: recipes, keys and values, and what was never finished.
        """
        return SnapshotFolder(f"{self._uri}/{tenant}", label="").sizes()

    def room(self, tenant: str, name: str, share: float = 1.0) -> float:
        """Bytes that a tenant may save under a name.

        Args:
            share: part of the limits that all it has saved may take with it.

        Raises:
            LimitError: there is no room, or no further name.
        """
        max_gib = self._config.max_kept_gib_per_tenant * share
        max_names = int(self._config.max_kept_names_per_tenant * share)
        others = self.sizes(tenant)
        others.pop(name, None)
        if len(others) >= max_names:
            raise LimitError(
                f"an API key may save under {max_names} names: delete one, save under one that "
                "you have, or raise the server's setting choreo.server.max_kept_names_per_tenant",
                parameter="max_kept_names_per_tenant",
                value=len(others),
            )
        num_bytes = sum(others.values())
        if num_bytes >= max_gib * _BYTES_PER_GIB:
            raise LimitError(
                f"an API key may save {max_gib:g} GiB: delete what you have saved, or raise the "
                "server's setting choreo.server.max_kept_gib_per_tenant",
                parameter="max_kept_gib_per_tenant",
                value=f"{num_bytes} bytes",
            )
        return max_gib * _BYTES_PER_GIB - num_bytes

    # -- the secret --------------------------------------------------------------------------

    def secret(self) -> bytes | None:
        """Secret of the folder; None: it has none.

        Raises:
            ChoreoError: it cannot be read.
        """
        text = self._root.text(_KEY_FILE)
        if text is None:
            return None
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise ChoreoError(
                f"{_KEY_FILE} in this folder is no key of tenants: put back the one that was there",
                parameter=self._option,
                value=self._uri,
            ) from None

    def write_secret(self, secret: bytes) -> None:
        """Write the secret into a folder that has none; for the operator's eyes alone."""
        self._root.make()
        self._root.write_text(_KEY_FILE, secret.hex())

    # -- at the start ------------------------------------------------------------------------

    async def load_all(self, sessions: Sessions) -> None:
        """Open the sessions whose messages were saved, and load these.

        What cannot be loaded is named in the log and left out.
        """
        for tenant in await asyncio.to_thread(self._root.names):
            if not _TENANT.fullmatch(tenant):
                continue
            for name in await asyncio.to_thread(self.names, tenant):
                try:
                    await self._load(sessions, tenant, name)
                except ChoreoError as error:
                    logger.error("--choreo-load: %s/%s was not loaded: %s", tenant, name, error)

    async def _load(self, sessions: Sessions, tenant: str, name: str) -> None:
        folder = self.folder(tenant, name)
        kept, is_trusted, _ = await asyncio.to_thread(checked_manifest, folder)
        try:  # another name may have opened it
            session = sessions.session(tenant, kept["session"])
        except UnknownSessionError:
            session = sessions.open(tenant, SessionOptions(session_id=kept["session"]))
        with session.used() as choreography:
            messages = await choreography.load(folder, progress=False)
        num_files = len(data_files(kept))
        logger.info(
            "--choreo-load: %d messages of session %s, %d with %s keys and values",
            len(messages),
            session.id,
            num_files,
            "trusted" if is_trusted else "UNTRUSTED",
        )


def start(
    keep: str | None, load: str | None, config: ServerConfig, key_file: str = ""
) -> tuple[SnapshotFolders | None, SnapshotFolders | None]:
    """The folders that the operator named, for saving and to be loaded; with one secret.

    Args:
        config: how much a tenant may save.
        key_file: file that the setting `keep_key` names; "": the key is made from the secret.

    Raises:
        ChoreoError: a folder cannot be reached, both belong to other tenants, or there is no key.
    """
    saved = SnapshotFolders(keep, "--choreo-keep", config) if keep else None
    loaded = SnapshotFolders(load, "--choreo-load", config) if load else None
    found = [folders.secret() for folders in (loaded, saved) if folders is not None]
    if loaded is not None and found[0] is None and load != keep:
        raise ChoreoError(
            f"no server has saved in this folder: it has no {_KEY_FILE}",
            parameter="--choreo-load",
            value=load,
        )
    known = {secret for secret in found if secret is not None}
    if len(known) > 1:
        raise ChoreoError(
            f"the folders of --choreo-load and --choreo-keep have other keys of tenants: name one "
            f"of them for both, or an empty one to save in ({_KEY_FILE})",
            parameter="--choreo-keep",
            value=keep,
        )
    if saved is not None or loaded is not None:
        secret = known.pop() if known else secrets.token_bytes(32)
        if saved is not None and found[-1] is None:
            saved.write_secret(secret)
        tenants.use_secret(secret)
        keep_key = key_of_file(key_file) if key_file else key_of_secret(secret)
        for folders in (saved, loaded):
            if folders is not None:
                folders.keep_key = keep_key
    return saved, loaded
