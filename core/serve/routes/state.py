"""GET /engine/state: the scheduler's figures and a picture of the KV pool, for those who want to see it work.

The engine process is asked, and answers between two steps; while nobody asks, it costs nothing. The answer says nothing
of prompts or replies.
"""

from __future__ import annotations

import dataclasses
import time

from fastapi import FastAPI, Response

from octavo.core.serve.failures import json_response
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the route to an app."""
    engine = serving.engine

    @app.get("/engine/state")
    async def state() -> Response:
        """Requests, totals since the start, and `kv`: cells f free, c cached, u in use, s shared."""
        read = await engine.read_state()
        stats = read.stats
        return json_response(
            {
                "model": serving.names[0],
                "max_model_len": engine.max_model_len,
                "uptime_seconds": max(0.0, round(time.time() - serving.started, 3)),
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "steps": stats.steps,
                "generated_tokens": stats.generated_tokens,
                "preemptions": stats.preemptions,
                "prefix_query_tokens": stats.prefix_query_tokens,
                "prefix_hit_tokens": stats.prefix_hit_tokens,
                "kv": dataclasses.asdict(read.kv),
            }
        )
