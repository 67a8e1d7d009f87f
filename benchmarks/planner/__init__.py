# SPDX-License-Identifier: Apache-2.0
"""How good the planner's schedules are, and what plans save: see benchmarks/RESULTS.md."""
