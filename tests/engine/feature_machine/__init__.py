# SPDX-License-Identifier: Apache-2.0
"""A random machine across features: programs over all options, on an engine stepped by hand.

program.py         a program is data: operations, and how it prints itself
generator.py       from a seed to a program
configurations.py  the engines that programs run on
machine.py         runs a program, one step of the engine at a time
ledger.py          what was made, and which refusals the definition allows
truth.py           what each answer should be: the dense oracle, cached by recipe
invariants.py      the recount, compared after every step; what is left at the end
shrink.py          from a failing program to a short one, printed as a test

python -m tests.engine.feature_machine --help
"""
