"""The scripts' manners: one line and a status for bad input."""

import os
import pathlib
import platform
import signal
import subprocess
import sys
import types

from absl import flags
import command_line
import pytest

from mod_jax import cli
from mod_jax import config as config_lib
from mod_jax.errors import UserError
from mod_jax.tasks.experiment import ExperimentConfig

ROOT = command_line.ROOT
CONFIG = """
import dataclasses

from mod_jax import config
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.tasks.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(MLPConfig):
  pass


def get_config(variant=''):
  if variant == 'key_error':
    return {}['a bug']
  if variant == 'nothing':
    return None
  if variant == 'refused':
    MoDConfig(capacity=2)
  base = ExperimentConfig(model=LMConfig())
  mine = LMConfig(feed_forward=Mine(width=192, hidden=8))
  variants = {'': base, 'tiny': dataclasses.replace(base, seed=1)}
  variants['mine'] = dataclasses.replace(base, model=mine)
  return config.choose(variant, variants)
"""
SLEEPS = """
import time

from mod_jax import cli

def main(_):
  print('asleep', flush=True)
  time.sleep(60)

cli.run(main)
"""
CHATTERS = """
import pathlib
import sys

from mod_jax import cli

def main(_):
  for _ in range(20):
    print('x' * 10_000)
    print('y', file=sys.stderr)
  pathlib.Path('written').touch()

cli.run(main)
"""


ALLOCATES = """
import resource, threading
from absl import flags
import jax
from mod_jax import cli

if started:
  flags.FLAGS(['script'])
  cli.start_backend()
jax.devices()  # Starts JAX's threads.

def allocate():
  bytearray(2**26)  # Freed at once.
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  bytearray(2**26)
  after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  print(after - before)

# XLA's results are not all from the main thread either.
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """Where the config files are."""
  monkeypatch.chdir(tmp_path)
  pathlib.Path('mine.py').write_text(CONFIG)
  pathlib.Path('bare.py').write_text('import mod_jax\n')
  pathlib.Path('plain.py').write_text('def get_config():\n  return None\n')
  pathlib.Path('broken.py').write_text('def get_config(:\n')
  pathlib.Path('config.json').write_text('{}')
  return tmp_path


def main(_):
  """Does what a script does with its config, or raises what it is told to."""
  match flags.FLAGS.then:
    case 'refuse':
      raise UserError('two\n  lines')
    case 'missing':
      raise FileNotFoundError(2, 'No such file', 'a/file')
    case 'full':
      raise OSError(28, 'No space left on device', 'a/file')
    case 'save':
      error = ValueError("Failed to write [os_error_code='28']\nand more")
      raise RuntimeError('The save failed.') from error
  config = cli.load_config(flags.FLAGS.config, ExperimentConfig)
  sys.stdout.write(config_lib.to_json(config))


def call(*args) -> command_line.Ended:
  def script():
    flags.DEFINE_string('config', None, 'File.')
    flags.DEFINE_string('workdir', None, 'Where to write.')
    flags.DEFINE_string('then', '', 'What to raise.')
    flags.mark_flag_as_required('workdir')
    cli.run(main, ['script.py', *args])

  return command_line.call(script)


GIVEN = ('--config=mine.py', '--workdir=w')


@pytest.mark.parametrize(
  ('args', 'sentence'),
  {
    (*GIVEN, '--config.model.num_layer=4'): "Did you mean 'model.num_layers'?",
    (*GIVEN, '--wrkdir=x'): "Unknown command line flag 'wrkdir'. Did you mean",
    (*GIVEN, 'config.seed=3'): "unexpected argument 'config.seed=3'",
    ('--config=mine.py',): '--workdir is missing',
    ('--config=mine.py', '--workdir'): '--workdir is given without a value',
    ('--workdir=w',): '--config is missing',
    ('--workdir=w', '--config=mime.py'): "Did you mean 'mine.py'?",
    ('--workdir=w', '--config=configs/lm/nod.py'): "'configs/lm/mod.py'?",
    ('--workdir=w', '--config=other:tiny'): 'mod_jax comes with configs/',
    ('--workdir=w', '--config=mine.py:tinny'): "Did you mean 'tiny'?",
    ('--workdir=w', '--config=mine.py:refused'): 'capacity=2',
    ('--workdir=w', '--config=mine.py:nothing'): 'is a NoneType, and this',
    ('--workdir=w', '--config=mine.py:mine'): 'Mine is defined in a config',
    ('--workdir=w', '--config=config.json'): 'config.json is no config file',
    ('--workdir=w', '--config=bare.py'): 'the file has no function get_config',
    ('--workdir=w', '--config=plain.py:tiny'): 'get_config() takes no variant',
    (*GIVEN, '--then=refuse'): 'error: two lines\n',
    (*GIVEN, '--then=full'): 'No space left on device (a/file): free some',
    (*GIVEN, '--then=save'): 'No space left on device: free some space',
  }.items(),
  ids=lambda x: ' '.join(x) if isinstance(x, tuple) else '',
)
def test_bad_input_is_told_in_one_line(args, sentence):
  ended = call(*args)
  assert (ended.status, ended.out) == (2, '')
  assert ended.err.startswith('error: ')
  assert ended.err.count('\n') == 1
  assert sentence in ended.err


@pytest.mark.parametrize(
  ('args', 'kind'),
  {
    (*GIVEN, '--then=missing'): FileNotFoundError,
    ('--workdir=w', '--config=mine.py:key_error'): KeyError,
    ('--workdir=w', '--config=broken.py'): SyntaxError,
  }.items(),
  ids=lambda x: x[-1] if isinstance(x, tuple) else '',
)
def test_bugs_keep_their_traceback(args, kind):
  with pytest.raises(kind) as bug:
    call(*args)
  # And are not buried under another.
  assert bug.value.__context__ is None


@pytest.mark.parametrize(
  ('args', 'changes'),
  [
    (GIVEN, {}),
    (('--config=mine.py:tiny', '--workdir=w'), {'seed': 1}),
    ((*GIVEN, '--config.seed', '3'), {'seed': 3}),
    (('--config.init=a/*', *GIVEN), {'init': 'a/*'}),
  ],
  ids=lambda x: ' '.join(x),
)
def test_overrides_reach_the_config(args, changes):
  ended = call(*args)
  assert (ended.status, ended.err) == (0, '')
  base = config_lib.load('mine.py').get_config()
  expected = config_lib.replace(base, changes)
  assert config_lib.from_json(ExperimentConfig, ended.out) == expected
  assert (expected == base) == (not changes)
  # A config that the same process loads afterwards is as in its file.
  assert cli.load_config('mine.py', ExperimentConfig) == base


def test_config_files_are_found_from_anywhere():
  name = pathlib.Path('configs/lm/mod.py')
  assert cli.config_file(f'{name}:tiny') == ROOT / name
  name.parent.mkdir(parents=True)
  name.touch()
  assert cli.config_file(f'{name}:tiny') == name


def start(code):
  return subprocess.Popen(
    [sys.executable, '-c', code],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    # A shell's background jobs ignore it, and hand that on.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )


def test_a_reader_that_has_left_stops_nothing():
  process = start(CHATTERS)
  process.stdout.close()
  # Not even with words at the end, of what Python could not write any more.
  assert process.stderr.read() == 'y\n' * 20
  assert process.wait(60) == 0
  assert pathlib.Path('written').exists()
  process.stderr.close()


def test_interrupt_is_one_line_and_130():
  process = start(SLEEPS)
  assert process.stdout.readline() == 'asleep\n'
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (130, 'interrupted\n')


def test_a_host_without_a_number(monkeypatch):
  monkeypatch.setattr(cli, '_DISTRIBUTED', types.SimpleNamespace(value=True))
  monkeypatch.setattr(cli.last_words, 'replace', lambda said: None)
  monkeypatch.setenv('JAX_NUM_PROCESSES', '2')
  monkeypatch.setenv('JAX_PROCESS_ID', '')
  with pytest.raises(UserError, match="invalid literal .*''.* JAX_PROCESS_ID"):
    cli.start_backend()


@pytest.mark.skipif(
  platform.libc_ver()[0] != 'glibc', reason='other mallocs have no such options'
)
@pytest.mark.parametrize('started', [False, True])
def test_a_cpu_backend_keeps_freed_memory(started):
  out = subprocess.run(
    [sys.executable, '-c', f'started = {started}\n{ALLOCATES}'],
    check=True,
    capture_output=True,
    text=True,
    env=os.environ | {'GLIBC_TUNABLES': ''},
  ).stdout
  # 2^26 bytes are 2^14 small pages, or 32 large ones.
  assert (int(out) < 20) == started
