# SPDX-License-Identifier: Apache-2.0
"""Pages and pictures of what was studied, that need nothing else."""
