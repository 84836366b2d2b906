"""A server in a thread, and the client that everybody has."""

import contextlib
import socket
import threading
import time

import openai
import uvicorn

from mod_jax.serving import server as server_lib


def client_of(port, key='none'):
  return openai.OpenAI(
    base_url=f'http://127.0.0.1:{port}/v1',
    api_key=key,
    max_retries=0,
    timeout=60,
  )


@contextlib.contextmanager
def serving(engine, run, queue=4, **kwargs):
  """Yields a client of a server in a thread."""
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    port = sock.getsockname()[1]
  app = server_lib.app(engine, run, name='tiny', queue=queue, **kwargs)
  settings = uvicorn.Config(
    app,
    port=port,
    log_level='warning',
    timeout_graceful_shutdown=server_lib.STOP_LIMIT,
  )
  server = uvicorn.Server(settings)
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  while not server.started:
    time.sleep(0.01)
  try:
    yield client_of(port)
  finally:
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()
