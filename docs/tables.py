"""Writes the tables with measured figures into README.md and the docs.

    python docs/tables.py
    python docs/tables.py README.md docs/performance.md

A page holds a table between two lines, and the command writes it anew:

    <!-- table: train_step -->
    <!-- end -->

Each function below makes the table of its name, from the JSON, JSONL or CSV
that a script in `benchmarks/` or `results/` has left, or by counting FLOPs. A
test asserts that the pages hold what is made here.
"""

import csv
import functools
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / 'benchmarks'))

# After the path above, since the benchmarks are no package.
import machine  # noqa: E402
from machine import markdown  # noqa: E402
import study  # noqa: E402
import study_tables  # noqa: E402

from mod_jax import flops  # noqa: E402
from mod_jax.errors import UserError  # noqa: E402
from mod_jax.layers.acm import AdaptiveConfig  # noqa: E402
from mod_jax.layers.routed import MoDConfig  # noqa: E402
from mod_jax.layers.routed import VisionRoutingConfig  # noqa: E402
from mod_jax.models import vit  # noqa: E402
from mod_jax.models.dynamic_vit import DynamicViTConfig  # noqa: E402
from mod_jax.models.lm import LMConfig  # noqa: E402

TABLES = {}
_START = re.compile(r'^<!-- table: (.*) -->$', re.MULTILINE)
_BLOCK = re.compile(
  r'^(<!-- table: (\w+) -->\n).*?^(<!-- end -->)$', re.MULTILINE | re.DOTALL
)


def pages() -> list[pathlib.Path]:
  """Returns the files whose tables are kept up to date."""
  folders = (ROOT / 'docs', ROOT / 'results')
  return [
    ROOT / 'README.md',
    *(page for folder in folders for page in sorted(folder.rglob('*.md'))),
  ]


def filled(text: str) -> str:
  """Returns a page's text with each table as its function makes it.

  Raises:
    UserError: there is no table of a name, or a table's end is missing.
  """

  def fill(block):
    start, name, end = block.groups()
    return f'{start}\n{TABLES[name]()}\n\n{end}'

  for name in _START.findall(text):
    if name not in TABLES:
      known = ', '.join(TABLES)
      raise UserError(f'table {name!r}: expected one of {known}.')
  blocks = list(_BLOCK.finditer(text))
  whole = [b[2] for b in blocks if len(_START.findall(b[0])) == 1]
  if whole != _START.findall(text):
    raise UserError(
      'each line <!-- table: NAME --> needs a line <!-- end --> of its own.'
    )
  return _BLOCK.sub(fill, text)


def table(function):
  """Makes a function's text available to the pages under its name."""
  TABLES[function.__name__] = function
  return function


@functools.cache
def measured(name: str) -> dict:
  """Returns what the script `benchmarks/NAME.py` has measured."""
  return json.loads((ROOT / 'benchmarks' / f'{name}.json').read_text())


def studied(name: str) -> dict[str, dict]:
  """Returns the runs of the study `benchmarks/NAME.py`, by name."""
  return study.read(ROOT / 'benchmarks' / f'{name}.jsonl')


@functools.cache
def proofs(name: str) -> list[dict[str, str]]:
  """Returns the rows of a CSV in `results/prove_paper/`."""
  with (ROOT / 'results' / 'prove_paper' / f'{name}.csv').open() as file:
    return list(csv.DictReader(file))


@functools.cache
def recipes() -> dict[str, dict[str, list[dict]]]:
  """Returns the runs of `routing_recipe.py` by group and name, by seed."""
  found = {}
  for path, of_seed in study_tables.by_model(studied('routing_recipe')).items():
    group, name = path.split('/')
    runs = [of_seed[seed] for seed in sorted(of_seed)]
    found.setdefault(group, {})[name] = runs
  return found


def compared(equal: str):
  """Returns the recipes that are compared at equal steps or FLOPs."""
  return study_tables.recipes(recipes())[equal].items()


def mean(runs: list[dict]) -> float:
  return machine.spread([run['loss'] for run in runs])['mean']


def between(low: float, high: float, digits: int = 3) -> str:
  return f'{low:.{digits}f}–{high:.{digits}f}'


# How fast it is.


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
  return f'{times}\n\n{decode_words()}'


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
  total = {name: sum(seconds.values()) for name, seconds in parts.items()}
  rows = [
    [part]
    + [f'{parts[name][part] / total[name]:.1%}' for name in ('dense', 'mod')]
    for part in parts['dense']
  ]
  return markdown(['part of the step', 'dense', 'MoD'], rows)


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
def decode():
  """A decoding step by the number of sequences and what came before."""
  rows = []
  for cell in measured('decode')['cells']:
    seconds = cell['mean_seconds']
    kept = cell['cache_bytes']
    torch = cell.get('dense_over_torch')
    rows.append(
      [
        f'{cell["context"]}',
        f'{cell["batch"]}',
        *(f'{1e3 * seconds[n]:.1f}' for n in ('dense', 'mod', 'mod_masked')),
        f'{cell["speedup"]:.2f}',
        f'{cell["ideal_speedup"]:.2f}',
        f'{kept["mod"] / kept["dense"]:.2f}',
        f'{cell["no_row_routed_probability"]:.2f}',
        '' if torch is None else f'{torch:.2f}',
      ]
    )
  header = [
    *('context', 'sequences', 'dense, ms', 'MoD, ms', 'MoD masked, ms'),
    *('speed-up', 'speed-up by bytes', 'cache / dense'),
    *('chance that no row is routed', 'dense / PyTorch'),
  ]
  return markdown(header, rows)


def decode_words() -> str:
  """How fast decoding is, in a sentence."""
  cells = [x for x in measured('decode')['cells'] if x['context'] == 512]
  speedups = [x['speedup'] for x in cells]
  over_torch = [1 / x['dense_over_torch'] for x in cells]
  batches = [x['batch'] for x in cells]
  return (
    f'Generating a token for {min(batches)} to {max(batches)} sequences after'
    ' 512 tokens, Mixture-of-Depths (12.5% of the tokens in every other block)'
    f' is {min(speedups):.2f} to {max(speedups):.2f} times as fast as the dense'
    f' twin, which is {min(over_torch):.1f} to {max(over_torch):.1f} times as'
    " fast as the same model by PyTorch's `transformers`"
    ' (`benchmarks/decode.py`).'
  )


@table
def speculation():
  """Tokens per second with a draft, over the dense twin's."""
  cells = measured('speculation')['cells']
  batches = sorted({cell['batch'] for cell in cells})
  found = {(c['temperature'], c['batch']): c['kinds'] for c in cells}
  rows = []
  for temperature in sorted({cell['temperature'] for cell in cells}):
    for kind in found[temperature, batches[0]]:
      if kind == 'dense':
        continue
      by_batch = [found[temperature, batch][kind] for batch in batches]
      rows.append(
        [
          f'{temperature:g}',
          'none' if kind == 'plain' else kind,
          f'{by_batch[0]["tokens_of_a_pass"]:.2f}',
          *(f'{found["over_dense"]:.2f}' for found in by_batch),
        ]
      )
  header = ['temperature', 'draft', 'tokens of a pass']
  header += [f'{n} sequence{"s" * (n > 1)}' for n in batches]
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


# How good it is.


def accuracy_at(script: str, name: str, key: str) -> str:
  """Returns the mean accuracy of a model on the digits, and its cost."""
  model = measured(script)['models'][name]
  gmacs = model['gmacs']
  if isinstance(gmacs, dict):  # It differs between seeds.
    gmacs = gmacs['mean']
  return f'{model[key]["mean"]:.1%} at {1e3 * gmacs:.1f} MMACs'


@table
def results():
  """The most important results, for the README."""
  texts = recipes()['equal FLOPs']
  one, two, mod = (
    f'{mean(texts[name]):.3f}'
    for name in ('dense, 1 block', 'dense, 2 blocks', 'MoD, 2 blocks')
  )

  def digits(name):
    return accuracy_at('vit_digits', name, 'after')

  def adaptive(name):
    return accuracy_at('acm_digits', name, 'accuracy')

  rows = [
    [
      'text at equal training FLOPs, nats/token'
      ' (`benchmarks/routing_recipe.py`)',
      f'{one} with one block, {two} with two',
      f'MoD, two blocks, one of them routed: {mod}',
    ],
    [
      'digits, accuracy (`benchmarks/vit_digits.py`)',
      f'{digits("dense")}, {digits("dense, 6 blocks")}',
      f'A-MoD: {digits("A-MoD 50%")}; DynamicViT: {digits("DynamicViT .7")}',
    ],
    [
      'digits, accuracy (`benchmarks/acm_digits.py`)',
      adaptive('dense'),
      f'adaptive width: {adaptive("adaptive, β = .4")},'
      f' {adaptive("adaptive, β = .6")}',
    ],
  ]
  return markdown(['what', 'dense', 'conditional'], rows)


@table
def recipe_equal_flops():
  """Small language models of equal training FLOPs."""
  rows = [
    [
      text,
      str(runs[0]['steps']),
      str(len(runs)),
      *(
        study_tables.over_seeds(runs, k)
        for k in ('loss', 'bits_per_byte', 'router_rule')
      ),
    ]
    for text, runs in compared('equal training FLOPs')
  ]
  header = [
    *('model', 'steps', 'seeds', 'nats/token', 'bits/byte'),
    'nats/token by the causal router',
  ]
  return markdown(header, rows)


@table
def recipe_equal_steps():
  """Small language models after as many steps, by recipe and seed."""
  rows = [
    [text, f'{mean(runs):.3f}', *(f'{r["loss"]:.3f}' for r in runs)]
    for text, runs in compared('equal steps')
  ]
  header = ['nats/token', 'mean', *(f'seed {seed}' for seed in range(3))]
  return markdown(header, rows)


@table
def recipe_words():
  """What the models of equal steps tell."""
  gate, more = recipes()['gate'], recipes()['auxiliary loss']
  four, two = (mean(gate[f'dense, {n} blocks']) for n in (4, 2))

  def share(runs):
    return (two - mean(runs)) / (two - four)

  control = min(mean(more[n]) for n in ('gaussian', 'stride'))
  blind = max(share(more[n]) for n in ('gaussian', 'stride'))
  with_aux, without = share(gate['sigmoid']), share(more['sigmoid, no aux'])
  return '\n'.join(
    [
      f'* Two more dense blocks are worth {two - four:.3f} nats. Routed at an'
      f' eighth of their cost they bring {with_aux:.0%} of that with the'
      f' auxiliary loss and {without:.0%} without it.',
      f'* Routed blocks that process tokens chosen at random, or every eighth'
      f' one, bring up to {blind:.0%}. The learned choice (sigmoid, auxiliary'
      f' loss) is {control - mean(gate["sigmoid"]):.3f} nats better than the'
      ' better of these two controls.',
    ]
  )


@table
def recipe_tokens():
  """What routed blocks bring by length of the rows and by vocabulary."""
  runs = recipes()['one seed']
  base = {
    name: [recipes()['gate'][name][0]]
    for name in ('sigmoid', 'dense, 2 blocks', 'dense, 4 blocks')
  }
  rows = []
  for text, suffix in (
    ('256 tokens, 2,048 subwords', None),
    ('512 tokens', 'length 512'),
    ('1,024 tokens', 'length 1024'),
    ('bytes', 'bytes'),
    ('512 subwords', 'BPE 512'),
    ('4,096 subwords', 'BPE 4096'),
  ):
    four, two, routed = (
      mean(runs[f'{name}, {suffix}'] if suffix else base[name])
      for name in ('dense, 4 blocks', 'dense, 2 blocks', 'sigmoid')
    )
    rows.append(
      [
        text,
        *(f'{loss:.3f}' for loss in (four, routed, two)),
        f'{(two - routed) / (two - four):.0%}',
      ]
    )
  header = ['seed 0', 'dense, 4 blocks', 'MoD', 'dense, 2 blocks', 'recovered']
  return markdown(header, rows)


@table
def recipe_one_seed():
  """What was tried with one seed, at equal steps."""
  names = {
    'sigmoid, aux .001': 'auxiliary loss 0.001',
    'sigmoid, aux .1': 'auxiliary loss 0.1',
    'alpha_sigmoid, no aux': '2 · sigmoid, no auxiliary loss',
    'sigmoid, predictor alone': 'predictor instead of the auxiliary loss',
    'sigmoid, normalised router': 'normalised input of the router',
    'sigmoid, router rate x 10': 'ten times the learning rate of the router',
    'sigmoid, first and last dense': 'first and last block dense',
    'sigmoid, capacity .1875': 'capacity 0.1875',
    'sigmoid, capacity .25': 'capacity 0.25',
    'sigmoid, capacity .5': 'capacity 0.5',
    'sigmoid, capacity 1': 'capacity 1',
  }
  runs = recipes()['one seed']
  rows = [[t, f'{mean(runs[name]):.3f}'] for name, t in names.items()]
  return markdown(['sigmoid, and', 'nats/token, seed 0'], rows)


@table
def vit_digits():
  """Vision transformers on the digits: cost and accuracy."""
  rows = [
    [
      name,
      f'{1e3 * row["gmacs"]:.1f}',
      f'{row["parameters"]:,}',
      machine.cell(row['before'], 100, 1) if name != 'dense' else '',
      machine.cell(row['after'], 100, 1),
    ]
    for name, row in measured('vit_digits')['models'].items()
  ]
  header = ['model', 'MMACs', 'parameters', 'adapted, %', 'fine-tuned, %']
  return markdown(header, rows)


@table
def acm_digits():
  """Adaptive width on the digits, by budget."""
  rows = [
    [
      name.replace('= .', '= 0.'),
      str(len(row['seeds'])),
      machine.cell(row['gmacs'], 1e3, 1),
      machine.cell(row.get('load')),
      machine.cell(row['accuracy'], 100, 1),
      machine.cell(row.get('load_std')),
      machine.cell(row.get('token_std')),
    ]
    for name, row in measured('acm_digits')['models'].items()
  ]
  header = [
    *('model', 'seeds', 'MMACs', 'load', 'accuracy, %'),
    *('deviation, images', 'deviation, tokens'),
  ]
  return markdown(header, rows)


@table
def compose_digits():
  """Pruning, routing and adaptive width on the digits, alone and together."""
  return study_tables.composition(studied('compose_digits'))


@table
def experts_recipe():
  """Experts and Mixture-of-Depths in language models, at equal FLOPs."""
  return study_tables.experts(studied('experts_recipe'))


@table
def conversion():
  """What a dense language model is worth, made routed."""
  return study_tables.conversion(studied('conversion'))


def laptop(name: str) -> list[dict[str, str]]:
  """Returns the lines of a file of the laptop's sweep."""
  path = ROOT / 'results' / 'isoflop_laptop' / f'{name}.csv'
  with path.open() as file:
    return list(csv.DictReader(file))


@table
def laptop_first_attempt():
  """Losses at 3e13 FLOPs that copying decides."""
  columns = {
    'held-out loss': 'loss',
    'first 32 tokens': 'loss_of_first_eighth',
    'last 32': 'loss_of_last_eighth',
    'random tokens, once': 'random_once',
    'again': 'random_again',
  }
  rows = [
    [
      f'{run["group"]}, width {run["width"]}',
      run['num_heads'],
      *(f'{float(run[column]):.2f}' for column in columns.values()),
    ]
    for run in laptop('first_attempt')
    if float(run['budget']) == 3e13
  ]
  return markdown(['four blocks', 'heads', *columns], rows)


@table
def laptop_third_attempt():
  """Losses at 3e13 FLOPs that copying decides once more."""
  columns = {
    'held-out loss': 'loss',
    'after tokens new in their context': 'loss_after_new',
    'after the others': 'loss_after_seen',
  }
  rows = [
    [
      f'{run["group"]}, width {run["width"]}',
      *(f'{float(run[column]):.3f}' for column in columns.values()),
    ]
    for run in laptop('third_attempt')
    if float(run['budget']) == 3e13
  ]
  return markdown(['one seed', *columns], rows)


@table
def laptop_rates():
  """The search for the learning rate of the laptop's sweep."""
  runs = laptop('tune')
  widths = sorted({run['width'] for run in runs}, key=int)
  by_size = {(run['group'], run['width']): run for run in runs}
  rows = []
  for group in dict.fromkeys(run['group'] for run in runs):
    of = [by_size[group, width] for width in widths]
    cells = (
      f'{float(run["loss"]):.3f} at {float(run["learning_rate"]):.4f}'
      for run in of
    )
    rows.append([group.removeprefix('rate_x'), *cells])
  return markdown(['factor', *(f'width {w}' for w in widths)], rows)


def laptop_fit():
  path = ROOT / 'results' / 'isoflop_laptop' / 'fit.json'
  return json.loads(path.read_text())


def interval(found, form: str) -> str:
  low, high = (format(found[end], form) for end in ('low', 'high'))
  return f'{found["value"]:{form}} ({low} to {high})'


def flops_budget(row) -> str:
  return f'{row["budget"]:g}'.replace('+', '')


@table
def laptop_equal_steps():
  """Routed models against their full blocks alone, after as many steps."""
  rows = [
    [
      flops_budget(row),
      f'{row["group"]} against {row["against"]}',
      str(row['pairs']),
      interval(row['loss_difference'], '+.3f'),
    ]
    for row in laptop_fit()['equal_steps']
  ]
  return markdown(['budget', 'at equal steps', 'pairs', 'nats/token'], rows)


@table
def laptop_rules():
  """What other rules than top-k cost, or a model without routed blocks."""
  rows = {}
  for row in laptop_fit()['causal']:
    of = rows.setdefault((flops_budget(row), row['group']), {})
    of[row['rule']] = f'{row["loss_difference"]:+.3f}'
  rules = sorted({rule for of in rows.values() for rule in of})
  return markdown(
    ['budget', 'models', *rules],
    [
      [*which, *(of.get(rule, '') for rule in rules)]
      for which, of in rows.items()
    ],
  )


@table
def laptop_minima():
  """The best models of the laptop's sweep at each budget, by parabolas."""
  told = laptop_fit()
  against = {
    (row['group'], row['budget']): row
    for row in told['comparisons']
    if row['method'] == 'parabola'
  }

  rows = []
  for curve in told['curves']:
    row = [flops_budget(curve), curve['group'], str(curve['runs'])]
    best = curve['parabola']
    if 'refused' in best:
      rows.append([*row, best['refused'], *[''] * 4])
      continue
    thousands = {end: x / 1e3 for end, x in best['params'].items()}
    row += [interval(thousands, '.0f'), interval(best['loss'], '.3f')]
    differs = against.get((curve['group'], curve['budget']))
    if differs:
      row += [
        interval(differs['params_ratio'], '.2f'),
        interval(differs['flops_ratio'], '.2f'),
        interval(differs['loss_difference'], '+.3f'),
      ]
    rows.append(row + [''] * (8 - len(row)))
  header = [
    *('budget', 'models', 'runs', 'best size, 1000s', 'nats/token'),
    *('parameters ×', 'FLOPs ×', 'loss difference'),
  ]
  return markdown(header, rows)


# What it costs, counted.


@table
def flops_lm():
  """FLOPs of routed language models over their dense twins'."""
  rows = []
  for width, layers, length, vocab in (
    (256, 8, 512, 256),
    (1024, 24, 2048, 32_000),
  ):
    config = LMConfig(
      width=width,
      num_layers=layers,
      num_heads=width // 64,
      vocab_size=vocab,
      mlp='gelu',
      routing=MoDConfig(capacity=0.125),
    )
    count = flops.forward(config, length)
    dense = flops.forward(config.dense_twin(), length)
    rows.append(
      [
        *(str(width), str(layers), f'{length:,}', f'{vocab:,}'),
        *(f'{count / 1e9:.2f}', f'{dense / 1e9:.2f}', f'{count / dense:.3f}'),
      ]
    )
  header = ['width', 'layers', 'tokens', 'vocabulary']
  header += ['MoD, GFLOPs', 'dense, GFLOPs', 'ratio']
  return markdown(header, rows)


@table
def macs_amod():
  """GMACs of vision transformers, dense and with A-MoD."""
  names = {
    'deit_tiny': 'DeiT-Ti',
    'deit_small': 'DeiT-S',
    'vit_base': 'ViT-B',
    'vit_large': 'ViT-L',
  }

  def giga(name, **changes):
    return f'{flops.published_macs(vit.BACKBONES[name](**changes)) / 1e9:.4f}'

  rows = []
  for name, text in names.items():
    routed = [
      {'num_classes': 196, 'routing': VisionRoutingConfig(capacity=capacity)}
      for capacity in (0.5, 0.125)
    ]
    rows.append([text, giga(name), *(giga(name, **r) for r in routed)])
  return markdown(['GMACs', 'dense', 'A-MoD 50%', 'A-MoD 12.5%'], rows)


@table
def macs_dynamic():
  """GMACs of DynamicViT on DeiT-S, by how much is kept."""
  keeps = (0.9, 0.8, 0.7, 0.6, 0.5)
  configs = [DynamicViTConfig(backbone=vit.deit_small(), keep=k) for k in keeps]
  row = [f'{flops.published_macs(config) / 1e9:.3f}' for config in configs]
  header = ['kept at each stage', *map(str, keeps)]
  return markdown(header, [['DeiT-S, GMACs', *row]])


@table
def acm_cost():
  """What an adaptive ViT-B costs at most."""
  config = vit.vit_base(adaptive=AdaptiveConfig())
  dense = flops.forward(config.dense_twin())
  gates = sum(parts.get('gate', 0) for _, parts in config.flops_table())
  return (
    f'With all four learners of each module, an ACMized ViT-B costs'
    f' {flops.forward(config) / dense:.3f} times the dense one, and its gates'
    f' are {gates / dense:.3f} of that.'
  )


# What programs compiled for TPUs tell.


def paired() -> dict[str, list[tuple[dict, dict]]]:
  """Returns (routed, dense) proofs of each size, by slice."""
  found = {}
  for routed, dense in zip(
    proofs('prove')[::2], proofs('prove')[1::2], strict=True
  ):
    assert dense['id'] == f'{routed["id"]}_dense'
    assert dense['topology'] == routed['topology']
    kind, _ = routed['topology'].split(':')
    found.setdefault(f'{routed["chips"]} {kind}', []).append((routed, dense))
  return found


def number(row: dict, *names: str) -> float:
  """Returns the sum of some columns."""
  return math.fsum(float(row[name]) for name in names)


def mesh(row: dict) -> str:
  return '·'.join(row[axis] for axis in ('data', 'fsdp', 'tensor'))


PROVED = {
  'GiB a chip': lambda row: f'{number(row, "memory") / 2**30:.1f}',
  'products, found / counted': lambda row: (
    f'{number(row, "products_ratio"):.4f}'
  ),
  'computed again': lambda row: (
    f'{number(row, "again") / number(row, "products"):.2f}'
  ),
  'sent, GB': lambda row: f'{number(row, "sent") / 1e9:.2f}',
  'bytes per kFLOP': lambda row: f'{1e3 * number(row, "bytes_per_flop"):.2f}',
  'products, ms': lambda row: f'{1e3 * number(row, "compute_seconds"):.1f}',
  'network, ms': lambda row: f'{1e3 * number(row, "network_seconds"):.1f}',
  'step predicted, ms': lambda row: f'{1e3 * number(row, "step_seconds"):.1f}',
}


@table
def prove():
  """The paper's models on slices of TPUs: MoD / dense twin."""
  rows = [
    [
      routed['id'].upper(),
      where,
      mesh(routed),
      *(f'{show(routed)} / {show(dense)}' for show in PROVED.values()),
    ]
    for where, pairs in paired().items()
    for routed, dense in pairs
  ]
  return markdown(['model', 'slice', 'mesh', *PROVED], rows)


def ratios(pairs: list[tuple[dict, dict]], *columns: str) -> str:
  """Returns the range of what MoD takes over what its dense twins take."""
  found = [
    number(mod, *columns) / number(dense, *columns) for mod, dense in pairs
  ]
  return f'{min(found):.2f} to {max(found):.2f}'


def steps(bound: str, text: str) -> str:
  """Returns a sentence about the steps on all slices with one bound."""
  slices = {
    where: pairs
    for where, pairs in paired().items()
    if all(row['bound'] == bound for pair in pairs for row in pair)
  }
  pairs = [pair for pairs in slices.values() for pair in pairs]
  return (
    f'On {" and ".join(slices)}, {text}, for MoD as for the dense models. The'
    f' step of MoD can take {ratios(pairs, "step_seconds")} of the dense time'
    ' if the two overlap in full, and'
    f' {ratios(pairs, "compute_seconds", "network_seconds")} if they do not'
    ' overlap at all.'
  )


@table
def prove_words():
  """What the table `prove` says."""
  off = max(abs(number(row, 'products_ratio') - 1) for row in proofs('prove'))
  more = {
    f'{mod["id"].upper()} on {where}': number(mod, 'sent')
    - number(dense, 'sent')
    for where, pairs in paired().items()
    for mod, dense in pairs
    if mod['tensor'] == '1'
  }
  usual = [extra for extra in more.values() if extra > 0]
  exceptions = [
    f' The exception is {where}, where it sends {-extra / 1e6:.0f} MB less.'
    for where, extra in more.items()
    if extra <= 0
  ]
  lines = [
    'The matrix products that are found in the compiled programs are those'
    f' that `mod_jax.flops` counts, within {off:.3%}. What is computed again'
    ' comes on top of them: rematerialisation, and what the attention kernel'
    ' does with masked pairs of tokens or in its backward pass.',
    'Where heads and hidden units are not split (`tensor` is 1), MoD sends what'
    " its dense twin sends, and the routers' gradients besides:"
    f' {min(usual) / 1e6:.2f} to {max(usual) / 1e6:.2f} MB.'
    f'{"".join(exceptions)}',
    steps('compute', 'the matrix products take longer than the communication'),
    steps('network', 'the communication takes longer than the matrix products'),
  ]
  return '\n'.join(f'* {line}' for line in lines)


@table
def prove_remedies():
  """The largest model on the slice where the network is the bound."""
  first, *_ = proofs('remedies')
  usual = [
    row
    for row in proofs('prove')
    if row['id'] == '3b' and row['topology'] == first['topology']
  ]
  names = {
    'fsdp_4': 'parameters split over fewer chips',
    'fsdp_8': 'parameters split over fewer chips',
    'no_remat': 'no rematerialisation',
    '3b': 'as in the table above',
  }
  rows = [
    [
      names[row['id']],
      mesh(row),
      *(
        PROVED[column](row)
        for column in (
          *('GiB a chip', 'sent, GB', 'products, ms', 'network, ms'),
          'step predicted, ms',
        )
      ),
    ]
    for row in usual + proofs('remedies')
  ]
  header = [
    *('3B, MoD', 'mesh', 'GiB a chip', 'sent, GB', 'products, ms'),
    *('network, ms', 'step predicted, ms'),
  ]
  return markdown(header, rows)


def main(names: list[str]) -> None:
  for path in map(pathlib.Path, names) if names else pages():
    try:
      text = path.read_text()
      new = filled(text)
    except (OSError, UserError) as error:
      raise SystemExit(f'error: {path}: {error}') from error
    if new != text:
      path.write_text(new)
      print(f'{path}: written')


if __name__ == '__main__':
  main(sys.argv[1:])
