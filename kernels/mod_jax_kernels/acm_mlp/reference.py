"""Learners in plain JAX: the reference, and the backend for CPUs."""

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels.acm_mlp import order as order_lib

# Most tokens of a product. Smaller tiles waste less on tokens with smaller k,
# larger ones use the matrix units better.
TILE = 256
# Up to so many tokens, as of an image or a recording, are in no tiles.
FEW = 512


def acm_mlp(
  x_TD, w1_NDF, b1_NF, w2_NFD, num_learners_T, activation='gelu', tile=None
):
  """See `mod_jax_kernels.acm_mlp`; sums are in float32."""
  if not x_TD.shape[0]:
    return jnp.zeros((0, w2_NFD.shape[-1]), x_TD.dtype)
  order = order_lib.order(num_learners_T, w1_NDF.shape[0])
  return forward(
    x_TD, w1_NDF, b1_NF, w2_NFD, order, activation=activation, tile=tile
  )


def forward(x_TD, w1_NDF, b1_NF, w2_NFD, order, *, activation, tile=None):
  """Returns y_TD.

  Each tile of tokens, taken in `order`, loops over as many learners as its
  largest number; tiles without any learner are skipped. If `tile` is None, few
  tokens are not split: see `_of_few`.
  """
  tokens, outputs = x_TD.shape[0], w2_NFD.shape[-1]
  # An export may have a symbol in place of a number.
  if tile is None and isinstance(tokens, int) and tokens <= FEW:
    return _of_few(x_TD, w1_NDF, b1_NF, w2_NFD, order, activation)
  tile = dispatch.at_most(tokens, tile or TILE)
  token_IP = _in_tiles(order.token_T, tile)
  count_N = order.count_N

  def one_tile(i, y_TD):
    start = i * tile
    token_P = token_IP[i]
    x_PD = x_TD.at[token_P].get(mode='clip')

    def one_learner(n, sum_PD):
      learner_PD = _learner(x_PD, w1_NDF[n], b1_NF[n], w2_NFD[n], activation)
      return sum_PD + jnp.where(_runs(start, tile, count_N[n]), learner_PD, 0.0)

    sum_PD = jax.lax.fori_loop(
      *(0, jnp.sum(count_N > start), one_learner),
      jnp.zeros((tile, outputs), jnp.float32),
    )
    return y_TD.at[token_P].set(
      sum_PD.astype(y_TD.dtype), mode='drop', unique_indices=True
    )

  # Skip tiles without learners: their results are already zero.
  return jax.lax.fori_loop(
    *(0, -(-count_N[0] // tile), one_tile),
    jnp.zeros((tokens, outputs), x_TD.dtype),
  )


def _of_few(x_TD, w1_NDF, b1_NF, w2_NFD, order, activation):
  """Returns y_TD; each learner runs once, on enough eighths of the tokens.

  Products of more rows are faster than those of a few tiles, and more numbers
  of rows to choose from would take longer to compile than they save.
  """
  tokens = x_TD.shape[0]
  step = max(32, 8 * -(-tokens // 64))
  x_TD = x_TD[order.token_T]

  def of_first(rows, n):
    def run(sum_TD):
      x_PD = x_TD[:rows]
      learner_PD = _learner(x_PD, w1_NDF[n], b1_NF[n], w2_NFD[n], activation)
      runs_P1 = _runs(0, rows, order.count_N[n])
      sum_PD = sum_TD[:rows] + jnp.where(runs_P1, learner_PD, 0.0)
      # Not `at[:rows]`, a scatter, on which XLA crashes in a sharded program.
      return jax.lax.dynamic_update_slice(sum_TD, sum_PD, (0, 0))

    return run

  def one_learner(n, sum_TD):
    sizes = [min(rows, tokens) for rows in range(step, tokens + step, step)]
    branches = [lambda sum_TD: sum_TD, *(of_first(rows, n) for rows in sizes)]
    return jax.lax.switch(-(-order.count_N[n] // step), branches, sum_TD)

  sum_TD = jax.lax.fori_loop(
    *(0, jnp.sum(order.count_N > 0), one_learner),
    jnp.zeros((tokens, w2_NFD.shape[-1]), jnp.float32),
  )
  return sum_TD.astype(x_TD.dtype)[order.slot_T]


def backward(
  x_TD, w1_NDF, b1_NF, w2_NFD, g_TD, order, *, activation, tile=TILE
):
  """Returns gradients of x, w1, b1 and w2, given the gradient g of y.

  It loops over tiles and learners as `forward`, and recomputes hidden units.
  """
  tile = dispatch.at_most(x_TD.shape[0], tile)
  token_IP = _in_tiles(order.token_T, tile)
  count_N = order.count_N

  def one_tile(i, carry):
    start = i * tile
    token_P = token_IP[i]
    x_PD, g_PD = (a.at[token_P].get(mode='clip') for a in (x_TD, g_TD))

    def one_learner(n, carry):
      dx_PD, dw1_NDF, db1_NF, dw2_NFD = carry
      runs_P1 = _runs(start, tile, count_N[n])
      # Zero both for tokens that do not run the learner, so that these add
      # nothing to the weights' gradients even if they are not finite.
      masked_x_PD, masked_g_PD = (
        jnp.where(runs_P1, a, 0) for a in (x_PD, g_PD)
      )
      preactivation_PF = _product(masked_x_PD, w1_NDF[n]) + b1_NF[n]
      hidden_PF, slope_PF = act_and_slope(preactivation_PF, activation)
      delta_PF = slope_PF * _product(masked_g_PD, w2_NFD[n].T)
      rounded_PF = delta_PF.astype(x_TD.dtype)
      return (
        dx_PD + _product(rounded_PF, w1_NDF[n].T),
        dw1_NDF.at[n].add(_product(masked_x_PD.T, rounded_PF)),
        db1_NF.at[n].add(delta_PF.sum(axis=0)),
        dw2_NFD.at[n].add(
          _product(hidden_PF.astype(x_TD.dtype).T, masked_g_PD)
        ),
      )

    dx_TD, *weights = carry
    dx_PD, *weights = jax.lax.fori_loop(
      *(0, jnp.sum(count_N > start), one_learner),
      (jnp.zeros(x_PD.shape, jnp.float32), *weights),
    )
    dx_TD = dx_TD.at[token_P].set(
      dx_PD.astype(dx_TD.dtype), mode='drop', unique_indices=True
    )
    return dx_TD, *weights

  inputs = x_TD, w1_NDF, b1_NF, w2_NFD
  dx_TD, *weights = jax.lax.fori_loop(
    *(0, -(-count_N[0] // tile), one_tile),
    (
      jnp.zeros_like(x_TD),
      *(jnp.zeros(w.shape, jnp.float32) for w in inputs[1:]),
    ),
  )
  return dx_TD, *(
    d.astype(w.dtype) for d, w in zip(weights, inputs[1:], strict=True)
  )


def act_and_slope(before, activation):
  """Returns the activation and its derivative, in float32."""
  if activation == 'linear':
    return before, jnp.ones_like(before)
  phi = 0.5 + 0.5 * jax.lax.erf(before * 0.5**0.5)
  density = jnp.exp(-0.5 * before * before) * (2 * jnp.pi) ** -0.5
  return before * phi, phi + before * density


def _in_tiles(token_T, tile):
  # Slots past the end hold an index out of range: reads clip, writes drop.
  tokens = token_T.size
  tiles = -(-tokens // tile)
  padding = (0, tiles * tile - tokens)
  token_S = jnp.pad(token_T, padding, constant_values=tokens)
  return token_S.reshape(tiles, tile)


def _runs(start, tile, count):
  return (start + jnp.arange(tile) < count)[:, None]


def _product(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _learner(x_PD, w1_DF, b1_F, w2_FD, activation):
  hidden_PF = _product(x_PD, w1_DF) + b1_F
  if activation == 'gelu':
    hidden_PF = jax.nn.gelu(hidden_PF, approximate=False)
  return _product(hidden_PF.astype(x_PD.dtype), w2_FD)
