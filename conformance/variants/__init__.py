"""Honest backends that compute in another way: a suite that fails one of them has a bound too tight.

How to write a variant: an op of the contract that is right by construction, and unlike the reference in the order, the
splitting, or the precision that its backend declares; a `Variant` with the ops that differ, in `gate.VARIANTS`. A
variant that raises an alarm is never made quieter: the bound's derivation is.
"""
