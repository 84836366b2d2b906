"""How much arithmetic a model does, added up from its layers' own counts.

Matrix products only, a multiply-add is 2; causal query-key pairs are counted
exactly; a routed block is counted on the k tokens it processes. Training is
three forward passes.
"""

import math

import jax
import jax.numpy as jnp

from mod_jax.routing import num_chosen


def forward(config, length: int) -> int:
  """Returns the FLOPs of a forward pass over one sequence.

  Args:
    config: a model's config; its `flops_table` is summed.
    length: tokens of the sequence.
  """
  return sum(sum(parts.values()) for _, parts in config.flops_table(length))


def macs(config, length: int) -> int:
  """Returns the multiply-accumulates of a forward pass: half the FLOPs."""
  return forward(config, length) // 2


def train(config, length: int) -> int:
  """Returns the FLOPs of a training step on one sequence: three forwards."""
  return 3 * forward(config, length)


def num_params(config) -> int:
  """Returns the number of parameters of a model."""
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = jax.eval_shape(config.build().init, jax.random.key(0), tokens)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes['params']))


def report(config, length: int) -> str:
  """Returns a table of FLOPs per layer and in total, for people.

  Args:
    config: a language model's config.
    length: tokens of a sequence.
  """
  table = config.flops_table(length)
  dense = dict(config.dense_twin().flops_table(length))
  total, dense_total = (
    forward(config, length),
    forward(config.dense_twin(), length),
  )
  params = num_params(config)
  names = []
  for _, parts in table:
    names += [name for name in parts if name not in names]
  names = [n for n in names if any(parts.get(n) for _, parts in table)]

  def line(first, cells):
    return first.ljust(18) + ''.join(str(cell).rjust(12) for cell in cells)

  lines = [
    f'FLOPs of a forward pass over one sequence of {length} tokens'
    ' (multiply-add = 2), in MFLOPs',
    line('layer', [*names, 'total', 'dense']),
  ]
  for layer, parts in table:
    cells = [f'{parts.get(n, 0) / 1e6:,.2f}' for n in names]
    twin = sum(dense[layer.split()[0]].values())
    lines.append(
      line(
        layer,
        [*cells, f'{sum(parts.values()) / 1e6:,.2f}', f'{twin / 1e6:,.2f}'],
      )
    )
  cells = [f'{sum(p.get(n, 0) for _, p in table) / 1e6:,.2f}' for n in names]
  lines.append(
    line('total', [*cells, f'{total / 1e6:,.2f}', f'{dense_total / 1e6:,.2f}'])
  )
  chosen = [
    f'block {i}: {num_chosen(c, length)}'
    for i, c in enumerate(config.capacities)
    if c is not None
  ]
  sequence_6nd = 6 * params * length
  lines += [
    '',
    f'tokens processed    {", ".join(chosen) or "all"} of {length}',
    f'parameters          {params:,}',
    f'forward             {total:.4e} FLOPs = {total / 2:.4e} MACs',
    f'dense twin forward  {dense_total:.4e} FLOPs = {dense_total / 2:.4e} MACs',
    f'ratio to dense      {total / dense_total:.4f}',
    f'training step       {3 * total:.4e} FLOPs per sequence'
    f' (dense twin {3 * dense_total:.4e})',
    f'6ND                 {sequence_6nd:.4e} FLOPs per sequence'
    ' (all parameters; knows neither attention pairs nor routing)',
  ]
  return '\n'.join(lines)
