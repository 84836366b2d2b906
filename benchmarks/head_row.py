"""Time of a language model's head with one row, and with two.

    python benchmarks/head_row.py

A tied head is the transposed embedding; another one has a matrix of its own.
The sizes are those of SmolLM2-135M. The result is written beside this file as
JSON.
"""

import functools

from absl import app, flags
import jax
import jax.numpy as jnp
import machine

from mod_jax import timing
import results as results_lib

_WIDTH = flags.DEFINE_integer('width', 576, 'D')
_VOCAB = flags.DEFINE_integer('vocab', 49152, 'V')
_ROUNDS = flags.DEFINE_integer('rounds', 30, 'Timed calls of each.')


def main(_):
  matrix_DV = jax.random.normal(jax.random.key(0), (_WIDTH.value, _VOCAB.value))
  heads = {
    'tied': (jax.jit(lambda x_BD, w_VD: x_BD @ w_VD.T), matrix_DV.T.copy()),
    'own': (jax.jit(lambda x_BD, w_DV: x_BD @ w_DV), matrix_DV),
  }
  calls = {
    f'{name}, {rows}': functools.partial(
      head, jnp.ones((rows, _WIDTH.value)), matrix
    )
    for name, (head, matrix) in heads.items()
    for rows in (1, 2)
  }
  seconds = timing.interleaved(calls, rounds=_ROUNDS.value, warmup=3)
  results = {
    **results_lib.settings('width', 'vocab', 'rounds'),
    'median_seconds': timing.medians(seconds),
    'two_rows_over_one': {
      name: timing.ratio_spread(seconds, f'{name}, 2', f'{name}, 1')
      for name in heads
    },
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
