"""Finding, reading and streaming checkpoints: safetensors directories and GGUF files.

    resolve_model(name) -> ModelSource -> open_checkpoint(source) -> Checkpoint -> load_weights(checkpoint, targets)
       resolve.py                            checkpoint.py                            stream.py
                                        safetensors.py | gguf.py

Importing this package imports neither torch nor any reader.
"""
