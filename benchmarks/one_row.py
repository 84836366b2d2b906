"""Time of matrix products with a single token's features, by their form.

    python benchmarks/one_row.py

`layers.dense.einsum` and `layers.quantized` choose by it. The matrix has the
size of SmolLM2-135M's head, [I, O] or, as that of a tied head, [O, I]; a row
has I features. A token is one row or two equal ones; in int8 its features are
always two, so there it is the layout that matters. The result is written beside
this file as JSON.
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
_LAYOUTS = 'IO', 'OI'


@functools.partial(jax.jit, static_argnums=0)
def product(layout: str, x_TI, matrix):
  """Returns features times a matrix, as integers in int32."""
  dtype = jnp.int32 if x_TI.dtype == jnp.int8 else x_TI.dtype
  spec = f'TI,{layout}->TO'
  return jnp.einsum(spec, x_TI, matrix, preferred_element_type=dtype)


def measure(dtype: str, counts: tuple[int, ...]) -> dict:
  """Returns seconds by layout and number of rows, and over the first's."""
  inputs, outputs = _INPUTS.value, _OUTPUTS.value
  matrix_IO = jnp.ones((inputs, outputs), dtype)
  calls = {}
  for layout in _LAYOUTS:
    matrix = matrix_IO if layout == 'IO' else matrix_IO.T.copy()
    for rows in counts:
      x_TI = jnp.ones((rows, inputs), dtype)
      name = f'{layout}, rows: {rows}'
      calls[name] = functools.partial(product, layout, x_TI, matrix)
  seconds = timing.interleaved(calls, rounds=_ROUNDS.value, warmup=3)
  first, *others = calls
  return {
    'median_seconds': timing.medians(seconds),
    f'over {first}': {
      name: timing.ratio_spread(seconds, name, first) for name in others
    },
  }


def main(_):
  products = {name: measure(name, (1, 2)) for name in ('float32', 'bfloat16')}
  products['int8'] = measure('int8', (2,))
  names = 'inputs', 'outputs', 'rounds'
  results_lib.save(
    __file__, {**results_lib.settings(*names), 'products': products}
  )


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
