"""Above the ops: tiny models through the backend (`model`), and whole requests through the engine (`engine`).

Imported only when one of these profiles is asked for: the profiles of ops need nothing of the engine.
"""
