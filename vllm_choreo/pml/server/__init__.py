# SPDX-License-Identifier: Apache-2.0
"""Schemas and prompts on a server: their routes, and `choreo_schema` on OpenAI's."""
