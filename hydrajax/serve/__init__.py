"""Serving: many requests at a time on one model, and OpenAI's interface over HTTP (docs/serving.md).

`batcher` is the engine and knows nothing of HTTP; `app` is the interface and knows nothing of devices.
"""
