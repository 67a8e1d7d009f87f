# SPDX-License-Identifier: Apache-2.0
"""The JSON of a call, of a message and of an error, once: for server, client and transcripts."""
