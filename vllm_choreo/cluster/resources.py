# SPDX-License-Identifier: Apache-2.0
"""State of an engine, as vLLM's clients tell it, and ours of a thread or a replica, too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Resources:
    """State of a client that is asked for where an operation of its engine is awaited.

    Attributes:
        engine_dead: True if the engine has ended.
        output_queue_task: task that ends when the engine does; None: none does.
    """

    engine_dead: bool = False
    output_queue_task: asyncio.Task[None] | None = None
