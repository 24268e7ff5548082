"""GET /metrics: the server's figures in Prometheus' text form."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from octavo.core.serve.metrics.catalogue import METRICS, Moment
from octavo.core.serve.metrics.text import CONTENT_TYPE, Exposition
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the route to an app."""
    engine = serving.engine
    # One engine runs here; scrapers that know several tell them apart by this label.
    labels = {"model_name": serving.names[0], "engine": "0"}
    exposition = Exposition(METRICS, labels, aliases=serving.settings.vllm_metrics)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """The figures of engine and server, while the engine lives and after it ended."""
        answered = request.app.state.watch.answered
        http = {labels: answered[labels] for labels in sorted(answered)}
        moment = Moment(engine.observer, engine.stats(), engine.config, http, serving.version, serving.started)
        return Response(exposition.write(moment), headers={"content-type": CONTENT_TYPE})
