# SPDX-License-Identifier: Apache-2.0
"""What do messages take in memory: shared by calls, and over a long session?"""
