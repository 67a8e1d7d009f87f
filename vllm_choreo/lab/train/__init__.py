# SPDX-License-Identifier: Apache-2.0
"""Trainer of adapters on recorded workflows as if choreographed: beside the wire, without vllm."""
