"""Shared by the peer scripts: arguments, timing, and the one JSON line per workload.

A peer script does three things: build an engine, warm it up, and call `run(...)` with a
function that serves one workload and returns a list of per-request lists of token times.
"""

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import sys
import time

START = time.time() - (
    time.clock_gettime(time.CLOCK_BOOTTIME)
    - float(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
)
CEILING_LEN = 2176  # room for the longest workload (2048 + 64)


def args(**extra):
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--precision", default="fp32")
    p.add_argument("--workloads", nargs="+", required=True)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--label", default="")
    p.add_argument("--resident", action="store_true", help="load once, then serve workload names read from stdin")
    for name, default in extra.items():
        p.add_argument("--" + name.replace("_", "-"), default=default, type=type(default))
    a = p.parse_args()
    a.loads = [json.load(open(w)) for w in a.workloads]
    return a


def warm_requests(n=4, prompt=64, new=8):
    """Small requests on ids of their own, so that they leave nothing useful in a prefix cache."""
    rng = random.Random(99)
    return [{"prompt": [rng.randrange(100, 49000) for _ in range(prompt)], "new": new} for _ in range(n)]


def rss_mib():
    """Peak resident size of this process and of its finished children."""
    return max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def emit(peer, a, load, t0, times, startup):
    """times[i] = the wall-clock moments at which request i's tokens became known."""
    requests = load["requests"]
    got = [len(t) for t in times]
    end = max(t[-1] for t in times)
    n_in, n_out = sum(len(r["prompt"]) for r in requests), sum(r["new"] for r in requests)
    gaps = [b - x for t in times for x, b in itertools.pairwise(t)]
    line = {
        "peer": peer,
        "precision": a.precision,
        "label": a.label,
        "workload": load["name"],
        "seconds": round(end - t0, 4),
        "in_tokens": n_in,
        "out_tokens": n_out,
        "complete": got == [r["new"] for r in requests],
        "out_tps": round(n_out / (end - t0), 2),
        "total_tps": round((n_in + n_out) / (end - t0), 2),
        "ttft_p50": round(statistics.median(t[0] - t0 for t in times), 4),
        "itl_p50": round(statistics.median(gaps), 5) if gaps else None,
        "rss_mib": round(rss_mib()),
        **startup,
    }
    if len(requests) == 1:
        line["prefill_tps"] = round(n_in / (times[0][0] - t0), 2)
        line["decode_tps"] = round((len(times[0]) - 1) / (times[0][-1] - times[0][0]), 2)
    print("RESULT " + json.dumps(line), flush=True)


def run(peer, a, serve, import_s):
    """Warm up, then serve every workload once. `serve(load)` returns (t0, times)."""
    warm = {
        "name": "warm",
        "max_seqs": 4,
        "prefix_cache": False,
        "max_len": CEILING_LEN,
        "requests": warm_requests(1, 32, 1),
    }
    serve(warm)
    startup = {"import_s": round(import_s, 2), "first_token_s": round(time.time() - START, 2)}
    serve({**warm, "requests": warm_requests()})
    if not a.resident:
        for load in a.loads:
            emit(peer, a, load, *serve(load), startup)
        return
    print("READY", flush=True)
    for turn, name in enumerate(sys.stdin):  # resident: serve the named workload at each line
        load = next(w for w in a.loads if w["name"] == name.strip())
        for r in load["requests"]:  # a fresh first token, so that no cache knows the prompts of an earlier turn
            r["prompt"][0] = 100 + turn
        emit(peer, a, load, *serve(load), startup)
