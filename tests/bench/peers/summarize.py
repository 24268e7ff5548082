"""Median and range per peer and workload, and the ratio to a reference within the same turn.

python summarize.py raw/a.jsonl [raw/b.jsonl ...] [--ref llama-f32]
"""

import argparse
import json
import statistics as st
from collections import defaultdict

p = argparse.ArgumentParser()
p.add_argument("files", nargs="+")
p.add_argument("--ref", default="llama-f32")
a = p.parse_args()
rows = [dict(json.loads(line), file=f) for f in a.files for line in open(f)]
for r in rows:  # no cold prefill here passes 700 tok/s: above 1500 the prompt came from a cache,
    if (r.get("prefill_tps") or 0) > 1500:  # so only the decode figures of that row mean anything
        r.update(prefill_tps=None, seconds=None, out_tps=None)
by = defaultdict(list)
for r in rows:
    by[r["workload"], r["label"]].append(r)


def turns(rs):
    return {(r["file"], r.get("turn", r.get("round"))): r["seconds"] for r in rs if r["seconds"]}


def mid(rs, key):
    v = [r[key] for r in rs if r.get(key) is not None]
    return f"{st.median(v):.4g} [{min(v):.4g}-{max(v):.4g}]" if v else "-"


print("| workload | peer | n | seconds | out tok/s | prefill tok/s | decode tok/s | itl p50 s | x speed of", a.ref, "|")
print("|" + "---|" * 9)
for (w, label), rs in sorted(by.items()):
    mine, ref = turns(rs), turns(by.get((w, a.ref), []))
    same = [ref[k] / mine[k] for k in mine if k in ref]
    print(
        "|",
        w,
        "|",
        label,
        "|",
        len(rs),
        "|",
        *(mid(rs, k) + " |" for k in ("seconds", "out_tps", "prefill_tps", "decode_tps", "itl_p50")),
        f"{st.median(same):.2f}" if same else "-",
        "|",
    )
