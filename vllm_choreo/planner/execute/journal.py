# SPDX-License-Identifier: Apache-2.0
"""Journal of a batch: a line of JSON for every value, so that a killed run can go on.

Its first line identifies the graph, the inputs and the model. A kill may cut off the last line,
which is dropped then.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_choreo.planner.errors import JournalError
from vllm_choreo.planner.logical.graph_json import function_name
from vllm_choreo.planner.logical.nodes import SOURCES, BoundGraph, Value
from vllm_choreo.planner.plan import Plan

_FORMAT = 1


class Journal:
    """Values of calls and functions, in a file.

    Args:
        path: the file, which is made or continued.
        compiled: graph and inputs that are run.
        identity: models and semantics; a journal of others is refused.

    Raises:
        JournalError: it is of another graph, of other inputs, of another model, or damaged.
    """

    def __init__(self, path: str | Path, compiled: BoundGraph, identity: object) -> None:
        self._path = Path(path)
        self._keys: dict[int, str] = {}
        self.values: dict[str, Value] = {}
        head = {"format": _FORMAT, "batch": _batch_digest(compiled), "identity": identity}
        head = json.loads(json.dumps(head))
        whole = self._read(head) if self._path.exists() and self._path.stat().st_size else 0
        self._file = open(self._path, "ab")  # noqa: SIM115  closed by `close`
        self._file.truncate(whole)
        if not whole:
            self._write(head)

    def restore(self, plan: Plan) -> Plan:
        """Make the journal's values known to a plan."""
        self._keys = task_keys(plan)
        written = {t: self.values[key] for t, key in self._keys.items() if key in self.values}
        return replace(plan, known={**plan.known, **written})

    def add(self, task: int, value: Value) -> None:
        """Write down the value of a task."""
        self._write({"key": self._keys[task], "value": value})

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()

    def _write(self, record: object) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()  # a killed process loses nothing; a machine that crashes may

    def _read(self, head: object) -> int:
        """Read the values; return the length of the whole lines, in bytes."""
        written = self._path.read_bytes()
        whole = written.rfind(b"\n") + 1
        lines = written[:whole].splitlines()
        if not lines:
            return 0
        try:
            found, *records = [json.loads(line) for line in lines]
            self.values = {record["key"]: record["value"] for record in records}
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused(f"it is damaged ({error!r})") from error
        if found != head:
            raise self._refused("it is of another graph, of other inputs or of another model")
        return whole

    def _refused(self, why: str) -> JournalError:
        advice = "remove it, or name another file"
        return JournalError(f"{why}: {advice}", parameter="journal", value=os.fspath(self._path))


def task_keys(plan: Plan) -> dict[int, str]:
    """Keys of calls and functions, by task; the same in every process."""
    digests: list[str] = []
    keys: dict[int, str] = {}
    for number, task in enumerate(plan.tasks):
        node = plan.graph.nodes[task.node]
        given = [digests[task_input] for task_input in task.inputs]
        parts: list[object] = [task.node, given]
        if node.kind in SOURCES:
            parts.append(plan.known[number])
        if not node.deterministic:
            parts.append(task.row)
        digests.append(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32])
        if node.kind in ("llm", "fn"):
            keys[number] = digests[-1]
    return keys


def _batch_digest(compiled: BoundGraph) -> str:
    """SHA-256 of a graph and its inputs, in hexadecimal digits."""
    nodes = [
        [node.kind, node.type, node.inputs, node.name, _plain(node.attrs)]
        for node in compiled.graph.nodes
    ]
    inputs = [[number, list(values)] for number, values in compiled.inputs.items()]
    text = json.dumps([nodes, inputs, dict(compiled.graph.outputs)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: function_name(value) if callable(value) else value for key, value in attrs.items()}
