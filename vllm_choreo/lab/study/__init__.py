# SPDX-License-Identifier: Apache-2.0
"""Studies of how far answers and distributions are from the text's, and how sure that is."""
