# SPDX-License-Identifier: Apache-2.0
"""Whether a way of running a workflow answers as well as the text, and how sure that is."""
