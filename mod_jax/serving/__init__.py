"""Serves language models.

* `slots`, `engine`: continuous batching, on the device and on the host.
* `grammar`, `text_stream`: JSON schemas, and the text of arriving tokens.
* `server`, `requests`, `chat`, `pictures`, `metrics`: the HTTP server.
* `text_process`: the tokenizer and chat template in a process of their own.

`server` parses a request by `requests` and submits it to the engine, where it
waits. `Engine.advance` gives it a free slot, and returns its text as events.
"""
