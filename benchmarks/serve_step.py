"""A step of the engine beside requests that ask for more, and without them.

    python benchmarks/serve_step.py

Times, in turn, steps of engines whose slots are all taken: by plain requests;
and by one that has a JSON schema, penalties, or log-probabilities of the
likeliest tokens, beside plain ones. The engine's host waits for each step, so
that nothing that it does is hidden by the device's work. The model has the
shape of SmolLM2-135M and random weights; the vocabulary is of random words. The
result is written beside this file as JSON.
"""

import types

from absl import app, flags
from flax import linen as nn
import jax
import machine
import numpy as np

from mod_jax import timing
from mod_jax.data.tokenizers import Tokenizer
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
from mod_jax.pretrained.load import Run
from mod_jax.serving.engine import Engine
import results as results_lib

_WIDTH = flags.DEFINE_integer('width', 576, 'D')
_LAYERS = flags.DEFINE_integer('layers', 30, 'Number of blocks.')
_VOCAB = flags.DEFINE_integer('vocab', 49152, 'V')
_SLOTS = flags.DEFINE_integer('slots', 8, 'Requests at a time.')
_LENGTH = flags.DEFINE_integer('length', 512, 'Tokens that a slot holds.')
_ROUNDS = flags.DEFINE_integer('rounds', 100, 'Timed steps of each.')
_WARMUP = 8
_PROMPT = 16
# Goes on for longer than a request may.
_SCHEMA = {
  'type': 'array',
  'minItems': 10**4,
  'items': {
    'type': 'object',
    'properties': {
      'name': {'type': 'string', 'maxLength': 40},
      'count': {'type': 'integer', 'minimum': 0, 'maximum': 1000},
      'kind': {'enum': ['one', 'two', 'three']},
    },
    'required': ['name', 'count', 'kind'],
    'additionalProperties': False,
  },
}
_MORE = {
  'plain': {},
  'schema': {'schema': _SCHEMA},
  'penalties': {'frequency_penalty': 0.5, 'logit_bias': {7: 1.0}},
  'likeliest': {'num_likeliest': 20},
}


class _Words(Tokenizer):
  """All bytes, and random words of 2 to 8 letters, half after a space."""

  def __init__(self, size: int):
    rng = np.random.default_rng(0)
    surfaces = {bytes([i]): None for i in range(256)}
    while len(surfaces) < size:
      letters = rng.integers(97, 123, rng.integers(2, 9)).astype(np.uint8)
      surfaces[b' ' * int(rng.integers(2)) + letters.tobytes()] = None
    super().__init__(
      surfaces=list(surfaces),
      names={},
      eos_id=None,
      bos_id=None,
      fingerprint='words',
    )

  def encode(self, text):
    return list(text.encode())

  def _decode(self, ids):
    return b''.join(self.surfaces[i] for i in ids).decode('utf-8', 'replace')


def step_function(run: Run, more: dict):
  """Returns a function that runs a step of an engine with full slots."""
  engine = Engine(run, slots=_SLOTS.value, max_length=_LENGTH.value)

  def fill():
    prompt = list(range(_PROMPT))
    engine.submit(prompt, temperature=1.0, **more)
    for seed in range(1, _SLOTS.value):
      engine.submit(prompt, temperature=1.0, seed=seed)

  def step():
    if engine.idle:
      fill()
    engine.advance()
    jax.block_until_ready(engine._state)

  return step


def main(_):
  machine.with_malloc(machine.KEPT)
  config = lm.LMConfig(
    vocab_size=_VOCAB.value,
    num_layers=_LAYERS.value,
    width=_WIDTH.value,
    num_heads=_WIDTH.value // 64,
    num_kv_heads=_WIDTH.value // 192,
    routing=MoDConfig(),
  )
  init = jax.jit(config.build().init)
  variables = nn.unbox(init(jax.random.key(0), config.example()))
  modality = types.SimpleNamespace(tokenizer=_Words(_VOCAB.value))
  task = types.SimpleNamespace(modality=modality)
  run = Run(config=config, variables=variables, task=task)
  steps = {name: step_function(run, more) for name, more in _MORE.items()}
  seconds = timing.interleaved(steps, rounds=_ROUNDS.value, warmup=_WARMUP)
  over_plain = {}
  for name in steps:
    middle, *quartiles = timing.ratio_spread(seconds, name, 'plain')
    over_plain[name] = {'time_ratio': middle, 'quartiles': quartiles}
  results = {
    **results_lib.settings(
      *('width', 'layers', 'vocab', 'slots', 'length', 'rounds')
    ),
    'median_seconds': timing.medians(seconds),
    'over_plain': over_plain,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
