"""Serves language models.

* `slots`, `engine`: continuous batching, on the device and on the host.
* `grammar`, `text_stream`: JSON schemas, and the text of arriving tokens.
* `server`, `requests`, `chat`, `pictures`, `metrics`: the HTTP server.
* `text_process`: the tokenizer and chat template in a process of their own.
"""
