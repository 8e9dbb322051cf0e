"""A receiver of OTLP over HTTP on 127.0.0.1. It parses requests with the protobuf messages of OpenTelemetry."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Point = tuple[Any, ...]
"""Name and sorted labels."""


class OtlpReceiver:
    """An HTTP server that keeps path, headers and message of each request, and answers with the status `answer`."""

    def __init__(self, *, failing: range = range(0)) -> None:
        """Answer the requests in `failing`, numbered from 1, with the status 503."""
        self.answer = 200
        self._failing = failing
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.messages: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver.take(self, self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        headers = {name.lower(): value for name, value in request.headers.items()}
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.paths.append(request.path)
        self.headers.append(headers)
        self.messages.append(ExportMetricsServiceRequest.FromString(body))
        request.send_response(503 if len(self.messages) in self._failing else self.answer)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def metrics(self, number: int = -1) -> list[Any]:
        """Return the metrics of one request, by default of the last one."""
        (resource,) = self.messages[number].resource_metrics
        (scope,) = resource.scope_metrics
        assert scope.scope.name == "ftis_node"
        return list(scope.metrics)

    def resource(self) -> dict[str, str]:
        """Return the attributes of the resource in the last request."""
        (resource,) = self.messages[-1].resource_metrics
        return {one.key: one.value.string_value for one in resource.resource.attributes}


def kind_of(metric: Any) -> str:
    """Return `counter` or `gauge`, the kind of a metric in Prometheus. Any other kind fails."""
    which = metric.WhichOneof("data")
    if which == "sum":
        assert metric.sum.is_monotonic
        return "counter"
    assert which == "gauge"
    return "gauge"


def points_of(metric: Any) -> dict[Point, float]:
    """Return the values of a metric by its name and labels."""
    points = getattr(metric, metric.WhichOneof("data")).data_points
    return {
        (metric.name, *sorted((one.key, one.value.string_value) for one in point.attributes)): point.as_double
        for point in points
    }
