# SPDX-License-Identifier: Apache-2.0
"""Rules of the tokens of its parents that a call encodes anew, for both sides; how to find them."""
