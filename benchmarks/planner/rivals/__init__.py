# SPDX-License-Identifier: Apache-2.0
"""How long a batch of a workflow takes: plans against other ways to run the same calls."""
