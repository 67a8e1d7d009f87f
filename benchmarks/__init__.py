# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `python -m benchmarks` runs the short form of all and writes RESULTS.md."""
