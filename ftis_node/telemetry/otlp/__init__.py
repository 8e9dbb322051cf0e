"""OpenTelemetry metrics, sent to a collector by OTLP over HTTP. Off unless `observe.otlp_endpoint` is set."""
