"""Runs cases on a backend and judges what came out.

judge ──► worker (own process) or in-process ──► attempt × 2 ──► bench (device side of one attempt)
  └─► the trial's check, on host data of its own ──► result
"""
