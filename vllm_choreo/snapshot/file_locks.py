# SPDX-License-Identifier: Apache-2.0
"""Locks on files of a local disk, which end with the process that holds them, however it ends.

They are locks of `flock`: on an open file, and on no name. Who has locked a file that was removed
since has locked nothing, and is told so. Storage without such locks has none to give: then
`try_lock` has nothing locked, and nothing is removed that a lock should have kept.
"""

from __future__ import annotations

import fcntl
import os


def lock_shared(path: str) -> int | None:
    """Lock a file against `try_lock`, which is waited for; None: it is not there, or no locks are.

    Returns:
        The lock, for `unlock`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    return _locked(descriptor, fcntl.LOCK_SH)


def lock_open_file(descriptor: int) -> int | None:
    """Lock a file that is open; until `unlock`, though the file is closed before."""
    return _locked(os.dup(descriptor), fcntl.LOCK_SH)


def try_lock(path: str) -> int | None:
    """Lock a file that nobody else has locked; None: somebody has, or it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    return _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(lock: int | None) -> None:
    """End a lock of one of the other functions, if there is one."""
    if lock is not None:
        os.close(lock)


def _locked(descriptor: int, how: int) -> int | None:
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
