"""A command `vllm` that starts Octavo: it translates flags, says what it could not, and becomes `octavo`."""
