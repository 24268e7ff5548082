"""Ahead-of-time compilation: the launches of real ops, built for a chip that isn't here, and what came out.

scenarios.py   ops at the shapes of models that people run, on tensors without data
   │  every launch parameter set of tuning/*.toml in turn
launches.py    the launches that these calls make, each once
   │
compile.py     Triton's compiler with a stand-in for the driver ──► the compiled kernel, as a device would get it
   │
the backend's  read.py: registers, spills, instructions ──► faults
   │
roofline.py    bytes and operations of the launch against the chip ──► time at the limit, and the share expected
"""
