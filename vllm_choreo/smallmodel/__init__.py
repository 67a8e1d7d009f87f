# SPDX-License-Identifier: Apache-2.0
"""A small real model from PyPI, made ready for demos and tests; on no side of the wire."""
