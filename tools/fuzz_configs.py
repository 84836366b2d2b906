"""Random overrides of every config: none may crash, hang, or be nonsense.

    python tools/fuzz_configs.py --count=2000 --seed=0

Overrides go the way that those of a command line go, `--config.x=…` and
`--sweep=x=…`. Whatever comes of them is either a sentence for the person who
gave them or a config that can be used: its numbers are finite, it can be saved
and read again, its model has shapes and FLOPs, and its optimiser a schedule.
Data are not looked at, nothing is computed and nothing written.

It is a process of its own, and not a function of the tests: a case that hangs
can only be ended for certain by ending its process.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import io
import math
import os
import pathlib
import random
import re
import sys
import time
import traceback
import types
import typing

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

# After the environment, which JAX reads once, as it is imported.
# ruff: noqa: E402
from absl import flags
from flax import linen as nn
import jax

from mod_jax import cli
from mod_jax import config as config_lib
from mod_jax import optimizer as optimizer_lib
from mod_jax.sweeps import grid
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.experiment import ExperimentConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIME_LIMIT = 300.0  # Seconds by the clock, of a machine that may be busy.
# Rows of FLOPs of the models that are traced; in others the same stands longer.
_TRACED = 10

EXTREMES = (
  *(math.inf, -math.inf, math.nan, 1e39, 1e308, 1e-320, -1.0),
  *(10**8, 10**20, -(10**20), -1, 0),
)
# Texts that some field, or all, should refuse; three spaces separate them.
NONSENSE = (
  *"""
inf   -inf   nan   1e999   -1e999   1e308   1e39   1e-320   -0.0   1e3   1.5
0   -1   -7   0.0   -0.5   99999999   100000000000000000000   0x10   1_0   3j
None   none   True   false   LMConfig   ViTConfig   é∞😀   \udcff   '   "   ,
()   (1,)   1,2,3   ((1, 2), (3,))   [1, [2]]   (0.5, inf)   (1e999,)   (
{}   {'a': 1}   {1: 2}   {[]: 1}   {'': ''}   {'x': {}}   {'width': 64}   .   ٣
{1, 2}   ((),)
{'type': 'LMConfig'}   {'type': 'ViTConfig'}   {'type': 'DynamicViTConfig'}
{'type': 'DynamicViTConfig'}   {'type': 'TextDataConfig'}   {'type': 'Nope'}
{'type': 'ImageDataConfig'}   {'type': 'ACMObjective'}   {'type': []}   f(x)   *
{'type': 'AdaptiveConfig'}
{'type': 'PruningObjective'}   lambda: 0   __import__("os")   b'x'   1 + 1
(('(', 1.0, 0),)   (('.*', 0.0, 0),)   (('.*', 1.0, 0),)   (('.*', inf, 0),)
(('.*', 1, 10**9),)   (('a{99999999999}', 1, 0),)
""".strip()
  .replace('\n', ' ' * 3)
  .split(' ' * 3),
  *('', ' ', '9' * 400, '9' * 5000, '0x' + 'f' * 5000, '-' * 9000 + '1'),
  *('(' * 500, '[' * 30 + ']' * 30),
)


def _members(hint):
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return typing.get_args(hint)
  return (hint,)


def _plausible(rng, hint):
  """Returns a value such as a field of this annotation might have."""
  hint = rng.choice(_members(hint))
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if dataclasses.is_dataclass(hint):
    # Of an abstract one, any.
    hint = rng.choice(list(config_lib.classes_of(hint).values()))
    hints = config_lib.annotations(hint)
    names = rng.sample(list(hints), min(len(hints), rng.randrange(3)))
    fields = {name: _plausible(rng, hints[name]) for name in names}
    return fields | ({'type': hint.__name__} if rng.random() < 0.8 else {})
  if origin is typing.Literal:
    return rng.choice(args)
  if origin is tuple:
    if args[-1] is Ellipsis:
      args = args[:1] * rng.randrange(4)
    return tuple(_plausible(rng, arg) for arg in args)
  if origin is typing.Annotated:
    ends = [end for end in vars(args[1]).values() if end is not None]
    if rng.random() < 0.3:
      return rng.choice(ends) + rng.choice((-1, 0, 0, 0, 1))
    hint = args[0]
  if hint in (int, float) and rng.random() < 0.2:
    return rng.choice(EXTREMES)
  return {
    types.NoneType: lambda: None,
    bool: lambda: rng.random() < 0.5,
    int: lambda: rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 32, 64, 224)),
    float: lambda: rng.choice((rng.random(), 1.0, 10 ** rng.uniform(-9, 9))),
    str: lambda: rng.choice(
      ('', 'a', 'bytes', '.*', 'block_0/mlp', '/no/file')
    ),
  }[hint]()


@functools.cache
def _bases():
  """Returns (file, variant, experiment) of every config there is."""
  found = []
  for file in sorted((ROOT / 'configs').rglob('*.py')):
    module = config_lib.load(file)
    for variant in module.VARIANTS:
      config = module.get_config(variant)
      found.append((file, variant, config))
  return found


def _draw(rng) -> tuple[str, ...]:
  """Returns a random command line."""
  file, variant, config = rng.choice(_bases())
  argv = ['fuzz', f'--config={file}:{variant}']
  fields = [(path, hint) for path, _, hint in config_lib.walk(config)]
  for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
    path, hint = rng.choice(fields)
    if rng.random() < 0.03:
      path += rng.choice(('x', '.x', '.', '..', ' ', '.type'))
    texts = []
    for _ in range(2):
      value = _plausible(rng, hint)
      text = value if isinstance(value, str) else repr(value)
      texts.append(rng.choice(NONSENSE) if rng.random() < 0.4 else text)
    if rng.random() < 0.2:
      argv.append(f'--sweep={path}={",".join(texts)}')
    else:
      argv.append(f'--config.{path}={texts[0]}')
  return tuple(argv)


@contextlib.contextmanager
def _own_flags():
  """Defines what train.py does, and takes it away again."""
  config = flags.DEFINE_string('config', None, 'The experiment.')
  sweep = flags.DEFINE_multi_string('sweep', [], 'Fields and values.')
  try:
    yield config, sweep
  finally:
    for name in list(flags.FLAGS):
      if name in ('config', 'sweep'):
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()


def _run(argv) -> str:
  """Returns what a command line ends in: `accepted` or `refused`.

  Raises:
    AssertionError: it ends otherwise.
    Exception: it ends in a traceback.
  """
  err = io.StringIO()
  status = 2

  def main(_):
    nonlocal status
    base = cli.load_config(config.value, ExperimentConfig)
    axes = grid.parse(base, sweep.value)
    for _, point in grid.points(base, axes):
      check(point)
    status = 0

  with (
    _own_flags() as (config, sweep),
    contextlib.redirect_stderr(err),
    contextlib.suppress(SystemExit),
  ):
    cli.run(main, list(argv))
  if status == 0:
    return 'accepted'
  told = err.getvalue()
  assert re.fullmatch(r'error: [^\n]+\n', told), f'not one line: {told!r}'
  return 'refused'


@functools.cache
def _shapes(model):
  rngs = {'params': jax.random.key(0), 'routing': jax.random.key(0)}
  return nn.unbox(
    jax.eval_shape(lambda: model.build().init(rngs, model.example()))
  )


def check(config: ExperimentConfig) -> None:
  """Checks that a config which was accepted can be used.

  Raises:
    AssertionError: it cannot.
    UserError: it cannot, and something says why.
  """
  text = config_lib.to_json(config)
  assert not re.search('Infinity|NaN', text), text
  again = config_lib.from_json(ExperimentConfig, text)
  assert (again, hash(again)) == (config, hash(config))
  # Phases are runs of their own; what they would start from is not there, and
  # epochs are of data that would have to be read.
  start = dataclasses.replace(
    config,
    init=config.init or '/no/run',
    train=dataclasses.replace(config.train, num_epochs=None),
  )
  for _, run in phases.expand(start, '/no/run'):
    _check_run(run)


def _check_run(config):
  steps = config.train.num_steps
  optimizer_lib.make_optimizer(config.optimizer, steps)
  rate = optimizer_lib.schedule(config.optimizer, steps)
  warmup_steps = config_lib.steps_of(config.optimizer.warmup_steps, steps)
  rates = [float(rate(step)) for step in (0, warmup_steps, steps)]
  assert all(0 <= r < math.inf for r in rates), rates
  assert rates[1] > 0, rates
  model, task = config.model, make_task(config)
  # None for images; with pictures in a text, the number of both.
  (length,) = task.modality.length or ((),)
  arguments = length if isinstance(length, tuple) else (length,)
  table = model.flops_table(*arguments)
  assert all(n >= 0 for _, parts in table for n in parts.values()), table
  for step in (0, steps):
    assert 0 < task.flops_per_step(task.static_args(step)) < math.inf
  tokens = task.modality.tokens_per_step
  assert tokens is None or tokens > 0
  if len(table) <= _TRACED:
    shapes = _shapes(model)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    assert sizes
    assert min(sizes) > 0
    optimizer_lib.check_rules(config.optimizer, shapes['params'])


def fuzz(count: int, seed: int) -> bool:
  """Tries so many command lines, and returns whether none failed."""
  rng = random.Random(seed)
  ends, longest = collections.Counter(), 0.0
  for _ in range(count):
    argv = _draw(rng)
    begun = time.process_time()
    shown = ' '.join(arg[:300] for arg in argv[1:])
    print(shown.encode(errors='surrogateescape'), flush=True)
    # Ends the process: what a signal's handler raises, Python drops in a
    # destructor or in a callback of its garbage collector.
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    try:
      end = _run(argv)
    except Exception:
      end = 'failed'
      print(traceback.format_exc(limit=-8), flush=True)
    longest = max(longest, time.process_time() - begun)
    ends[end] += 1
  told = ', '.join(f'{n} {end}' for end, n in sorted(ends.items()))
  print(f'{count} overrides: {told}; the longest took {longest:.1f} s')
  return not ends['failed']


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--count', type=int, default=2000)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  sys.exit(not fuzz(args.count, args.seed))


if __name__ == '__main__':
  main()
