"""examples/octavo-vllm-alias: every flag of the table leads to one that Octavo has, and its command starts Octavo."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.base.errors import ConfigError
from octavo.core.cli import bench_serve, chat, complete, run_batch, serve
from octavo.core.cli.flags import engine_config, serve_config
from octavo.core.cli.parser import Parser
from tests.fakes import tiny_models
from tests.packaging.isolated import ROOT, Environment

EXAMPLE = ROOT / "examples" / "octavo-vllm-alias"
CLIENTS = {"chat": (chat, complete), "bench": (bench_serve,), "batch": (run_batch,)}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def alias(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package's modules calls and table."""
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    from octavo_vllm_alias import calls, page, table, translate

    return type("Alias", (), {"calls": calls, "page": page, "table": table, "BadCall": translate.BadCall})


def parser_of(command: Any) -> Parser:
    parser = Parser("octavo", None)
    command.add_arguments(parser)
    return parser


def flags_of(*commands: Any) -> dict[str, Any]:
    return {name: act for command in commands for act in parser_of(command)._actions for name in act.option_strings}


def parsed(words: list[str]) -> tuple[Any, Any]:
    """What Octavo makes of the words of `octavo serve`: the configs of engine and server."""
    assert words[0] == "serve"
    args = parser_of(serve).parse(words[1:])
    return engine_config(args), serve_config(args)


# -- the tables ---------------------------------------------------------------------------------------


def test_the_page_is_made_from_the_table(alias: Any) -> None:
    command = "PYTHONPATH=examples/octavo-vllm-alias/src python -m octavo_vllm_alias.page > docs/vllm-flags.md"
    assert (ROOT / "docs" / "vllm-flags.md").read_text() == alias.page.page(), f"run {command}"


def test_every_flag_stands_once_and_says_why(alias: Any) -> None:
    for section in ("serve", *CLIENTS):
        flags = alias.table.load_table(section).flags
        names = [name for flag in flags for name in flag.names]
        assert len(names) == len(set(names))
        assert all(flag.text for flag in flags if flag.fate != alias.table.TAKEN)
    assert len(alias.table.load_table().flags) > 300


@pytest.mark.parametrize("section", ["serve", *CLIENTS])
def test_what_is_taken_leads_to_a_flag_of_octavo_of_the_same_kind(alias: Any, section: str) -> None:
    ours = flags_of(*CLIENTS.get(section, (serve,)))
    for flag in alias.table.load_table(section).flags:
        if flag.fate == alias.table.TAKEN and flag.to.startswith("--"):
            assert flag.to in ours, flag
            assert (flag.kind == "switch") == (ours[flag.to].nargs == 0), flag
            choices = set(ours[flag.to].choices or ()) or set(str(ours[flag.to].metavar or "").split("|"))
            if len(choices) > 1:
                assert set(flag.values.values()) <= choices, flag


def test_no_flag_of_the_same_name_is_forgotten(alias: Any) -> None:
    """What Octavo has and vLLM calls alike is not idle or refused."""
    ours = {name for name in flags_of(serve) if name.startswith("--")} - {"--config", "--model"}
    for flag in alias.table.load_table().flags:
        if flag.fate != alias.table.TAKEN:
            assert not ours & set(flag.names), flag


# -- calls --------------------------------------------------------------------------------------------

PRESETS = {
    "a preset of KServe's LLMInferenceService": (
        "/mnt/models --served-model-name qwen2 --port 8000 --max-model-len 4096 --dtype float16 "
        "--disable-uvicorn-access-log --enable-ssl-refresh --ssl-certfile /tls/tls.crt --ssl-keyfile /tls/tls.key"
    ),
    "the module, as older presets start it": (
        "--model=/mnt/models --port=8080 --disable-log-requests --gpu-memory-utilization=0.95 --swap-space=0 "
        "--max-num-seqs=256 --trust-remote-code false"
    ),
    "a script for a large model": (
        "org/model -tp 2 --max_model_len 128k -q awq_marlin --kv-cache-dtype fp8_e4m3 -O3 --enable-chunked-prefill "
        "--tool-call-parser openai --reasoning-parser openai_gptoss --enable-auto-tool-choice "
        '--no-enable-prefix-caching --compilation-config.mode=3 --limit-mm-per-prompt {"image":0}'
    ),
    "adapters and pages": (
        'm --enable-lora --lora-modules a=/a {"name":"b","path":"/b"} --allowed-origins ["https://x"] --api-key k1 k2 '
        "--long-prefill-token-threshold 0 --data-parallel-size 1 --cpu-offload-gb 0"
    ),
}


@pytest.mark.parametrize("text", PRESETS.values(), ids=PRESETS)
def test_presets_are_calls_that_octavo_takes(alias: Any, text: str) -> None:
    engine, server = parsed(alias.calls.serve(text.split(), {}).words)
    assert engine.model in ("/mnt/models", "org/model", "m")
    assert server.host == "0.0.0.0"


def test_values_are_translated(alias: Any) -> None:
    engine, server = parsed(alias.calls.serve(PRESETS["a script for a large model"].split(), {}).words)
    assert (engine.tensor_parallel_size, engine.max_model_len, engine.quantization) == (2, 128_000, "awq")
    assert (engine.kv_cache_dtype, engine.enable_prefix_caching) == ("fp8", False)
    assert (server.tool_call_parser, server.reasoning_parser) == ("gpt_oss", "gpt_oss")
    engine, server = parsed(alias.calls.serve(PRESETS["adapters and pages"].split(), {}).words)
    assert (engine.enable_lora, dict(engine.lora_modules)) == (True, {"a": "/a", "b": "/b"})
    assert (server.cors_origins, server.api_key) == (("https://x",), ("k1", "k2"))
    words = """m --chat-template t.jinja --default-chat-template-kwargs {"enable_thinking":false,"mode":"x"}"""
    engine, server = parsed(alias.calls.serve(words.split(), {}).words)
    assert engine.chat_template == "t.jinja"
    assert not parsed(alias.calls.serve(["m", "--disable-uvicorn-access-log"], {}).words)[1].access_log
    assert parsed(alias.calls.serve(["m", "--disable-uvicorn-access-log=false"], {}).words)[1].access_log
    assert dict(server.chat_template_kwargs) == {"enable_thinking": "false", "mode": '"x"'}
    text = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@pod@m", "replay_endpoint": "tcp://*:5558"}'
    )
    engine, _ = parsed(alias.calls.serve(["m", "--kv-events-config", text], {}).words)
    assert (engine.kv_events_endpoint, engine.kv_events_replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    assert engine.kv_events_topic == "kv@pod@m"
    off = '{"enable_kv_cache_events": false, "endpoint": "tcp://*:1"}'
    assert parsed(alias.calls.serve(["m", "--kv-events-config", off], {}).words)[0].kv_events_endpoint is None
    words = "m --max-model-len auto --kv-cache-memory-bytes 2G --gpu-memory-utilization 0.99 --host 127.0.0.1"
    engine, server = parsed(alias.calls.serve(words.split(), {}).words)
    assert engine.max_model_len is None
    assert engine.kv_cache_memory_bytes == 2 << 30
    assert engine.kv_memory_fraction == 0.95
    assert server.host == "127.0.0.1"


def test_guesses_by_prompt_lookup_are_taken_and_those_of_a_model_refused(alias: Any) -> None:
    for words in (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'],
        ["--spec-method", "ngram", "--spec-tokens", "5"],
        ["--speculative-model", "[ngram]", "--num-speculative-tokens", "5"],
    ):
        engine, _ = parsed(alias.calls.serve(["m", *words], {}).words)
        assert engine.num_speculative_tokens == 5
    for words in (["--spec-method", "eagle"], ["--speculative-model", "m2"], ["--spec-model", "m2"]):
        with pytest.raises(alias.BadCall):
            alias.calls.serve(["m", *words], {})
    eagle = ["--speculative-config", '{"method": "eagle", "model": "m2", "num_speculative_tokens": 5}']
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        parsed(alias.calls.serve(["m", *eagle], {}).words)


def test_what_does_nothing_is_told_once(alias: Any) -> None:
    notes = alias.calls.serve(["m", "--enforce-eager", "--enforce-eager", "--swap-space", "4"], {}).notes
    assert [note.split()[0] for note in notes] == ["--enforce-eager", "--swap-space"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m --enforce-eagr", "unknown flag '--enforce-eagr'; did you mean '--enforce-eager'?"),
        ("m --gpu-memory-utilisation=0.9", "did you mean '--gpu-memory-utilization'?"),
        ("m --no-max-model-len", "unknown flag"),
        ("m n", "unexpected argument 'n'"),
        ("m --pipeline-parallel-size 2", "is refused: a model is split over its heads only"),
        ("m -pp 2", "-pp is refused"),
        ("m --enable-sleep-mode", "is refused: there is no sleep mode"),
        ("m --load-format dummy", "it may be auto, hf, safetensors"),
        ("m --max-model-len", "--max-model-len has no value"),
        ("m --enable-lora=maybe", "give true or false"),
        ("m --config no-such-file", "No such file"),
        ("m --frobnicate", "see docs/vllm-flags.md"),
    ],
)
def test_a_wrong_call_says_why(alias: Any, text: str, words: str) -> None:
    with pytest.raises(alias.BadCall) as error:
        alias.calls.serve(text.split(), {})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["--no-enable-sleep-mode", "--pipeline-parallel-size=1", "--worker-cls auto", "-dp 1"])
def test_what_asks_for_nothing_is_accepted(alias: Any, text: str) -> None:
    assert alias.calls.serve(["m", *text.split()], {}).words == ["serve", "m", "--host=0.0.0.0"]


def test_a_file_of_flags_gives_way_to_the_command_line(alias: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: org/model\nmax-num-seqs: 8\nport: 1\nenable-lora: true\nenforce_eager: true\n"
        "served-model-name: [a, b]\ncompilation-config: {mode: 3}\n"
    )
    call = alias.calls.serve(["--config", str(path), "--port", "2"], {})
    engine, server = parsed(call.words)
    assert (engine.model, engine.max_num_seqs, engine.enable_lora) == ("org/model", 8, True)
    assert (server.port, server.served_model_name) == (2, ("a", "b"))
    assert len(call.notes) == 2


def test_variables_are_passed_on(alias: Any) -> None:
    environ = {"VLLM_API_KEY": "k", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    assert alias.calls.serve(["m"], environ).variables == {"OCTAVO_API_KEY": "k", "OCTAVO_ALLOW_LORA_UPDATES": "true"}
    assert alias.calls.serve(["m"], {"VLLM_LOGGING_LEVEL": "INFO"}).variables == {"OCTAVO_LOG_LEVEL": "info"}
    assert "OCTAVO_API_KEY" not in alias.calls.serve(["m", "--api-key", "other"], environ).variables
    assert alias.calls.serve(["m", "--hf-token", "t", "--download-dir", "/d"], {}).variables == {
        "HF_TOKEN": "t",
        "HF_HUB_CACHE": "/d",
    }


def test_clients(alias: Any) -> None:
    call = alias.calls.chat(["--url", "http://h:1/v1", "--model-name", "m", "--system-prompt", "s", "-q", "Hi"], {})
    args = parser_of(chat).parse(call.words[1:])
    assert (args.url, args.model, args.system, args.prompt) == ("http://h:1/v1", "m", "s", "Hi")
    call = alias.calls.complete(["--max-tokens", "5", "--stats"], {})
    assert parser_of(complete).parse(call.words[1:]).sampling_max_tokens == "5"
    assert call.notes


def test_a_benchmark(alias: Any) -> None:
    text = (
        "--backend openai-chat --host h --port 9 --model m --dataset-name prefix_repetition "
        "--prefix-repetition-prefix-len 64 --prefix-repetition-num-prefixes 3 --num-prompts 7 --request-rate inf "
        "--goodput ttft:500 e2el:900 --save-result --result-dir d"
        " --result-filename f.json --temperature 0.5 --burstiness 1.0 --num-warmups 1"
    )
    call = alias.calls.bench_serve([*text.split(), "--extra-body", '{"x": [1]}'], {})
    args = parser_of(bench_serve).parse(call.words[2:])
    assert (args.url, args.model, args.endpoint, args.workload) == ("http://h:9", "m", "chat", "shared-prefix")
    assert (args.prefix_tokens, args.num_prefixes, args.num_prompts, args.warmup) == (64, 3, 7, 1)
    assert (args.slo, args.json, args.no_ignore_eos) == (["ttft=500", "e2e=900"], "d/f.json", True)
    assert json.loads(args.body) == {"temperature": 0.5, "x": [1]}
    assert not call.variables
    for refused in (
        "--burstiness 0.5",
        "--dataset-name sonnet",
        "--dataset-name sharegpt",
        "--extra-body x",
        "--header a",
    ):
        with pytest.raises(alias.BadCall):
            alias.calls.bench_serve(refused.split(), {})


def test_a_batch(alias: Any) -> None:
    call = alias.calls.run_batch(
        ["-i", "in", "-o", "out", "--model", "m", "--max-num-seqs", "4", "--enable-metrics"], {}
    )
    args = parser_of(run_batch).parse(call.words[1:])
    assert (args.input_file, args.output_file, args.model, args.max_num_seqs) == ("in", "out", "m", "4")
    with pytest.raises(alias.BadCall, match="listens nowhere"):
        alias.calls.run_batch(["-i", "in", "-o", "out", "--model", "m", "--host", "h"], {})


def test_octavo_says_itself_what_is_wrong_with_a_value(alias: Any) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parsed(alias.calls.serve(["m", "--max-model-len", "many"], {}).words)


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The alias, installed from a wheel."""
    root = tmp_path_factory.mktemp("alias")
    environment = Environment(root)
    shutil.copytree(EXAMPLE, root / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    environment.checked(f"pip wheel -q --no-build-isolation -w {root}/wheels {root}/source")
    environment.checked(f"pip install -q {root}/wheels/*.whl")
    return environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama, without a tokenizer."""
    return tiny_models.save(tiny_models.make_llama(), tmp_path_factory.mktemp("model"))


def started(environment: Environment, *words: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server, its address, and what it said before."""
    process = environment.start(*words)
    try:
        said: list[str] = []
        deadline = time.monotonic() + 120
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            assert time.monotonic() < deadline
            if " on http://" in line:
                yield process, f"http://127.0.0.1:{line.rsplit(':', 1)[1].strip()}", said
                return
        raise AssertionError(f"it ended: {said}")
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("form", ["vllm serve {}", "python -m vllm.entrypoints.openai.api_server --model={}"])
def test_a_server_starts_and_ends_as_the_process_that_was_started(
    environment: Environment, model: Path, form: str
) -> None:
    words = [*form.format(model).split(), "--port", "0", "--served-model-name", "m", "--enforce-eager"]
    words += ["--num-gpu-blocks-override", "64"]
    for process, url, said in started(environment, *words):
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 3
        assert sum("--enforce-eager does nothing here" in line for line in said) == 1
        process.terminate()
        assert process.wait(30) == 0


def test_the_command_says_what_it_is(environment: Environment) -> None:
    assert environment.checked("vllm --version").startswith("octavo ")
    assert "serve, chat, complete" in environment.checked("vllm --help")
    assert "--max-model-len" in environment.checked("vllm serve --help=all")
    for wrong in ("vllm collect-env", "vllm serve m --enforce-eagr", "vllm serve"):
        done = environment.run(wrong)
        assert done.returncode == 2
        assert "error: " in done.stdout
        assert len(done.stdout.splitlines()) == 1
    assert (
        "from octavo import LLM"
        in environment.run("python -c 'from vllm import LLM'; python -c 'import vllm; vllm.LLM'").stdout
    )
