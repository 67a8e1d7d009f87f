# SPDX-License-Identifier: Apache-2.0
"""What do the tables of *Prompt Choreography* on blocked and leaked information say of a model?"""
