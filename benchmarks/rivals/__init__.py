# SPDX-License-Identifier: Apache-2.0
"""The settings in which others measure reuse apart from prefixes, over HTTP against any server."""
