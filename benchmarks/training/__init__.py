# SPDX-License-Identifier: Apache-2.0
"""What training wins back: adapters of every placement, on their own task and on others."""
