# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo profile-pair`: which layers a variant encodes anew of what another has encoded."""
