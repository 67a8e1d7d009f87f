# SPDX-License-Identifier: Apache-2.0
"""Which tokens of its parents a call encodes anew: rules for both sides, and how they are found."""
