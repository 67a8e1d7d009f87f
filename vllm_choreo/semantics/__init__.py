# SPDX-License-Identifier: Apache-2.0
"""What messages and calls mean: pure rules that both sides of the wire share; no torch, no vLLM."""
