# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: what the compiler makes of the Triton kernels, without a GPU."""
