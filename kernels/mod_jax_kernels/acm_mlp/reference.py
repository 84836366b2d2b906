"""Learners in plain JAX: the reference, and the backend for CPUs."""

import functools

import jax
import jax.numpy as jnp

from mod_jax_kernels import dispatch

# Maximum number of tokens of a product. Smaller tiles waste less work on tokens
# that do not run the learner; larger tiles use the matrix units better.
TILE = 256


def forward(x_TD, w1_NDF, b1_NF, w2_NFD, order, *, activation, keep, tile=TILE):
  """Returns y_TD and before_SH, the hidden units before the activation.

  Row s of before_SH has the units of the token at slot s, for all learners side
  by side; units of learners that the token does not run may be anything.
  Without `keep`, before_SH is None.

  The outer loop is over learners, so that each weight is sliced once. A learner
  runs on the first tokens in `order`: on whole tiles, and for the last tokens
  on the smallest sufficient part of a tile. Each size of a part is compiled
  apart, so there are few sizes, with small steps only between small sizes.
  """
  tokens = x_TD.shape[0]
  learners, hidden, outputs = w2_NFD.shape
  tile = dispatch.at_most(tokens, tile)
  step = 8 * -(-tile // 128)
  sizes = [step * n for n in (1, 2, 3, 4, 6, 8, 10, 12, 14)]
  sizes = [rows for rows in sizes if rows < tile] + [tile]
  token_S = _padded(order.token_T, tile)
  x_SD = x_TD.at[token_S].get(mode='clip')

  def one_learner(n, carry):
    w1_DF, b1_F, w2_FD = w1_NDF[n], b1_NF[n], w2_NFD[n]
    count = order.count_N[n]

    def on_rows(rows, start, carry):
      sum_SD, before_SH = carry
      x_PD, sum_PD = (
        jax.lax.dynamic_slice_in_dim(a, start, rows) for a in (x_SD, sum_SD)
      )
      learner_PD, before_PF = _learner(x_PD, w1_DF, b1_F, w2_FD, activation)
      sum_PD += jnp.where(_runs(start, rows, count), learner_PD, 0.0)
      sum_SD = jax.lax.dynamic_update_slice_in_dim(sum_SD, sum_PD, start, 0)
      if keep:
        before_SH = jax.lax.dynamic_update_slice(
          before_SH, before_PF.astype(x_TD.dtype), (start, n * hidden)
        )
      return sum_SD, before_SH

    def on_tile(i, carry):
      start = i * tile
      # `switch` clamps a too large index, so `sizes[:-1]` would do; but for few
      # tokens that is empty, and XLA crashes on this in a sharded program.
      size = jnp.sum(count - start > jnp.asarray(sizes))
      branches = [functools.partial(on_rows, rows, start) for rows in sizes]
      return jax.lax.switch(size, branches, carry)

    return jax.lax.fori_loop(0, -(-count // tile), on_tile, carry)

  sum_SD = jnp.zeros((token_S.shape[0], outputs), jnp.float32)
  before_SH = None
  if keep:
    before_SH = jnp.zeros((token_S.shape[0], learners * hidden), x_TD.dtype)
  # Skip learners without tokens.
  sum_SD, before_SH = jax.lax.fori_loop(
    *(0, jnp.sum(order.count_N > 0, dtype=jnp.int32), one_learner),
    (sum_SD, before_SH),
  )
  y_TD = sum_SD.astype(x_TD.dtype)[order.slot_T]
  return y_TD, before_SH[:tokens] if keep else None


def backward(
  x_TD, w1_NDF, b1_NF, w2_NFD, order, before_SH, g_TD, *, activation, tile=TILE
):
  """Returns gradients of x, w1, b1 and w2, given the gradient g of y.

  Loops over learners and tiles like `forward`, but all tiles have one size.
  `before_SH` is what `forward` returned.
  """
  tile = dispatch.at_most(x_TD.shape[0], tile)
  token_S = _padded(order.token_T, tile)
  x_SD, g_SD = (a.at[token_S].get(mode='clip') for a in (x_TD, g_TD))
  padding = token_S.shape[0] - before_SH.shape[0]
  before_SH = jnp.pad(before_SH, ((0, padding), (0, 0)))

  def one_learner(n, carry):
    dx_SD, *sums = carry
    w1_DF, w2_FD = w1_NDF[n], w2_NFD[n]
    hidden = w2_FD.shape[0]

    def on_tile(i, carry):
      dx_SD, dw1_DF, db1_F, dw2_FD = carry
      start = i * tile
      # Set both to 0 for tokens that do not run the learner, which then add
      # nothing to the weights' gradients even if they are not finite.
      runs_P1 = _runs(start, tile, order.count_N[n])
      x_PD, g_PD = (
        jnp.where(runs_P1, jax.lax.dynamic_slice_in_dim(a, start, tile), 0)
        for a in (x_SD, g_SD)
      )
      before_PF = jax.lax.dynamic_slice(
        before_SH, (start, n * hidden), (tile, hidden)
      )
      hidden_PF, slope_PF = act_and_slope(
        jnp.where(runs_P1, before_PF, 0).astype(jnp.float32), activation
      )
      delta_PF = slope_PF * _product(g_PD, w2_FD.T)
      rounded_PF = delta_PF.astype(x_TD.dtype)
      dx_PD = jax.lax.dynamic_slice_in_dim(dx_SD, start, tile)
      dx_PD += _product(rounded_PF, w1_DF.T)
      return (
        jax.lax.dynamic_update_slice_in_dim(dx_SD, dx_PD, start, 0),
        dw1_DF + _product(x_PD.T, rounded_PF),
        db1_F + delta_PF.sum(axis=0),
        dw2_FD + _product(hidden_PF.astype(x_TD.dtype).T, g_PD),
      )

    dx_SD, *of_learner = jax.lax.fori_loop(
      *(0, -(-order.count_N[n] // tile), on_tile),
      (dx_SD, *(jnp.zeros(a.shape[1:], a.dtype) for a in sums)),
    )
    return dx_SD, *(
      jax.lax.dynamic_update_index_in_dim(a, of_n, n, 0)
      for a, of_n in zip(sums, of_learner, strict=True)
    )

  weights = w1_NDF, b1_NF, w2_NFD
  dx_SD, *sums = jax.lax.fori_loop(
    *(0, jnp.sum(order.count_N > 0, dtype=jnp.int32), one_learner),
    tuple(jnp.zeros(a.shape, jnp.float32) for a in (x_SD, *weights)),
  )
  return dx_SD.astype(x_TD.dtype)[order.slot_T], *(
    a.astype(w.dtype) for a, w in zip(sums, weights, strict=True)
  )


def act_and_slope(before, activation):
  """Returns the activation and its derivative, in float32."""
  if activation == 'linear':
    return before, jnp.ones_like(before)
  phi = 0.5 + 0.5 * jax.lax.erf(before * 0.5**0.5)
  density = jnp.exp(-0.5 * before * before) * (2 * jnp.pi) ** -0.5
  return before * phi, phi + before * density


def _padded(token_T, tile):
  """Returns token indices, padded to whole tiles with an index out of range."""
  tokens = token_T.size
  padding = -(-tokens // tile) * tile - tokens
  return jnp.pad(token_T, (0, padding), constant_values=tokens)


def _runs(start, tile, count):
  return (start + jnp.arange(tile) < count)[:, None]


def _product(a, b):
  return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _learner(x_PD, w1_DF, b1_F, w2_FD, activation):
  before_PF = hidden_PF = _product(x_PD, w1_DF) + b1_F
  if activation == 'gelu':
    hidden_PF = jax.nn.gelu(before_PF, approximate=False)
  return _product(hidden_PF.astype(x_PD.dtype), w2_FD), before_PF
