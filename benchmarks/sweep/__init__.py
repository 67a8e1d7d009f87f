# SPDX-License-Identifier: Apache-2.0
"""How does the gain of a tree of thoughts grow with its candidates and voters?"""
