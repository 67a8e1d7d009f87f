# SPDX-License-Identifier: Apache-2.0
"""What choreographed plans change: their next-token distributions beside those of the text."""
