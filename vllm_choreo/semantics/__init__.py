# SPDX-License-Identifier: Apache-2.0
"""Meaning of messages and calls: rules that both sides of the wire share; no torch, no vLLM."""
