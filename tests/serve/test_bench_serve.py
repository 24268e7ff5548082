"""`octavo bench serve` against a real server."""

import json

from octavo.core.cli.main import main


def test_every_token_is_counted_and_the_server_is_left_idle(server, tmp_path):
    path = tmp_path / "report.json"
    words = ["--num-prompts", "12", "--input-tokens", "10", "--output-tokens", "5", "--max-concurrency", "6"]
    assert main(["bench", "serve", "--url", server.url, *words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"]) == (12, 0)
    assert (report["in_tokens"], report["out_tokens"]) == (120, 60)
    assert report["model"] == "tiny"
    assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"]


def test_a_shared_prefix_is_found_in_the_cache(server, tmp_path):
    path = tmp_path / "report.json"
    words = ["--workload", "shared-prefix", "--prefix-tokens", "64", "--num-prefixes", "2", "--input-tokens", "8"]
    words += ["--num-prompts", "10", "--output-tokens", "2", "--max-concurrency", "1", "--seed", "7"]
    assert main(["bench", "serve", "--url", server.url, *words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["in_tokens"] == 720
    assert report["cached_tokens"] == 8 * 64


def test_chat_is_measured_too(server, tmp_path):
    path = tmp_path / "report.json"
    words = ["--endpoint", "chat", "--num-prompts", "3", "--input-tokens", "10", "--no-ignore-eos"]
    assert main(["bench", "serve", "--url", server.url, *words, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["completed"] == 3
