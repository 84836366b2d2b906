"""How fast it is: what the scripts in `benchmarks/` have measured."""

from machine import markdown

from table_parts.common import ROOT, between, measured, table
from table_parts.decoding import decode_words


@table
def speed():
  """The most important times, for the README."""
  step, vision = measured('train_step'), measured('vit_train_step')
  batches = measured('vit_throughput')['batches']
  capacity = step['config']['capacity']
  rows = [
    (f'training step, MoD {capacity:.1%}', 'train_step', step),
    (
      'training step, DeiT-S, A-MoD 50%',
      'vit_train_step',
      vision['routed']['amod_50'],
    ),
  ]
  for batch in reversed(batches):
    for name, text in (
      ('amod', 'A-MoD 50%'),
      ('dynamic_vit', 'DynamicViT 0.7'),
    ):
      title = f'inference, DeiT-S, batch {batch}, {text}'
      rows.append((title, 'vit_throughput', batches[batch]['routed'][name]))
  times = markdown(
    ['over the dense twin', 'FLOPs', 'time'],
    [
      [
        f'{title} (`benchmarks/{script}.py`)',
        *(f'{ratios[n]:.3f}' for n in ('flop_ratio', 'time_ratio')),
      ]
      for title, script, ratios in rows
    ],
  )
  return f'{times}\n\n{beside_timm()}\n\n{decode_words()}'


@table
def environments():
  """Where and when each benchmark was run."""
  rows = []
  for path in sorted((ROOT / 'benchmarks').glob('*.json')):
    where = measured(path.stem)['environment']
    rows.append(
      [
        f'`benchmarks/{path.stem}.py`',
        where['date'],
        where['processor'],
        f'jax {where["jax"]}, Python {where["python"]}',
        'large pages' if 'hugetlb=1' in where.get('glibc_tunables', '') else '',
      ]
    )
  return markdown(['script', 'date', 'device', 'versions', 'memory'], rows)


@table
def train_step():
  """The training step of a language model, of its twin and of PyTorch."""
  found = measured('train_step')
  sizes = found['config']
  title = (
    f'{sizes["num_layers"]} layers, width {sizes["width"]}, {sizes["batch"]} ×'
    f' {sizes["length"]} tokens'
  )
  names = {
    'mod': f'MoD, {sizes["capacity"]:.1%} in every other layer',
    'dense': 'dense twin',
    'torch': 'PyTorch, dense',
    'matmul': 'one matrix product, 2048³',
  }
  rows = [
    [
      text,
      f'{found["median_seconds"][name]:.3f}',
      f'{found["gflops_per_second"][name]:.0f}',
    ]
    for name, text in names.items()
  ]
  return markdown([title, 'seconds (median)', 'GFLOP/s'], rows)


@table
def train_step_ratios():
  """What the times of `train_step` are, each over another."""
  found = measured('train_step')
  torch = found['torch']
  rows = [
    ['FLOPs, MoD over dense', f'{found["flop_ratio"]:.3f}', ''],
    [
      'time, MoD over dense',
      f'{found["time_ratio"]:.3f}',
      between(*found['time_ratio_quartiles']),
    ],
    [
      'that time ratio over the FLOP ratio',
      f'{found["time_ratio_over_flop_ratio"]:.2f}',
      '',
    ],
    [
      'time, dense over PyTorch',
      f'{torch["dense_over_torch"]:.3f}',
      between(*torch['dense_over_torch_quartiles']),
    ],
    [
      'FLOP/s, dense over the matrix product',
      f'{found["dense_rate_over_matmul_rate"]:.3f}',
      '',
    ],
  ]
  return markdown(['ratio', 'median', 'quartiles'], rows)


@table
def train_step_parts():
  """Where the time of a training step goes."""
  parts = measured('train_step')['seconds_by_part']
  return _parts({'dense': parts['dense'], 'MoD': parts['mod']})


@table
def vision_training_parts():
  """Where the time of a training step of a vision transformer goes."""
  parts = measured('vit_train_step')['seconds_by_part']
  return _parts({'dense': parts['dense'], 'A-MoD 50%': parts['amod_50']})


def _parts(seconds: dict[str, dict[str, float]]) -> str:
  """Returns a table of shares of parts, by model."""
  rows = []
  for part in next(iter(seconds.values())):
    shares = (of[part] / sum(of.values()) for of in seconds.values())
    rows.append([part, *(f'{share:.1%}' for share in shares)])
  return markdown(['part of the step', *seconds], rows)


@table
def compile_time():
  """How long a model takes to compile, by depth."""
  found = measured('compile_time')
  rows = [
    [
      kind,
      *(f'{found["median_seconds"][f"{kind}_{n}"]:.2f}' for n in (8, 24)),
      f'{found["growth_8_to_24"][kind]:.2f}',
    ]
    for kind in ('scanned', 'unrolled')
  ]
  header = ['layers are', '8 layers, s', '24 layers, s', '24 over 8']
  return markdown(header, rows)


@table
def head_loss():
  """The loss in chunks over the plain one, by vocabulary."""
  rows = []
  for size, row in measured('head_loss')['by_vocabulary'].items():
    seconds = row['median_seconds']
    rows.append(
      [
        f'{int(size):,}',
        *(f'{1e3 * seconds[n]:.1f}' for n in ('plain', 'chunked')),
        f'{row["chunked_over_plain"]:.2f} ({between(*row["quartiles"])})',
      ]
    )
  header = ['vocabulary', 'all logits at once, ms', 'in chunks, ms', 'ratio']
  return markdown(header, rows)


@table
def image_input():
  """A training step with reading pictures over one without, by cache."""
  found = measured('image_input')
  rate, ratios = found['images_per_second'], found['time_over_none']
  rows = [['a batch that is there already', f'{rate["none"]:.0f}', '', '']]
  for name in ('memory', 'disk', 'decoded'):
    label = 'none' if name == 'decoded' else name
    middle, *quartiles = ratios[name]
    ratio = [f'{middle:.2f}', between(*quartiles, 2)]
    rows.append([f'`{label}`', f'{rate[name]:.0f}', *ratio])
  header = ['`data.cache`', 'images/s', 'time / first row', 'quartiles']
  return markdown(header, rows)


def over_dense(routed: dict, names: dict[str, str]) -> list[list[str]]:
  """Returns a row for each model: FLOPs and time over the dense twin's."""
  return [
    [
      text,
      f'{routed[name]["flop_ratio"]:.3f}',
      f'{routed[name]["time_ratio"]:.3f}',
      between(*routed[name]['quartiles']),
      f'{routed[name]["time_over_flops"]:.2f}',
    ]
    for name, text in names.items()
  ]


OVER_DENSE = ['FLOPs / dense', 'time / dense', 'quartiles', 'time / FLOPs']


@table
def experts_time():
  """The training step of models with experts over that of the dense twin."""
  found = measured('experts')
  names = {
    'MoD': 'MoD, 12.5% in every other block',
    'experts': 'eight experts',
    'experts, half of the slots': 'eight experts, slots for half of the tokens',
    'staged': 'staged: MoD around experts',
    'integrated': 'integrated: half of the choices do nothing',
  }
  return markdown(['model', *OVER_DENSE], over_dense(found['models'], names))


@table
def no_ops_words():
  """What the time of choices that do nothing is."""
  found = measured('experts')['integrated_over']
  experts, same = found['experts'], found['as many slots, without no-ops']
  low, high = same['quartiles']
  return (
    'Choices that do nothing cost nothing: a step takes'
    f' {same["time_ratio"]:.2f} (quartiles {low:.2f}–{high:.2f}) of the time of'
    ' a model that has as many slots and no no-op. Over plain experts, leaving'
    f' half of the choices to a no-op takes {experts["flop_ratio"]:.2f} of the'
    f' FLOPs and {experts["time_ratio"]:.2f} of the time, since attention stays'
    ' as it is, and has more of the time than of the FLOPs.'
  )


@table
def experts_slice():
  """What a chip does in a step of a larger model with experts, as compiled."""
  found = measured('experts')
  rows = [
    [
      name,
      f'{row["memory"] / 2**30:.1f}',
      f'{row["products"] / row["model_flops"] * row["chips"]:.3f}',
      f'{row["collectives"].get("all-to-all", (0, 0))[1] / 1e6:.0f}',
      f'{row["sent"] / 1e6:.0f}',
      f'{1e3 * row["compute_seconds"]:.1f}',
      f'{1e3 * row["network_seconds"]:.1f}',
    ]
    for name, row in found['on_a_slice'].items()
  ]
  header = [
    *(f'on {found["topology"]}', 'GiB a chip', 'products, found / counted'),
    *('all-to-all, MB', 'sent, MB', 'products, ms', 'network, ms'),
  ]
  return markdown(header, rows)


@table
def vision_inference():
  """Inference of vision transformers, over the dense one's."""
  found = measured('vit_throughput')
  settings = found['settings']
  names = {
    'amod': f'A-MoD {settings["capacity"]:.0%}',
    'dynamic_vit': f'DynamicViT, keeps {settings["keep"]}',
    'without_heads': f'DynamicViT, keeps {settings["keep"]}, no heads',
  }
  rows = []
  for batch, row in found['batches'].items():
    images = row['images_per_second']
    for routed in over_dense(row['routed'], names):
      rows.append([batch, *routed])
    for routed, name in zip(rows[-len(names) :], names, strict=True):
      routed += [f'{images[name]:.1f}', f'{images["dense"]:.1f}']
  header = ['batch', 'model', *OVER_DENSE, 'images/s', 'dense, images/s']
  return markdown(header, rows)


@table
def vision_training():
  """Training steps of vision transformers, over the dense one's."""
  found = measured('vit_train_step')
  names = {
    f'{method.lower().replace("-", "")}_{share}': f'{method} {share}%'
    for share in ('50', '12.5')
    for method in ('A-MoD', 'MoD')
  }
  title = f'DeiT-S, batch {found["settings"]["batch"]}'
  return markdown([title, *OVER_DENSE], over_dense(found['routed'], names))


def beside_timm() -> str:
  """How long dense ViTs take beside timm's, in a sentence."""
  step = measured('vit_train_step')
  ratios = [
    f'{row["torch"]["dense_over_torch"]:.2f} for batches of {batch}'
    for batch, row in measured('vit_throughput')['batches'].items()
  ]
  torch = step['torch']
  return (
    "The time of the dense DeiT-S, divided by that of timm's model run eagerly,"
    f' is {", ".join(ratios)},'
    f' and {torch["dense_over_torch"]:.2f} for a training step on'
    f' {step["settings"]["batch"]} images ({torch["about"]}).'
  )


@table
def acm_layer():
  """An adaptive feed-forward by the mean number of learners that run."""
  found = measured('acm_layer')
  rows = [
    [name, f'{seconds:.3f}', f'{found["over_static"][name]:.3f}']
    for name, seconds in found['median_seconds'].items()
    if name not in ('static', 'all_dense')
  ]
  for name, text in (
    ('all_dense', 'all learners, as one dense feed-forward'),
    ('static', 'the static feed-forward'),
  ):
    ratio = found['over_static'].get(name, 1.0)
    seconds = found['median_seconds'][name]
    rows.append([text, f'{seconds:.3f}', f'{ratio:.3f}'])
  return markdown(['mean learners', 'seconds', 'over static'], rows)


@table
def acm_layer_fit():
  """How well a line fits the times of `acm_layer`."""
  found = measured('acm_layer')['linear_r_squared']
  return (
    f'A straight line through the times of the gated layer has R² {found:.3f}.'
  )


@table
def route_scores():
  """Attention that also scores tokens, over attention alone."""
  found = measured('route_scores')
  rows = [
    [f'{text}, {length} tokens']
    + [
      f'{row["over_attention"][n]:.2f}'
      for n in ('route_scores', 'materialised')
    ]
    for key, text in (
      ('forward', 'forward'),
      ('forward_backward', 'forward and backward'),
    )
    for length, row in found[key].items()
  ]
  header = ['over attention alone', '`route_scores`', 'whole map and its mean']
  return markdown(header, rows)


@table
def token_select():
  """Choosing and moving tokens, over a routed block's own time."""
  found = measured('token_select')
  names = {
    'select_xla': 'top-k by bisection (`xla`, what CPUs take)',
    'select_sort': 'top-k by sorting (`sort`)',
    'gather': 'gather, with its gradient',
    'scatter_add': 'scatter-add, with its gradient',
  }
  rows = [
    [
      text,
      f'{1e3 * found["median_seconds"][name]:.2f}',
      f'{found["share_of_block_step"][name]:.1%}',
    ]
    for name, text in names.items()
  ]
  settings = found['settings']
  title = (
    f'{settings["k"]} of {settings["length"]} tokens, {settings["batch"]} rows'
  )
  return markdown([title, 'ms', "share of the block's step"], rows)


@table
def lora():
  """A step of adapters and routers, over one of all weights."""
  found = measured('lora')
  full, adapted = (found['about'][name] for name in ('full', 'lora'))
  peak = found['peak_mib']
  low_high = between(*found['quartiles'], 2)
  rows = [
    ['FLOPs of a step', f'{found["flop_ratio"]:.2f}'],
    ['time of a step', f'{found["time_ratio"]:.2f} ({low_high})'],
    [
      'trained weights, gradients, optimiser',
      f'{adapted["training_bytes"] / full["training_bytes"]:.3f}',
    ],
    ['peak of the process', f'{peak["lora"] / peak["full"]:.2f}'],
  ]
  return markdown(['', 'LoRA over all weights (quartiles)'], rows)


@table
def wav2vec2():
  """Forward passes of recognisers, and their time over others'."""
  found = measured('wav2vec2')
  rows = []
  for batch, timed in found['by_batch'].items():
    seconds, adaptive = timed['median_seconds'], timed['adaptive']
    dense = timed['dense_over_torch']
    rows.append(
      [
        batch,
        *(f'{seconds[name]:.2f}' for name in ('dense', 'torch', 'adaptive')),
        f'{dense["ratio"]:.2f} ({between(*dense["quartiles"], 2)})',
        f'{adaptive["time_ratio"]:.2f} ({between(*adaptive["quartiles"], 2)})',
        f'{adaptive["flop_ratio"]:.2f}',
      ]
    )
  header = ['recordings', 'dense, s', 'PyTorch, s', 'adaptive, s']
  header += ['dense over PyTorch', 'adaptive over dense', 'their FLOPs']
  return markdown(header, rows)


@table
def serve_step():
  """The engine's step where a request asks for more, over plain requests."""
  over = measured('serve_step')['over_plain']
  names = {
    'schema': 'a JSON schema',
    'penalties': 'penalties',
    'likeliest': 'log-probabilities of the likeliest tokens',
  }
  rows = [
    [
      text,
      f'{over[name]["time_ratio"]:.2f}',
      between(*over[name]['quartiles'], 2),
    ]
    for name, text in names.items()
  ]
  return markdown(
    ['one request of eight asks for', 'time over plain', 'quartiles'], rows
  )


_VLM = {
  'dense': 'dense',
  'pmod': 'p-MoD',
  'gamma': 'γ-MoD',
  'fastv': 'FastV',
  'pooled': '2 × 2 pooling',
}


@table
def vlm_decode():
  """Answers about pictures: first tokens, further ones, caches."""
  cells = sorted(measured('vlm')['cells'], key=lambda cell: cell['batch'])
  names = _VLM | {'torch': 'PyTorch, dense'}
  return _answers(cells, names)


@table
def vlm_scenes_prompts():
  """Questions about scenes: times to the first token, and caches."""
  cell = measured('vlm_scenes')
  names = {name: name for name in cell['seconds_to_first_token']}
  return _answers([cell], names)


def _answers(cells: list[dict], names: dict[str, str]) -> str:
  """Returns a table of what `benchmarks/vlm.py` measures, by numbers of rows.

  Args:
    cells: what it has found, for a number of rows each.
    names: of the models in the table, by those in the cells.
  """
  rows = []
  for cell in cells:
    first, step = cell['seconds_to_first_token'], cell['seconds_per_step']
    sizes = cell['cache_bytes']
    for name, seconds in first.items():
      ratios = cell['prompt'].get(name)
      over = [''] * 3
      if ratios is not None:
        low, high = ratios['quartiles']
        over = [
          f'{ratios["flop_ratio"]:.3f}',
          f'{ratios["time_ratio"]:.3f} ({between(low, high)})',
          f'{ratios["time_over_flops"]:.3f}',
        ]
      mib = ''
      if name in sizes:
        share = sizes[name] / sizes['dense']
        mib = f'{sizes[name] / 2**20:.3g} ({share:.3f})'
      rows.append(
        [
          *(str(cell['batch']), names[name], f'{seconds:.3g}', *over),
          *(f'{1e3 * step[name]:.1f}', mib),
        ]
      )
  header = [
    *('rows', 'model', 'first token, s', 'FLOPs over dense'),
    *('time over dense', 'time over FLOPs', 'per token, ms'),
    'cache, MiB (over dense)',
  ]
  return markdown(header, rows)


@table
def vlm_decode_words():
  """What `benchmarks/vlm.py` has measured, in words."""
  found = measured('vlm')
  cells = found['cells']
  same = all(c['same_first_tokens'] and c['same_last_tokens'] for c in cells)
  torch = [c['dense_over_torch']['prompt'][0] for c in cells]
  of_step = [c['dense_over_torch']['step'][0] for c in cells]
  share = found['llava_cache_share']
  return (
    f'{found["layers"]} blocks of width {found["width"]}, a picture of 576'
    f' tokens and a question of {found["text"]}, two CPU cores. The dense model'
    f' takes {min(torch):.2f} to {max(torch):.2f} of the time of'
    " `transformers`' `LlavaForConditionalGeneration` with the same weights to"
    f' the first token, and {min(of_step):.2f} to {max(of_step):.2f} for a'
    f' further one; their tokens are {"the same" if same else "not the same"}.'
    " Of the image tokens' keys and values in LLaVA's 32 layers, caches of"
    f' p-MoD keep {share["pmod"]:.3f}, and those of γ-MoD {share["gamma"]:.3f}.'
  )
