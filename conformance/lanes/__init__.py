"""The lanes a case must pass: exact (bit for bit), probe (a needle), statistical (bounds), distribution (sampling)."""
