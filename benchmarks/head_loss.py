"""Time of the chunked loss of the head against that of the plain loss.

    python benchmarks/head_loss.py

For each vocabulary size, value and gradients of the head's loss are computed in
turn from all logits at once and by `losses.head_loss`. `--chunks` adds numbers
of tokens in a chunk that `head_loss` would not choose. The result is written
beside this file as JSON.
"""

import functools

from absl import app, flags
import jax
import jax.numpy as jnp
import machine

from mod_jax import losses, timing
import results as results_lib

_TOKENS = flags.DEFINE_integer('tokens', 4096, 'Tokens of a step.')
_WIDTH = flags.DEFINE_integer('width', 256, 'D')
_ROUNDS = flags.DEFINE_integer('rounds', 21, 'Timed calls of each.')
_VOCABULARIES = flags.DEFINE_list('vocabularies', [256, 2048, 32_768], 'V')
_CHUNKS = flags.DEFINE_list('chunks', [], 'Tokens of chunks, to be compared.')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of the features.'
)


def plain(x_BLD, kernel_DV, targets_BL, weights_BL):
  # Products are in the dtype of x, as in `head_loss`.
  logits_BLV = jnp.einsum('BLD,DV->BLV', x_BLD, kernel_DV.astype(x_BLD.dtype))
  return losses.next_token_loss(logits_BLV, targets_BL, weights_BL)


def compiled(loss, *arguments):
  """Returns a function that computes a loss and its gradients."""

  def mean(x_BLD, kernel_DV, *rest):
    total, count = loss(x_BLD, kernel_DV, *rest)
    return total / count

  step = jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))
  return functools.partial(step, *arguments)


def main(_):
  machine.with_malloc(machine.KEPT)
  rows = {}
  for size in map(int, _VOCABULARIES.value):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (8, _TOKENS.value // 8)
    x_BLD = jax.random.normal(keys[0], (*shape, _WIDTH.value), _DTYPE.value)
    kernel_DV = jax.random.normal(keys[1], (_WIDTH.value, size)) / 16
    targets_BL = jax.random.randint(keys[2], shape, 0, size)
    arguments = (x_BLD, kernel_DV, targets_BL, jnp.ones(shape))
    functions = {
      'plain': compiled(plain, *arguments),
      'chunked': compiled(losses.head_loss, *arguments),
    }
    for chunk in map(int, _CHUNKS.value):
      loss = functools.partial(losses.head_loss, chunk=chunk)
      functions[f'chunks of {chunk}'] = compiled(loss, *arguments)
    seconds = timing.interleaved(
      functions,
      rounds=_ROUNDS.value,
      warmup=3,
      queued=timing.queue_length(),
    )
    middle, low, high = timing.ratio_spread(seconds, 'chunked', 'plain')
    rows[size] = {
      'median_seconds': timing.medians(seconds),
      'chunked_over_plain': middle,
      'quartiles': [low, high],
    }
  results = results_lib.settings('tokens', 'width', 'dtype', 'rounds')
  results_lib.save(__file__, {**results, 'by_vocabulary': rows})


if __name__ == '__main__':
  app.run(main)
