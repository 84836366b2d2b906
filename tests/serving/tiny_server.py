"""A model with a tokenizer, its server in a thread, and everybody's client."""

import contextlib
import dataclasses
import socket
import threading
import time

import openai
import tiny
import tokenizers
from tokenizers import pre_tokenizers
import uvicorn

import mod_jax
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.serving import server as server_lib

END = 257  # After bytes and `zz`; ids from 258 on are padding of the model.


def export(folder, length, template, split=None):
  """Exports a model with a chat template, whose tokens are bytes and `zz`.

  The tokenizer first splits texts by the pattern `split`. Returns the folder.
  """
  pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), 'zz']
  ids = {piece: i for i, piece in enumerate(pieces)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [('z', 'z')]))
  tokenizer.add_special_tokens(['<eos>'])
  assert tokenizer.token_to_id('<eos>') == END
  steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
  if split is not None:
    pattern = tokenizers.Regex(split)
    steps.insert(0, pre_tokenizers.Split(pattern, 'isolated'))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'chat_template.jinja').write_text(template)
  model = dataclasses.replace(
    tiny.LM, vocab_size=270, routing=MoDConfig(capacity=0.5)
  )
  data = TextDataConfig(
    length=length, tokenizer='huggingface', tokenizer_path=str(folder)
  )
  mod_jax.export(tiny.run(tiny.experiment(model, data)), folder)
  return folder


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
