"""Time of matrix products with a single token's features, by their form.

    python benchmarks/one_row.py

`layers.dense.einsum` and `layers.quantized` choose by it. The matrix has the
size of SmolLM2-135M's head, [I, O] or, as that of a tied head, [O, I]; a row
has I features. Forms are one row, two equal ones, and a vector, which has no
axis of rows. In int8 a token's features are two rows, so there it is the layout
that matters. The result is written beside this file as JSON.
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
_FORMS = {'one row': 1, 'two rows': 2, 'vector': None}  # Numbers of rows.


@functools.partial(jax.jit, static_argnums=0)
def product(layout: str, x, matrix):
  """Returns features times a matrix, as integers in int32."""
  rows = 'T' * (x.ndim - 1)
  dtype = jnp.int32 if x.dtype == jnp.int8 else x.dtype
  spec = f'{rows}I,{layout}->{rows}O'
  return jnp.einsum(spec, x, matrix, preferred_element_type=dtype)


def measure(dtype: str, forms) -> dict:
  """Returns seconds by form and layout, and over those of the first."""
  inputs, outputs = _INPUTS.value, _OUTPUTS.value
  matrix_IO = jnp.ones((inputs, outputs), dtype)
  calls = {}
  for layout in _LAYOUTS:
    matrix = matrix_IO if layout == 'IO' else matrix_IO.T.copy()
    for form in forms:
      rows = _FORMS[form]
      x = jnp.ones(inputs if rows is None else (rows, inputs), dtype)
      calls[f'{layout}, {form}'] = functools.partial(product, layout, x, matrix)
  seconds = timing.interleaved(calls, rounds=_ROUNDS.value, warmup=3)
  first, *others = calls
  return {
    'median_seconds': timing.medians(seconds),
    f'over {first}': {
      name: timing.ratio_spread(seconds, name, first) for name in others
    },
  }


def main(_):
  products = {name: measure(name, _FORMS) for name in ('float32', 'bfloat16')}
  products['int8'] = measure('int8', ['two rows'])
  names = 'inputs', 'outputs', 'rounds'
  results_lib.save(
    __file__, {**results_lib.settings(*names), 'products': products}
  )


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
