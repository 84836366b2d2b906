"""Time of matrix products with two rows, over that with a single one.

    python benchmarks/one_row.py

`layers.dense.einsum` takes two rows for one where this says that it pays. The
matrix has the size of SmolLM2-135M's head, transposed as that of a tied head
or not. The result is written beside this file as JSON.
"""

import functools

from absl import app, flags
import jax
import jax.numpy as jnp
import machine

from mod_jax import timing
import results as results_lib

_INPUTS = flags.DEFINE_integer('inputs', 576, 'I')
_OUTPUTS = flags.DEFINE_integer('outputs', 49152, 'O')
_ROUNDS = flags.DEFINE_integer('rounds', 30, 'Timed calls of each.')


def main(_):
  inputs, key = _INPUTS.value, jax.random.key(0)
  products = {
    'plain': jax.jit(lambda x_TI, w_IO: x_TI @ w_IO),
    'transposed': jax.jit(lambda x_TI, w_OI: x_TI @ w_OI.T),
  }
  ratios = {}
  for dtype in ('float32', 'bfloat16'):
    matrix_IO = jax.random.normal(key, (inputs, _OUTPUTS.value), dtype)
    for name, product in products.items():
      matrix = matrix_IO if name == 'plain' else matrix_IO.T.copy()
      calls = {
        rows: functools.partial(
          product, jnp.ones((rows, inputs), dtype), matrix
        )
        for rows in (1, 2)
      }
      seconds = timing.interleaved(calls, rounds=_ROUNDS.value, warmup=3)
      ratios[f'{dtype}, {name}'] = {
        'median_seconds': timing.medians(seconds),
        'two_rows_over_one': timing.ratio_spread(seconds, 2, 1),
      }
  names = 'inputs', 'outputs', 'rounds'
  results_lib.save(
    __file__, {**results_lib.settings(*names), 'products': ratios}
  )


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
