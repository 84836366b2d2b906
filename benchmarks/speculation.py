"""Speed of speculative decoding, against plain decoding and the dense twin's.

    python benchmarks/speculation.py --workdir=runs/speculation

Trains a Mixture-of-Depths model with an early-exit loss on the embedded text,
or resumes its training. Then it continues held-out texts with every kind of
draft, in turn, greedily and at temperature 1. The dense twin's weights are
random, which does not change its time. `tokens_of_a_pass` is the mean number of
tokens that a verification adds to a sequence; in a batch, all sequences wait
for the slowest. The result is written beside this file as JSON.
"""

import itertools
import pathlib

from absl import app, flags, logging
from flax import linen as nn
import jax
import machine
import numpy as np

import mod_jax
from mod_jax import config as config_lib
from mod_jax import timing
from mod_jax.errors import UserError
from mod_jax.sampling import Draft, generate
from mod_jax.tasks import phases
import results as results_lib

_WORKDIR = flags.DEFINE_string('workdir', 'runs/speculation', 'For the runs.')
_WIDTH = flags.DEFINE_integer('width', 256, 'D')
_LAYERS = flags.DEFINE_integer('layers', 8, 'Number of blocks.')
_EXIT = flags.DEFINE_integer('exit', 2, 'Blocks of the early exit.')
_STEPS = flags.DEFINE_integer('steps', 400, 'Of training.')
_BATCHES = flags.DEFINE_list('batches', [1, 2, 4, 8], 'Sequences.')
_TEMPERATURES = flags.DEFINE_list('temperatures', [0.0, 1.0], 'Of sampling.')
_PROMPT = flags.DEFINE_integer('prompt', 64, 'Tokens of each prompt.')
_NEW = flags.DEFINE_integer('new', 128, 'Tokens that are added to each.')
_ROUNDS = flags.DEFINE_integer('rounds', 4, 'Sets of prompts.')

mod = machine.configs('lm/mod.py')


def drafts() -> dict[str, Draft]:
  """Returns the drafts to measure, by name."""
  trained, half = _EXIT.value, _LAYERS.value // 2
  return {
    'early, 2': Draft(kind='early', layers=trained, tokens=2),
    'early, 4': Draft(kind='early', layers=trained, tokens=4),
    # The early-exit loss has not trained the head at this depth.
    f'first {half} blocks, 2': Draft(kind='early', layers=half, tokens=2),
    'never, 2': Draft(kind='never', tokens=2),
    'lookup, 2': Draft(kind='lookup', tokens=2),
    'lookup, 4': Draft(kind='lookup', tokens=4),
  }


def trained():
  """Trains the model if necessary; returns it and its held-out losses."""
  name = f'early{_EXIT.value}'
  config = config_lib.replace(
    mod.experiment(mod.ROUTING, name, num_layers=_LAYERS.value),
    {
      'model.width': _WIDTH.value,
      'model.num_heads': _WIDTH.value // 64,
      'model.early_exit': _EXIT.value,
      'train.num_steps': _STEPS.value,
      'optimizer.learning_rate': 2e-3,
      'optimizer.warmup_steps': _STEPS.value // 10,
      'evaluation.every': 0,
      'evaluation.final_batches': 16,
      'evaluation.sample_tokens': 0,
      'checkpoint.keep': 1,
      'log.every': 20,
      'log.tensorboard': False,
    },
  )
  directory = pathlib.Path(_WORKDIR.value, name)
  outcome = phases.train(config, directory)
  if not outcome.finished:
    raise UserError(f'{name} was stopped: the same command continues.')
  rules = ('top_k', 'threshold', 'never')
  losses = {rule: outcome.metrics[f'{rule}/loss'] for rule in rules}
  return mod_jax.load(directory), losses


def prompts(run, batch: int):
  """Yields tokens_BP of held-out texts, cycling through them."""
  rows = [
    row
    for chunk in run.task.modality.eval_batches(batch_size=16, num_batches=4)
    for row, weight in zip(chunk['tokens'], chunk['weights'], strict=True)
    if weight.all()
  ]
  rows = np.array(rows)[:, : _PROMPT.value]
  for i in itertools.count():
    yield rows[np.arange(batch * i, batch * (i + 1)) % len(rows)]


class Decoder:
  """Continues texts, and records the number of passes of each call."""

  def __init__(self, run, model, variables, batch, temperature, draft):
    self._model, self._variables = model, variables
    self._temperature, self._draft = temperature, draft
    self._prompts = prompts(run, batch)
    self._mode = run.config.routing.mode('threshold', overflow='drop')
    self.passes = []

  def __call__(self):
    generated = generate(
      self._model,
      self._variables,
      next(self._prompts),
      max_new_tokens=_NEW.value,
      mode=self._mode,
      temperature=self._temperature,
      key=jax.random.key(len(self.passes)),
      draft=self._draft,
    )
    generated.tokens_BN.block_until_ready()
    # Without the pass over the prompt, which yields the first token.
    self.passes.append(int(generated.passes) - 1)
    self.routed = float(generated.routed)


def measure(run, batch: int, temperature: float) -> dict:
  """Returns tokens per second and tokens of a pass, by kind of decoding."""
  twin = run.config.dense_twin().build()
  shapes = jax.jit(twin.init)(jax.random.key(0), run.config.example())
  dense = nn.unbox(shapes)
  cases = {
    'dense': Decoder(run, twin, dense, batch, temperature, None),
    'plain': Decoder(run, run.model, run.variables, batch, temperature, None),
  }
  for name, draft in drafts().items():
    cases[name] = Decoder(
      run, run.model, run.variables, batch, temperature, draft
    )
  seconds = timing.interleaved(cases, rounds=_ROUNDS.value)
  mean = {name: sum(x) / len(x) for name, x in seconds.items()}
  kinds = {}
  for name, case in cases.items():
    passes = case.passes[-_ROUNDS.value :]
    kinds[name] = {
      'tokens_per_second': batch * _NEW.value / mean[name],
      'over_dense': mean['dense'] / mean[name],
      'over_plain': mean['plain'] / mean[name],
      'tokens_of_a_pass': (_NEW.value - 1) * len(passes) / sum(passes),
    }
  return {
    'batch': batch,
    'temperature': temperature,
    'routed': cases['plain'].routed,
    'kinds': kinds,
  }


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
  run, losses = trained()
  cells = []
  for temperature in map(float, _TEMPERATURES.value):
    for batch in map(int, _BATCHES.value):
      cells.append(measure(run, batch, temperature))
      print(cells[-1], flush=True)
  names = ('width', 'layers', 'exit', 'steps', 'prompt', 'new', 'rounds')
  results = {
    **results_lib.settings(*names),
    'vocab_size': run.config.vocab_size,
    'capacity': mod.ROUTING.capacity,
    'held_out_loss': losses,
    'cells': cells,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
