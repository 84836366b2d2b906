"""Time of attention with scores against attention alone, by length.

    python benchmarks/route_scores.py --lengths=1024,2048,4096

Times, in turn, this platform's implementation of `route_scores`, its XLA
reference, attention without scores, as blocks run it, and the mean of the whole
attention map; each forward, and forward and backward. The backward pass begins
at attention's output alone, since scores that only rank tokens have no
gradient; with `--score_gradient`, at the scores as well. With `--peak_tflops`
and `--bandwidth` of the device, lower bounds of the time for products and for
memory traffic are reported. The result is written beside this file as JSON.
"""

import functools

from absl import app, flags
import jax
import jax.numpy as jnp

from mod_jax import timing
import mod_jax_kernels
import results as results_lib

_LENGTHS = flags.DEFINE_list('lengths', ['256', '512'], 'L')
_BATCH = flags.DEFINE_integer('batch', 8, 'B')
_HEADS = flags.DEFINE_integer('heads', 6, 'H')
_CHANNELS = flags.DEFINE_integer('channels', 64, 'C')
_DTYPE = flags.DEFINE_enum(
  'dtype', None, ['float32', 'bfloat16'], 'bfloat16 by default, not on a CPU.'
)
_CAUSAL = flags.DEFINE_bool('causal', False, 'Whether tokens see earlier ones.')
_SCORE_GRADIENT = flags.DEFINE_bool(
  'score_gradient', False, 'Whether the backward pass begins at scores too.'
)
_PEAK = flags.DEFINE_float('peak_tflops', None, "The device's, in this dtype.")
_BANDWIDTH = flags.DEFINE_float('bandwidth', None, "Its memory's, in GB/s.")
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed calls of each.')

# Products of L x L x C for each head: with scores, and without. A backward pass
# recomputes the map, and then has four products. Gradients of scores take one
# more product of queries and keys.
_PRODUCTS = {'forward': (3, 2), 'forward_backward': (8, 7)}


def materialised(q_BLHC, k_BLHC, v_BLHC, causal):
  """Returns out and score, computed from the whole attention map."""
  logit_BHLS = jnp.einsum(
    'BLHC,BSHC->BHLS', q_BLHC, k_BLHC, preferred_element_type=jnp.float32
  )
  logit_BHLS *= q_BLHC.shape[-1] ** -0.5
  if causal:
    earlier_LS = jnp.tri(q_BLHC.shape[1], dtype=bool)
    logit_BHLS = jnp.where(earlier_LS, logit_BHLS, -jnp.inf)
  weight_BHLS = jax.nn.softmax(logit_BHLS)
  out_BLHC = jnp.einsum(
    'BHLS,BSHC->BLHC', weight_BHLS.astype(v_BLHC.dtype), v_BLHC
  )
  return out_BLHC, weight_BHLS.mean(axis=(1, 2))


def attention(q_BLHC, k_BLHC, v_BLHC, causal):
  """Returns out, and zeros for scores."""
  out_BLHC = mod_jax_kernels.attention(q_BLHC, k_BLHC, v_BLHC, causal=causal)
  return out_BLHC, jnp.zeros(q_BLHC.shape[:2])


def contenders(causal: bool) -> dict:
  """Returns functions of q, k and v to out and score, by name."""
  ours = functools.partial(mod_jax_kernels.route_scores, causal=causal)
  return {
    'attention': functools.partial(attention, causal=causal),
    'route_scores': ours,
    'xla': functools.partial(ours, implementation='xla'),
    'materialised': functools.partial(materialised, causal=causal),
  }


def with_gradients(function, scored: bool):
  """Returns a function that also returns gradients of q, k and v."""

  def run(q_BLHC, k_BLHC, v_BLHC, dout_BLHC, dscore_BL):
    del dscore_BL
    out_BLHC, vjp, score_BL = jax.vjp(
      function, q_BLHC, k_BLHC, v_BLHC, has_aux=True
    )
    return out_BLHC, score_BL, vjp(dout_BLHC)

  def run_scored(q_BLHC, k_BLHC, v_BLHC, dout_BLHC, dscore_BL):
    results, vjp = jax.vjp(function, q_BLHC, k_BLHC, v_BLHC)
    return results, vjp((dout_BLHC, dscore_BL))

  return run_scored if scored else run


def floors(direction: str, shape, itemsize: int) -> dict[str, float]:
  """Returns lower bounds of the seconds, given the device's flags."""
  batch, length, heads, channels = shape
  pairs = length * (length + 1) // 2 if _CAUSAL.value else length**2
  product = 2 * batch * heads * channels * pairs
  scores, alone = _PRODUCTS[direction]
  scores += _SCORE_GRADIENT.value and direction != 'forward'
  # Forward: q, k, v and out. Backward, in addition: q, k, v, out and its
  # gradient, and three gradients.
  arrays = 4 if direction == 'forward' else 12
  moved = arrays * batch * length * heads * channels * itemsize
  result = {}
  if _PEAK.value:
    result['products'] = scores * product / (_PEAK.value * 1e12)
    result['products_without_scores'] = alone * product / (_PEAK.value * 1e12)
  if _BANDWIDTH.value:
    result['bytes'] = moved / (_BANDWIDTH.value * 1e9)
  return result


def measure(direction: str, shape, dtype: str) -> dict:
  """Returns median seconds, ratios and floors for one length."""
  keys = jax.random.split(jax.random.key(0), 5)
  arrays = [jax.random.normal(key, shape, dtype) for key in keys[:4]]
  arrays.append(jax.random.normal(keys[4], shape[:2]))
  functions = {}
  for name, function in contenders(_CAUSAL.value).items():
    if direction == 'forward':
      compiled, args = jax.jit(function), arrays[:3]
    else:
      compiled = jax.jit(with_gradients(function, _SCORE_GRADIENT.value))
      args = arrays
    functions[name] = functools.partial(compiled, *args)
  seconds = timing.interleaved(
    functions, rounds=_ROUNDS.value, warmup=2, queued=timing.queue_length()
  )
  return {
    'median_seconds': timing.medians(seconds),
    'over_attention': {
      name: timing.ratio_spread(seconds, name, 'attention')[0]
      for name in functions
      if name != 'attention'
    },
    'materialised_over_route_scores': timing.ratio_spread(
      seconds, 'materialised', 'route_scores'
    )[0],
    'floor_seconds': floors(direction, shape, arrays[0].dtype.itemsize),
  }


def main(_):
  on_cpu = jax.default_backend() == 'cpu'
  dtype = _DTYPE.value or ('float32' if on_cpu else 'bfloat16')
  results = {
    'settings': {
      **results_lib.settings(
        *('batch', 'heads', 'channels', 'causal', 'score_gradient'),
        *('peak_tflops', 'bandwidth', 'rounds'),
      ),
      'dtype': dtype,
    }
  }
  for direction in _PRODUCTS:
    results[direction] = {}
    for length in _LENGTHS.value:
      shape = _BATCH.value, int(length), _HEADS.value, _CHANNELS.value
      results[direction][length] = measure(direction, shape, dtype)
  results_lib.save(__file__, results)


if __name__ == '__main__':
  app.run(main)
