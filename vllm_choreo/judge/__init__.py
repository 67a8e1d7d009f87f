# SPDX-License-Identifier: Apache-2.0
"""Quality of a way of running a workflow against the text's, and how sure it is."""
