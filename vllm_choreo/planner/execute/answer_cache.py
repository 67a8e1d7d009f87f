# SPDX-License-Identifier: Apache-2.0
"""The answer cache: values of deterministic operators, by the digest of operator and inputs.

Helium calls it the prompt cache. Least recently used entries are dropped first; tenants share
nothing. In memory, or in a file that several processes may use at once (SQLite).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from vllm_choreo.planner.logical.nodes import Node, Value

_MAX_ENTRIES = 100_000


class AnswerCache:
    """Values of deterministic operators, by what they are and read; see `answer_key`.

    Args:
        path: file of the cache; None: it is in memory.
        tenant: owner of the entries that are seen and written.
        max_entries: entries that the tenant may have; those unused for longest are dropped.

    Attributes:
        hits, misses: look-ups through this object that found an entry, and that did not.
    """

    def __init__(
        self, path: str | Path | None = None, *, tenant: str = "", max_entries: int = _MAX_ENTRIES
    ) -> None:
        self.tenant = tenant
        self.hits = self.misses = 0
        self._store = _File(Path(path), tenant) if path is not None else _Memory()
        self._max_entries = max_entries

    def get(self, key: str) -> tuple[bool, Value]:
        """Return (whether there is an entry, its value)."""
        found = self._store.get(key)
        self.hits += found is not None
        self.misses += found is None
        return (False, None) if found is None else (True, json.loads(found))

    def put(self, key: str, value: Value) -> None:
        """Keep a value that JSON can express."""
        self._store.put(key, json.dumps(value), self._max_entries)

    def clear(self) -> None:
        """Drop all entries of the tenant."""
        self._store.clear()

    def close(self) -> None:
        """Close the file, if there is one."""
        self._store.close()

    def __len__(self) -> int:
        return len(self._store)


class _Memory:
    def __init__(self) -> None:
        self._entries: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: str, value: str, most: int) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > most:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()

    def close(self) -> None:
        """Do nothing: no file is open."""

    def __len__(self) -> int:
        return len(self._entries)


class _File:
    """Entries in an SQLite file; the least `used`, a counter of look-ups, was used longest ago."""

    def __init__(self, path: Path, tenant: str) -> None:
        self._tenant = tenant
        self._db = sqlite3.connect(path, timeout=60.0, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS entries (tenant TEXT, key TEXT, value TEXT NOT NULL, "
            "used INTEGER NOT NULL, PRIMARY KEY (tenant, key)) WITHOUT ROWID"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS by_use ON entries (tenant, used)")

    def get(self, key: str) -> str | None:
        # One statement, so that processes that use the file at once do not drop what is read.
        row = self._db.execute(
            f"UPDATE entries SET used = {self._next()} WHERE tenant = ? AND key = ? "
            "RETURNING value",
            (self._tenant, self._tenant, key),
        ).fetchone()
        return row and str(row[0])

    def put(self, key: str, value: str, most: int) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(
            f"INSERT OR REPLACE INTO entries VALUES (?, ?, ?, {self._next()})",
            (self._tenant, key, value, self._tenant),
        )
        over = len(self) - most
        if over > 0:
            self._db.execute(
                "DELETE FROM entries WHERE tenant = ? AND key IN "
                "(SELECT key FROM entries WHERE tenant = ? ORDER BY used LIMIT ?)",
                (self._tenant, self._tenant, over),
            )
        self._db.execute("COMMIT")

    def clear(self) -> None:
        self._db.execute("DELETE FROM entries WHERE tenant = ?", (self._tenant,))

    def close(self) -> None:
        self._db.close()

    def __len__(self) -> int:
        found = self._db.execute("SELECT count(*) FROM entries WHERE tenant = ?", (self._tenant,))
        return int(found.fetchone()[0])

    @staticmethod
    def _next() -> str:
        return "(SELECT coalesce(max(used), 0) + 1 FROM entries WHERE tenant = ?)"


class ModelCache:
    """Answer cache as one model sees it, or none.

    Args:
        cache: the cache; None: nothing is found or kept.
        identity: models, semantics and chat template on which answers depend besides their prompts.
    """

    def __init__(self, cache: AnswerCache | None, identity: object) -> None:
        self._cache, self._identity = cache, identity

    def key(self, node: Node, inputs: Sequence[Value]) -> str | None:
        """Digest of the value of an `llm` or `fn`; None: it is sampled, or cannot be cached."""
        if not node.deterministic:
            return None
        if node.kind == "llm":
            asked = [node.attrs["turns"], sorted(node.attrs["sampling"].items())]
            return answer_key(self._identity, list(inputs), asked)
        return None if self._cache is None else function_key(node.attrs["function"], inputs)

    def get(self, key: str | None) -> tuple[bool, Value]:
        """Return (whether there is an entry, its value)."""
        return (False, None) if self._cache is None or key is None else self._cache.get(key)

    def put(self, key: str | None, value: Value) -> None:
        """Keep a value."""
        if self._cache is not None and key is not None:
            self._cache.put(key, value)

    def probe(self, node: Node, inputs: Sequence[Value]) -> tuple[bool, Value]:
        """Look an `llm` or `fn` up; return (whether there is an entry, its value)."""
        return self.get(self.key(node, inputs))


# -- digests ---------------------------------------------------------------------------------------


def answer_key(identity: object, prompt: Sequence[Value], sampling: object) -> str:
    """Digest of an answer's model (`identity`), of what it reads and how it is decoded."""
    return _digest("llm", identity, prompt, sampling)


def function_key(function: Callable[..., Any], inputs: Sequence[Value]) -> str | None:
    """Digest of a pure function's value; None: its code does not tell what the function is.

    It covers the code, its defaults and the values that it closes over, if JSON can express them;
    not the functions that the code calls.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    closed = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    defaults = [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]
    try:
        return _digest(
            "fn",
            code.co_code.hex(),
            _constants(code),
            code.co_names,
            closed,
            defaults,
            list(inputs),
        )
    except (TypeError, ValueError):
        return None


def _constants(code: CodeType) -> list[object]:
    """Constants of a code object and of the functions inside it."""
    return [
        [inner.co_code.hex(), _constants(inner), list(inner.co_names)]
        if isinstance(inner, CodeType)
        else repr(inner)
        for inner in code.co_consts
    ]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
