"""What the tools that disturb runs share: processes, and what they leave."""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from absl import logging

ROOT = pathlib.Path(__file__).resolve().parents[1]
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_OPENING = re.compile(r' (?:starts|continues at step (\d+)): [\d,]+ param')

COMMON = {
  'evaluation.every': 20,
  'evaluation.batches': 1,
  'evaluation.final_batches': 1,
  'log.every': 2,
  'log.tensorboard': False,
}
LANGUAGE = COMMON | {
  'model.vocab_size': 300,
  'data.tokenizer_vocab_size': 300,
  'model.num_layers': 2,
  'model.width': 32,
  'model.num_heads': 2,
  'data.length': 64,
  'optimizer.warmup_steps': 10,
  'evaluation.sample_tokens': 8,
}


class Failure(Exception):
  """What was promised does not hold."""


@dataclasses.dataclass(frozen=True)
class Kind:
  """A command that trains, but for its workdir.

  Attributes:
    config: the file, with its variant.
    changes: overrides of its fields.
    more: other flags.
    runs: directories of its runs below the workdir, in their order.
    each: whether each of them shall get so many signals, or all together.
  """

  config: str
  changes: dict
  more: tuple[str, ...] = ()
  runs: tuple[str, ...] = ('.',)
  each: bool = False

  def command(self, workdir, saves=None) -> list[str]:
    """Returns the whole command; `saves` are overrides of when it saves."""
    changes = self.changes | (saves or {'checkpoint.every_minutes': 0})
    return [
      *(sys.executable, f'{ROOT}/train.py'),
      f'--config={ROOT}/{self.config}',
      f'--workdir={workdir}',
      *self.more,
      *(f'--config.{name}={value}' for name, value in changes.items()),
    ]


class Process:
  """A command that runs, and what it has said so far."""

  def __init__(self, command: Sequence[str], **environment):
    self.said = ''
    self.directories = set()  # Of the runs that were begun or continued.
    self.opened = threading.Event()  # It trains, or is about to.
    self.began = time.monotonic()
    self._process = subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=os.environ | environment,
    )
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    for line in self._process.stdout:
      self.said += line
      if _OPENING.search(line):
        self.directories.add(line.rpartition(' in ')[2].strip())
        self._open()
    self._open()  # Or it never will.

  def _open(self):
    if not self.opened.is_set():
      self.opened_at = time.monotonic()
      self.opened.set()

  @property
  def pid(self) -> int:
    return self._process.pid

  def running(self) -> bool:
    return self._process.poll() is None

  def signal(self, number):
    self._process.send_signal(number)

  def kill(self):
    self._process.kill()

  def wait(self, timeout=300) -> int:
    """Returns the status; raises Failure if there is none in time."""
    try:
      status = self._process.wait(timeout)
      self._reader.join(timeout)
    except subprocess.TimeoutExpired as error:
      raise Failure(f'does not end:\n{self.said}') from error
    finally:
      self.kill()
    return status


def undisturbed(kind: Kind, workdir, saves=None):
  """Runs a command to its end; returns the seconds to its first step, and on.

  Raises:
    Failure: it did not end well.
  """
  process = Process(kind.command(workdir, saves))
  process.opened.wait(600)
  startup = time.monotonic() - process.began
  status = process.wait(600)
  if status:
    raise Failure(f'undisturbed, status {status}:\n{process.said}')
  return startup, time.monotonic() - process.began - startup


def environment(cache):
  """Programs are the same in all processes: compiled once."""
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('MPLBACKEND', 'agg')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(cache)
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'


def metrics(run) -> bytes:
  """Returns the metrics of a run, without when and how often it was started."""
  lines = (run / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
  return b''.join(x for x in lines if json.loads(x)['kind'] != 'event')


def contents(workdir, runs: Sequence[str]) -> dict[str, bytes]:
  """Returns what a finished command leaves, by name: files, and arrays."""
  import jax
  import numpy as np

  from mod_jax import trees
  from mod_jax.runs import checkpoints

  found = {}
  for path in sorted(workdir.rglob('*')):
    name = str(path.relative_to(workdir))
    if path.is_file() and 'checkpoints' not in path.parts:
      text = path.read_bytes()
      if path.name == 'metrics.jsonl':
        text = metrics(path.parent)
      if path.name == 'config.json':  # The rounds differ in when they save.
        text = json.dumps(json.loads(text) | {'checkpoint': None}).encode()
      # What names the directory names another one.
      found[name] = text.replace(str(workdir).encode(), b'WORKDIR')
  for run in runs:
    folder = workdir / run / 'checkpoints'
    step = checkpoints.steps(folder)[-1]
    found[f'{run}: last step'] = str(step).encode()
    saved = json.loads((folder / f'{step}/metadata/metadata').read_text())
    found[f'{run}: data position'] = json.dumps(saved['data_position']).encode()
    names = ('params', 'opt_state', 'model_state', 'ema', 'rng')
    restored = checkpoints.restore_named(folder, names)
    for name, array in trees.flatten(restored.state).items():
      array = np.asarray(jax.device_get(array))
      found[f'{run}: {name}'] = array.tobytes()
  return found


def compare(expected, found):
  """Raises Failure for the first thing that is not as it should be."""
  for name in sorted(expected.keys() | found.keys()):
    if name not in found:
      raise Failure(f'{name} is missing')
    if name not in expected:
      raise Failure(f'{name} is there, and should not be')
    if expected[name] != found[name]:
      raise Failure(f'{name} differs')


def main(doc: str, work: Callable[..., str], **defaults):
  """Does a tool's work in a temporary folder, and prints what it came to.

  Args:
    doc: of the script.
    work: called with the folder and, by name, the options; returns a line.
    defaults: of the options, besides `seed`.
  """
  parser = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  for name, default in (defaults | {'seed': 0}).items():
    parser.add_argument(f'--{name}', type=type(default), default=default)
  options = vars(parser.parse_args())
  paths = [str(ROOT), str(ROOT / 'kernels')]
  sys.path[:0] = paths
  os.environ['PYTHONPATH'] = os.pathsep.join(paths)
  logging.set_verbosity(logging.WARNING)
  for number in CAUGHT:
    # Where they are ignored, as Ctrl-C is in a shell's background job, they
    # would be in the processes too.
    signal.signal(number, signal.SIG_DFL)
  with tempfile.TemporaryDirectory() as folder:
    environment(f'{folder}/compiled')
    try:
      print(f'{work(pathlib.Path(folder), **options)}.')
    except Failure as failure:
      sys.exit(f'{options}: {failure}')
