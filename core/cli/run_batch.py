"""Answer a batch file of OpenAI's form with a model, without a server.

Every line is answered or told what is wrong with it. The output is there when all of it is; until then, and after an
interrupt, what is done stands beside it in FILE.part, and --resume goes on from there. Exit code 0 says that every line
has its answer, which may be an error; the last line printed tells how many.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.cli.flags import add_config_flags, add_model, engine_config, engine_keywords, serve_config
from octavo.core.cli.interrupt import INTERRUPTED, quiet_imports

if TYPE_CHECKING:
    from octavo.core.serve.batch.output import BatchOutput
    from octavo.core.serve.batch.run import Counts

PROGRESS_SECONDS = 10.0
NO_LIMIT = 2**31 - 1

NETWORK = (
    "host", "port", "api_key", "api_key_file", "cors_origins", "ssl_certfile", "ssl_keyfile", "read_timeout_seconds",
    "max_queued_requests", "drain_seconds", "stall_seconds", "allow_lora_updates", "access_log", "log_level",
    "log_format", "vllm_metrics", "otlp_traces_endpoint",
)  # fmt: skip
"""Settings of the server that mean nothing without one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, MODEL, and every setting of the engine and of what the server does with a request."""
    add_model(parser, required=False)
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="the requests, one a line")
    parser.add_argument("-o", "--output-file", metavar="FILE", required=True, help="the answers, one a line")
    parser.add_argument("--resume", action="store_true", help="go on from what an interrupted run has left")
    parser.add_argument(
        "--max-in-flight", metavar="N", type=int, help="requests at once (default: twice --max-num-seqs)"
    )
    add_config_flags(parser, ServeConfig, skip=NETWORK)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Answer the file. 130 after an interrupt."""
    engine, server = engine_config(args), serve_config(args)
    # The door is our own: nobody needs a key, the queue is as long as what is in flight, and the output is the log.
    server = dataclasses.replace(
        server, api_key=(), api_key_file=None, max_queued_requests=NO_LIMIT, access_log=False, otlp_traces_endpoint=None
    )
    in_flight = 2 * engine.max_num_seqs if args.max_in_flight is None else args.max_in_flight
    if in_flight < 1:
        raise ConfigError(f"--max-in-flight is {in_flight}; give at least 1", field="max_in_flight")
    with quiet_imports():
        _check_extra()
        from octavo.core.serve.batch.output import BatchOutput
        from octavo.core.serve.batch.run import Counts

    with _open_input(args.input_file, args.output_file) as source:
        output, counts = BatchOutput(Path(args.output_file), resume=args.resume), Counts()
        kept, started = len(output.done), time.monotonic()
        try:
            asyncio.run(_run(engine, server, source, output, counts, in_flight))
            output.finish()
        except (KeyboardInterrupt, asyncio.CancelledError):
            told = f"{kept + counts.answered} answers are in {output.part_path}; go on from them with --resume"
            print(f"octavo: interrupted; {told}", file=sys.stderr)
            return INTERRUPTED
        finally:
            output.close()
    before = f" and {kept} before" if kept else ""
    seconds = time.monotonic() - started
    told = f"{counts.answered} answered{before}, {counts.failed} refused or failed, in {seconds:.1f} s"
    print(f"octavo: {told}: {args.output_file}", file=sys.stderr)
    return 0


async def _run(
    config: EngineConfig, server: ServeConfig, source: BinaryIO, output: BatchOutput, counts: Counts, in_flight: int
) -> None:
    from octavo import AsyncEngine, __version__
    from octavo.core.serve.api import create_app
    from octavo.core.serve.batch.lines import URLS, read_jobs
    from octavo.core.serve.batch.run import run_batch

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # SIGINT does so by itself
    async with AsyncEngine(**engine_keywords(config)) as engine:
        app = create_app(engine, server.served_model_name or (config.model,), __version__, server)
        paths = {getattr(route, "path", "") for route in app.routes}
        jobs = read_jobs(source, [url for url in URLS if url in paths], server.max_body_bytes, output.done)
        telling = asyncio.create_task(_tell(counts)) if config.progress else None
        try:
            await run_batch(
                app, jobs, output, counts, max_in_flight=in_flight, cause_of_end=lambda: engine.cause_of_end
            )
        finally:
            if telling is not None:
                telling.cancel()


async def _tell(counts: Counts) -> None:
    """How far it is, now and then."""
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        print(f"octavo: {counts.answered} answered, {counts.failed} refused or failed", file=sys.stderr)


def _open_input(path: str, output_path: str) -> BinaryIO:
    if Path(path).resolve() == Path(output_path).resolve():
        raise ConfigError("the input and the output are the same file; name another --output-file", field="output_file")
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"--input-file {path}: {error.strerror}", field="input_file") from error


def _check_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError("octavo run-batch needs the extra serve; pip install 'octavo[serve]'") from error
