# SPDX-License-Identifier: Apache-2.0
"""What workflows should take on GPUs, before any was measured; `python -m benchmarks.gpu.model`."""
