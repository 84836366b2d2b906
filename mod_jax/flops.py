"""FLOPs of models, summed over the rows of their `flops_table`.

A row is a layer's name and its parts: FLOPs by name of the part. A layer's
config counts them by its method `flops`; for routed blocks, see
`layers/routed.py`.

All models are counted alike: matrix products only, a multiply-add is 2 FLOPs.
Causal query-key pairs are counted exactly, and routed blocks on the k tokens
that they process. Training is three forward passes; frozen weights need less.

`published_macs` counts as published tables of vision transformers do, though
these call the result FLOPs: multiply-accumulates of the same products, and 5
for each element that a layer norm reads.

`config` is the config of a model. `length` is the number of tokens of a
sequence for language models, and of frames of a recording for speech models.
For models that read text and pictures it is (tokens, pictures), or the number
of tokens with one picture. It is None for other models of pictures.
"""

from collections.abc import Callable, Mapping
import math
import re

import jax

from mod_jax import tables, trees
from mod_jax.errors import UserError
from mod_jax.models import protocol
from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config

Length = int | tuple[int, int] | None


def forward(config, length: Length = None) -> int:
  """Returns the FLOPs of a forward pass over one sequence or picture."""
  return sum(products(parts) for _, parts in _table(config, length))


def products(parts: Mapping[str, int]) -> int:
  """Returns the FLOPs of a layer's `parts` in all, without those of norms."""
  return sum(count for name, count in parts.items() if name != 'norm')


def published_macs(config, length: Length = None) -> int:
  """Returns the forward pass's multiply-accumulates, as published tables do."""
  return sum(sum(parts.values()) for _, parts in _table(config, length)) // 2


def _table(config, length):
  return config.flops_table(*_arguments(config, length))


def _train_table(config, length):
  """Returns `flops_table` in training, with a row for each run of a head."""
  if isinstance(config, VLMConfig) and config.adaptive is None:
    return config.flops_table(*_arguments(config, length), train=True)
  table, exits = _table(config, length), ()
  if isinstance(config, LMConfig) and config.early_exit:
    exits = (f'block_{config.early_exit - 1}',)
  if isinstance(config, DETRConfig):
    earlier = range(config.num_decoder_layers - 1)
    exits = tuple(f'decoder/block_{i}' for i in earlier)
  head = table[-1:]
  return [
    x
    for row, parts in table
    for x in ((row, parts), *head * (row.split()[0] in exits))
  ]


def train(
  config,
  length: Length = None,
  frozen: Callable[[str], bool] | None = None,
) -> int:
  """Returns the FLOPs of a training step on one sequence: three forwards.

  An early exit of a language model runs the head a second time, and a DETR runs
  its heads after each block of the decoder. A DynamicViT with a learned score
  only masks patches in training and so processes all of them, unless it has
  adaptive modules, which are trained on the kept patches. `frozen(name)` is
  True for parameters without a gradient. A product with one saves half of its
  backward pass; a row before all trained parameters has no backward pass.
  """
  if isinstance(config, DynamicViTConfig) and config.adaptive is None:
    config = config.masked
  total = sum(products(parts) for _, parts in _train_table(config, length))
  if frozen is None:
    return 3 * total
  return 3 * total - _saved(config, length, frozen)


def _saved(config, length, frozen) -> int:
  """Returns the FLOPs that a training step saves by frozen parameters."""
  names = trees.flatten(protocol.shapes(config)['params'])
  trained = [name for name in names if not frozen(name)]
  table = _train_table(config, length)
  table = [(row.split()[0], parts) for row, parts in table]
  starts = {row: config.row_prefixes(row) for row, _ in table}
  known = tuple(start for row in starts.values() for start in row)
  # Gradients pass through a row of the table if that row or an earlier one has
  # trained parameters. Parameters of no row count as if before the first one.
  before = any(not name.startswith(known) for name in trained)
  saved = 0
  for row, parts in table:
    trained_here = [name for name in trained if name.startswith(starts[row])]
    reached = before or bool(trained_here)
    # The head at an early exit has a row before later blocks, but these blocks
    # do not read its output.
    before = before if row == 'head' else reached
    if not reached:
      saved += 2 * products(parts)
    elif re.search(_BLOCK, row):
      for name, count in _weight_flops(config, length, row).items():
        saved += count * frozen(name)
    elif row != 'tower' and not any(
      re.search(_WEIGHTS, name) for name in trained_here
    ):
      # No weight in this row has a gradient. Except in blocks and in vision
      # towers, one factor of every product is a weight.
      saved += products(parts)
  return saved


# Name of a block's row: the prefix of its stack's names, and the block number.
_BLOCK = r'^(|.+/)block_(\d+)$'
# Parameters that are factors in matrix products.
_WEIGHTS = r'(^|/)(kernel|embedding)$'


def _weight_flops(config, length, row) -> dict[str, int]:
  """Returns FLOPs of products with a block's matrices, by parameter name."""
  inner, i = re.match(_BLOCK, row).groups()
  stack, i, before = config.stack, int(i), 0
  if inner == 'decoder/':  # In a DETR, the encoder's blocks are listed first.
    stack, before = config.decoder, len(stack.layers)
  prefix = row
  if stack.scan:
    prefix = f'{inner}layers/block_{i % stack.period}'
  tokens, whole = (
    x.tokens_per_block(*_arguments(config, length))[before + i]
    for x in (config, config.dense_twin())
  )
  counts = {}
  layer = stack.layers[i]
  of_attention, of_mlp = layer.halves(tokens, whole)
  for name, slot in layer.block.slots.items():
    entering = of_mlp if name == 'mlp' else of_attention
    if name in ('cross_attention/key', 'cross_attention/value'):
      entering = layer.source_tokens(config.num_tokens)
    counts |= slot.weight_flops(f'{prefix}/{name}', entering)
  return counts


def steps_within(
  budget: float, config, batch_size: int, length: Length = None
) -> int:
  """Returns the number of steps, at least 1, closest to a budget of FLOPs."""
  return max(1, round(budget / (batch_size * train(config, length))))


def num_params(config) -> int:
  """Counts the elements of a model's parameters, without allocating them."""
  params = protocol.shapes(config)['params']
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def _arguments(config, length):
  if length is not None:
    return length if isinstance(length, tuple) else (length,)
  # Vision models need no length: their configs have the size of images.
  if isinstance(config, LMConfig | Wav2Vec2Config | VLMConfig):
    raise UserError(
      f'{type(config).__name__} without a length: the cost of this model'
      ' depends on how many tokens it reads; pass length=….'
    )
  return ()


def report(
  config,
  length: Length = None,
  frozen: Callable[[str], bool] | None = None,
) -> str:
  """Returns a table of FLOPs per layer and in total, as text to print.

  `frozen` is as in `train`.
  """
  args = _arguments(config, length)
  table = config.flops_table(*args)
  twin, twin_length = _dense_twin(config, length)
  dense = dict(_table(twin, twin_length))
  total, dense_total = forward(config, length), forward(twin, twin_length)
  params = num_params(config)
  names = dict.fromkeys(name for _, parts in table for name in parts)
  sums = {n: sum(parts.get(n, 0) for _, parts in table) for n in names}
  names = [name for name in names if sums[name] and name != 'norm']

  def cells(layer, parts, twin):
    counts = [*(parts.get(n, 0) for n in names), products(parts), twin]
    return [layer, *(f'{count / 1e6:,.2f}' for count in counts)]

  row_name = 'image' if length is None else 'sequence'
  num_tokens = args[0] if args else config.num_tokens
  rows = [['layer', *names, 'total', 'dense']]
  for layer, parts in table:
    of_twin = products(dense.get(layer.split()[0], {}))
    rows.append(cells(layer, parts, of_twin))
  rows.append(cells('total', sums, dense_total))
  # Keyed by the number of tokens that the same block of the dense twin
  # processes: in a decoder, these are the queries.
  fewer = {}
  for i, (count, whole) in enumerate(
    zip(
      config.tokens_per_block(*args),
      twin.tokens_per_block(*_arguments(twin, twin_length)),
      strict=True,
    )
  ):
    blocks = fewer.setdefault(whole, [])
    if count != whole:
      blocks.append(f'block {i}: {count}')
  processed = '; '.join(
    f'{", ".join(blocks) or "all"} of {whole}'
    for whole, blocks in fewer.items()
  )
  lines = [
    f'FLOPs of a forward pass over one {row_name} of {num_tokens} tokens'
    ' (matrix products, multiply-add = 2), in MFLOPs',
    *tables.aligned(rows),
    '',
    f'tokens processed    {processed}',
    *_expert_lines(config, num_tokens),
    f'parameters          {params:,}',
    f'forward             {total:.4e} FLOPs = {total / 2:.4e} MACs',
    f'dense twin forward  {dense_total:.4e} FLOPs = {dense_total / 2:.4e} MACs',
    f'ratio to dense      {total / dense_total:.4f}',
    f'training step       {train(config, length, frozen):.4e} FLOPs per'
    f' {row_name}'
    f' (dense twin {train(twin, twin_length):.4e})',
  ]
  if length is None:
    lines.append(
      f'published GMACs     {published_macs(config) / 1e9:.4f}, as tables have'
      ' it: norms count too'
    )
  else:
    lines.append(
      f'6ND                 {6 * params * num_tokens:.4e} FLOPs per sequence'
      ' (all parameters; knows neither attention pairs nor routing)'
    )
  return '\n'.join(lines)


def _dense_twin(config, length: Length):
  """Returns the dense twin and the length in it, where no patch is dropped."""
  twin = config.dense_twin()
  if isinstance(config, VLMConfig):
    tokens, images = length if isinstance(length, tuple) else (length, 1)
    dropped = twin.num_patches - config.num_patches
    length = (tokens + images * dropped, images)
  return twin, length


def _expert_lines(config, tokens: int) -> list[str]:
  """Returns lines about the experts' slots in a block that all tokens enter."""
  experts = config.experts
  if experts is None:
    return []
  if experts.capacity_factor is None:
    return ['expert slots        one for each choice: nothing is dropped']
  slots = experts.num_experts * experts.slots_per_expert(tokens)
  filled = slots
  if experts.choice == 'token':
    filled = min(slots, round(experts.share * experts.per_token * tokens))
  return [
    f'expert slots        {slots} for {tokens} tokens; at balance {filled} are'
    ' filled'
  ]
