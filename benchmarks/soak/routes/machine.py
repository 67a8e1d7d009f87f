# SPDX-License-Identifier: Apache-2.0
"""What happens to a server's machine: its clock is set, its disk is full, its processes are killed,
and somebody writes into the folder of what was saved.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

from vllm_choreo.testing.server import Server

_SOURCE = Path(__file__).with_name("machine.cpp")
_END_SECONDS = 60.0
# What a process is called by, in its command line.
ROLES = {"worker": "Worker", "engine core": "EngineCore", "API server": ""}


class Machine:
    """The clock and the disk of the servers that are started with its `environment`.

    Args:
        folder: for the library and its state; `disk` lies in it.
    """

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._state, library = folder / "machine.state", folder / "machine.so"
        self.set()
        command = ["g++", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "SOAK_MACHINE": str(self._state),
            "SOAK_DISK": str(self.disk),
        }

    def set(self, *, ahead: int = 0, is_full: bool = False) -> None:
        """Set the wall clock so many seconds ahead of the true one; fill the disk, or empty it."""
        # In place: the processes have the file mapped.
        mode = "r+b" if self._state.exists() else "wb"
        with self._state.open(mode) as file:
            file.write(struct.pack("qq", ahead, is_full))


def processes(server: Server) -> dict[int, str]:
    """The command of the API server and of all that it has started, by process id."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(None, 2) for line in listed]
    commands = {int(pid): args for pid, _, args in rows}
    found, todo = {}, [server.process.pid]
    while todo:
        parent = todo.pop()
        found[parent] = commands.get(parent, "")
        todo += [int(pid) for pid, of, _ in rows if int(of) == parent]
    return found


def kill(server: Server, role: str) -> tuple[list[int], float]:
    """Kill the processes of a role without a word.

    Returns:
        The processes of the server that are still there after a minute, and how many seconds it
        took until there were none.
    """
    tree = processes(server)
    if role == "API server":
        chosen = [server.process.pid]
    else:
        chosen = [pid for pid, command in tree.items() if ROLES[role] in command]
    assert chosen, (role, tree)
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    while rest := [pid for pid in tree if _is_alive(pid)]:
        server.process.poll()  # or it is a zombie
        if time.monotonic() - begun > _END_SECONDS:
            break
        time.sleep(0.1)
    return rest, time.monotonic() - begun


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def forge(rng: random.Random, folder: Path) -> str:
    """Damage what was saved somewhere under `folder`; how."""
    saved = sorted(path.parent for path in folder.rglob("manifest.json"))
    if not saved:
        return "nothing was saved"
    chosen = rng.choice(saved)
    others = [path for path in saved if path.parent != chosen.parent]
    files = sorted(path for path in chosen.iterdir() if path.is_file())
    how = rng.choice(("a byte", "the end", "another's folder" if others else "a byte", "a file"))
    if how == "another's folder":
        source = rng.choice(others)
        shutil.rmtree(chosen)
        shutil.copytree(source, chosen)
    else:
        file = rng.choice(files)
        content = bytearray(file.read_bytes())
        if how == "a file":
            file.unlink()
        elif how == "the end":
            file.write_bytes(content[: len(content) // 2])
        elif content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            file.write_bytes(content)
    return how
