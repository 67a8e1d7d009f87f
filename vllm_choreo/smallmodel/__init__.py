# SPDX-License-Identifier: Apache-2.0
"""Small real models from PyPI, made ready for demos and tests; on no side of the wire."""
