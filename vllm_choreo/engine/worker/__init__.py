# SPDX-License-Identifier: Apache-2.0
"""Spans in vLLM's worker processes: laid out, rotated, attended to."""
