# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo run`: a workflow on problems, its transcripts and a page that shows them."""
