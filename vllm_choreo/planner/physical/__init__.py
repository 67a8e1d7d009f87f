# SPDX-License-Identifier: Apache-2.0
"""Choice of how prompts are read, which worker runs which call, and in which order."""
