# SPDX-License-Identifier: Apache-2.0
"""Language of operators, graphs as data, and the tasks that they come to."""
