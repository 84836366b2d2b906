"""Learners on TPUs.

A TPU moves single rows slowly. So kernels read large tiles of tokens in their
given order, and sort them on the chip, tokens with the most learners first: in
blocks of 128 tokens, by products with one-hot matrices; and then, in the whole
tile, in pieces of eight rows, the height of a register. Each learner runs on
the first pieces, in units of 128 rows. Hidden units stay on the chip. The
kernel of the gradient recomputes them, and sums gradients of weights over its
tiles.
"""

import functools
import itertools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from mod_jax_kernels import dispatch
from mod_jax_kernels import tiles as tiles_lib
from mod_jax_kernels.acm_mlp import order as order_lib
from mod_jax_kernels.acm_mlp import reference
from mod_jax_kernels.acm_mlp.tiles import TILES
from mod_jax_kernels.pallas_parts import (
  LANES,
  VMEM_BYTES,
  block_of,
  interpret,
  product,
)

PIECE = 8  # Rows of a register of float32.
# On-chip memory for a tile's rows and gradients of weights together, and for
# the gradients alone. The rest of VMEM_BYTES is for blocks of weights and for
# intermediate results of a unit.
_BYTES = 42 * 2**20
_GRADIENT_BYTES = 20 * 2**20
# Maximum number of weights in a block of each of a learner's two kernels.
_WEIGHTS = 2**20


@dispatch.jit(static_argnames=('activation', 'keep'))
def forward(x_TD, w1_NDF, b1_NF, w2_NFD, order, *, activation, keep):
  """See `reference.forward`; hidden units stay on the chip."""
  plan = forward_plan(x_TD, w1_NDF, b1_NF, w2_NFD, order)
  unit = functools.partial(_outputs, activation=activation)
  (y_TD,) = plan.call(unit, range(plan.steps), plan.tiles, x_TD.dtype)
  # A placeholder for the hidden units: where a program is for several
  # platforms, all backends must return the same shapes. `backward` below does
  # not read the array, so the compiler removes it.
  units = x_TD.shape[0], b1_NF.size
  return y_TD, jnp.zeros(units, x_TD.dtype) if keep else None


@dispatch.jit(static_argnames='activation')
def backward(x_TD, w1_NDF, b1_NF, w2_NFD, order, _, g_TD, *, activation):
  """See `reference.backward`; hidden units are recomputed."""
  weights = w1_NDF, b1_NF, w2_NFD
  plan = backward_plan(x_TD, *weights, g_TD, order)
  unit = functools.partial(_gradients, activation=activation)
  most = max(_GRADIENT_BYTES // plan.gradient_bytes, 1)
  groups = [
    range(first, min(first + most, plan.steps))
    for first in range(0, plan.steps, most)
  ]
  dtype = x_TD.dtype if len(groups) == 1 else jnp.float32
  # A chip may have two cores, and each sums gradients of weights by itself.
  parts = min(plan.tiles, 2)
  dx_TD, *dw = zip(
    *(plan.call(unit, steps, parts, dtype, sums=True) for steps in groups),
    strict=True,
  )
  dw = (sum(jnp.concatenate(d, axis=1)) for d in dw)
  return sum(dx_TD[1:], dx_TD[0]).astype(x_TD.dtype), *(
    plan.of_learners(d, axis).reshape(w.shape).astype(w.dtype)
    for d, axis, w in zip(dw, (2, 2, 1), weights, strict=True)
  )


def forward_plan(x_TD, w1_NDF, b1_NF, w2_NFD, order):
  """Returns the plan of the kernel of `forward`."""
  width = w2_NFD.shape[-1]
  return Plan((x_TD,), (w1_NDF, b1_NF, w2_NFD), order, width, _BYTES)


def backward_plan(x_TD, w1_NDF, b1_NF, w2_NFD, g_TD, order):
  """Returns the plan of the kernel of `backward`."""
  weights, rest = (w1_NDF, b1_NF, w2_NFD), _BYTES - _GRADIENT_BYTES
  return Plan((x_TD, g_TD), weights, order, x_TD.shape[1], rest)


class Plan:
  """Grid and blocks of a kernel.

  The kernel loops over tiles of tokens, and in a tile over steps. A step is a
  block of hidden units of a learner; results of all steps are summed.

  Attributes:
    tiles: number of tiles.
    steps: number of steps of all learners.
    rows: number of rows of a tile.
    pieces_IN: number of pieces of eight rows that run each learner, for each
      tile; flat.
    gradient_bytes: size of the gradients of a step's weights, in bytes.
  """

  def __init__(self, arrays, weights, order, width, num_bytes):
    sizes = tiles_lib.choose(TILES, 'pallas')
    w1_NDF, b1_NF, w2_NFD = weights
    self._learners, inputs, hidden = w1_NDF.shape
    outputs = w2_NFD.shape[-1]
    self._arrays, self._width = arrays, width
    # Make b1 [N, 1, F]: a block may have one row if that is the whole axis.
    self._weights = w1_NDF, b1_NF.astype(jnp.float32)[:, None], w2_NFD
    most = min(sizes['hidden'], _WEIGHTS // max(inputs, outputs))
    units = block_of(hidden, max(most, LANES))
    self._blocks = hidden // units
    self.steps = self._learners * self._blocks
    self._shapes = (inputs, units), (1, units), (units, outputs)
    self.gradient_bytes = 4 * sum(a * b for a, b in self._shapes)
    # Rows of tokens and results: two buffers each, and a sorted float32 copy.
    tokens, dtype = arrays[0].shape[0], arrays[0].dtype
    row_bytes = (2 * dtype.itemsize + 4) * (
      width + sum(a.shape[1] for a in arrays)
    )
    most = max(min(sizes['rows'], num_bytes // row_bytes) // LANES, 1) * LANES
    tiles = pl.cdiv(tokens, most)
    tiles += tiles > 1 and tiles % 2  # Give two cores equally many tiles.
    self.rows = pl.cdiv(pl.cdiv(tokens, tiles), LANES) * LANES
    self.tiles = pl.cdiv(tokens, self.rows)
    padding = self.tiles * self.rows - tokens
    k_IBL = jnp.pad(order.num_learners_T, (0, padding)).reshape(
      self.tiles, -1, LANES
    )
    self._scalars = _places(k_IBL, self._learners)
    _, self.pieces_IN, _ = self._scalars
    self._k_IBL = k_IBL

  def call(self, unit, steps, parts, dtype, *, sums=False):
    """Runs the kernel with some of the steps, on all tiles.

    Args:
      unit: maps rows of the arrays, whether they run the learner, and blocks of
        weights to rows of the result and, if `sums`, gradients of the weights.
      steps: range of the steps to run.
      parts: number of parts of the tiles, which cores run separately.
      dtype: dtype of the result.
      sums: whether to sum gradients of weights over the tiles of a part.

    Returns:
      The result, then gradients [parts, steps, …] of each of the weights.
    """
    rows, in_part = self.rows, pl.cdiv(self.tiles, parts)

    def tile(p, i):
      # The last part may have fewer tiles than others.
      return jnp.minimum(p * in_part + i, self.tiles - 1)

    def block(p, i, s, running_I):
      # Pallas reads no block if its index has not changed, so steps that do not
      # run keep the index of the last step that runs.
      step = jnp.minimum(s + steps.start, running_I[tile(p, i)] * blocks - 1)
      step = jnp.maximum(step, steps.start)
      return jax.lax.div(step, blocks), jax.lax.rem(step, blocks)

    def up(p, i, s, running_I, *_):
      n, f = block(p, i, s, running_I)
      return n, 0, f

    def down(p, i, s, running_I, *_):
      n, f = block(p, i, s, running_I)
      return n, f, 0

    def of_rows(width):
      return pl.BlockSpec((rows, width), lambda p, i, *_: (tile(p, i), 0))

    # Not a Python integer, which may have 64 bits: `lax.div` promotes nothing.
    blocks = np.int32(self._blocks)
    tokens = pl.BlockSpec(
      (1, rows // LANES, LANES), lambda p, i, *_: (tile(p, i), 0, 0)
    )
    widths = [a.shape[1] for a in self._arrays]
    of_steps = [(len(steps), *shape) for shape in self._shapes if sums]
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    call = pl.pallas_call(
      functools.partial(
        _kernel,
        unit=unit,
        learner=lambda s: jax.lax.div(s + steps.start, blocks),
        learners=self._learners,
        tiles=self.tiles,
        arrays=len(widths),
        sums=len(of_steps),
      ),
      out_shape=[
        jax.ShapeDtypeStruct((self._arrays[0].shape[0], self._width), dtype),
        *(float32((parts, *shape)) for shape in of_steps),
      ],
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(self._scalars),
        grid=(parts, in_part, len(steps)),
        in_specs=[
          *(tokens, *map(of_rows, widths)),
          *(
            pl.BlockSpec((1, *shape), at)
            for shape, at in zip(self._shapes, (up, up, down), strict=True)
          ),
        ],
        out_specs=[
          of_rows(self._width),
          *(pl.BlockSpec(memory_space=pl.ANY) for _ in of_steps),
        ],
        scratch_shapes=[
          *(
            pltpu.VMEM((rows, width), jnp.float32)
            for width in (*widths, 1, self._width)
          ),
          *(pltpu.VMEM(shape, jnp.float32) for shape in of_steps),
          pltpu.VMEM((rows // LANES, LANES), jnp.int32),
          pltpu.SemaphoreType.DMA,
        ],
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
        vmem_limit_bytes=VMEM_BYTES,
      ),
      interpret=interpret(),
    )
    return call(*self._scalars, self._k_IBL, *self._arrays, *self._weights)

  def of_learners(self, gradients, axis):
    """Returns gradients [steps, …] as [learners, …], with blocks at `axis`."""
    return jnp.moveaxis(
      gradients.reshape(self._learners, self._blocks, *gradients.shape[1:]),
      1,
      axis,
    )


def _places(k_IBL, learners):
  """Returns the order of each tile's pieces, and how many run a learner.

  Returns:
    running_I: largest number of learners of a token in each tile.
    pieces_IN: number of each tile's pieces that run each learner, flat.
    place_IC: place of each piece in its sorted tile, flat.
  """
  tiles, _, lanes = k_IBL.shape
  runs_IBLN = k_IBL[..., None] > jnp.arange(learners)
  count_IBN = runs_IBLN.sum(axis=2, dtype=jnp.int32)
  # Number of learners of each piece's first token, which runs the most.
  most_IC = jnp.sum(
    count_IBN[:, :, None] > jnp.arange(0, lanes, PIECE)[:, None],
    axis=-1,
    dtype=jnp.int32,
  ).reshape(tiles, -1)
  pieces_IN = jnp.sum(
    most_IC[..., None] > jnp.arange(learners), axis=1, dtype=jnp.int32
  )
  place_IC = order_lib.slots(most_IC, learners)
  return most_IC.max(axis=1), pieces_IN.ravel(), place_IC.ravel()


def _kernel(
  running_I,
  pieces_IN,
  place_IC,
  k,
  *refs,
  unit,
  learner,
  learners,
  tiles,
  arrays,
  sums,
):
  """Sums a tile's results over steps, and gradients of weights over tiles."""
  del running_I  # Only the block indices of weights depend on it.
  refs = iter(refs)
  (
    inputs,
    weights,
    (out,),
    gradients,
    ordered,
    (ordered_k, sum_PD),
    totals,
    (slots, done),
  ) = (
    list(itertools.islice(refs, n))
    for n in (arrays, 3, 1, sums, arrays, 2, sums, 2)
  )
  part, i, s = (pl.program_id(axis) for axis in range(3))
  last_tile, last_step = (pl.num_programs(axis) - 1 for axis in (1, 2))
  tile, n = part * pl.num_programs(1) + i, learner(s)
  exists = tile < tiles
  blocks, pieces = out.shape[0] // LANES, LANES // PIECE

  square = functools.partial(
    jax.lax.broadcasted_iota, jnp.int32, (LANES, LANES)
  )

  def picked(row_1L, hot_LL):
    return jnp.where(hot_LL, row_1L, 0.0).sum(axis=1, keepdims=True)

  def one_hot(b):
    return slots[pl.ds(b, 1)] == square(0)

  def places(b):
    first = (tile * blocks + b) * pieces
    return [_rows(place_IC[first + c], PIECE) for c in range(pieces)]

  @pl.when(i == 0)
  def _():
    for total in totals:
      total[s] = jnp.zeros(total.shape[1:], jnp.float32)

  @pl.when(exists & (s == 0))
  def _():
    def order(b, _):
      k_1L = k[0, pl.ds(b, 1)].astype(jnp.float32)
      k_L1 = picked(k_1L, square(0) == square(1))
      # A token comes after tokens with more learners, and after earlier tokens
      # with as many.
      after_LL = (k_L1 > k_1L) | ((k_L1 == k_1L) & (square(0) < square(1)))
      slot_1L = after_LL.astype(jnp.float32).sum(axis=0, keepdims=True)
      slots[pl.ds(b, 1)] = slot_1L.astype(jnp.int32)
      hot_LL = one_hot(b)
      arranged = [(ordered_k, picked(k_1L, hot_LL))]
      for ref, to in zip(inputs, ordered, strict=True):
        # Set rows past the end and tokens without learners to 0: they may be
        # NaN, which the product would spread. Select in float32, because not
        # all TPUs support selects of bfloat16.
        x_LD = jnp.where(
          k_L1 > 0, ref[_rows(b, LANES)].astype(jnp.float32), 0.0
        )
        arranged += [
          (to, product(hot_LL.astype(ref.dtype), x_LD.astype(ref.dtype)))
        ]
      for c, place in enumerate(places(b)):
        for to, value in arranged:
          to[place] = value[c * PIECE : (c + 1) * PIECE]
      sum_PD[_rows(b, LANES)] = jnp.zeros((LANES, sum_PD.shape[1]), jnp.float32)
      return _

    jax.lax.fori_loop(0, blocks, order, None)

  def run(u, _):
    @pl.when(u * pieces < pieces_IN[tile * learners + n])
    def _():
      rows = _rows(u, LANES)
      result_LD, *parts = unit(
        *(x[rows] for x in ordered),
        ordered_k[rows] > n.astype(jnp.float32),
        *(w[0] for w in weights),
      )
      sum_PD[rows] += result_LD
      for total, of_unit in zip(totals, parts, strict=True):
        total[s] += of_unit

    return _

  @pl.when(exists)
  def _():
    jax.lax.fori_loop(0, blocks, run, None)

  @pl.when(exists & (s == last_step))
  def _():
    def restore(b, _):
      sum_LD = jnp.concatenate([sum_PD[place] for place in places(b)])
      hot_LL = one_hot(b).astype(out.dtype)
      restored_LD = product(hot_LL, sum_LD.astype(out.dtype), (0, 0))
      out[_rows(b, LANES)] = restored_LD.astype(out.dtype)
      return _

    jax.lax.fori_loop(0, blocks, restore, None)

  @pl.when((i == last_tile) & (s == last_step))
  def _():
    for gradient, total in zip(gradients, totals, strict=True):
      copy = pltpu.make_async_copy(total, gradient.at[part], done)
      copy.start()
      copy.wait()


def _rows(block, size):
  return pl.ds(pl.multiple_of(block * size, size), size)


def _outputs(x_LD, runs_L1, w1_DF, b1_1F, w2_FD, *, activation):
  dtype = w1_DF.dtype
  hidden_LF, _ = reference.act_and_slope(
    product(x_LD.astype(dtype), w1_DF) + b1_1F, activation
  )
  y_LD = product(hidden_LF.astype(dtype), w2_FD)
  return (jnp.where(runs_L1, y_LD, 0.0),)


def _gradients(x_LD, g_LD, runs_L1, w1_DF, b1_1F, w2_FD, *, activation):
  dtype = w1_DF.dtype
  x_LD = x_LD.astype(dtype)
  # Rows that do not run the learner must add nothing to any result.
  g_LD = jnp.where(runs_L1, g_LD, 0.0).astype(dtype)
  hidden_LF, slope_LF = reference.act_and_slope(
    product(x_LD, w1_DF) + b1_1F, activation
  )
  delta_LF = slope_LF * product(g_LD, w2_FD, (1, 1))
  rounded_LF = delta_LF.astype(dtype)
  return (
    product(rounded_LF, w1_DF, (1, 1)),
    product(x_LD, rounded_LF, (0, 0)),
    jnp.sum(delta_LF, axis=0, keepdims=True),
    product(hidden_LF.astype(dtype), g_LD, (0, 0)),
  )
