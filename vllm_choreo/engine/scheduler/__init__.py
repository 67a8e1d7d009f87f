# SPDX-License-Identifier: Apache-2.0
"""Calls in vLLM's scheduler process: admission, blocks, last tokens, refusals, snapshots."""
