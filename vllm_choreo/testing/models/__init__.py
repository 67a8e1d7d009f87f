# SPDX-License-Identifier: Apache-2.0
"""Small models, real ones from PyPI and random ones, as folders for demos and tests."""
