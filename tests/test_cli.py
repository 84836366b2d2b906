"""The scripts' manners: one line and a status for bad input, in processes.

Each case is a process of its own. Nearly all are forked from one that has
imported everything, since importing takes longest.
"""

import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import textwrap
import types

import pytest

from mod_jax import cli
from mod_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent

LIBRARY = """
  import abc
  import dataclasses
  from typing import Literal

  from mod_jax import config
  from mod_jax.errors import UserError


  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Routing:
    capacity: float = 0.125
    gate: Literal['raw', 'sigmoid'] = 'raw'

    def __post_init__(self):
      config.validate(self)
      if not 0 < self.capacity <= 1:
        raise UserError(f'capacity={self.capacity}: expected (0, 1].')


  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Score(abc.ABC):

    @property
    @abc.abstractmethod
    def power(self):
      '''Makes the class one that others derive from.'''


  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Model:
    num_layers: int = 2
    tied: bool = True
    kv_heads: int | None = None
    path: str | None = None
    names: tuple[str, ...] = ()
    routing: Routing | None = Routing()
    dense: Routing | None = None
    score: Score | None = None

    def __post_init__(self):
      config.validate(self)


  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Experiment:
    steps: int = 10
    model: Model = Model()

    def __post_init__(self):
      config.validate(self)
"""

CONFIG = """
  import dataclasses

  import library
  from mod_jax import config


  def get_config(variant=''):
    base = library.Experiment()
    if variant == 'key_error':
      return {}['a bug']
    if variant == 'value_error':
      return int('a bug')
    if variant == 'nothing':
      return None
    if variant == 'refused':
      library.Routing(capacity=2)
    variants = {'': base, 'tiny': dataclasses.replace(base, steps=1)}
    return config.choose(variant, variants)
"""

# A config file whose config has a class of its own.
ONE = """
  from __future__ import annotations

  import dataclasses

  import library


  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Mine(library.Score):
    power: int = 2


  def get_config():
    return library.Experiment(model=library.Model(score=Mine()))
"""

SCRIPT = """
  import sys
  import time

  from absl import flags
  import library
  from mod_jax import cli
  from mod_jax import config
  from mod_jax.errors import UserError

  CONFIG = flags.DEFINE_string('config', None, 'File.')
  WORKDIR = flags.DEFINE_string('workdir', None, 'Where to write.')
  THEN = flags.DEFINE_string('then', '', 'What to do after loading.')


  def main(argv):
    del argv
    experiment = cli.load_config(CONFIG.value, library.Experiment)
    if THEN.value == 'refuse':
      raise UserError('two\\n  lines')
    if THEN.value == 'crash':
      raise ValueError('a bug')
    if THEN.value == 'full':
      raise OSError(28, 'No space left on device', 'a/file')
    if THEN.value == 'save':
      try:
        raise ValueError("Failed to write [os_error_code='28']\\nand more")
      except ValueError as error:
        raise RuntimeError('The save failed.') from error
    if THEN.value == 'missing':
      open('no such file')
    if THEN.value == 'chatter':
      for _ in range(20):
        print('x' * 10_000)
        print('y', file=sys.stderr)
      open(WORKDIR.value, 'w').close()
      return
    if THEN.value == 'sleep':
      print('asleep', flush=True)
      time.sleep(60)
    sys.stdout.write(config.to_json(experiment))


  if __name__ == '__main__':
    flags.mark_flag_as_required('workdir')
    cli.run(main)
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('cli')
  for name, text in (
    ('library.py', LIBRARY),
    ('tiny_config.py', CONFIG),
    ('script.py', SCRIPT),
  ):
    (path / name).write_text(textwrap.dedent(text), encoding='utf-8')
  (path / 'bare.py').write_text('import library\n', encoding='utf-8')
  (path / 'config.json').write_text('{}', encoding='utf-8')
  (path / 'one.py').write_text(textwrap.dedent(ONE), encoding='utf-8')
  (path / 'broken.py').write_text('def get_config(:\n', encoding='utf-8')
  return path


def environment():
  return os.environ | {'PYTHONPATH': str(ROOT), 'PYTHONDONTWRITEBYTECODE': '1'}


def start(folder, *args):
  return subprocess.Popen(
    [sys.executable, 'script.py', *args],
    cwd=folder,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    # A shell's background jobs ignore it, and hand that on.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )


GIVEN = ('--config=tiny_config.py', '--workdir=w')
TINY = ('--config=tiny_config.py:tiny', '--workdir=w')
REFUSALS = {
  (*GIVEN, '--config.model.num_layer=4'): (
    "--config.model.num_layer: config.model has no field 'num_layer'. "
    "Did you mean 'model.num_layers'?"
  ),
  (*GIVEN, '--config.model.num_layer', '4'): (
    "--config.model.num_layer: config.model has no field 'num_layer'. "
    "Did you mean 'model.num_layers'?"
  ),
  (*GIVEN, '--config.model.num_layers=abc'): (
    '--config.model.num_layers=abc: expected an integer.'
  ),
  (*GIVEN, '--wrkdir=x'): "Unknown command line flag 'wrkdir'. Did you mean",
  (*GIVEN, 'config.steps=3'): "unexpected argument 'config.steps=3'",
  ('--config=tiny_config.py',): '--workdir is missing',
  ('--workdir=w',): '--config is missing',
  ('--workdir=w', '--config=tiny_confg.py'): (
    "--config=tiny_confg.py: there is no file 'tiny_confg.py'. "
    "Did you mean 'tiny_config.py'?"
  ),
  ('--workdir=w', '--config', 'nowhere/x.py:tiny'): (
    "--config=nowhere/x.py:tiny: there is no file 'nowhere/x.py'."
  ),
  ('--workdir=w', '--config=tiny_config.py:tinny'): (
    "unknown variant 'tinny': expected one of '', 'tiny'. Did you mean 'tiny'?"
  ),
  ('--workdir=w', '--config=tiny_config.py:refused'): (
    'capacity=2: expected (0, 1].'
  ),
  ('--workdir=w', '--config=tiny_config.py:nothing'): (
    '--config=tiny_config.py:nothing: get_config returned a NoneType, expected'
  ),
  ('--workdir=w', '--config=configs/lm/nod.py'): (
    "--config=configs/lm/nod.py: there is no file 'configs/lm/nod.py'. "
    "Did you mean 'configs/lm/mod.py'?"
  ),
  ('--workdir=w', '--config=mine:tiny'): (
    "--config=mine:tiny: there is no file 'mine'. mod_jax comes with configs/"
  ),
  ('--workdir=w', '--config=config.json'): (
    '{folder}/config.json is no config file: expected Python, FILE.py.'
  ),
  ('--workdir=w', '--config=bare.py'): (
    '--config=bare.py: the file has no function get_config'
  ),
  ('--workdir=w', '--config=one.py:tiny'): (
    '--config=one.py:tiny: get_config() takes no variant'
  ),
  ('--workdir=w', '--config=one.py'): (
    'Mine is defined in a config file {folder}/one.py: a saved config could'
  ),
  ('--config=tiny_config.py', '--workdir'): (
    '--workdir is given without a value: write --workdir=VALUE;'
  ),
  (*GIVEN, '--then=refuse'): 'two lines',
  (*GIVEN, '--then=full'): (
    'No space left on device (a/file): free some space; nothing that was saved'
  ),
  (*GIVEN, '--then=save'): 'No space left on device: free some space; nothing',
}
BUGS = {
  (*GIVEN, '--then=crash'): 'ValueError: a bug',
  (*GIVEN, '--then=missing'): 'FileNotFoundError: ',
  ('--workdir=w', '--config=tiny_config.py:key_error'): "KeyError: 'a bug'",
  ('--workdir=w', '--config=tiny_config.py:value_error'): 'ValueError: ',
  ('--workdir=w', '--config=broken.py'): 'SyntaxError: ',
}
SUCCESSES = {
  GIVEN: {},
  (*GIVEN, '--config.model.kv_heads=3'): {'kv_heads': 3},
  (*GIVEN, '--config.model.kv_heads', '3'): {'kv_heads': 3},
  (*GIVEN, '--noconfig.model.tied'): {'tied': False},
  (*GIVEN, '--config.model.path=a/*.txt'): {'path': 'a/*.txt'},
  (*GIVEN, '--config.model.names=a'): {'names': ['a']},
  (*GIVEN, "--config.model.names='a','b'"): {'names': ['a', 'b']},
  ('--config.model.path=x', *GIVEN): {'path': 'x'},
  (*GIVEN, "--config.model.dense={'gate': 'sigmoid'}"): {
    'dense': {'capacity': 0.125, 'gate': 'sigmoid'}
  },
  (*GIVEN, '--config.model.routing.capacity=0.5'): {
    'routing': {'capacity': 0.5, 'gate': 'raw'}
  },
}


# Reads a list of command lines; each runs in a fork, its streams into files.
FORKS = """
  import json
  import os
  import runpy
  import sys

  import library
  from mod_jax import cli

  for i, args in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if not child:
      for stream, name in ((1, 'out'), (2, 'err')):
        os.dup2(os.open(f'{i}.{name}', os.O_CREAT | os.O_WRONLY), stream)
      sys.argv = ['script.py', *args]
      runpy.run_path('script.py', run_name='__main__')
      break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f'{i}.status', 'w') as file:
      file.write(str(status))
"""


@pytest.fixture(scope='module')
def results(folder):
  """Runs every case once; returns status, stdout and stderr of each."""
  cases = [*REFUSALS, *BUGS, *SUCCESSES, TINY]
  subprocess.run(
    [sys.executable, '-c', textwrap.dedent(FORKS)],
    cwd=folder,
    env=environment(),
    input=json.dumps(cases),
    text=True,
    check=True,
    timeout=120,
  )

  def read(i, name):
    return (folder / f'{i}.{name}').read_text()

  return {
    args: (int(read(i, 'status')), read(i, 'out'), read(i, 'err'))
    for i, args in enumerate(cases)
  }


@pytest.mark.parametrize('args', REFUSALS, ids=' '.join)
def test_bad_input_is_told_in_one_line(results, args, folder):
  status, out, err = results[args]
  assert err.startswith('error: ' + REFUSALS[args].format(folder=folder))
  assert err.count('\n') == 1
  assert 'Traceback' not in err
  assert (status, out) == (2, '')


@pytest.mark.parametrize('args', BUGS, ids=' '.join)
def test_bugs_keep_their_traceback(results, args):
  status, out, err = results[args]
  assert 'Traceback (most recent call last)' in err
  assert BUGS[args] in err
  assert '\nerror: ' not in err
  assert (status, out) == (1, '')


@pytest.mark.parametrize('args', SUCCESSES, ids=' '.join)
def test_overrides_reach_the_config(results, args):
  status, out, err = results[args]
  assert (status, err) == (0, '')
  _, plain, _ = results[GIVEN]
  expected = json.loads(plain)
  expected['model'].update(SUCCESSES[args])
  assert json.loads(out) == expected


def test_variant_reaches_the_config_file(results):
  status, out, _ = results[TINY]
  assert (status, json.loads(out)['steps']) == (0, 1)


def test_config_files_are_found_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  name = pathlib.Path('configs/lm/mod.py')
  assert cli.config_file(f'{name}:tiny') == ROOT / name
  name.parent.mkdir(parents=True)
  name.write_text('', encoding='utf-8')
  assert cli.config_file(f'{name}:tiny') == name


def test_bug_in_a_config_file_is_not_buried_under_another(results):
  _, _, err = results['--workdir=w', '--config=tiny_config.py:key_error']
  assert err.count('Traceback (most recent call last)') == 1


def test_a_reader_that_has_left_stops_nothing(folder):
  process = start(folder, *GIVEN[:1], '--workdir=written', '--then=chatter')
  process.stdout.close()
  process.stderr.close()
  assert process.wait(60) == 0
  assert (folder / 'written').exists()
  # Not even with words at the end, of what Python could not write any more.
  process = start(folder, *GIVEN)
  process.stdout.close()
  assert process.stderr.read() == ''
  assert process.wait(60) == 0
  process.stderr.close()


def test_a_stream_that_never_was():
  assert cli._Unbroken(None).write('text') == 4


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
  code = f"""
    import resource
    import threading

    from absl import flags
    import jax

    from mod_jax import cli

    def faults():
      return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    if {started}:
      flags.FLAGS(['script'])
      cli.start_backend()
    jax.devices()  # Starts JAX's threads.

    def allocate():
      bytearray(2**26)  # Freed at once.
      before = faults()
      bytearray(2**26)
      print(faults() - before)

    # XLA's results are not all from the main thread either.
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
  """
  out = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code)],
    check=True,
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, 'GLIBC_TUNABLES': '', 'JAX_PLATFORMS': 'cpu'},
  ).stdout
  # 2^26 bytes are 2^14 small pages.
  assert (int(out) < 100) == started


def test_interrupt_is_one_line_and_130(folder):
  process = start(folder, *GIVEN, '--then=sleep')
  assert process.stdout.readline() == 'asleep\n'
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (130, 'interrupted\n')
