# SPDX-License-Identifier: Apache-2.0
"""What a workflow did, kept and run again; on the client's side."""
