"""Runs a model's tokenizer and chat template in processes of their own.

Both come with the model's folder, which may be untrusted, and both are
programs: a regular expression may backtrack for hours, and a template may loop
or exhaust the memory. Python cannot interrupt them: the tokenizer's Rust code
holds the GIL while it runs, so in the server's own process no other thread
would run and no signal be handled. Pictures, which come with requests, are
decoded here for the same reason.

So a separate process loads the tokenizer once and forks for each connection.
The kernel kills a fork that exceeds its CPU time or memory; the other forks and
the server go on. This module has both sides: `TextProcess` is the server's, and
run as a script, the module is the separate process.
"""

import base64
import contextlib
import functools
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

from mod_jax.data import image_folder, resize, tokenizers
from mod_jax.errors import UserError
from mod_jax.serving import chat, grammar

# CPU seconds that each job may take, and its description in the message that it
# exceeded its limits. Prompts are limited by the size of a request;
# `decode_after` gets only a few tokens at a time.
_JOBS = {
  'encode': (2.0, "the model's tokenizer on this text"),
  'encode_chat': (2.0, "the model's chat template or tokenizer on this chat"),
  'encode_parts': (2.0, "the model's tokenizer on this chat"),
  'fit_picture': (2.0, 'decoding this picture'),
  'check_schema': (2.0, 'compiling this JSON schema'),
  'decode_after': (0.25, "the model's tokenizer on these tokens"),
}
_WALL = 10  # Limit of elapsed time, as a multiple of the CPU seconds.
_MEMORY = 2**30  # Bytes that a fork may allocate beyond its initial size.
_MOST_REPLY = 2**22  # Largest reply, in bytes.
MAX_PIXELS = 2**25  # Of a picture; decoded, these take 100 MB.


class TextProcess:
  """The server's side: calls methods of `_Texts` in forks of the process.

  Threads may share the object, but only one of them may call `decode_after`.
  """

  def __init__(self, kind: str, path: str, *, pretrained: bool):
    """Starts the process, and waits until it has loaded the tokenizer.

    `kind` and `path` are those of the tokenizer, whose folder may have a chat
    template. If `pretrained`, prompts begin with the special tokens that the
    tokenizer puts before texts. Raises UserError if the tokenizer cannot be
    loaded.
    """
    # A private directory, so that other users cannot connect to the socket.
    self._folder = tempfile.TemporaryDirectory(prefix='mod_jax-')
    self._address = os.path.join(self._folder.name, 'socket')
    module = 'mod_jax.serving.text_process'
    arguments = json.dumps([self._address, kind, path, pretrained])
    self._process = subprocess.Popen(
      [sys.executable, '-P', '-m', module, arguments],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      # Forking is only safe while the process has a single thread.
      env=os.environ
      | {'OPENBLAS_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
      | {'RUST_BACKTRACE': '0'},
      # Make a process group of its own, so that `stop` also kills all forks,
      # and Ctrl-C in the terminal does not reach them.
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
    """Kills the process and all its forks."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self._folder.cleanup()

  def call(self, name: str, *args) -> Any:
    """Calls a method of `_Texts` in a new fork, and returns its result.

    Raises UserError if the method refuses the arguments, fails, or exceeds its
    CPU time or memory, and OSError if the process has ended.
    """
    with self._connect() as stream:
      return _ask(stream, name, args)

  def decode_after(self, before: list[int], ids: list[int]) -> str:
    """Calls `_Texts.decode_after` in a fork that is kept between calls."""
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
  try:
    job = json.dumps([name, args]).encode()
  except (ValueError, RecursionError) as error:  # E.g. a huge integer.
    raise UserError(f'the request cannot be read: {error}') from error
  reply = b''
  with contextlib.suppress(OSError):  # The fork may be killed meanwhile.
    stream.write(job + b'\n')
    stream.flush()
    reply = stream.readline()
  if not reply:
    seconds, what = _JOBS[name]
    raise UserError(
      f'{what} took more than {seconds} seconds of computing, or'
      f' {_MEMORY >> 20} MiB: give another one, or take another model if this'
      ' happens with any.'
    )
  result, refusal = json.loads(reply)
  if refusal is not None:
    raise UserError(refusal)
  return result


class _Texts:
  """The jobs that forks run; to refuse arguments, they raise UserError."""

  def __init__(self, kind: str, path: str, pretrained: bool):
    self._tokenizer = tokenizers.make(kind, path)
    self._encode = self._tokenizer.encode
    if pretrained:
      self._encode = self._tokenizer.encode_prompt
    self._kind, self._path = kind, path
    # Most bytes of a token. Chats also spell special tokens, by their names.
    self._token_bytes = max(
      int(size) or len(self._tokenizer.spelled(i).encode())
      for i, size in enumerate(self._tokenizer.token_bytes)
    )

  def encode(self, texts: list[str], most: int) -> list[list[int]]:
    """Returns the tokens of each prompt; refuses more than `most` in one."""
    return self._tokens(functools.partial(map, self._encode), texts, most)

  def encode_chat(self, messages: list[dict], most: int) -> list[list[int]]:
    """Returns the tokens of a rendered chat, as a list of one prompt."""
    text = chat.render(self._kind, self._path, messages)
    encode_all = functools.partial(map, self._tokenizer.encode_chat)
    return self._tokens(encode_all, [text], most)

  def encode_parts(self, texts: list[str], most: int) -> list[list[int]]:
    """Returns the tokens of each part of a text, at most `most` in one."""
    return self._tokens(self._tokenizer.encode_parts, texts, most)

  def fit_picture(self, encoded: str, fit: dict) -> str:
    """Returns the uint8 pixels of a picture after `resize.center_crop`.

    `encoded` is the picture's file, and the result the bytes of its pixels,
    both in base64; `fit` are further arguments of `center_crop`.
    """
    try:
      file = base64.b64decode(encoded, validate=True)
    except ValueError as error:
      raise UserError(
        f'the data of a picture are no base64 ({error}): encode its file anew.'
      ) from error
    image = image_folder.decode(file, 'a picture', MAX_PIXELS)
    fitted = resize.center_crop(image, **fit)
    return base64.b64encode(fitted.tobytes()).decode()

  def check_schema(self, schema: dict) -> None:
    """Refuses a JSON schema that cannot be compiled within a job's limits."""
    grammar.check(schema)

  def decode_after(self, before, ids) -> str:
    return self._tokenizer.decode_after(before, ids)

  def _tokens(self, encode_all, texts, most):
    # Do not even tokenise a text that has too many bytes for `most` tokens.
    for text in texts:
      size = len(text.encode('utf-8', 'replace'))
      if size > most * self._token_bytes:
        raise UserError(
          f'a prompt of {size} bytes does not fit max_length={most} tokens:'
          ' shorten it.'
        )
    encoded = list(encode_all(texts))
    for tokens in encoded:
      if len(tokens) > most:
        raise UserError(
          f'a prompt of {len(tokens)} tokens does not fit max_length={most}:'
          ' shorten it.'
        )
    return encoded


class _Handler(socketserver.StreamRequestHandler):
  """A fork: runs the jobs of one connection until it is closed."""

  def handle(self):
    # Both time limits send a signal. Reset these signals: the server's parent
    # may have ignored or blocked them, and child processes inherit that.
    for number in (signal.SIGPROF, signal.SIGALRM):
      signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    _limit_memory()
    with contextlib.suppress(OSError):  # The caller may have disconnected.
      for line in self.rfile:
        self.wfile.write(self._done(*json.loads(line)))

  def _done(self, name, args):
    result = refusal = None
    seconds, what = _JOBS[name]
    # SIGPROF kills the process when its CPU time is up. SIGALRM kills it when
    # too much time has passed, as it waits or the machine is too busy.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)
    try:
      result = getattr(self.server.texts, name)(*args)
    except UserError as error:
      refusal = f'{error!s:.500}'
    except BaseException as error:  # Rust's PanicException is no Exception.
      refusal = f'{what} failed: {error!r:.500}'
    reply = json.dumps([result, refusal]).encode() + b'\n'
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if len(reply) > _MOST_REPLY:
      sys.exit()  # The caller reports this as too much time or memory.
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
  # Only Linux has /proc, and enforces RLIMIT_AS reliably.
  with contextlib.suppress(FileNotFoundError):
    pages = pathlib.Path('/proc/self/statm').read_text().split()[0]
    limit = int(pages) * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


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
