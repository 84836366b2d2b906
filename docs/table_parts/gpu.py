"""What `benchmarks/accelerator.py` has measured on a GPU."""

import functools
import json

from machine import markdown

from table_parts.common import ROOT, table
from table_parts.speed import between


@functools.cache
def stage(name: str) -> dict:
  """Returns the parts of a stage, by name."""
  return json.loads((ROOT / 'results' / 'h100' / f'{name}.json').read_text())


@table
def gpu_words():
  """The step on a GPU in a sentence, for the README."""
  found = stage('training')['lm_220m']
  torch = found['torch']
  return (
    'On one H100 a training step of a dense language model of 12 blocks of'
    f' width {found["config"]["width"]} reaches'
    f' {found["utilization"]["dense"]:.0%} of the peak, and takes'
    f' {torch["dense_over_torch"]:.2f} of the time of'
    " `transformers`' Llama with `torch.compile`; Mixture-of-Depths takes"
    f' {found["time_ratio"]:.2f} of the dense step, where FLOPs say'
    f' {found["flop_ratio"]:.2f} (`benchmarks/accelerator.py`).'
  )


@table
def gpu_step():
  """A training step of a language model, of its twin and of PyTorch."""
  found = stage('training')['lm_220m']
  sizes = found['config']
  title = (
    f'{sizes["num_layers"]} layers, width {sizes["width"]}, {sizes["batch"]} ×'
    f' {sizes["length"]} tokens, {sizes["vocab_size"]:,} words'
  )
  names = {
    'mod': f'MoD, {sizes["capacity"]:.1%} in every other layer',
    'dense': 'dense twin',
    'torch': f'PyTorch, dense ({found["torch"]["about"]})',
  }
  peak = found['gflops_per_second']['dense'] / found['utilization']['dense']
  rows = [
    [
      text,
      f'{1e3 * found["median_seconds"][name]:.1f}',
      f'{found["gflops_per_second"][name] / 1e3:.0f}',
      f'{found["gflops_per_second"][name] / peak:.1%}',
    ]
    for name, text in names.items()
  ]
  header = [title, 'ms (median)', 'TFLOP/s', 'of the peak (MFU)']
  ratios = (
    f'Over the dense twin MoD takes {found["time_ratio"]:.3f} of the time'
    f' (quartiles {between(*found["time_ratio_quartiles"])}) for'
    f' {found["flop_ratio"]:.3f} of the FLOPs, and the twin'
    f' {found["torch"]["dense_over_torch"]:.3f} of the time of PyTorch'
    f' ({between(*found["torch"]["dense_over_torch_quartiles"])}).'
  )
  return f'{markdown(header, rows)}\n\n{ratios}'


@table
def gpu_parts():
  """Where the time of such a step goes."""
  parts = stage('training')['lm_220m']['seconds_by_part']
  rows = [
    [part]
    + [f'{1e3 * parts[name].get(part, 0):.1f}' for name in ('dense', 'mod')]
    for part in parts['mod']
  ]
  total = {name: sum(seconds.values()) for name, seconds in parts.items()}
  rows.append(['all', *(f'{1e3 * total[n]:.1f}' for n in ('dense', 'mod'))])
  return markdown(['ms', 'dense', 'MoD'], rows)


@table
def gpu_errors():
  """The largest error of each kernel."""
  rows = []
  for op, part in stage('kernels').items():
    errors = {
      name.split()[-1]: found
      for name, found in part['errors'].items()
      if isinstance(found, dict)
    }
    backend = next(iter(part['errors'])).split()[1]
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
