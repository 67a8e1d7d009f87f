# SPDX-License-Identifier: Apache-2.0
"""The page on which messages and calls are tried by hand, beside the same as text (`/choreo/`)."""
