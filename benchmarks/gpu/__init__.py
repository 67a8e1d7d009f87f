# SPDX-License-Identifier: Apache-2.0
"""Checks and times of the GPU kernels, without vLLM; see `python -m benchmarks.gpu --help`."""
