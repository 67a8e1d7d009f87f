# SPDX-License-Identifier: Apache-2.0
"""Calls in vLLM's scheduler process: arrival, blocks, seals, refusals, snapshots."""
