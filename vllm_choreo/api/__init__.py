# SPDX-License-Identifier: Apache-2.0
"""The facades of a program with an engine in its hands; on the client's side, no torch."""
