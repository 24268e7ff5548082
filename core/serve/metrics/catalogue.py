"""Every metric of GET /metrics: its names, its meaning, where its value comes from.

Names that begin with `vllm:` are those that llm-d, KServe and the Gateway API Inference Extension read: the endpoint
picker takes num_requests_waiting, num_requests_running, kv_cache_usage_perc, the labels block_size and num_gpu_blocks
of cache_config_info and the labels of lora_requests_info, whose value is the time it was written at; autoscalers take
the sums and counts of the histograms. docs/metrics.md is made from this table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.core.base.config import EngineConfig
from octavo.core.base.metrics import Histogram, SchedulerStats
from octavo.core.engine.observer import Figures, Observer
from octavo.core.serve.metrics.text import Labels, Metric

VLLM = "vllm:"
ADAPTER_LABELS = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
CACHE_LABELS = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")


@dataclass(frozen=True, slots=True)
class Moment:
    """What a scrape reads, as it is now.

    Attributes:
        observer, stats, config: the engine's.
        http: (path, status) -> requests answered so.
        version, started: Octavo's version, and the Unix time of the start.
    """

    observer: Observer
    stats: SchedulerStats
    config: EngineConfig
    http: Mapping[Labels, int]
    version: str
    started: int

    @property
    def figures(self) -> Figures:
        """The front's totals."""
        return self.observer.figures


def _adapters(moment: Moment) -> Mapping[Labels, float] | None:
    if not moment.config.serves_adapters:
        return None
    running, waiting = moment.observer.adapters_running, moment.observer.adapters_waiting
    return {(",".join(sorted(running)), ",".join(sorted(waiting)), str(moment.config.max_loras)): time.time()}


def _cache(moment: Moment) -> Mapping[Labels, float]:
    config = moment.config
    blocks = str(moment.stats.kv_blocks_total)
    return {(str(config.block_size), blocks, config.kv_cache_dtype, str(config.enable_prefix_caching)): 1}


def _seconds(name: str, help_: str, read: Callable[[Figures], Histogram], aliases: Sequence[str]) -> Metric[Moment]:
    return Metric(
        name=f"octavo_{name}_seconds",
        kind="histogram",
        help=help_,
        read=lambda moment: read(moment.figures),
        aliases=[f"{VLLM}{alias}_seconds" for alias in aliases],
    )


def _tokens(name: str, help_: str, read: Callable[[Figures], Histogram], alias: str) -> Metric[Moment]:
    return Metric(
        name=f"octavo_{name}_tokens",
        kind="histogram",
        help=help_,
        read=lambda moment: read(moment.figures),
        aliases=[f"{VLLM}{alias}"],
    )


def _total(name: str, help_: str, read: Callable[[Moment], float], alias: str | None = None) -> Metric[Moment]:
    aliases = [] if alias is None else [f"{VLLM}{alias}_total"]
    return Metric(name=f"octavo_{name}_total", kind="counter", help=help_, read=read, aliases=aliases)


def _gauge(name: str, help_: str, read: Callable[[Moment], float], *aliases: str) -> Metric[Moment]:
    names = [VLLM + alias for alias in aliases]
    return Metric(name=f"octavo_{name}", kind="gauge", help=help_, read=read, aliases=names)


METRICS: Sequence[Metric[Moment]] = (
    _gauge("num_requests_running", "Choices that hold a place in the batch.",
           lambda m: m.observer.num_running, "num_requests_running"),
    _gauge("num_requests_waiting", "Choices that wait for a place, preempted ones among them.",
           lambda m: m.observer.num_waiting, "num_requests_waiting"),
    _gauge("kv_cache_usage", "Share of the KV cache's blocks that live requests hold, from 0 to 1.",
           lambda m: m.stats.kv_usage, "kv_cache_usage_perc", "gpu_cache_usage_perc"),
    _gauge("kv_blocks", "Blocks of the KV cache.", lambda m: m.stats.kv_blocks_total),
    _gauge("kv_blocks_used", "Blocks that live requests hold.", lambda m: m.stats.kv_blocks_used),
    _gauge("kv_blocks_cached", "Free blocks whose content a prefix can still hit.",
           lambda m: m.stats.kv_blocks_cached),
    Metric(name="octavo_cache_config_info", kind="gauge", help="The KV cache, in its labels; always 1.",
           labels=CACHE_LABELS, read=_cache, aliases=[f"{VLLM}cache_config_info"]),
    Metric(name="octavo_lora_requests_info", kind="gauge",
           help="Adapters with running and with waiting requests, in its labels; the Unix time of the scrape.",
           labels=ADAPTER_LABELS, read=_adapters, aliases=[f"{VLLM}lora_requests_info"]),
    Metric(name="octavo_requests_finished_total", kind="counter",
           help="Choices that ended, by reason: stop, length, abort (the client left) or error.",
           labels=("finished_reason",), read=lambda m: {(r.value,): n for r, n in m.figures.finished.items()},
           aliases=[f"{VLLM}request_success_total"]),
    Metric(name="octavo_http_requests_total", kind="counter",
           help="Requests answered, by route and status; 499: the client left.",
           labels=("path", "status"), read=lambda m: m.http),
    _total("prompt_tokens", "Tokens of prompts that were computed, each prompt once.",
           lambda m: m.figures.prompt_tokens, "prompt_tokens"),
    _total("generation_tokens", "Tokens of replies.", lambda m: m.figures.generated_tokens, "generation_tokens"),
    _total("prefix_cache_queries", "Prompt tokens looked for in the prefix cache, at first starts only.",
           lambda m: m.stats.prefix_query_tokens, "prefix_cache_queries"),
    _total("prefix_cache_hits", "Those of them that were found.",
           lambda m: m.stats.prefix_hit_tokens, "prefix_cache_hits"),
    _total("preemptions", "Times a running choice lost its blocks and had to wait again.",
           lambda m: m.stats.preemptions, "num_preemptions"),
    _total("steps", "Steps of the engine.", lambda m: m.stats.steps),
    _total("scheduled_tokens", "Tokens computed, those computed again after a preemption too.",
           lambda m: m.stats.scheduled_tokens),
    _total("draft_tokens", "Tokens guessed ahead and computed.",
           lambda m: m.stats.drafted_tokens, "spec_decode_num_draft_tokens"),
    _total("accepted_draft_tokens", "Guesses that held.",
           lambda m: m.stats.accepted_tokens, "spec_decode_num_accepted_tokens"),
    Metric(name="octavo_op_fallback_calls_total", kind="counter",
           help="Calls of ops that the backend lacks and plain torch computes, told every few seconds.",
           labels=("op",), read=lambda m: {(op,): calls for op, calls in sorted(m.observer.fallback_calls.items())}),
    _seconds("time_to_first_token", "From a choice's submission to its first token.",
             lambda f: f.first_token_seconds, ["time_to_first_token"]),
    _seconds("inter_token_latency", "Between two tokens of a choice that follow each other.",
             lambda f: f.between_tokens_seconds, ["inter_token_latency", "time_per_output_token"]),
    _seconds("request_time_per_output_token", "A choice's mean time per token behind the first.",
             lambda f: f.per_token_seconds, ["request_time_per_output_token"]),
    _seconds("e2e_request_latency", "From a choice's submission to its end.",
             lambda f: f.request_seconds, ["e2e_request_latency"]),
    _seconds("request_queue_time", "From a choice's submission to its first start.",
             lambda f: f.queue_seconds, ["request_queue_time"]),
    _seconds("request_prefill_time", "From a choice's first start to its first token.",
             lambda f: f.prefill_seconds, ["request_prefill_time"]),
    _seconds("request_decode_time", "From a choice's first token to its last.",
             lambda f: f.decode_seconds, ["request_decode_time"]),
    _seconds("request_inference_time", "From a choice's first start to its end.",
             lambda f: f.inference_seconds, ["request_inference_time"]),
    _tokens("request_prompt", "Prompt tokens of each choice that ended by itself.",
            lambda f: f.request_prompt_tokens, "request_prompt_tokens"),
    _tokens("request_generation", "Reply tokens of each choice that ended by itself.",
            lambda f: f.request_generated_tokens, "request_generation_tokens"),
    _tokens("step", "Tokens computed in one step.", lambda f: f.step_tokens, "iteration_tokens_total"),
    Metric(name="octavo_build_info", kind="gauge", help="Octavo's version, in its label; always 1.",
           labels=("version",), read=lambda m: {(m.version,): 1}),
    _gauge("start_time_seconds", "Unix time of the server's start.", lambda m: m.started),
)  # fmt: skip
"""In the order of the text."""
