"""Deliberately broken backends, one per class of fault: a suite that doesn't catch them proves nothing.

How to write a mutant:
 1. A function `change(call)` under @before (it replaces arguments) or @after (it alters what was written), or
    `fault(honest, call)` under @around, in a module of this package. `call` holds the op's arguments by the contract's
    names. Off the trigger change nothing: a test compares mutant and reference bit for bit.
 2. A `Mutant(name, fault, source, op, wrap)` in the module's `MUTANTS` tuple, the module in `gate.MODULES`.
 3. Name it in `faults` of the cases that are there to catch it: only those run, so keep them few and small.

A trigger is as narrow as the fault was on the device where it was seen: one block size, one head count, contexts
longer than one split. A fault that shows everywhere is caught by the first case, and says nothing about the grid.
"""
