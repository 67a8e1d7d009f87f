# SPDX-License-Identifier: Apache-2.0
"""A watch by which an engine core whose API server was killed ends, and its workers with it.

vLLM's engine core waits for requests for ever, with the model and the KV cache in memory, and a
supervisor that starts the server again has two of them. (Its workers watch the engine core.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from functools import cache
from multiprocessing.connection import wait

# For vLLM to end by itself, as it does when it is asked to.
_GRACE_SECONDS = 15.0


@cache
def end_with_parent() -> None:
    """End this process, if it is an engine core's, when the process that started it ends."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("EngineCore"):
        return
    sentinel = parent.sentinel  # readable when the parent has ended, however it did

    def watch() -> None:
        wait([sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="choreo-parent", daemon=True).start()
