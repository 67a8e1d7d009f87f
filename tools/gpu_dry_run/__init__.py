# SPDX-License-Identifier: Apache-2.0
"""A dry run of the path on NVIDIA GPUs, without one. `make gpu-dry-run`."""
