# SPDX-License-Identifier: Apache-2.0
"""The work of the mixed load, in batches and over HTTP: lengths, and the two sides."""

from __future__ import annotations

SIDES = ("choreographed", "cached prefix")
NUM_MESSAGES, MESSAGE_TOKENS = 4, 512  # whole blocks: the prefix is as long, and all of it cached
SLOTS = 4  # of each half: ordinary requests, and calls that read the messages
HEADER_TOKENS = 16
PROMPT_TOKENS = (32, 128)  # of an ordinary request, from, to
ANSWER_TOKENS = (8, 24)
