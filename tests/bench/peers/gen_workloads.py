"""Write the peer workloads (token ids, fixed seeds) to workloads/*.json.

Each file: {"name", "max_seqs", "prefix_cache", "max_len", "requests": [{"prompt": [ids], "new": n}]}
Ids are drawn from 100..48999: valid for SmolLM2 (vocabulary 49152) and never a special token.
"""

import json
import random
from pathlib import Path

OUT = Path(__file__).parent / "workloads"


def ids(rng, n):
    return [rng.randrange(100, 49000) for _ in range(n)]


def write(name, requests, max_seqs=1, prefix_cache=False):
    longest = max(len(r["prompt"]) + r["new"] for r in requests)
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(
        json.dumps(
            {"name": name, "max_seqs": max_seqs, "prefix_cache": prefix_cache, "max_len": longest, "requests": requests}
        )
    )


rng = random.Random(1)
write("w1", [{"prompt": ids(rng, 128), "new": 128}])

rng = random.Random(2)
mixed = [{"prompt": ids(rng, rng.randint(32, 256)), "new": rng.randint(32, 128)} for _ in range(64)]
write("w2", mixed, max_seqs=32)
write("w2x64", mixed, max_seqs=64)

rng = random.Random(3)
prefix = ids(rng, 512)
write("w3", [{"prompt": prefix + ids(rng, 32), "new": 32} for _ in range(32)], max_seqs=32, prefix_cache=True)

rng = random.Random(4)
write("w4", [{"prompt": ids(rng, 2048), "new": 64}])
