# SPDX-License-Identifier: Apache-2.0
"""Engines behind Ray Serve: two choices, prefixes with affinity, and what calls read."""
