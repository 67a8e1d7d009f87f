# SPDX-License-Identifier: Apache-2.0
"""Records of workflows, kept and run again; on the client's side."""
