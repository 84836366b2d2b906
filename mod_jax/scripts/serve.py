"""Serves a language model to clients of OpenAI's API.

  mod-jax-serve --model=runs/mod --port=8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "def main(", "stream": true}'

--model is a run, a folder that was exported, or one of Hugging Face. The server
needs the extra `server`, and JSON schemas the extra `json`: pip install
'mod_jax[server,json]'. docs/server.md has all parameters.
"""

import os

from absl import flags
import jax

from mod_jax import cli, paths
from mod_jax.errors import UserError
from mod_jax.pretrained import load as load_lib
from mod_jax.serving.engine import Engine

_KEY = 'MOD_JAX_API_KEY'
# Directory of JAX's compilation cache, for faster starts.
_PROGRAMS = '~/.cache/mod_jax/programs'


def define_flags() -> None:
  flags.DEFINE_string('model', None, 'Directory of the model.', required=True)
  cli.define_dtype()
  flags.DEFINE_string(
    *('rule', None),
    'Causal rule of a routed model, of those that it was trained for.',
  )
  flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
  flags.DEFINE_integer(
    *('port', 8000, 'Port to listen at; 0 for any.'),
    lower_bound=0,
    upper_bound=65535,
  )
  flags.DEFINE_integer('slots', 8, 'Requests that are decoded at a time.')
  flags.DEFINE_integer(
    'queue', 64, 'Prompts that may wait for a slot.', lower_bound=0
  )
  flags.DEFINE_list(
    'allowed_hosts',
    None,
    'Names that requests may be sent to, such as example.com or *.example.com;'
    ' * for any. By default those of this machine alone, and any where --host'
    ' is no address of this machine alone.',
  )
  flags.DEFINE_integer(
    'max_length',
    None,
    'Tokens of a prompt and its continuation, besides those of pictures; by'
    " default the run's length of training, and 2,048 at most of a published"
    ' model.',
  )
  flags.DEFINE_integer(
    'pictures',
    None,
    'Most pictures of a request, of a model that sees; by default as many as in'
    ' training, and 1 of a published model.',
  )
  flags.DEFINE_string(
    'api_key',
    None,
    'Key that requests must have, as in Authorization: Bearer KEY; by default'
    f' that of the environment variable {_KEY}, which other users of the'
    ' machine cannot see.',
  )
  flags.DEFINE_integer(
    'drain_seconds',
    10,
    'Seconds that requests may go on after SIGTERM.',
    lower_bound=0,
  )


def main(_) -> None:
  """Compiles everything that requests need, and serves until stopped."""
  args = flags.FLAGS
  try:
    import uvicorn

    from mod_jax.serving import server
  except ImportError as error:
    raise UserError(
      f"the server needs {error.name}: pip install 'mod_jax[server]'."
    ) from error
  key = args.api_key
  if key is None:
    key = os.environ.get(_KEY)
  if key == '':
    raise UserError(
      f'the key is empty: set --api_key or {_KEY}, or leave out both for a'
      ' server that asks for none.'
    )
  _keep_programs()
  run = load_lib.load(args.model, dtype=args.dtype)
  engine = Engine(
    run,
    slots=args.slots,
    max_length=args.max_length,
    pictures=args.pictures,
    mode=args.rule,
  )
  hosts = args.allowed_hosts
  if hosts is None:
    local = args.host in ('localhost', '127.0.0.1', '::1')
    hosts = server.LOOPBACK if local else ['*']
  application = server.app(
    engine,
    run,
    name=os.path.basename(os.path.abspath(args.model)),
    queue=args.queue,
    hosts=hosts,
    key=key,
  )
  # `server.app` has moved the tokenizer into a process of its own.
  engine.warm_up(lambda what: print(f'compiling {what}', flush=True))
  uvicorn.run(
    application,
    host=args.host,
    port=args.port,
    timeout_graceful_shutdown=args.drain_seconds,
  )


def _keep_programs() -> None:
  """Sets JAX's compilation cache to `_PROGRAMS`, unless one is configured."""
  if jax.config.jax_compilation_cache_dir is not None:
    return
  folder = paths.expand(_PROGRAMS)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    print(f'compiled programs are not kept: {error}', flush=True)
    return
  jax.config.update('jax_compilation_cache_dir', os.fspath(folder))


def run() -> None:
  """Entry point of the console command."""
  define_flags()
  cli.run(main)


if __name__ == '__main__':
  run()
