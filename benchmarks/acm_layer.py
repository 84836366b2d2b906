"""Time of one adaptive layer against the mean number of learners.

    python benchmarks/acm_layer.py

An FFN of ViT-B, 768 -> 3072 -> 768, on 128 images of 197 tokens, four learners.
The gate runs, but its choices are replaced by random ones with a given mean,
since those of an untrained gate are arbitrary. The layer is timed in turn with
the static FFN and with all learners run densely. The result is written beside
this file as JSON. On a CPU, all of them use huge pages of memory, unless
`--nohuge_pages`. On a GPU give `--dtype=bfloat16 --grouped`, which adds all
learners as products of groups, by `jax.lax.ragged_dot` (which multiplies all
rows by all weights on CPUs and GPUs) and by `grouped_dot`, and `--peak_tflops
--bandwidth_tb` for a lower bound of the time of a forward pass. `--gradient`
times all gradients.
"""

import functools

from absl import app, flags
from flax import linen as nn
import jax
import jax.numpy as jnp
import machine
import numpy as np

from mod_jax import timing
from mod_jax.layers import acm
from mod_jax.layers.mlp import MLP, MLPConfig
import mod_jax_kernels
import results as results_lib

_WIDTH = flags.DEFINE_integer('width', 768, 'D')
_HIDDEN = flags.DEFINE_integer('hidden', 3072, 'Of the static FFN.')
_LEARNERS = flags.DEFINE_integer('learners', 4, 'N')
_IMAGES = flags.DEFINE_integer('images', 128, 'B')
_TOKENS = flags.DEFINE_integer('tokens', 197, 'L')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of the computation.'
)
_POINTS = flags.DEFINE_integer('points', 8, 'Mean numbers, from N / points.')
_GROUPED = flags.DEFINE_bool('grouped', False, 'Beside products of groups.')
_GRADIENT = flags.DEFINE_bool('gradient', False, 'Forward and backward.')
_PEAK = flags.DEFINE_float('peak_tflops', None, "The device's products.")
_BANDWIDTH = flags.DEFINE_float('bandwidth_tb', None, 'Its memory, TB/s.')
_HUGE = flags.DEFINE_bool('huge_pages', True, 'Memory in large pages.')
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Timed calls of each.')


def draw(key, mean: float, shape) -> jax.Array:
  """Draws numbers of learners with this mean, from a binomial distribution.

  Unless the mean is 0 or N, all numbers in 0..N occur, as with a real gate.
  """
  draws = jax.random.bernoulli(
    key, mean / _LEARNERS.value, (_LEARNERS.value, *shape)
  )
  return draws.sum(axis=0, dtype=jnp.int32)


def grouped(dot, x_TD, up_NDF, bias_NF, down_NFD, chosen_T):
  """The same as `acm_mlp` by products of groups: a row for each pair."""
  tokens, learners = x_TD.shape[0], up_NDF.shape[0]
  order_T = jnp.argsort(-chosen_T)
  # Learner n runs on the first `count_N[n]` of the ordered tokens.
  count_N = jnp.sum(chosen_T[None] > jnp.arange(learners)[:, None], axis=1)
  end_N = jnp.cumsum(count_N)
  row_R = jnp.arange(tokens * learners)
  learner_R = jnp.searchsorted(end_N, row_R, side='right').clip(0, learners - 1)
  place_R = row_R - (end_N - count_N)[learner_R]
  token_R = order_T[place_R.clip(0, tokens - 1)]
  hidden_RF = dot(x_TD[token_R], up_NDF, count_N)
  hidden_RF = nn.gelu(hidden_RF + bias_NF[learner_R], approximate=False)
  y_RD = dot(hidden_RF, down_NFD, count_N)
  y_RD = jnp.where((row_R < end_N[-1])[:, None], y_RD, 0)
  return jnp.zeros_like(x_TD).at[token_R].add(y_RD)


def compiled(function):
  """Compiles a function of parameters and tokens, or all of its gradients."""
  if not _GRADIENT.value:
    return jax.jit(function)

  def loss(*args):
    return (function(*args).astype(jnp.float32) ** 2).sum()

  return jax.jit(jax.grad(loss, (0, 1)))


def floor(config, mean: float) -> float | None:
  """Returns a lower bound of the seconds; None without the device's flags."""
  if not (_PEAK.value and _BANDWIDTH.value):
    return None
  tokens = _IMAGES.value * _TOKENS.value
  products = tokens * (mean * config.learner_flops + config.gate_flops)
  size = jnp.dtype(_DTYPE.value).itemsize
  weights = config.num_learners * config.hidden * 2 * config.inputs
  moved = size * (2 * tokens * config.inputs + weights)
  return max(products / (_PEAK.value * 1e12), moved / (_BANDWIDTH.value * 1e12))


def main(_):
  if _HUGE.value:
    machine.with_malloc(machine.HUGE_PAGES)
  shape = _IMAGES.value, _TOKENS.value
  dtype = _DTYPE.value
  key = jax.random.key(0)
  z_BLD = jax.random.normal(key, (*shape, _WIDTH.value), dtype)
  config = acm.ffn_config(
    _WIDTH.value, _HIDDEN.value, num_learners=_LEARNERS.value
  )
  module = acm.ACM(config, dtype=dtype)
  init = jax.jit(acm.ACM(config, 'all', dtype=dtype).init)
  params = nn.unbox(init(key, z_BLD[:1, :2]))['params']
  static = MLP(
    MLPConfig(width=_WIDTH.value, hidden=_HIDDEN.value, kind='gelu', bias=True),
    dtype=dtype,
  )
  static_params = nn.unbox(jax.jit(static.init)(key, z_BLD[:1, :2]))

  def adaptive(run, params, z_BLD, drawn_BL):
    logits_BLM = module.apply({'params': params}, z_BLD, method=_gate)
    # Depends on the gate's output, so XLA keeps it, but takes the drawn choice.
    chosen_BL = jnp.where(jnp.isnan(logits_BLM.sum(axis=-1)), 0, drawn_BL)
    return run(
      z_BLD.reshape(-1, _WIDTH.value),
      params['up'].astype(dtype),
      params['bias'].astype(dtype),
      params['down'].astype(dtype),
      chosen_BL.reshape(-1),
    )

  def all_learners(params, z_BLD):
    every = acm.ACM(config, _LEARNERS.value, dtype=dtype)
    return every.apply({'params': params}, z_BLD)[0]

  ours = compiled(functools.partial(adaptive, mod_jax_kernels.acm_mlp))
  functions = {
    'static': functools.partial(compiled(static.apply), static_params, z_BLD),
    'all_dense': functools.partial(compiled(all_learners), params, z_BLD),
  }
  means = [
    _LEARNERS.value * i / _POINTS.value for i in range(_POINTS.value + 1)
  ]
  drawn = {mean: draw(key, mean, shape) for mean in means}
  for mean, drawn_BL in drawn.items():
    functions[f'{mean:g}'] = functools.partial(ours, params, z_BLD, drawn_BL)
  if _GROUPED.value:
    for dot in (jax.lax.ragged_dot, mod_jax_kernels.grouped_dot):
      run = compiled(
        functools.partial(adaptive, functools.partial(grouped, dot))
      )
      functions[dot.__name__] = functools.partial(
        run, params, z_BLD, drawn[_LEARNERS.value]
      )
  seconds = timing.interleaved(
    functions, rounds=_ROUNDS.value, queued=timing.queue_length()
  )
  median = timing.medians(seconds)
  ratios = {
    name: timing.ratio_spread(seconds, name, 'static')[0]
    for name in functions
    if name != 'static'
  }
  positive = [mean for mean in means if mean > 0]
  times = np.array([median[f'{mean:g}'] for mean in positive])
  real = np.array([float(drawn[mean].mean()) for mean in positive])
  slope, intercept = np.polyfit(real, times, 1)
  residual = times - (slope * real + intercept)
  r_squared = 1 - residual.var() / times.var()
  results = {
    'settings': results_lib.settings(
      *('width', 'hidden', 'learners', 'images', 'tokens', 'dtype', 'gradient'),
      'rounds',
    ),
    'median_seconds': median,
    'over_static': ratios,
    'mean_learners': dict(zip(map(str, positive), real.tolist(), strict=True)),
    'linear_r_squared': float(r_squared),
    'floor_seconds': {f'{mean:g}': floor(config, mean) for mean in means},
  }
  results_lib.save(__file__, results)


def _gate(module, z_BLD):
  return module.gate(z_BLD)


if __name__ == '__main__':
  app.run(main)
