"""Reading quantised checkpoints of every format into the types of `core.backend.quant`, and quantising plain ones."""
