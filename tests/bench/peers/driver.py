"""Run engines over workloads, interleaved, and append every RESULT line to raw/<out>.jsonl.

    python driver.py [--only octavo-fp32,llama-f32] [--plan w1,w4,w1,w4] [--out main]

Every peer is started once (its start-up is in each line) and then serves one workload at a time in turn. Run it with a
Python that has Octavo; PEER_VENVS names the folder of the peers' own environments, PEER_HF the Hugging Face model.
Add an engine by adding a line to PEERS: it needs a script that takes the arguments of common.py.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

from octavo.core.base.errors import OctavoError
from octavo.core.cli.bench_peer import Peer

HERE = Path(__file__).parent
VENVS = Path(os.environ.get("PEER_VENVS", "."))
HF = os.environ.get("PEER_HF", "models/smollm2-hf")
GGUF = os.environ.get("PEER_GGUF", "models/SmolLM2-135M-Instruct.Q4_1.gguf")
M = HERE / "models"
ALL = ["w1", "w3", "w4", "w2"]
OWN = None  # the environment this script runs in
PEERS = {  # name: (venv, script, model, precision, workloads, extra arguments)
    "octavo-fp32": (OWN, "peer_octavo.py", "smollm2", "fp32", ALL, []),
    "octavo-bf16": (OWN, "peer_octavo.py", "smollm2", "bf16", ALL, []),
    "llama-f32": ("vl", "peer_llamacpp.py", M / "smollm2-F32.gguf", "fp32", ALL, []),
    "vllm-fp32": ("vv", "peer_vllm.py", HF, "fp32", ALL, []),
    "ov-f16": ("vl", "peer_openvino.py", M / "smollm2-F16.gguf", "f16w", ALL, []),
    "ov-q8_0": ("vl", "peer_openvino.py", M / "smollm2-Q8_0.gguf", "Q8_0", ALL, []),
    "llama-q8_0": ("vl", "peer_llamacpp.py", M / "smollm2-Q8_0.gguf", "Q8_0", ALL, []),
    "llama-q4_0": ("vl", "peer_llamacpp.py", M / "smollm2-Q4_0.gguf", "Q4_0", ALL, []),
    "ov-q4_0": ("vl", "peer_openvino.py", M / "smollm2-Q4_0.gguf", "Q4_0", ALL, []),
    "vllm-bf16": ("vv", "peer_vllm.py", HF, "bf16", ALL, []),
    "llama-bf16": ("vl", "peer_llamacpp.py", M / "smollm2-BF16.gguf", "bf16", ALL, []),
    "hf-fp32": ("va", "peer_hf.py", HF, "fp32", ["w1", "w4", "w2"], ["--mode", "static"]),
    "ct2-fp32": ("vl", "peer_ct2.py", M / "ct2-fp32", "fp32", ALL, []),
    "ct2-int8": ("vl", "peer_ct2.py", M / "ct2-int8", "int8", ALL, []),
    "ort-int4": ("vl", "peer_ort.py", M / "ort-int4", "int4", ["w1", "w4"], []),
    "ort-fp32": ("vl", "peer_ort.py", M / "ort-fp32", "fp32", ["w1", "w4"], []),
    "hf-cb-fp32": ("va", "peer_hf.py", HF, "fp32", ["w2", "w3"], ["--mode", "cb"]),
    "hf-bf16": ("va", "peer_hf.py", HF, "bf16", ["w1"], ["--mode", "static"]),
    "llama-q4_1": ("vl", "peer_llamacpp.py", GGUF, "Q4_1", ALL, []),
    "llama-f16": ("vl", "peer_llamacpp.py", M / "smollm2-F16.gguf", "fp16", ALL, []),
}


def start(name, stack):
    """The running peer; its stderr goes to raw/<name>.err."""
    venv, script, model, precision, loads, extra = PEERS[name]
    python = sys.executable if venv is OWN else str(VENVS / venv / "bin/python")
    command = [python, str(HERE / script), "--model", str(model), "--precision", precision, "--label", name, *extra]
    log = stack.enter_context(open(HERE / "raw" / f"{name}.err", "wb"))
    return stack.enter_context(Peer(name, command, [str(HERE / "workloads" / f"{load}.json") for load in loads], log))


def main():
    p = argparse.ArgumentParser()
    p.add_argument(
        "--plan",
        default="w1,w4,w3,w2,w1,w4,w3,w2,w1,w4,w3,w2",
        help="workloads in order; each is served by every peer before the next begins",
    )
    p.add_argument("--only", default="")
    p.add_argument("--out", default="main")
    p.add_argument("--minutes", type=float, default=1e9, help="start no new workload after this long")
    a = p.parse_args()
    os.environ.pop("OPENBLAS_CORETYPE", None)  # an override that slows numpy
    begun, out = time.time(), HERE / "raw" / f"{a.out}.jsonl"
    out.parent.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        peers = []
        for name in a.only.split(",") if a.only else list(PEERS):
            try:
                peers.append(start(name, stack))
                print("ready", name, round(time.time() - begun), flush=True)
            except OctavoError as error:
                print("FAILED to start:", error, flush=True)
        for turn, load in enumerate(a.plan.split(",")):
            for peer in list(peers):
                if load not in PEERS[peer.name][4] or time.time() - begun > a.minutes * 60:
                    continue
                try:
                    line = peer.serve(load)
                except OctavoError as error:  # a peer that skips tokens is not measured
                    print("LOST:", error, flush=True)
                    peers.remove(peer)
                    continue
                line.update(turn=turn, at=round(time.time() - begun))
                with open(out, "a") as f:
                    f.write(json.dumps(line) + "\n")
                shown = (line[key] for key in ("seconds", "out_tps"))
                print(peer.name, load, *shown, line.get("prefill_tps"), line.get("decode_tps"), flush=True)


if __name__ == "__main__":
    main()
