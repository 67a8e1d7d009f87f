# SPDX-License-Identifier: Apache-2.0
"""The clients of the server tests' two tenants serve here too."""

from tests.server.conftest import alpha, beta, pytest_runtest_makereport

__all__ = ["alpha", "beta", "pytest_runtest_makereport"]
