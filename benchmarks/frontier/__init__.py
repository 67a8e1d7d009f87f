# SPDX-License-Identifier: Apache-2.0
"""What repair buys: rules by budgets by tasks, all charged alike, by the distance to the text."""
