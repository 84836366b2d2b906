"""A model's tokenizer and chat template, in processes of their own.

Both come with the model's folder, which may be a stranger's, and both are
programs: a pattern may backtrack for hours, and a template loop, or ask for all
memory there is. Python cannot interrupt them. Rust holds its lock for as long
as it tokenises, so that in a server's own process no other thread would run
meanwhile, and no signal be heard.

So a process loads the tokenizer once and forks for each connection. The kernel
ends a fork that computes for too long or takes too much memory; the others, and
the server, go on. The module is both sides: `TextProcess` is the server's, and
as a script it is the process.
"""

import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
from typing import Any

import jinja2

from mod_jax.data import tokenizers
from mod_jax.errors import UserError
from mod_jax.serving import chat

# Seconds of computing that a job may take. Prompts have as many bytes as a
# request at most; what is decoded at a time is a few tokens.
_SECONDS = {'encode': 2.0, 'encode_chat': 2.0, 'decode_after': 0.25}
_MEMORY = 2**30  # Bytes that a fork may take beyond what it begins with.
_MOST_REPLY = 2**22  # Bytes of an answer.


class TextProcess:
  """The server's side: jobs of `_Texts`, each done by a fork.

  Threads may share it, but for `decode_after`, which is for one of them.
  """

  def __init__(self, kind: str, path: str, *, pretrained: bool):
    """Starts the process, and waits until it has loaded.

    Args:
      kind: of the tokenizer, as is path; see `tokenizers.make`.
      path: beside which a chat template may lie.
      pretrained: whether prompts begin as the tokenizer says that texts do.

    Raises:
      UserError: it cannot load them.
    """
    # A directory that is ours alone: who can connect can have texts read.
    self._folder = tempfile.TemporaryDirectory(prefix='mod_jax-')
    self._address = os.path.join(self._folder.name, 'socket')
    module = 'mod_jax.serving.text_process'
    told = json.dumps([self._address, kind, path, pretrained])
    self._process = subprocess.Popen(
      [sys.executable, '-P', '-m', module, told],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      # Forks can only be made where there is a single thread.
      env=os.environ
      | {'OPENBLAS_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
      | {'RUST_BACKTRACE': '0'},
      # A group of its own, to be ended with all forks, and not by Ctrl-C.
      start_new_session=True,
    )
    self._kept = None  # The connection of `decode_after`.
    with self._process.stdout as stdout:
      ready = stdout.readline()
    if not ready:
      self.stop()
      raise UserError(
        f'the tokenizer at {path!r} cannot be loaded in a process of its own;'
        ' what that process wrote above tells why.'
      )

  @property
  def alive(self) -> bool:
    return self._process.poll() is None

  def stop(self) -> None:
    """Ends all jobs, whatever they do."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self._folder.cleanup()

  def call(self, name: str, *args) -> Any:
    """Returns what a method of `_Texts` does, run by a fork of its own.

    Raises:
      UserError: it refuses, fails, or takes more than it may.
      OSError: the process has ended.
    """
    with self._connect() as stream:
      return _ask(stream, name, args)

  def decode_after(self, before: list[int], ids: list[int]) -> str:
    """Returns what `Tokenizer.decode_after` does, by a fork that is kept.

    Raises:
      UserError: as `call`, as OSError.
    """
    if self._kept is None:
      self._kept = self._connect()
    try:
      return _ask(self._kept, 'decode_after', (before, ids))
    except UserError:
      stream, self._kept = self._kept, None
      with contextlib.suppress(OSError):
        stream.close()
      raise

  def _connect(self):
    with socket.socket(socket.AF_UNIX) as connection:
      connection.connect(self._address)
      return connection.makefile('rwb')


def _ask(stream, name, args):
  reply = b''
  with contextlib.suppress(OSError):  # It may be ended before it has read all.
    stream.write(json.dumps([name, args]).encode() + b'\n')
    stream.flush()
    reply = stream.readline()
  if not reply:
    raise UserError(
      f"the model's tokenizer or chat template took more than {_SECONDS[name]}"
      f' seconds of computing, or {_MEMORY >> 20} MiB: give another text, or'
      ' another model if this happens with any.'
    )
  result, refusal = json.loads(reply)
  if refusal is not None:
    raise UserError(refusal)
  return result


class _Texts:
  """The jobs."""

  def __init__(self, kind: str, path: str, pretrained: bool):
    self._tokenizer = tokenizers.make(kind, path)
    self._encode = self._tokenizer.encode
    if pretrained:
      self._encode = self._tokenizer.encode_prompt
    self._path = pathlib.Path(path) if kind == 'huggingface' else None

  def encode(self, texts: list[str], most: int) -> list[list[int]]:
    """Returns the tokens of prompts, of `most` tokens each at most."""
    return [self._tokens(self._encode, text, most) for text in texts]

  def encode_chat(self, messages: list[dict], most: int) -> list[list[int]]:
    """Returns the tokens of a chat, as those of a single prompt."""
    template = self._path and chat.read_template(self._path)
    if template is None:
      raise UserError(
        'this model has no chat template: use /v1/completions with a prompt.'
      )
    try:
      text = template.render(messages=messages, add_generation_prompt=True)
    except jinja2.TemplateError as error:
      raise UserError(f'messages do not fit the template: {error}') from error
    return [self._tokens(self._tokenizer.encode_chat, text, most)]

  def decode_after(self, before, ids) -> str:
    return self._tokenizer.decode_after(before, ids)

  def _tokens(self, encode, text, most):
    # No tokenizer is asked about what cannot fit.
    size = len(text.encode('utf-8', 'replace'))
    if size > most * int(self._tokenizer.token_bytes.max()):
      raise UserError(
        f'a prompt of {size} bytes does not fit max_length={most} tokens:'
        ' shorten it.'
      )
    tokens = encode(text)
    if len(tokens) > most:
      raise UserError(
        f'a prompt of {len(tokens)} tokens does not fit max_length={most}:'
        ' shorten it.'
      )
    return tokens


class _Handler(socketserver.StreamRequestHandler):
  """A fork: does the jobs of one connection until that is closed."""

  def handle(self):
    _limit_memory()
    with contextlib.suppress(OSError):  # Whoever asked may have left.
      for line in self.rfile:
        self.wfile.write(self._done(*json.loads(line)))

  def _done(self, name, args):
    result = refusal = None
    # At its end comes a signal, which ends the process unless it is handled.
    signal.setitimer(signal.ITIMER_PROF, _SECONDS[name])
    try:
      result = getattr(self.server.texts, name)(*args)
    except UserError as error:
      refusal = f'{error!s:.500}'
    except BaseException as error:  # Of Rust, PanicException is one.
      refusal = f"the model's tokenizer or template failed: {error!r:.500}"
    reply = json.dumps([result, refusal]).encode() + b'\n'
    signal.setitimer(signal.ITIMER_PROF, 0)
    if len(reply) > _MOST_REPLY:
      sys.exit()  # As if it had taken too much memory.
    return reply


class _Server(socketserver.ForkingUnixStreamServer):
  def __init__(self, address, texts):
    self.texts = texts
    self._parent = os.getppid()
    super().__init__(address, _Handler)

  def service_actions(self):
    super().service_actions()
    if os.getppid() != self._parent:
      sys.exit()


def _limit_memory():
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  # Elsewhere than in Linux, systems do not hold to such a limit.
  with contextlib.suppress(FileNotFoundError):
    pages = pathlib.Path('/proc/self/statm').read_text().split()[0]
    most = int(pages) * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
  address, *source = json.loads(sys.argv[1])
  try:
    texts = _Texts(*source)
  except UserError as error:
    sys.exit(f'error: {error}')
  with _Server(address, texts) as server:
    print('ready', flush=True)
    server.serve_forever()


if __name__ == '__main__':
  main()
