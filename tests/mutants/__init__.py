"""Faults put into the code on purpose, one module per wing; tests/mutations.py applies them.

A fault stands in the module that is called as the wing of the file it changes, and once.
"""

from mutants import (
    adapters,
    agents,
    base,
    conversation,
    generation,
    gym,
    harbor,
    mcp,
    method,
    ms_swift,
    openenv,
    recipe,
    reports,
    run,
    samples,
    scripts,
    training,
    verl,
)
from mutants.mutation import Mutation

WINGS = (
    method,
    base,
    conversation,
    generation,
    training,
    run,
    recipe,
    reports,
    adapters,
    agents,
    ms_swift,
    verl,
    mcp,
    gym,
    openenv,
    harbor,
    samples,
    scripts,
)
MUTATIONS: list[Mutation] = [mutation for wing in WINGS for mutation in wing.MUTATIONS]
