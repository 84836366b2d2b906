"""What the TPU compiler says of two ways to move tokens.

    python benchmarks/compiled_moves.py

For a v5e, in bfloat16: an eighth of 2,048 tokens of width 768 in a batch of 8,
as a routed language model takes them, and half of the 197 tokens of a ViT-B on
128 images. They are gathered, and their results added in their places, by index
or as products with one-hot rows. What the figures are is said in `compiled.py`.
The result is written beside this file as JSON.
"""

import json
import sys

from absl import app
import compiled
import jax
import jax.numpy as jnp

import results as results_lib

_MOVED = {
  'language model': (8, 2048, 256),
  'ViT': (128, 197, 98),
}
_WIDTH = 768


def gather(x_BLD, idx_BK):
  return jnp.take_along_axis(
    x_BLD, idx_BK[..., None], axis=1, mode='promise_in_bounds'
  )


def gather_one_hot(x_BLD, idx_BK):
  return jax.nn.one_hot(idx_BK, x_BLD.shape[1], dtype=x_BLD.dtype) @ x_BLD


def add(x_BLD, idx_BK, y_BKD):
  options = {'unique_indices': True, 'indices_are_sorted': True}
  return jax.vmap(
    lambda x_LD, idx_K, y_KD: x_LD.at[idx_K].add(
      y_KD, mode='promise_in_bounds', **options
    )
  )(x_BLD, idx_BK, y_BKD)


def add_one_hot(x_BLD, idx_BK, y_BKD):
  place_BKL = jax.nn.one_hot(idx_BK, x_BLD.shape[1], dtype=x_BLD.dtype)
  return x_BLD + jnp.einsum('BKL,BKD->BLD', place_BKL, y_BKD)


def programs():
  """Returns (what is done, how, function, shapes)."""
  for model, (batch, length, kept) in _MOVED.items():
    x_BLD = jax.ShapeDtypeStruct((batch, length, _WIDTH), jnp.bfloat16)
    y_BKD = jax.ShapeDtypeStruct((batch, kept, _WIDTH), jnp.bfloat16)
    idx_BK = jax.ShapeDtypeStruct((batch, kept), jnp.int32)
    gathered, added = (x_BLD, idx_BK), (x_BLD, idx_BK, y_BKD)
    yield f'gather, {model}', 'by index', gather, gathered
    yield f'gather, {model}', 'one-hot product', gather_one_hot, gathered
    yield f'add, {model}', 'by index', add, added
    yield f'add, {model}', 'one-hot product', add_one_hot, added


def main(_):
  cells = []
  with compiled.dumped() as folder:
    for what, how, function, args in programs():
      told, _ = compiled.estimated('v5e', function, args, folder)
      cells.append({'what': what, 'how': how, **told})
      print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
  results_lib.save(__file__, {'device': 'v5e', 'cells': cells})


if __name__ == '__main__':
  app.run(main)
