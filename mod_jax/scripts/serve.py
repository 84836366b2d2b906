"""Serves a language model to clients of OpenAI's API.

  mod-jax-serve --model=runs/mod --port=8000
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "def main(", "stream": true}'

--model is a run, a folder that was exported, or one of Hugging Face. The server
needs the extra `server`: pip install 'mod_jax[server]'.
"""

import os

from absl import flags

from mod_jax import cli
from mod_jax.errors import UserError
from mod_jax.pretrained import load as load_lib
from mod_jax.serving.engine import Engine


def define_flags() -> None:
  """Defines the flags of `main`."""
  flags.DEFINE_string('model', None, 'Directory of the model.')
  flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16'],
    'Of the weights and the computation; by default weights in float32, and the'
    " computation as in the model's config.",
  )
  flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at.')
  flags.DEFINE_integer('port', 8000, 'Port to listen at; 0 for any.')
  flags.DEFINE_integer('slots', 8, 'Requests that are decoded at a time.')
  flags.DEFINE_integer('queue', 64, 'Prompts that may wait for a slot.')
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
    'Tokens of a prompt and its continuation; by default as in training.',
  )


def main(_) -> None:
  """Compiles everything that requests need, and serves until stopped."""
  args = flags.FLAGS
  if not args.model:
    raise UserError('--model is missing: give the directory of a model.')
  try:
    import uvicorn

    from mod_jax.serving import server
  except ImportError as error:
    raise UserError(
      f"the server needs {error.name}: pip install 'mod_jax[server]'."
    ) from error
  run = load_lib.load(args.model, dtype=args.dtype)
  engine = Engine(run, slots=args.slots, max_length=args.max_length)
  hosts = args.allowed_hosts
  if hosts is None:
    local = args.host in ('localhost', '127.0.0.1', '::1')
    hosts = server.LOOPBACK if local else ['*']
  application = server.app(
    engine,
    run,
    name=os.path.basename(os.path.normpath(args.model)),
    queue=args.queue,
    hosts=hosts,
  )
  print('compiling…', flush=True)
  # `server.app` has moved the tokenizer into a process of its own.
  engine.warm_up()
  uvicorn.run(
    application,
    host=args.host,
    port=args.port,
    timeout_graceful_shutdown=server.STOP_LIMIT,
  )


def run() -> None:
  """Entry point of the console command."""
  define_flags()
  cli.run(main)


if __name__ == '__main__':
  run()
