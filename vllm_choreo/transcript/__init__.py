# SPDX-License-Identifier: Apache-2.0
"""Runs as data and as a page: calls in order, with messages, parents and times."""
