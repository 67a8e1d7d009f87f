# SPDX-License-Identifier: Apache-2.0
"""Training on recorded workflows as if choreographed: beside the wire, without vllm."""
