"""Learners on TPUs.

XLA gathers the tokens in order before the kernel, and its results back after
it, so that tiles of tokens are contiguous. That is the largest part of the time
which does not depend on the number of learners. Hidden units stay on the chip,
and both kernels of the gradient recompute them.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles as tiles_lib
from mod_jax_kernels.acm_mlp import reference
from mod_jax_kernels.acm_mlp.tiles import TILES
from mod_jax_kernels.pallas_parts import (
  VMEM_BYTES,
  block_of,
  interpret,
  product,
)


@dispatch.jit(static_argnames='activation')
def forward(x_TD, w1_NDF, b1_NF, w2_NFD, order, *, activation):
  """See `reference.forward`."""
  plan = _Plan(x_TD, w2_NFD, order.count_N)
  y_SD = plan.call(
    functools.partial(_outputs, activation=activation),
    ('rows', 'up', 'bias', 'down'),
    (plan.ordered(x_TD, order.token_T), w1_NDF, _bias(b1_NF), w2_NFD),
    width=w2_NFD.shape[-1],
  )
  return y_SD[order.slot_T]


@dispatch.jit(static_argnames='activation')
def backward(x_TD, w1_NDF, b1_NF, w2_NFD, g_TD, order, *, activation):
  """See `reference.backward`."""
  plan = _Plan(x_TD, w2_NFD, order.count_N)
  arrays = (
    plan.ordered(x_TD, order.token_T),
    plan.ordered(g_TD, order.token_T),
    *(w1_NDF, _bias(b1_NF), w2_NFD),
  )
  dx_SD = plan.call(
    functools.partial(_input_gradients, activation=activation),
    *(('rows', 'rows', 'up', 'bias', 'down'), arrays),
    width=x_TD.shape[1],
  )
  dw1_NDF, db1_N1F, dw2_NFD = plan.call_weights(
    functools.partial(_weights_kernel, activation=activation), arrays
  )
  return (
    dx_SD[order.slot_T],
    dw1_NDF,
    db1_N1F[:, 0].astype(b1_NF.dtype),
    dw2_NFD,
  )


class _Plan:
  """Grids and blocks of the kernels."""

  def __init__(self, x_TD, w2_NFD, count_N):
    sizes = tiles_lib.choose(TILES, 'pallas')
    tokens, self._width = x_TD.shape
    self._learners, hidden, self._outputs = w2_NFD.shape
    # Memory tiles have 8 rows of float32 or 16 of bfloat16.
    self._rows = min(sizes['rows'], -(-tokens // 16) * 16)
    self._tiles = -(-tokens // self._rows)
    self._hidden = block_of(hidden, sizes['hidden'])
    self._steps = hidden // self._hidden
    self._count_N = count_N
    starts_I = jnp.arange(self._tiles, dtype=jnp.int32) * self._rows
    self._largest_I = jnp.sum(
      count_N > starts_I[:, None], axis=1, dtype=jnp.int32
    )

  def ordered(self, x_TD, token_T):
    """Returns the tokens in order, padded to whole tiles with any token."""
    tokens = token_T.size
    return x_TD[jnp.pad(token_T, (0, self._tiles * self._rows - tokens))]

  def call(self, learner, kinds, arrays, *, width):
    """Runs a kernel that sums over learners and hidden units, per tile.

    Args:
      learner: maps blocks of the arrays to the contribution of a learner.
      kinds: kind of block of each array.
      arrays: operands.
      width: width of the result.
    """

    def last(i, largest_I):
      # An unchanged index reads no new block, so learners that do not run keep
      # the last one's.
      return jnp.maximum(largest_I[i] - 1, 0)

    def running(i, n, largest_I):
      return jnp.minimum(n, last(i, largest_I))

    def step(i, n, f, largest_I):
      return jnp.where(n < largest_I[i], f, self._steps - 1)

    def tile(i, n, f, count_N, largest_I):
      return jnp.minimum(i, self._last_tile(count_N[0])), 0

    def up(i, n, f, count_N, largest_I):
      return running(i, n, largest_I), 0, step(i, n, f, largest_I)

    def down(i, n, f, count_N, largest_I):
      return running(i, n, largest_I), step(i, n, f, largest_I), 0

    places = {'rows': tile, 'up': up, 'bias': up, 'down': down}
    rows = self._rows
    call = pl.pallas_call(
      functools.partial(_tile_kernel, rows=rows, learner=learner),
      out_shape=jax.ShapeDtypeStruct(
        (self._tiles * rows, width), arrays[0].dtype
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(self._tiles, self._learners, self._steps),
        in_specs=[
          pl.BlockSpec(self._block(kind, array), places[kind])
          for kind, array in zip(kinds, arrays, strict=True)
        ],
        out_specs=pl.BlockSpec((rows, width), lambda i, *_: (i, 0)),
        scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32)],
      ),
      **_options('parallel', 'arbitrary', 'arbitrary'),
    )
    return call(self._count_N, self._largest_I, *arrays)

  def call_weights(self, kernel, arrays):
    """Runs a kernel that sums over the tokens of each learner."""

    def tile(n, f, i, count_N):
      return jnp.minimum(i, self._last_tile(count_N[n])), 0

    places = {
      'rows': tile,
      'up': lambda n, f, i, count_N: (n, 0, f),
      'bias': lambda n, f, i, count_N: (n, 0, f),
      'down': lambda n, f, i, count_N: (n, f, 0),
    }
    kinds = 'rows', 'rows', 'up', 'bias', 'down'
    specs = [
      pl.BlockSpec(self._block(kind, array), places[kind])
      for kind, array in zip(kinds, arrays, strict=True)
    ]
    call = pl.pallas_call(
      functools.partial(kernel, rows=self._rows),
      out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays[2:]],
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(self._learners, self._steps, self._tiles),
        in_specs=specs,
        out_specs=specs[2:],
        scratch_shapes=[
          pltpu.VMEM(self._block(kind, array)[1:], jnp.float32)
          for kind, array in zip(kinds[2:], arrays[2:], strict=True)
        ],
      ),
      **_options('parallel', 'parallel', 'arbitrary'),
    )
    return call(self._count_N, *arrays)

  def _last_tile(self, count):
    """Returns the last tile that holds any of the first `count` tokens."""
    return jax.lax.div(jnp.maximum(count - 1, 0), self._rows)

  def _block(self, kind, array):
    return {
      'rows': (self._rows, array.shape[-1]),
      'up': (1, self._width, self._hidden),
      'bias': (1, 1, self._hidden),
      'down': (1, self._hidden, self._outputs),
    }[kind]


def _tile_kernel(count_N, largest_I, *refs, rows, learner):
  """Sums contributions of learners over the tokens of a tile that run them."""
  *inputs, out, sum_PD = refs
  i, n, f = (pl.program_id(axis) for axis in range(3))

  @pl.when((n == 0) & (f == 0))
  def _():
    sum_PD[:] = jnp.zeros_like(sum_PD)

  @pl.when(n < largest_I[i])
  def _():
    learner_PD = learner(*inputs)
    sum_PD[:] += jnp.where(_runs(i, rows, count_N[n]), learner_PD, 0.0)

  @pl.when((n == pl.num_programs(1) - 1) & (f == pl.num_programs(2) - 1))
  def _():
    out[:] = sum_PD[:].astype(out.dtype)


def _outputs(x, w1, b1, w2, *, activation):
  preactivation_PF = product(x[:], w1[0]) + b1[0]
  hidden_PF, _ = reference.act_and_slope(preactivation_PF, activation)
  return product(hidden_PF.astype(x.dtype), w2[0])


def _input_gradients(x, g, w1, b1, w2, *, activation):
  preactivation_PF = product(x[:], w1[0]) + b1[0]
  _, slope_PF = reference.act_and_slope(preactivation_PF, activation)
  delta_PF = slope_PF * product(g[:], w2[0], (1, 1))
  return product(delta_PF.astype(x.dtype), w1[0], (1, 1))


def _weights_kernel(count_N, x, g, w1, b1, w2, *refs, rows, activation):
  gradients, sums = refs[:3], refs[3:]
  dw1_DF, db1_1F, dw2_FD = sums
  n, i = pl.program_id(0), pl.program_id(2)

  @pl.when(i == 0)
  def _():
    for total in sums:
      total[:] = jnp.zeros_like(total)

  @pl.when(i * rows < count_N[n])
  def _():
    runs_P1 = _runs(i, rows, count_N[n])
    # Zero both for tokens that do not run the learner, so that these add
    # nothing even if not finite. In float32, because not all TPUs support
    # selects of bfloat16.
    x_PD, g_PD = (
      jnp.where(runs_P1, ref[:].astype(jnp.float32), 0.0).astype(ref.dtype)
      for ref in (x, g)
    )
    preactivation_PF = product(x_PD, w1[0]) + b1[0]
    hidden_PF, slope_PF = reference.act_and_slope(preactivation_PF, activation)
    delta_PF = slope_PF * product(g_PD, w2[0], (1, 1))
    dw1_DF[:] += product(x_PD, delta_PF.astype(x.dtype), (0, 0))
    db1_1F[:] += jnp.sum(delta_PF, axis=0, keepdims=True)
    dw2_FD[:] += product(hidden_PF.astype(x.dtype), g_PD, (0, 0))

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    for gradient, total in zip(gradients, sums, strict=True):
      gradient[0] = total[:].astype(gradient.dtype)


def _runs(i, rows, count):
  slot_P1 = i * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
  return slot_P1 < count


def _bias(b1_NF):
  # Add a dimension, so that blocks of one row span a whole dimension.
  return b1_NF.astype(jnp.float32)[:, None]


def _options(*semantics):
  return {
    'compiler_params': pltpu.CompilerParams(
      dimension_semantics=semantics, vmem_limit_bytes=VMEM_BYTES
    ),
    'interpret': interpret(),
  }
