# SPDX-License-Identifier: Apache-2.0
"""Chats that are cut inside: what edits cost, what cutting costs, and whom others can steer."""
