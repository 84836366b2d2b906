"""Time of choosing the next tokens, over what XLA does with plain code.

    python benchmarks/choose_token.py

In rows of as many logits as SmolLM2-135M has. The plain code takes the place of
the largest logit by `argmax`, draws by `jax.random.categorical`, and sorts for
the `top_k` likeliest and for the nucleus `top_p`. The result is written beside
this file as JSON.
"""

import functools

from absl import app, flags
import jax
import jax.numpy as jnp
import machine

from mod_jax import sampling, timing
from mod_jax.layers import vocabulary
import results as results_lib

_VOCAB = flags.DEFINE_integer('vocab', 49152, 'Logits of a row.')
_BATCHES = flags.DEFINE_list('batches', [1, 32], 'Rows.')
_ROUNDS = flags.DEFINE_integer('rounds', 30, 'Timed calls of each.')


def _sorted(logits_BV, keep):
  """Returns the logits for which `keep` holds in a row in falling order."""
  order_BV = jnp.argsort(-logits_BV, axis=-1)
  falling_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
  falling_BV = jnp.where(keep(falling_BV), falling_BV, -jnp.inf)
  return jnp.take_along_axis(falling_BV, jnp.argsort(order_BV), axis=-1)


def _in_nucleus(falling_BV):
  probability_BV = jax.nn.softmax(falling_BV)
  return jnp.cumsum(probability_BV, axis=-1) - probability_BV < 0.9


def _draw(key_B, logits_BV):
  return jax.vmap(vocabulary.draw)(key_B, jax.nn.softmax(logits_BV))


def candidates():
  """Returns plain code and that of mod_jax, of keys and logits, by name."""

  def filtered(**settings):
    def function(key_B, logits_BV):
      del key_B
      return sampling.filter_logits(logits_BV, **settings)

    return function

  def by_sorting(keep):
    return lambda _, logits_BV: _sorted(logits_BV, keep)

  def top_50(logits_BV):
    return jnp.arange(logits_BV.shape[-1]) < 50

  return {
    'likeliest': (
      lambda _, logits_BV: logits_BV.argmax(axis=-1),
      lambda _, logits_BV: vocabulary.argmax(logits_BV),
    ),
    'drawn': (jax.vmap(jax.random.categorical), _draw),
    'top_k=50': (by_sorting(top_50), filtered(top_k=50)),
    'top_p=0.9': (by_sorting(_in_nucleus), filtered(top_p=0.9)),
  }


def main(_):
  cells = []
  for batch in map(int, _BATCHES.value):
    key = jax.random.key(0)
    shape = batch, _VOCAB.value
    inputs = jax.random.split(key, batch), 3 * jax.random.normal(key, shape)
    for name, both in candidates().items():
      plain, ours = (functools.partial(jax.jit(f), *inputs) for f in both)
      seconds = timing.interleaved(
        {'plain': plain, 'mod_jax': ours}, rounds=_ROUNDS.value, warmup=3
      )
      cells.append(
        {
          'batch': batch,
          'choice': name,
          'median_seconds': timing.medians(seconds),
          'over_plain': timing.ratio_spread(seconds, 'mod_jax', 'plain'),
        }
      )
  settings = results_lib.settings('vocab', 'rounds')
  results_lib.save(__file__, {**settings, 'cells': cells})


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
