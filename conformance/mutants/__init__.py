"""Deliberately broken backends, one per class of fault: a suite that doesn't catch them proves nothing.

How to write a mutant:
 1. A function `wrap(honest) -> broken` in a module of this package: the op of the reference, with the fault put in by
    changing its arguments, or its outputs, under the trigger only. Off the trigger call `honest` and change nothing:
    the gate's tests compare the two bit for bit.
 2. A `Mutant(name, fault, source, op, wrap)` in the module's `MUTANTS` tuple, the module in `gate.MODULES`.
 3. Name it in `faults` of the cases that are there to catch it: only those run, so keep them few and small.
"""
