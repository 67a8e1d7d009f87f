# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts on a server, for its clients."""
