"""What HTTP costs: the same requests offline, from AsyncEngine and over a socket, in turns, with one configuration.

    PYTHONPATH=src python tests/bench/bench_serve.py [--model smollm2] [--clients 16] [--rounds 3]     one line of JSON

Offline is `LLM.generate` with as many requests at once as there are clients; the front is `AsyncEngine` with as many
streams; HTTP is `octavo serve` under `octavo bench serve`. `added_itl_ms` is HTTP's median gap less the front's. Client
and server share the machine's cores with the engine, so the ratio is that of a small machine; `front_us_per_token` is
the CPU time of the server's own process, which a larger one does not notice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from octavo import LLM, AsyncEngine, SamplingParams

OCTAVO = [sys.executable, "-m", "octavo.core.cli.main"]
ENVIRON = {**os.environ, "PYTHONPATH": "src"}


def workload(count: int) -> list[dict[str, Any]]:
    """Requests as peers/gen_workloads.py draws them for w2."""
    rng = random.Random(2)

    def one() -> dict[str, Any]:
        prompt = [rng.randrange(100, 49_000) for _ in range(rng.randint(32, 256))]
        return {"prompt": prompt, "new": rng.randint(32, 128)}

    return [one() for _ in range(count)]


def offline(llm: LLM, requests: list[dict[str, Any]]) -> float:
    """Tokens per second."""
    params = [SamplingParams(temperature=0.0, max_tokens=each["new"], ignore_eos=True) for each in requests]
    llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate([each["prompt"] for each in requests], params)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)


class Front:
    """An AsyncEngine in this process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._engine = AsyncEngine(model, **options)
        self._runner.run(self._engine.start())

    def itl_p50(self, requests: list[dict[str, Any]], clients: int) -> float:
        """The median gap between the pieces of a stream, in seconds."""
        return statistics.median(self._runner.run(self._gaps(requests, clients)))

    async def _gaps(self, requests: list[dict[str, Any]], clients: int) -> list[float]:
        places, gaps = asyncio.Semaphore(clients), []

        async def one(request: dict[str, Any]) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=request["new"], ignore_eos=True)
            async with places:
                times = [time.perf_counter() async for _ in self._engine.generate(request["prompt"], params)]
            gaps.extend(later - earlier for earlier, later in itertools.pairwise(times))

        await asyncio.gather(*map(one, requests))
        return gaps

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()


class Served:
    """`octavo serve` with the flags given."""

    def __init__(self, model: str, flags: list[str]) -> None:
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - closed by close()
        command = [*OCTAVO, "serve", model, "--port", "0", *flags]
        self._process = subprocess.Popen(command, stderr=self._log, env=ENVIRON)
        self.url = self._wait_url()

    def _wait_url(self) -> str:
        while " on http://" not in (log := Path(self._log.name).read_text()):
            if self._process.poll() is not None:
                raise SystemExit(log)
            time.sleep(0.1)
        return log.split()[-1]

    def run(self, model: str, path: Path, clients: int) -> dict[str, Any]:
        """The client's figures, and the CPU microseconds per token of the server's own process."""
        front = psutil.Process(self._process.pid)
        before = sum(front.cpu_times()[:2])
        report = path.with_name("report.json")
        command = [*OCTAVO, "bench", "serve", "--url", self.url, "--model", model, "--workload", str(path)]
        command += ["--max-concurrency", str(clients), "--num-prompts", "1000000", "--json", str(report)]
        subprocess.run(command, stdout=subprocess.DEVNULL, env=ENVIRON, check=True)
        figures: dict[str, Any] = json.loads(report.read_text())
        used = sum(front.cpu_times()[:2]) - before
        return {
            "out_tps": figures["out_tps"],
            "front_us_per_token": round(used / figures["out_tokens"] * 1e6, 1),
            "client_us_per_event": figures["client"]["cpu_us_per_event"],
            **{f"{name}_{p}": figures[f"{name}_ms"][p] / 1e3 for name in ("ttft", "itl") for p in ("p50", "p99")},
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    requests = workload(args.requests)
    flags = ["--dtype", "float32", "--max-num-seqs", str(args.clients), "--max-model-len", "512", "--no-progress"]
    flags += ["--no-enable-prefix-caching", "--served-model-name", "m"]
    options = {"dtype": "float32", "max_num_seqs": args.clients, "max_model_len": 512, "progress": False}
    options |= {"enable_prefix_caching": False}
    served, front = Served(args.model, flags), Front(args.model, options)
    rounds = []
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, **options) as llm:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps({"name": "w2", "requests": requests}))
        try:
            offline(llm, requests[: args.clients])
            for _ in range(args.rounds):
                figures = {
                    "offline_tps": offline(llm, requests),
                    "front_itl_p50": front.itl_p50(requests, args.clients),
                }
                rounds.append(figures | served.run("m", path, args.clients))
        finally:
            served.close()
            front.close()
    names = ("offline_tps", "out_tps", "front_us_per_token", "client_us_per_event", "ttft_p50", "itl_p50", "itl_p99")
    result = {name: round(statistics.median(each[name] for each in rounds), 5) for name in (*names, "front_itl_p50")}
    result["added_itl_ms"] = round(
        1e3 * statistics.median(each["itl_p50"] - each["front_itl_p50"] for each in rounds), 2
    )
    ratio = statistics.median(each["out_tps"] / each["offline_tps"] for each in rounds)
    print(json.dumps({"model": args.model, "clients": args.clients, **result, "http_over_offline": round(ratio, 3)}))


if __name__ == "__main__":
    main()
