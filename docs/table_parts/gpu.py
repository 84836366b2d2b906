"""What `benchmarks/accelerator.py` has measured on a GPU."""

import functools
import json

from machine import markdown

from mod_jax import flops
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.models import vit
from table_parts.common import ROOT, between, table

DENSE = vit.deit_small()
AMOD = vit.deit_small(routing=VisionRoutingConfig(capacity=0.5))


@functools.cache
def stage(name: str) -> dict:
  """Returns the parts of a stage, by name."""
  return json.loads((ROOT / 'results' / 'h100' / f'{name}.json').read_text())


def profiled(name: str) -> float:
  """Returns the seconds of a step by its profile."""
  return stage('profiles')['steps'][name]['seconds']


@table
def gpu_words():
  """Steps on a GPU in a few sentences, for the README."""
  found = stage('training')['lm_220m_heads_of_128']
  torch = stage('training')['lm_220m']['torch']
  vit_dense, amod = (profiled(f'vit_{n}') for n in ('dense', 'amod_50'))
  return (
    'On one H100 a training step of a dense language model of 12 blocks of'
    f' width {found["config"]["width"]} reaches'
    f' {found["utilization"]["dense"]:.0%} of the peak; Mixture-of-Depths takes'
    f' {found["time_ratio"]:.2f} of its time, where FLOPs say'
    f' {found["flop_ratio"]:.2f}. With smaller heads the dense step takes'
    f" {torch['dense_over_torch']:.2f} of the time of `transformers`' Llama"
    f' with `torch.compile` (`benchmarks/train_step.py`). By profiles, a step'
    f' of DeiT-S with A-MoD takes {amod / vit_dense:.2f} of the dense one,'
    f' where FLOPs say {flops.train(AMOD) / flops.train(DENSE):.2f}'
    ' ([how](docs/performance.md#on-one-h100)).'
  )


@table
def gpu_step():
  """A training step of a language model, of its twin and of PyTorch."""
  stages = stage('training')
  torch, sizes = stages['lm_220m']['torch'], stages['lm_220m']['config']
  rows = []
  for key, title, names in (
    ('lm_220m', 'as it comes', ('dense', 'mod')),
    ('lm_220m_heads_of_128', "XLA's autotuning off", ('dense', 'mod')),
    ('lm_220m', f'PyTorch ({torch["about"]})', ('torch',)),
  ):
    found = stages[key]
    rate, seconds = found['gflops_per_second'], found['median_seconds']
    peak = rate['dense'] / found['utilization']['dense']
    heads, width = found['config']['num_heads'], found['config']['width']
    cells = [f'{1e3 * seconds[n]:.1f} | {rate[n] / peak:.1%}' for n in names]
    if 'mod' in names:
      spread = between(*found['time_ratio_quartiles'])
      cells.append(f'{found["time_ratio"]:.3f} ({spread})')
    rows.append([title, f'{heads} × {width // heads}', *cells])
  rows[-1] += [' | ', '']
  title = (
    f'{sizes["num_layers"]} layers, width {sizes["width"]}, {sizes["batch"]} ×'
    f' {sizes["length"]} tokens, {sizes["vocab_size"]:,} words'
  )
  header = [title, 'heads', 'dense, ms', 'MFU', 'MoD, ms', 'MFU']
  ratios = (
    f'FLOPs of MoD are {found["flop_ratio"]:.3f} of the dense ones. The dense'
    f' step takes {torch["dense_over_torch"]:.3f} of the time of PyTorch'
    f' ({between(*torch["dense_over_torch_quartiles"])}).'
  )
  return f'{markdown([*header, "MoD over dense"], rows)}\n\n{ratios}'


@table
def gpu_vit():
  """A training step of DeiT-S."""
  rows = []
  for name, text, config in (
    ('vit_dense', 'dense', DENSE),
    ('vit_amod_50', 'A-MoD on half of the tokens in every other block', AMOD),
  ):
    seconds = profiled(name)
    rows.append(
      [
        text,
        f'{1e3 * seconds:.1f}',
        f'{seconds / profiled("vit_dense"):.3f}',
        f'{flops.train(config) / flops.train(DENSE):.3f}',
      ]
    )
  title = 'DeiT-S, 128 images of 224 pixels'
  return markdown([title, 'ms', 'time over dense', 'FLOPs over dense'], rows)


@table
def gpu_parts():
  """Where the time of such steps goes."""
  columns = {
    'lm_dense': 'language model',
    'lm_mod': 'with MoD',
    'vit_dense': 'DeiT-S',
    'vit_amod_50': 'with A-MoD',
  }
  parts = {
    name: stage('profiles')['steps'][name]['seconds_by_part']
    for name in columns
  }
  rows = [
    [part, *(f'{1e3 * parts[name].get(part, 0):.1f}' for name in columns)]
    for part in parts['lm_mod']
  ]
  rows.append(
    ['all', *(f'{1e3 * sum(x.values()):.1f}' for x in parts.values())]
  )
  return markdown(['ms', *columns.values()], rows)


@table
def gpu_moves():
  """Choosing and moving tokens, over a routed block's step, in sentences."""
  found, config = stage('profiles'), stage('training')['lm_220m']['config']
  moves, steps = found['routing_of_lm_mod'], found['steps']
  routed = config['num_layers'] // 2
  # What both models do outside of their blocks.
  rest = found['head_products'] + sum(
    steps['lm_mod']['seconds_by_part'][part]
    for part in ('embedding, head and loss', 'optimiser')
  )
  all_parts = {
    name: sum(steps[name]['seconds_by_part'].values())
    for name in ('lm_dense', 'lm_mod')
  }
  dense = (all_parts['lm_dense'] - rest) / config['num_layers']
  block = (all_parts['lm_mod'] - rest) / routed - dense
  micro = {name: 1e6 * seconds / routed for name, seconds in moves.items()}
  total = sum(micro.values())
  return (
    f"By the profile of MoD's step a routed block takes {1e3 * block:.2f} ms,"
    f' forward and backward, where a dense one takes {1e3 * dense:.2f}. Of it'
    f' the choice takes {micro["choose"]:.0f} µs; the gather'
    f' {micro["gather"]:.0f} and its gradient {micro["gather_gradient"]:.0f};'
    f' the scatter-add {micro["scatter_add"]:.0f}, and a copy of all features'
    f' before it {micro["copy"]:.0f}: {total / (1e6 * block):.0%} in all, and'
    f' {(total - micro["copy"]) / (1e6 * block):.0%} without the copy.'
  )


@table
def gpu_errors():
  """The largest error of each kernel."""
  rows = []
  for op, part in stage('kernels').items():
    found = {n: x for n, x in part['errors'].items() if isinstance(x, dict)}
    errors = {name.split()[-1]: x for name, x in found.items()}
    backend = next(iter(found)).split()[1]
    rows.append(
      [
        f'`{op}`, {backend}',
        *(
          f'{max(errors[x].values()):.1e}' if x in errors else 'not supported'
          for x in ('float32', 'bfloat16')
        ),
      ]
    )
  return markdown(['kernel', 'float32', 'bfloat16'], rows)


@table
def gpu_route_scores():
  """Attention that also scores tokens, over attention alone."""
  found = stage('kernel_times')['route_scores_vit']
  rows = []
  for key, text in (
    ('forward', 'forward'),
    ('forward_backward', 'forward and backward'),
  ):
    for length, row in found[key].items():
      over = row['over_attention']
      rows.append(
        [
          f'{text}, {length} tokens',
          f'{1e3 * row["median_seconds"]["attention"]:.3f}',
          *(f'{over[n]:.2f}' for n in ('route_scores', 'materialised')),
          f'{row["materialised_over_route_scores"]:.1f}',
        ]
      )
  header = ['', 'attention alone (cuDNN), ms', '`route_scores` over it']
  header += ['whole map and its mean over it', 'whole map over `route_scores`']
  return markdown(header, rows)


@table
def gpu_acm():
  """An adaptive feed-forward by the mean number of learners that run."""
  forward, gradient = (
    stage('kernel_times')[name] for name in ('acm_layer', 'acm_layer_gradient')
  )
  rows = []
  for name in gradient['median_seconds']:
    if name not in forward['median_seconds']:
      continue
    text = {
      'static': 'the static feed-forward',
      'all_dense': 'all learners, as one dense feed-forward',
    }.get(name, name)
    row = [text]
    for found in (forward, gradient):
      row.append(f'{1e3 * found["median_seconds"][name]:.3f}')
      row.append(f'{found["over_static"].get(name, 1.0):.2f}')
    rows.append(row)
  rows = rows[2:] + rows[1::-1]
  header = ['mean learners', 'forward, ms', 'over static']
  header += ['with gradients, ms', 'over static']
  fits = [f'{x["linear_r_squared"]:.4f}' for x in (forward, gradient)]
  words = (
    f'Straight lines through the times of the gated layer have R² {fits[0]}'
    f' and, with gradients, {fits[1]}. Four learners by `jax.lax.ragged_dot`'
    f' take {forward["over_static"]["ragged 4"]:.1f} times as long as the'
    ' static feed-forward.'
  )
  return f'{markdown(header, rows)}\n\n{words}'


@table
def gpu_head():
  """The head's loss by the tokens of a chunk."""
  seconds = stage('head_chunks')['median_seconds']
  row = [f'{1e3 * x:.1f}' for x in seconds.values()]
  header = [f'{int(n):,}' for n in seconds]
  return markdown(['tokens of a chunk', *header], [['ms', *row]])
