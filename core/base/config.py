"""The one typed configuration, from which flags, config-file keys and OCTAVO_* variables are generated.

    defaults  <  --config FILE  <  OCTAVO_* variables  <  flags, or keyword arguments from Python
                                        │
                            EngineConfig(**values)       frozen; validate() at the door
                                        │
                  config.resolve(max_model_len=8192, …)  a new config, once model and device are known

Nothing mutates a config. "auto" and None mean *open*: whoever learns the fact fills it in through `resolve()`, and
what the user set is never overwritten. Add a field here and its flag, key, variable, help and check exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from octavo.core.base.errors import ConfigError
from octavo.core.base.logs import FORMS, LEVELS
from octavo.core.base.options import Kind, option, options_of, read_keys

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "int8")
QUANTIZATIONS = ("int8", "int4", "fp8", "awq", "gptq", "compressed-tensors", "fbgemm_fp8", "bitsandbytes", "mxfp4")
"""What a plain checkpoint can be quantised to, and the formats of quantised ones, which may be named, too."""
POLICIES = ("fcfs", "priority")
POOLINGS = ("mean", "cls", "last")
MAX_BLOCK_SIZE = 256
TOOL_CALL_PARSERS = (
    "auto", "none", "gpt_oss", "deepseek_v3", "qwen3_coder", "mistral", "hermes", "pythonic", "llama3_json", "gemma",
)  # fmt: skip
REASONING_PARSERS = ("auto", "none", "gpt_oss", "mistral", "deepseek_r1", "qwen3", "granite")
"""How models write calls and reasoning; core/serve/tools/registry.py reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. Each field's meaning stands in its help text."""

    model: str = option(
        "", "a directory, a .gguf file, a Hugging Face id, or a demo name (smollm2, gemma3-270m, minilm)"
    )
    tokenizer: str | None = option(None, "another directory, file or id to take the tokenizer from")
    revision: str | None = option(None, "the branch, tag or commit of a Hugging Face id")
    chat_template: str | None = option(None, "a jinja file with the chat template, in place of the model's own")

    backend: str = option("auto", "the device backend; auto takes the best that is available and says which")
    backend_options: Mapping[str, str] = option(
        {}, "an option of the backend's own; may be repeated", kind=Kind.MAP, flag="--backend-option"
    )
    strict_backend: bool = option(False, "refuse to start where an op would fall back to plain torch", kind=Kind.BOOL)
    num_threads: int | None = option(
        None, "host threads that compute, over all devices (default: the cores this process may use)",
        kind=Kind.INT, low=1, high=1024,
    )  # fmt: skip
    tensor_parallel_size: int = option(
        1, "devices that one model is split over, a process for each", kind=Kind.INT, low=1, high=1024
    )
    expert_parallel: bool = option(
        False, "give each of these devices whole experts, in place of a part of every expert", kind=Kind.BOOL
    )

    pooling: str | None = option(
        None, "which rows become a text's vector, for an embedding model whose files do not say", choices=POOLINGS
    )

    dtype: str = option("auto", "how weights are stored; auto keeps the checkpoint's type", choices=DTYPES)
    quantization: str | None = option(
        None, "quantise a plain checkpoint while it loads: int8, int4 or fp8; a quantised one needs nothing",
        choices=QUANTIZATIONS,
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "the most tokens of a prompt and its reply (default: the model's own limit)", kind=Kind.INT, low=1
    )

    enable_lora: bool = option(
        False, "serve low-rank adapters; on by itself where lora_modules names some", kind=Kind.BOOL
    )
    lora_modules: Mapping[str, str] = option(
        {}, "an adapter to load at start, NAME=PATH of a PEFT directory; may be repeated", kind=Kind.MAP
    )
    max_loras: int = option(4, "the most adapters in one batch", kind=Kind.INT, low=1, high=1024)
    max_lora_rank: int | None = option(
        None, "the largest rank of an adapter (default: the largest of lora_modules, 16 at least)",
        kind=Kind.INT, low=1, high=4096,
    )  # fmt: skip
    max_cpu_loras: int = option(
        64, "adapters kept in the host's memory; others are read again (a model on several devices keeps all)",
        kind=Kind.INT, low=1,
    )  # fmt: skip

    block_size: int = option(16, "tokens in one KV-cache block", kind=Kind.INT, low=1, high=MAX_BLOCK_SIZE)
    kv_cache_dtype: str = option(
        "auto", "how keys and values are stored; fp8 and int8 take a quarter of float32's memory",
        choices=KV_CACHE_DTYPES,
    )  # fmt: skip
    num_kv_blocks: int | None = option(None, "blocks in the KV cache, instead of a size", kind=Kind.INT, low=1)
    kv_cache_memory_bytes: int | None = option(None, "the KV cache's size, such as 2GiB", kind=Kind.BYTES, low=1)
    kv_memory_fraction: float | None = option(
        None, "share of the free memory for the KV cache where no size is given (default: what suits the device)",
        kind=Kind.FLOAT, low=0.01, high=0.95,
    )  # fmt: skip
    enable_prefix_caching: bool = option(True, "keep computed blocks and reuse equal prefixes", kind=Kind.BOOL)

    kv_events_endpoint: str | None = option(
        None, "where to tell routers which blocks are cached, such as tcp://*:5557; tcp://HOST:PORT connects instead"
    )
    kv_events_replay_endpoint: str | None = option(
        None, "where they may ask again for what they missed, such as tcp://*:5558"
    )
    kv_events_topic: str = option("", "the topic of these messages; llm-d reads kv@POD@MODEL")
    kv_events_buffer_steps: int = option(
        10_000, "messages that can be asked for again", kind=Kind.INT, low=1, high=1_000_000
    )
    kv_events_hwm: int = option(
        100_000, "messages that may wait for one slow router; it loses those beyond",
        kind=Kind.INT, low=1, high=2**31 - 1,
    )  # fmt: skip

    max_num_seqs: int = option(256, "the most requests that run at once", kind=Kind.INT, low=1, high=65536)
    max_num_batched_tokens: int | None = option(
        None, "the most tokens computed in one step (default: what suits the device)", kind=Kind.INT, low=1
    )
    long_prefill_threshold: int | None = option(
        None, "the most prompt tokens of one request in one step (default: no limit of its own)", kind=Kind.INT, low=1
    )
    scheduling_policy: str = option("fcfs", "which waiting request is next", choices=POLICIES)

    num_speculative_tokens: int = option(
        0, "tokens of a request guessed from its own text and computed at once; replies stay the same; 0: none",
        kind=Kind.INT, low=0, high=64,
    )  # fmt: skip
    grammar_timeout_seconds: float = option(
        10.0, "how long the form of a structured reply may take to compile", kind=Kind.FLOAT, low=0.001, high=3600.0
    )  # fmt: skip
    deterministic: bool = option(
        False, "demand that a reply never depends on what shares its batch, or refuse to start",
        kind=Kind.BOOL,
    )  # fmt: skip
    seed: int = option(0, "draws the seeds of requests that bring none", kind=Kind.INT, low=0, high=2**63 - 1)
    progress: bool = option(True, "show a progress bar while a model loads", kind=Kind.BOOL)

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may name a low-rank adapter."""
        return self.enable_lora or bool(self.lora_modules)

    @classmethod
    def from_keys(cls, values: Mapping[str, object], source: str = "config") -> Self:
        """A validated config from names and values as a user writes them.

        Raises:
            ConfigError: an unknown name (the nearest one is offered) or a wrong value.
        """
        config = cls(**read_keys(values, options_of(cls), source))
        config.validate()
        return config

    def validate(self) -> None:
        """Check every field, and the fields against each other.

        Raises:
            ConfigError: naming the field, its limit and the fix.
        """
        _check_fields(self)
        if not self.model.strip():
            raise ConfigError(
                "model is missing; give a directory, a .gguf file, a Hugging Face id or a demo name such as smollm2",
                field="model",
            )
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_kv_blocks and kv_cache_memory_bytes both say how large the KV cache is; give one of them",
                field="num_kv_blocks",
            )
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise ConfigError(
                "kv_events_replay_endpoint is given without kv_events_endpoint; give that too",
                field="kv_events_replay_endpoint",
            )
        if self.kv_events_endpoint is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_endpoint tells what the prefix cache holds; leave enable_prefix_caching on",
                field="kv_events_endpoint",
            )

    def resolve(self, **facts: Any) -> Self:
        """A new config in which `facts` fill the fields that are still open (None or "auto").

        Fields that the user set keep their values. The result is validated.
        """
        known = options_of(type(self))
        open_facts = {name: value for name, value in facts.items() if getattr(self, name) in (None, "auto")}
        for name, value in open_facts.items():
            open_facts[name] = known[name].convert(value)
        config = dataclasses.replace(self, **open_facts)
        config.validate()
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where and under which name the HTTP server answers."""

    host: str = option("127.0.0.1", "the address to listen on")
    port: int = option(8000, "the port to listen on; 0 takes a free one", kind=Kind.INT, low=0, high=65535)
    served_model_name: tuple[str, ...] = option(
        (), "a name of the model in the API; may be repeated (default: as MODEL was given)", kind=Kind.LIST
    )
    api_key: tuple[str, ...] = option(
        (), "a key that every request but those of health must bring; may be repeated", kind=Kind.LIST
    )
    api_key_file: str | None = option(None, "a file of such keys, one a line; empty lines and # lines are passed over")
    cors_origins: tuple[str, ...] = option(
        (), "a web origin whose pages may call the API, or *; may be repeated", kind=Kind.LIST
    )
    ssl_certfile: str | None = option(None, "a PEM file with the certificate chain; the server then speaks HTTPS")
    ssl_keyfile: str | None = option(None, "the PEM file of the certificate's key (default: in the same file)")
    max_body_bytes: int = option(
        32 << 20, "the largest body of a request, such as 32MiB", kind=Kind.BYTES, low=1024, high=1 << 32
    )
    read_timeout_seconds: float = option(
        60.0, "how long a request may take to arrive, or to bring 64 KiB more of itself", kind=Kind.FLOAT, low=1,
        high=86400,
    )  # fmt: skip
    max_queued_requests: int = option(
        4096, "requests that may wait for their start; more are told to come back (429)", kind=Kind.INT, low=1
    )
    drain_seconds: float = option(
        10.0, "how long replies in flight may take after SIGTERM or an interrupt", kind=Kind.FLOAT, low=0, high=86400
    )
    stall_seconds: float = option(
        120.0, "how long a step may take before /health turns red", kind=Kind.FLOAT, low=1, high=86400
    )
    tool_call_parser: str = option(
        "auto", "how the model writes calls of tools; auto asks its chat template, none leaves them in the text",
        choices=TOOL_CALL_PARSERS,
    )  # fmt: skip
    reasoning_parser: str = option(
        "auto", "how the model marks its reasoning; auto asks its chat template, none leaves it in the text",
        choices=REASONING_PARSERS,
    )  # fmt: skip
    chat_template_kwargs: Mapping[str, str] = option(
        {}, "a variable of the chat template where a request gives none, NAME=VALUE in JSON or a text; may be repeated",
        kind=Kind.MAP, flag="--chat-template-kwarg",
    )  # fmt: skip
    access_log: bool = option(True, "log a line for each request, never what it says", kind=Kind.BOOL)
    log_level: str = option("info", "what is logged, from this on", choices=LEVELS)
    log_format: str = option("text", "log lines for people, or one JSON object a line", choices=FORMS)
    otlp_traces_endpoint: str | None = option(
        None, "the URL that spans go to, OTLP over HTTP, such as http://localhost:4318/v1/traces (the extra tracing)"
    )
    vllm_metrics: bool = option(
        True, "give /metrics under vLLM's names as well, which gateways and autoscalers read", kind=Kind.BOOL
    )
    page: bool = option(True, "serve a page at / to chat with the model and to watch the engine", kind=Kind.BOOL)
    strict_api: bool = option(
        False, "refuse a request with a field that nobody knows, in place of a warning header", kind=Kind.BOOL
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring a chat template of their own, which runs in a sandbox", kind=Kind.BOOL
    )
    allow_lora_updates: bool = option(
        False, "let clients load and unload adapters, from any path that the server can read", kind=Kind.BOOL
    )

    def validate(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its limit and the fix.
        """
        _check_fields(self)
        if not self.host:
            raise ConfigError("host is empty; give 0.0.0.0 to listen on all addresses", field="host")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name has an empty name; leave it out", field="served_model_name")


def _check_fields(config: EngineConfig | ServeConfig) -> None:
    """Each value against its own option: type, choices and range."""
    for name, item in options_of(type(config)).items():
        value = getattr(config, name)
        if (wanted := item.convert(value)) != value:
            raise ConfigError(f"{name} is {value!r}; give {wanted!r}", field=name)
