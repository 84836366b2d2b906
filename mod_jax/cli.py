"""Flags, `--config.FIELD=VALUE`, and error messages that all scripts share."""

import contextlib
import ctypes
import errno
import functools
import inspect
import io
import logging as python_logging
import os
import pathlib
import platform
import re
import sys

from absl import app, flags, logging
import jax

from mod_jax import config as config_lib
from mod_jax import last_words, paths
from mod_jax.errors import UserError

# Patterns of absl's error messages, and the text to show instead.
_PLAIN_WORDS = (
  (r'.*Flag --(\S+) must have a value.*', r'--\1 is missing: give --\1=VALUE.'),
  (
    r'Missing value for flag --?(\S+)',
    r'--\1 is given without a value: write --\1=VALUE; --help explains it.',
  ),
  (r'flag (--.+?): .*invalid literal for int.*', r'\1: expected an integer.'),
  (r'flag (--.+?): .*could not convert.*', r'\1: expected a number.'),
  (r'flag (--.+?): Non-boolean.*', r'\1: expected true or false.'),
  (r'flag (--.+?: .*)', r'\1'),
)
# System errors that may occur anywhere, and the remedies to suggest.
_OF_THE_SYSTEM = {
  errno.ENOSPC: 'free some space',
  errno.EDQUOT: 'free some space, or have the quota raised',
  errno.EFBIG: 'raise the limit on the size of files',
  errno.EROFS: 'name another directory',
  errno.EACCES: 'have the permissions changed, or name another directory',
  errno.EPERM: 'have the permissions changed, or name another directory',
  errno.ENOTDIR: 'move that file away, or name another directory',
  errno.EEXIST: 'move that file away, or name another directory',
  errno.ENAMETOOLONG: 'name a shorter path',
  errno.ELOOP: 'mend that link',
  errno.EIO: 'look after the disk, or the network that it is on',
  errno.ESTALE: 'look after the network file system',
}

# The errno in messages of TensorStore, which writes the checkpoints.
_IN_TENSORSTORE = re.compile(r"\[os_error_code='(\d+)'\]")
_OVERRIDE = re.compile(r'--?config\.([^=]+)(?:=(.*))?', re.DOTALL)
_overrides = []  # (path, text) of --config.PATH=TEXT, in order.

_DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'Whether this is one of several hosts, each running the same command.',
)
_HOST_TIMEOUT = flags.DEFINE_integer(
  'host_timeout',
  60,
  'Seconds without a sign of life after which one of --distributed counts as'
  ' dead, and the others end.',
  lower_bound=1,
)
_START_TIMEOUT = flags.DEFINE_integer(
  'start_timeout',
  300,
  'Seconds that the hosts of --distributed wait for each other at the start.',
  lower_bound=1,
)
_COMPILATION_CACHE = flags.DEFINE_string(
  'compilation_cache',
  None,
  'Directory of compiled programs, from which restarts and further runs take'
  ' them; gs://… works too.',
)
_TRUST = flags.DEFINE_multi_string(
  'trust',
  [],
  'Module, as in package.module, whose classes a saved config may name. Nothing'
  ' that such a config names is imported otherwise.',
)
# M_ARENA_MAX, M_MMAP_MAX and M_TRIM_THRESHOLD of glibc's malloc.h: one heap for
# all memory, no separate mappings, and the heap never shrinks.
_MALLOPT = ((-8, 1), (-4, 0), (-1, -1))
# Parts of the error messages of collectives after another host has ended.
_LOST_HOST = re.compile(
  'Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|[Cc]oordination service|heartbeat'
)
_LOST = (
  'another host of this run has ended, or cannot be reached: what it said tells'
  ' why; the same command on all hosts continues.'
)


def start_backend():
  """Joins the other hosts of --distributed; on CPUs, keeps freed memory.

  On TPU pods and under Slurm, JAX finds the hosts by itself; elsewhere it reads
  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  When a host dies, the others end with one sentence and a nonzero status: at
  once if JAX notices the broken connection, otherwise a few seconds after
  --host_timeout has passed.
  """
  if _DISTRIBUTED.value:
    _join_hosts()
  # `default_backend` starts the backends of JAX, so it is not called if
  # JAX_PLATFORMS is set.
  if (jax.config.jax_platforms or jax.default_backend()) == 'cpu':
    keep_freed_memory()


def keep_freed_memory():
  """Stops glibc's malloc from returning freed memory to the system.

  XLA allocates every result anew, and on a CPU would otherwise spend much of
  each step on page faults. Call it before JAX's first computation, which starts
  threads.
  """
  if platform.libc_ver()[0] != 'glibc':
    return
  malloc = ctypes.CDLL(None)
  for option, value in _MALLOPT:
    malloc.mallopt(option, value)


def _join_hosts():
  variables = ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
  # When another host dies, JAX aborts this process from native code. No Python
  # runs any more, so another process has to print the message.
  last_words.replace(f'error: {_LOST}')
  try:
    count, index = (
      int(os.environ[name]) if name in os.environ else None
      for name in variables
    )
    jax.distributed.initialize(
      num_processes=count,
      process_id=index,
      initialization_timeout=_START_TIMEOUT.value,
      heartbeat_timeout_seconds=_HOST_TIMEOUT.value,
      shutdown_timeout_seconds=_HOST_TIMEOUT.value,
    )
  except (RuntimeError, ValueError) as error:
    raise UserError(
      f'--distributed: {_one_line(error)} Set JAX_COORDINATOR_ADDRESS,'
      ' JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave the flag out for a'
      ' single host.'
    ) from error


def run(main, argv=None, *, positional=False):
  """Parses the flags, calls `main(argv)` and exits with its status.

  User errors (`UserError` from anywhere, a bad flag, an unknown or invalid
  field of a config, a missing config file) become one line `error: …` on stderr
  and status 2; so do system errors such as a full disk. Ctrl-C becomes one line
  and status 130; training saves first. Any other exception is a bug and keeps
  its traceback.

  If stdout or stderr is closed, by `| head` or with its terminal, the program
  goes on and writes all files; its further output is lost.

  `argv` begins with the program's name; None is `sys.argv`. `main` gets that
  name and the positional arguments; unless `positional`, these are errors.
  """

  def prepared(rest):
    if _COMPILATION_CACHE.value is not None:
      folder = os.fspath(paths.expand(_COMPILATION_CACHE.value))
      jax.config.update('jax_compilation_cache_dir', folder)
    config_lib.trust(_TRUST.value)
    return main(rest)

  _prepare_help(sys.modules[main.__module__])
  # Orbax logs details of each save at INFO, and its threads and asyncio log a
  # traceback of each failed write, which is raised as well.
  logging.set_verbosity(logging.WARNING)
  logging.get_absl_logger().addFilter(_is_no_error_of_orbax)
  python_logging.getLogger('asyncio').setLevel(python_logging.CRITICAL)
  # Call this before stderr is wrapped: absl removes the other log handlers of
  # stderr, and would not recognise them later.
  logging.use_absl_handler()
  with (
    contextlib.redirect_stdout(_Unbroken(sys.stdout)),
    contextlib.redirect_stderr(_Unbroken(sys.stderr)),
  ):
    try:
      parse = functools.partial(_parse_flags, positional=positional)
      app.run(prepared, argv, flags_parser=parse)
    except UserError as error:
      _exit_with(_one_line(error))
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      sys.exit(130)
    except Exception as error:
      message = _refused_by_system(error)
      if jax.distributed.is_initialized() and _LOST_HOST.search(str(error)):
        message = _LOST
      if message is None:
        raise
      _exit_with(message)
    finally:
      # They are this command's, and not of what its process loads later.
      _overrides.clear()
      sys.stdout.flush()


def _prepare_help(module):
  """Makes --help show a module's flags, and by default its docstring."""
  started = sys.modules['__main__']
  started.__doc__ = started.__doc__ or module.__doc__
  for source in (module, sys.modules[__name__]):
    for flag in flags.FLAGS.get_key_flags_for_module(source):
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def _is_no_error_of_orbax(record):
  of_orbax = 'orbax' in pathlib.Path(record.pathname).parts
  return not (of_orbax and record.levelno >= python_logging.ERROR)


def _exit_with(sentence):
  print(f'error: {sentence}', file=sys.stderr)
  if sentence == _LOST:
    # `sys.exit` would wait for the other hosts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)
  sys.exit(2)


def _refused_by_system(error) -> str | None:
  """Returns a message with a remedy if a system error is the cause, or None."""
  while error is not None:
    number = getattr(error, 'errno', None)
    if number is None and (match := _IN_TENSORSTORE.search(str(error))):
      number = int(match[1])
    if number in _OF_THE_SYSTEM:
      name = getattr(error, 'filename', None)
      return (
        f'{os.strerror(number)}{f" ({name})" if name else ""}:'
        f' {_OF_THE_SYSTEM[number]}; nothing that was saved before is lost, and'
        ' the same command continues.'
      )
    error = error.__cause__
  return None


class _Unbroken:
  """Wraps a stream. Once writing has failed, further output is discarded."""

  def __init__(self, stream):
    # Python's stream is None if the descriptor was closed at the start.
    self._stream = io.StringIO() if stream is None else stream

  def write(self, text):
    with self._or_sink():
      self._stream.write(text)
    return len(text)

  def flush(self):
    with self._or_sink():
      self._stream.flush()

  @contextlib.contextmanager
  def _or_sink(self):
    try:
      yield
    except OSError:  # BrokenPipeError, or EIO from a closed terminal.
      sink = os.open(os.devnull, os.O_WRONLY)
      # Also discards buffered output, which Python writes at exit.
      os.dup2(sink, self._stream.fileno())
      os.close(sink)

  def __getattr__(self, name):
    return getattr(self._stream, name)


def define_dtype() -> None:
  """Defines --dtype, which commands pass on to `pretrained.load`."""
  flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16', 'int8'],
    'Of the weights and the computation; by default weights in float32, and the'
    " computation as in the model's config. int8: only the weights.",
  )


def load_config(file, cls, *, complete=True, changes=None):
  """Returns the experiment of --config, changed by --config.FIELD=VALUE.

  A config file may define `complete(config)`, which sets fields that depend on
  others, such as the number of classes of a folder of images. It is called with
  the changed config; the command line's values are then set again.

  Args:
    file: the value of --config, FILE.py[:variant]; None if it was not given.
    cls: the dataclass that the config file builds, e.g. ExperimentConfig.
    complete: whether to call `complete`, which may read data.
    changes: values by dotted field to set after the command line's, such as
      those of a point of a sweep.
  """

  def change(config):
    return config_lib.replace(changed(config), changes or {})

  if file is None:
    raise UserError(
      '--config is missing: give a config file such as '
      '--config=configs/lm/mod.py, with :variant if you want one.'
    )
  _, _, variant = file.partition(':')
  module = config_lib.load(config_file(file))
  if not hasattr(module, 'get_config'):
    raise UserError(
      f'--config={file}: the file has no function get_config, which returns a'
      ' config.'
    )
  if variant and not inspect.signature(module.get_config).parameters:
    raise UserError(
      f'--config={file}: get_config() takes no variant, so leave ":{variant}"'
      ' out.'
    )
  config = module.get_config(*([variant] if variant else []))
  if not isinstance(config, cls):
    raise UserError(
      f'--config={file} is a {type(config).__name__}, and this command takes a'
      f' {cls.__name__}.'
    )
  config = change(config)
  if complete and hasattr(module, 'complete'):
    config = change(module.complete(config))
  return config


def config_file(file) -> pathlib.Path:
  """Returns the path of the config file in FILE.py[:variant].

  If FILE.py does not exist, it is looked up among mod_jax's own config files.
  """
  name = file.partition(':')[0]
  path = pathlib.Path(name)
  if path.is_file():
    return path
  package = pathlib.Path(__file__).parent
  # Config files are inside the package in a wheel, beside it in the repository.
  root = package if (package / 'configs').is_dir() else package.parent
  installed = {
    str(config_path.relative_to(root)): config_path
    for config_path in sorted(root.glob('configs/**/*.py'))
  }
  if name in installed:
    return installed[name]
  files = [*path.parent.glob('*.py'), *installed]
  near = config_lib.nearest(path, files, os.path.basename)
  raise UserError(
    f'--config={file}: there is no file {name!r}.{near} mod_jax comes with'
    f' {", ".join(installed)}.'
  )


def changed(config):
  """Returns a config changed by the command line's --config.FIELD=VALUE."""
  return config_lib.override(config, _overrides)


def _one_line(error):
  return ' '.join(str(error).split())


def _parse_flags(argv, *, positional=False):
  """Parses flags as absl does, but raises UserError for user errors."""
  try:
    rest = flags.FLAGS(_take_overrides(argv))
  except flags.Error as error:
    raise UserError(_in_plain_words(error)) from error
  if rest[1:] and not positional:
    raise UserError(
      f'unexpected argument {rest[1]!r}: flags start with -- and take their '
      'value after an equals sign, as in --workdir=runs/mod.'
    )
  return rest


def _take_overrides(argv):
  """Moves --config.FIELD=VALUE to `_overrides`; returns the other arguments."""
  remaining = []
  arguments = iter(argv)
  for argument in arguments:
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
      remaining.append(argument)
      continue
    path, text = match.groups()
    if text is None:
      text = next(arguments, None)
    if text is None:
      raise UserError(f'{argument}: expected a value, as in {argument}=VALUE.')
    _overrides.append((path, text))
  return remaining


def _in_plain_words(error):
  """Returns absl's message in words that say what was expected."""
  message = _one_line(error)
  for pattern, plain in _PLAIN_WORDS:
    if match := re.fullmatch(pattern, message):
      return match.expand(plain)
  return message
