"""`octavo bench`: workloads, figures, and a peer in a process of its own."""

import json
import sys

import pytest

from octavo.core.base.errors import ConfigError, RequestFailed
from octavo.core.cli.bench_peer import Peer, peer_command
from octavo.core.cli.bench_workload import default_workload, read_workload
from octavo.core.cli.main import main
from tests.fakes.scripted_llm import scripted_llm

PEER = """
import json, sys
assert sys.argv[1:3] == ["--resident", "--workloads"], sys.argv
print("loading"); print("READY", flush=True)
for name in sys.stdin:
    print("RESULT " + json.dumps({"name": name.strip(), "complete": %s, "out_tps": 0.001, "seconds": 9}), flush=True)
"""


@pytest.fixture
def llm(monkeypatch):
    return scripted_llm(monkeypatch)


@pytest.fixture
def workload_file(tmp_path):
    path = tmp_path / "tiny.json"
    requests = [{"prompt": [5, 6, 7], "new": 4}, {"prompt": [5, 9], "new": 2}]
    path.write_text(json.dumps({"name": "tiny", "max_seqs": 2, "prefix_cache": False, "requests": requests}))
    return str(path)


@pytest.fixture
def peer_script(tmp_path):
    def write(complete="True", body=PEER):
        path = tmp_path / "peer.py"
        path.write_text(body % complete if "%s" in body else body)
        return f"{sys.executable} {path}"

    return write


def test_throughput_is_recorded(llm, workload_file, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["bench", "throughput", "m", "--workload", workload_file, "--repeats", "2", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["workload"] == "tiny"
    assert [run["out_tokens"] for run in report["runs"]] == [6, 6]
    assert report["median"]["in_tokens"] == 5
    assert report["settings"]["max_num_seqs"] == 2
    assert report["settings"]["max_model_len"] == 36  # the warm-up's length, here longer than the workload's
    assert "turn 1: octavo" in capsys.readouterr().out


def test_each_turn_has_prompts_that_no_cache_knows(llm, workload_file):
    main(["bench", "throughput", "m", "--workload", workload_file, "--repeats", "2"])
    _, first, second = (prompts for prompts, _ in llm.made[0].asked)
    assert first[0][0] != second[0][0]
    assert first[0][1:] == second[0][1:] == [6, 7]


def test_latency_is_recorded(llm, workload_file, tmp_path):
    out = tmp_path / "out.json"
    assert main(["bench", "latency", "m", "--workload", workload_file, "--json", str(out), "--repeats", "1"]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["out_tokens"] == 6
    assert run["ttft_p50"] >= 0
    assert run["decode_tps"] > 0


def test_a_peer_takes_its_turns_and_the_ratio_is_recorded(llm, workload_file, peer_script, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--workload", workload_file, "--json", str(out), "--repeats", "3", "--peer", f"other={peer_script()}"]
    assert main(["bench", "throughput", "m", *words]) == 0
    peer = json.loads(out.read_text())["peers"]["other"]
    assert len(peer["runs"]) == 3
    assert peer["out_tps_ratio"] > 1
    assert "against other: out_tps x" in capsys.readouterr().out


def test_a_peer_that_leaves_tokens_out_is_not_compared(llm, workload_file, peer_script, capsys):
    words = ["--workload", workload_file, "--peer", f"other={peer_script(complete='False')}"]
    assert main(["bench", "throughput", "m", *words]) == 1
    assert "peer other did not generate every token" in capsys.readouterr().err
    assert llm.made[0].closed


@pytest.mark.parametrize(("body", "words"), [("", "ended before it said READY"), ("print('READY')", "ended")])
def test_a_peer_that_ends_is_named(workload_file, peer_script, body, words):
    _, command = peer_command(f"x={peer_script(body=body)}")
    with pytest.raises(RequestFailed, match=words), Peer("x", command, [workload_file]) as peer:
        peer.serve("tiny")


@pytest.mark.parametrize("text", ["", "name", "=command", "name= "])
def test_a_peer_needs_a_name_and_a_command(text):
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        peer_command(text)


def test_a_peer_that_cannot_start_is_one_line(llm, workload_file, capsys):
    assert main(["bench", "throughput", "m", "--workload", workload_file, "--peer", "x=no-such-program"]) == 2
    assert "peer x: no-such-program" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"name": "x", "max_seqs": 1, "requests": []}', '{"name": "x", "max_seqs": 0, "requests": [1]}',
     '{"name": "x", "max_seqs": 1, "requests": [{"prompt": [], "new": 1}]}',
     '{"name": "x", "max_seqs": 1, "requests": [{"prompt": [1], "new": 0}]}'],
)  # fmt: skip
def test_a_wrong_workload_is_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--workload"):
        read_workload(str(path))


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_the_default_workloads_are_seeded(mode):
    assert default_workload(mode) == default_workload(mode)
    assert default_workload(mode).longest_tokens <= 512


def test_repeats_must_be_positive(llm, capsys):
    assert main(["bench", "latency", "m", "--repeats", "0"]) == 2
    assert "--repeats is 0" in capsys.readouterr().err
