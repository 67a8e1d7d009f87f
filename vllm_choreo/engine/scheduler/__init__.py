# SPDX-License-Identifier: Apache-2.0
"""Calls in vLLM's scheduler process: arrival, room, sealing, refusing."""
