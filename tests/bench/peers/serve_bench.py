"""Load test of an OpenAI-compatible /v1/completions endpoint with streaming, at fixed concurrency.

    python serve_bench.py --url http://127.0.0.1:8000 --model NAME --workload workloads/w2.json --concurrency 16
Only the standard library. Prompts go as token ids. Prints one JSON line: TTFT p50/p99, ITL p50/p99, output tok/s.
"""

import argparse
import http.client
import itertools
import json
import threading
import time
from urllib.parse import urlparse

p = argparse.ArgumentParser()
p.add_argument("--url", required=True)
p.add_argument("--model", required=True)
p.add_argument("--workload", required=True)
p.add_argument("--concurrency", type=int, default=16)
p.add_argument("--peer", default="")
p.add_argument("--warm", type=int, default=2)
a = p.parse_args()
load, host = json.load(open(a.workload)), urlparse(a.url)


def one(r):
    """Send one request; return (send time, [moments at which a chunk with text arrived], completion tokens)."""
    c = http.client.HTTPConnection(host.hostname, host.port, timeout=600)
    body = {
        "model": a.model,
        "prompt": r["prompt"],
        "max_tokens": r["new"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": True,
    }
    t = time.time()
    c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    resp, at, used = c.getresponse(), [], None
    assert resp.status == 200, (resp.status, resp.read()[:300])
    for raw in resp:
        if raw.startswith(b"data: {"):
            now, d = time.time(), json.loads(raw[6:])
            if d.get("usage"):
                used = d["usage"]["completion_tokens"]
            if d.get("choices") and d["choices"][0].get("finish_reason") is None:
                at.append(now)
    c.close()
    return t, at, used


for _r in load["requests"][: a.warm]:
    one({"prompt": [101 + k for k in range(40)], "new": 4})
queue, done, lock = list(load["requests"])[::-1], [], threading.Lock()


def worker():
    while True:
        with lock:
            if not queue:
                return
            r = queue.pop()
        got = one(r)
        with lock:
            done.append(got)


t0 = time.time()
threads = [threading.Thread(target=worker) for _ in range(a.concurrency)]
[t.start() for t in threads]
[t.join() for t in threads]
wall = time.time() - t0
ttft = sorted(at[0] - t for t, at, _ in done)
itl = sorted(y - x for _, at, _ in done for x, y in itertools.pairwise(at))


def pick(v, q):
    return round(v[min(len(v) - 1, int(q * len(v)))], 4)


out = sum(u or 0 for _, _, u in done)
print(
    "RESULT "
    + json.dumps(
        {
            "peer": a.peer,
            "workload": load["name"] + "-http",
            "concurrency": a.concurrency,
            "seconds": round(wall, 2),
            "out_tokens": out,
            "expected": sum(r["new"] for r in load["requests"]),
            "out_tps": round(out / wall, 2),
            "ttft_p50": pick(ttft, 0.5),
            "ttft_p99": pick(ttft, 0.99),
            "itl_p50": pick(itl, 0.5),
            "itl_p99": pick(itl, 0.99),
        }
    )
)
