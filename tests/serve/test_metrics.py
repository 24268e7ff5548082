"""GET /metrics over a real socket: what each request leaves in the figures, under our names and under vLLM's."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from octavo.core.base.config import ServeConfig
from octavo.core.serve.metrics.catalogue import METRICS
from tests.fakes import tiny_models
from tests.fakes.chains import save_chains
from tests.lora.packer import make_lora
from tests.serve.conftest import Server
from tests.serve.scrapes import Scrape, scrape
from tests.serve.test_client_gone import send

LORA_NAMES = {"octavo_lora_requests_info", "vllm:lora_requests_info"}
IDLE = ("octavo_num_requests_running", "octavo_num_requests_waiting", "octavo_kv_cache_usage")
RARE = 1234
"""A token that SmolLM2 never writes here."""


@contextmanager
def running(model: Path, settings: ServeConfig | None = None, **options: Any) -> Iterator[Server]:
    made = Server(str(model), settings, **options)
    with made:
        yield made


def gained(server: Server, before: Scrape) -> Mapping[str, float]:
    """What every unlabelled figure gained since; zero is left out."""
    after = scrape(server.http)
    gains = {
        name: value - before.samples[name, labels] for (name, labels), value in after.samples.items() if not labels
    }
    return {name: gain for name, gain in gains.items() if gain}


def settled(server: Server) -> Scrape:
    server.wait_idle()
    return scrape(server.http)


class TestText:
    def test_every_metric_is_there_under_each_of_its_names(self, server: Server) -> None:
        found = scrape(server.http).kinds
        wanted = {name: metric.kind for metric in METRICS for name in (metric.name, *metric.aliases)}
        assert found == {name: kind for name, kind in wanted.items() if name not in LORA_NAMES}

    def test_both_names_tell_the_same(self, server: Server) -> None:
        server.complete("Loop", max_tokens=5, temperature=0)
        now = settled(server)
        for metric in METRICS:
            for alias in metric.aliases:
                for (name, labels), value in now.samples.items():
                    if name in (alias, *(alias + end for end in ("_bucket", "_sum", "_count"))):
                        assert now.samples[metric.name + name[len(alias) :], labels] == value

    def test_the_description_says_that_it_is_text(self, server: Server) -> None:
        operation = server.http.get("/openapi.json").json()["paths"]["/metrics"]["get"]
        assert set(operation["responses"]["200"]["content"]) == {"text/plain"}

    def test_the_labels_that_gateways_read(self, server: Server) -> None:
        labels = scrape(server.http).labels("vllm:cache_config_info")
        assert labels["block_size"] == "16"
        assert int(labels["num_gpu_blocks"]) == server.stats().kv_blocks_total

    def test_vllms_names_can_be_left_out(self, chain_model: Path) -> None:
        with running(chain_model, ServeConfig(vllm_metrics=False), tokenizer="smollm2") as server:
            kinds = scrape(server.http).kinds
        assert kinds
        assert all(name.startswith("octavo_") for name in kinds)

    def test_names_with_quotes_and_line_feeds_are_written_so_that_they_can_be_read(self) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        from octavo.core.serve.metrics.text import Exposition, Metric

        name = 'a"b\\n\nc\\'
        metric: Metric[None] = Metric(name="octavo_x", kind="gauge", help="X.", read=lambda _: 1)
        text = Exposition([metric], {"model_name": name}, aliases=False).write(None).decode()
        (family,) = text_string_to_metric_families(text)
        assert family.samples[0].labels == {"model_name": name}


class TestOneRequest:
    def test_tokens_and_times_of_a_completion(self, server: Server) -> None:
        before = settled(server)
        started = time.monotonic()
        usage = server.complete("Loop one two three four" * 8, max_tokens=7, temperature=0).usage
        seconds = time.monotonic() - started
        server.wait_idle()
        gains = gained(server, before)
        assert gains["octavo_prompt_tokens_total"] == usage.prompt_tokens
        assert gains["octavo_generation_tokens_total"] == usage.completion_tokens == 7
        assert gains["octavo_prefix_cache_queries_total"] == usage.prompt_tokens
        assert gains["octavo_step_tokens_sum"] == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens + 6
        counts = {name: gain for name, gain in gains.items() if name.startswith("octavo_") and name.endswith("_count")}
        assert counts.pop("octavo_inter_token_latency_seconds_count") == 6
        assert counts.pop("octavo_step_tokens_count") == 7
        assert set(counts.values()) == {1}
        assert len(counts) == 9
        times = {
            name[7:-12]: gain for name, gain in gains.items() if name.startswith("octavo_") and "seconds_sum" in name
        }
        assert all(0 < value < seconds for value in times.values())
        queue, prefill, decode = (times[f"request_{part}_time"] for part in ("queue", "prefill", "decode"))
        assert math.isclose(times["time_to_first_token"], queue + prefill)
        assert math.isclose(times["e2e_request_latency"], queue + prefill + decode)
        assert math.isclose(times["request_inference_time"], prefill + decode)
        assert math.isclose(times["inter_token_latency"], decode)
        assert math.isclose(times["request_time_per_output_token"], decode / 6)

    def test_a_stream_counts_like_a_whole_reply(self, server: Server) -> None:
        before = settled(server)
        assert len(list(server.complete("Loop", max_tokens=5, temperature=0, stream=True))) >= 5
        server.wait_idle()
        gains = gained(server, before)
        assert gains["octavo_generation_tokens_total"] == 5
        assert gains["octavo_e2e_request_latency_seconds_count"] == 1

    def test_choices_count_each_and_their_prompt_once(self, server: Server) -> None:
        before = settled(server)
        usage = server.complete("Loop", max_tokens=3, n=3, temperature=1.0).usage
        server.wait_idle()
        gains = gained(server, before)
        assert gains["octavo_prompt_tokens_total"] == usage.prompt_tokens
        assert gains["octavo_generation_tokens_total"] == usage.completion_tokens
        assert gains["octavo_time_to_first_token_seconds_count"] == 3

    @pytest.mark.parametrize(
        ("prompt", "fields", "reason"),
        [("Loop", {"max_tokens": 4}, "length"), ("Loop", {"stop": "three"}, "stop"), ("ABC", {}, "stop")],
    )
    def test_the_reason_of_the_end(self, server: Server, prompt: str, fields: dict[str, Any], reason: str) -> None:
        before = settled(server)
        reply = server.complete(prompt, temperature=0, **fields)
        assert reply.choices[0].finish_reason == reason
        after = settled(server)
        for each in ("stop", "length", "abort", "error"):
            gain = [now.of("vllm:request_success_total", finished_reason=each) for now in (before, after)]
            assert gain[1] - gain[0] == (each == reason)

    def test_a_prefix_hit(self, server: Server) -> None:
        prompt = [44449, 582, 827, 1296] * 16
        server.complete(prompt, max_tokens=1, cache_salt="metrics")
        before = settled(server)
        usage = server.complete(prompt, max_tokens=1, cache_salt="metrics").usage
        gains = gained(server, before)
        assert gains["vllm:prefix_cache_queries_total"] == 64
        assert gains["vllm:prefix_cache_hits_total"] == usage.prompt_tokens_details.cached_tokens == 48

    def test_a_refused_request_leaves_its_status_and_nothing_else(self, server: Server) -> None:
        before = settled(server)
        server.refusal(prompt="Loop", max_tokens=-1)
        server.refusal(prompt=[1] * 4000)
        after = settled(server)
        labels = {"path": "/v1/completions", "status": "400"}
        refused = [
            now.samples.get(("octavo_http_requests_total", frozenset(labels.items())), 0) for now in (before, after)
        ]
        assert refused[1] - refused[0] == 2
        assert not gained(server, before)


class TestGauges:
    def test_running_and_waiting_rise_and_fall_to_nothing(self, server: Server) -> None:
        before = settled(server)
        with ExitStack() as clients:
            for _ in range(6):
                clients.enter_context(closing(send(server, prompt="Loop", stream=True)))
            server.wait(lambda s: s.num_running == 4 and s.num_waiting == 2)
            now = scrape(server.http)
            assert now["vllm:num_requests_running"] == 4
            assert now["vllm:num_requests_waiting"] == 2
            assert 0 < now["vllm:kv_cache_usage_perc"] <= 1
        server.wait_idle()
        after = settled(server)
        assert [after[name] for name in IDLE] == [0, 0, 0]
        aborts = [now.of("octavo_requests_finished_total", finished_reason="abort") for now in (before, after)]
        assert aborts[1] - aborts[0] == 6
        gains = gained(server, before)
        assert gains["octavo_request_queue_time_seconds_count"] == 4, "two never started"
        assert "octavo_e2e_request_latency_seconds_count" not in gains, "those who leave tell of themselves"

    def test_no_counter_ever_falls(self, server: Server) -> None:
        scrapes, done = [scrape(server.http)], threading.Event()

        def keep_scraping() -> None:
            while not done.is_set():
                scrapes.append(scrape(server.http))

        thread = threading.Thread(target=keep_scraping)
        thread.start()
        try:
            for tokens in (1, 20):
                server.complete("Loop", max_tokens=tokens, n=2)
                with closing(send(server, prompt="Loop", n=3)):
                    server.wait(lambda s: s.num_running == 3)
                server.wait_idle()
        finally:
            done.set()
            thread.join()
        assert len(scrapes) > 3
        kinds = scrapes[0].kinds
        gauges = {name for name, kind in kinds.items() if kind == "gauge"}
        for before, after in itertools.pairwise(scrapes):
            fallen = {name for name, value in before.samples.items() if after.samples[name] < value}
            assert {name for name, _ in fallen} <= gauges

    def test_calls_of_fallbacks(self, chain_model: Path) -> None:
        with running(chain_model, tokenizer="smollm2") as server:
            server.complete("Loop", max_tokens=1)
            told = server.engine.observer.fallback_calls
            assert told == {}, "the CPU has every op of this model"
            server.engine.observer.fell_back({"rope": 7})
            assert scrape(server.http).of("octavo_op_fallback_calls_total", op="rope") == 7

    def test_strangers_make_no_new_lines(self, server: Server) -> None:
        server.http.get("/nothing-of-the-kind")
        before = len(settled(server).samples)
        for index in range(20):
            server.http.get(f"/nothing/{index}", headers={"x-request-id": f"id-{index}"})
            server.complete("Loop", max_tokens=1, extra_headers={"x-request-id": f"id-{index}"}, user=f"u{index}")
        after = settled(server)
        assert len(after.samples) <= before + 1
        assert after.of("octavo_http_requests_total", path="other", status="404") >= 21

    def test_a_path_with_a_name_in_it_counts_under_its_route(self, server: Server) -> None:
        for name in ("tiny", "other", "another"):
            server.http.get(f"/v1/models/{name}")
        after = settled(server)
        assert after.of("octavo_http_requests_total", path="/v1/models/{model_id}", status="200") >= 1
        assert after.of("octavo_http_requests_total", path="/v1/models/{model_id}", status="404") >= 2


def test_tokens_computed_again_after_a_preemption_are_no_hits(chain_model: Path) -> None:
    """vllm#25780."""
    options = {"tokenizer": "smollm2", "num_kv_blocks": 40, "max_model_len": 512, "max_num_seqs": 4}
    with running(chain_model, **options) as server:
        prompts = [[44449, 582, 827, 1296 + index] * 12 for index in range(4)]
        usage = server.complete(prompts, max_tokens=200, ignore_eos=True, temperature=0).usage
        after = settled(server)
    assert after["vllm:num_preemptions_total"] > 0
    assert after["vllm:prefix_cache_queries_total"] == usage.prompt_tokens == 4 * 48
    assert after["vllm:prefix_cache_hits_total"] == 0
    assert after["vllm:generation_tokens_total"] == 800
    assert after["octavo_scheduled_tokens_total"] > usage.prompt_tokens + 800
    assert after["octavo_request_queue_time_seconds_count"] == 4, "a second start is no second wait in the queue"
    assert [after[name] for name in IDLE] == [0, 0, 0]


def test_a_request_that_fails_by_itself_is_counted(tmp_path: Path) -> None:
    """mlx-vlm#1163."""
    model = save_chains(tmp_path)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][RARE] = math.nan
    save_file(weights, model / "model.safetensors")
    with running(model, tokenizer="smollm2") as server:
        before = settled(server)
        response = server.post("completions", prompt=[[44449], [RARE]], max_tokens=3)
        assert response.status_code == 500
        assert server.complete([44449], max_tokens=3, temperature=0).choices[0].text
        after = settled(server)
    errors = [now.of("octavo_requests_finished_total", finished_reason="error") for now in (before, after)]
    assert errors == [0, 1]
    assert after["octavo_num_requests_running"] == after["octavo_num_requests_waiting"] == 0
    assert all(math.isfinite(value) for value in after.samples.values())


def test_adapters_in_the_labels(tmp_path: Path) -> None:
    """As the Gateway API Inference Extension reads them."""
    model = tiny_models.make_llama()
    tiny_models.save(model, tmp_path / "model")
    for index in range(2):
        make_lora(model, ["q_proj"], r=3, seed=index).save(tmp_path / f"a{index}")
    modules = {f"a{index}": str(tmp_path / f"a{index}") for index in range(2)}
    with running(tmp_path / "model", lora_modules=modules, max_loras=1, max_model_len=None) as server:

        def labels() -> dict[str, str]:
            return scrape(server.http).labels("vllm:lora_requests_info")

        assert labels() == {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        body = {"prompt": [5, 6, 7], "stream": True, "max_tokens": 100}
        with closing(send(server, model="a0", **body)):
            server.wait(lambda s: s.num_running == 1)
            with closing(send(server, model="a1", **body)):
                server.wait(lambda s: s.num_waiting == 1)
                assert labels() == {"max_lora": "1", "running_lora_adapters": "a0", "waiting_lora_adapters": "a1"}
        server.wait_idle()
        now = scrape(server.http)
        assert now.labels("vllm:lora_requests_info")["running_lora_adapters"] == ""
        assert abs(now.of("vllm:lora_requests_info", **labels()) - time.time()) < 60


class TestDoor:
    def test_it_needs_no_key_and_stays_open_while_draining(self, chain_model: Path) -> None:
        with running(chain_model, ServeConfig(api_key=("secret",)), tokenizer="smollm2") as server:
            assert server.http.get("/v1/models").status_code == 401
            before = scrape(server.http)
            assert before.of("octavo_http_requests_total", path="/v1/models", status="401") == 1
            assert server._web is not None
            server._web.config.app.state.door.drain()  # type: ignore[union-attr]
            assert server.http.get("/v1/models").status_code == 503
            assert scrape(server.http).of("octavo_http_requests_total", path="/v1/models", status="503") == 1

    def test_the_figures_outlive_the_engine(self, chain_model: Path) -> None:
        with running(chain_model, tokenizer="smollm2") as server:
            engine = max(psutil.Process().children(), key=lambda child: child.create_time())
            with closing(send(server, prompt="Loop", stream=True)):
                server.wait(lambda s: s.num_running == 1)
                os.kill(engine.pid, signal.SIGKILL)
                deadline = time.monotonic() + 5
                while scrape(server.http).of("octavo_requests_finished_total", finished_reason="error") != 1:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            assert scrape(server.http)["octavo_num_requests_running"] == 0
