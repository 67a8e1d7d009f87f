# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: engines, sides in turn, steps, statistics, records, pictures."""
