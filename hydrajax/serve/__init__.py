"""Continuous batching on one model, and an OpenAI-compatible API over HTTP (docs/serving.md).

`batcher` is the engine and does not depend on HTTP; `app` is the API and does not touch devices.
"""
