"""How much arithmetic a model does, added up from its layers' own counts.

One convention for all models: matrix products only, a multiply-add is 2 FLOPs.
Causal query-key pairs are counted exactly, and a routed block on the k tokens
that it processes. Training is three forward passes.

Beside it stands `published_macs`, what tables of vision transformers call
FLOPs: multiply-accumulates of the same products, and 5 for each element that a
layer norm reads.
"""

from collections.abc import Mapping
import math

import jax

from mod_jax.errors import UserError
from mod_jax.models.lm import LMConfig


def forward(config, length: int | None = None) -> int:
  """Returns the FLOPs of a forward pass over one sequence or image.

  Args:
    config: a model's config; its `flops_table` is summed.
    length: tokens of the sequence; for language models.

  Raises:
    UserError: a language model without a length.
  """
  return sum(map(products, _table(config, length)))


def products(parts: Mapping[str, int]) -> int:
  """Returns the FLOPs of a layer, from its parts: without its norms."""
  return sum(count for name, count in parts.items() if name != 'norm')


def published_macs(config, length: int | None = None) -> int:
  """Returns what published tables have for a forward pass, norms included."""
  return sum(sum(parts.values()) for parts in _table(config, length)) // 2


def _table(config, length):
  table = config.flops_table(*_arguments(config, length))
  return [parts for _, parts in table]


def train(config, length: int | None = None) -> int:
  """Returns the FLOPs of a training step on one sequence: three forwards."""
  return 3 * forward(config, length)


def steps_within(
  budget: float, config, batch_size: int, length: int | None = None
) -> int:
  """Returns how many training steps come nearest to a budget of FLOPs.

  Args:
    budget: FLOPs of the whole run.
    config: of the model.
    batch_size: sequences or images of a step.
    length: tokens of a sequence; for language models.
  """
  return max(1, round(budget / (batch_size * train(config, length))))


def num_params(config) -> int:
  """Returns the number of parameters of a model."""
  init = config.build().init
  shapes = jax.eval_shape(lambda: init(jax.random.key(0), config.example()))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes['params']))


def _arguments(config, length):
  if length is not None:
    return (length,)
  if isinstance(config, LMConfig):  # An image's size stands in the config.
    raise UserError(
      f'{type(config).__name__} without a length: the cost of a language model'
      ' depends on how many tokens it reads; pass length=….'
    )
  return ()


def report(config, length: int | None = None) -> str:
  """Returns a table of FLOPs per layer and in total, for people.

  Args:
    config: a model's config.
    length: tokens of a sequence; for language models.
  """
  given = _arguments(config, length)
  table = config.flops_table(*given)
  dense = dict(config.dense_twin().flops_table(*given))
  total, dense_total = (
    forward(config, length),
    forward(config.dense_twin(), length),
  )
  params = num_params(config)
  names = []
  for _, parts in table:
    names += [name for name in parts if name not in names]
  names = [n for n in names if any(parts.get(n) for _, parts in table)]
  names = [n for n in names if n != 'norm']

  def line(first, cells):
    return first.ljust(18) + ''.join(str(cell).rjust(12) for cell in cells)

  one = 'image' if length is None else 'sequence'
  of = config.num_tokens if length is None else length
  lines = [
    f'FLOPs of a forward pass over one {one} of {of} tokens'
    ' (matrix products, multiply-add = 2), in MFLOPs',
    line('layer', [*names, 'total', 'dense']),
  ]
  for layer, parts in table:
    cells = [f'{parts.get(n, 0) / 1e6:,.2f}' for n in names]
    twin = products(dense.get(layer.split()[0], {}))
    lines.append(
      line(
        layer,
        [*cells, f'{products(parts) / 1e6:,.2f}', f'{twin / 1e6:,.2f}'],
      )
    )
  cells = [f'{sum(p.get(n, 0) for _, p in table) / 1e6:,.2f}' for n in names]
  lines.append(
    line('total', [*cells, f'{total / 1e6:,.2f}', f'{dense_total / 1e6:,.2f}'])
  )
  chosen = [
    f'block {i}: {count}'
    for i, count in enumerate(config.tokens_per_block(*given))
    if count != of
  ]
  lines += [
    '',
    f'tokens processed    {", ".join(chosen) or "all"} of {of}',
    f'parameters          {params:,}',
    f'forward             {total:.4e} FLOPs = {total / 2:.4e} MACs',
    f'dense twin forward  {dense_total:.4e} FLOPs = {dense_total / 2:.4e} MACs',
    f'ratio to dense      {total / dense_total:.4f}',
    f'training step       {3 * total:.4e} FLOPs per {one}'
    f' (dense twin {3 * dense_total:.4e})',
  ]
  if length is None:
    lines.append(
      f'published GMACs     {published_macs(config) / 1e9:.4f}, as tables have'
      ' it: norms count too'
    )
  else:
    lines.append(
      f'6ND                 {6 * params * length:.4e} FLOPs per sequence'
      ' (all parameters; knows neither attention pairs nor routing)'
    )
  return '\n'.join(lines)
