"""The semantics in float64, written for clarity and sharing no code with the reference ops. Imports no backend."""
