# SPDX-License-Identifier: Apache-2.0
"""Running of a plan: progress, answers and where they lie, failures, measurements."""
