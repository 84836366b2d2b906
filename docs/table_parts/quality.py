"""How good it is: what studies in `benchmarks/` came to, with their spread."""

import functools
import json
import statistics

import machine
from machine import markdown
import study_tables

from table_parts.common import ROOT, studied, table
from table_parts.laptop import dense_gain, laptop_fit


def mean(runs: list[dict]) -> float:
  return machine.spread([run['loss'] for run in runs])['mean']


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


# Of the studies of vision, by what the README calls them.
_METHODS = {
  'dense, trained on': 'all blocks',
  'dense, 4 blocks': 'the first four of six',
  'ToMe, r = 11': 'ToMe',
  'EViT .4': 'EViT',
  'DynamicViT .7': 'DynamicViT',
  'A-MoD 50%': 'A-MoD',
  'MoD 50%': 'MoD',
  'ACM, β = .5': 'adaptive width',
}


def _accuracy(models: dict[str, list[dict]], name: str) -> str:
  """Returns a method's mean accuracy, and its FLOPs over the dense model's."""

  def over_runs(name, key):
    return statistics.mean(run[key] for run in models[name])

  dense = over_runs('dense, trained on', 'forward_flops')
  share = over_runs(name, 'forward_flops') / dense
  return f'{over_runs(name, "accuracy"):.1%} ({share:.2f})'


@table
def results():
  """The most important results, for the README."""
  least = {
    (curve['group'], curve['budget']): curve['parabola']['loss']['value']
    for curve in laptop_fit()['curves']
    if 'loss' in curve['parabola']
  }

  def text(group):
    return ' and '.join(
      f'{least[group, flops]:.3f}' for flops in (8e12, 2.5e13)
    )

  rows = [
    [
      'text at 8e12 and 2.5e13 training FLOPs, the best size, nats/token'
      ' (`configs/sweeps/laptop.py`)',
      text('dense'),
      f'MoD: {text("mod")}',
    ]
  ]
  for what, script in (
    ('scenes, the largest digit', 'vit_scenes'),
    ('real pictures of 12 classes', 'vit_clipart'),
  ):
    # Other methods may have other seeds.
    runs = {
      name: run
      for name, run in studied(script).items()
      if name.rsplit('/', 1)[0] in _METHODS
    }
    models = study_tables.of_whole_seeds(runs)
    dense, first, *others = (
      f'{label} {_accuracy(models, name)}' for name, label in _METHODS.items()
    )
    title = f'{what}, accuracy (`benchmarks/{script}.py`)'
    rows.append([title, f'{dense}, {first}', ', '.join(others)])
  rows.append(_converted())
  return markdown(['what', 'dense', 'conditional'], rows)


def _converted() -> list[str]:
  """The README's row of a pretrained language model."""
  runs, trained = studied('convert_smollm2'), '1.05M tokens'
  whole = runs[f'dense, {trained}/0']

  def cell(label, way, key):
    line = runs[f'{way}, {trained}/0']
    ratio = line['forward_flops'] / whole['forward_flops']
    return f'{label} {line[key]:.2f} ({ratio:.2f})'

  return [
    f'SmolLM2-135M, trained for a further {trained}, nats/token, one seed'
    ' (`benchmarks/convert_smollm2.py`)',
    f'{cell("all blocks", "dense", "loss")}, '
    + cell(
      'four blocks deleted',
      'least influence, half as many deleted',
      'without_routed_blocks',
    ),
    cell('MoD 50% in eight blocks', 'least influence, MoD 50%', 'loss'),
  ]


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
  return study_tables.adapted(studied('vit_digits'))


@table
def vit_scenes():
  """Methods that skip work, on scenes: cost and accuracy."""
  return study_tables.methods(studied('vit_scenes'))


@table
def vit_scenes_pairs():
  """Differences between methods, on scenes."""
  return study_tables.method_pairs(studied('vit_scenes'))


@table
def vit_clipart():
  """Methods that skip work, on Open Clip Art: cost and accuracy."""
  return study_tables.methods(studied('vit_clipart'))


@table
def vit_clipart_convergence():
  """How fast methods recover on clip art."""
  return study_tables.convergence(studied('vit_clipart'))


@table
def vit_clipart_pairs():
  """Differences between methods, on Open Clip Art."""
  return study_tables.method_pairs(studied('vit_clipart'))


@table
def acm_digits():
  """Adaptive width on the digits, by budget."""
  return study_tables.adaptive(studied('acm_digits'))


@table
def speech_words():
  """Adaptive width in a recogniser of synthetic words, by budget."""
  return study_tables.speech(studied('speech_words'))


@table
def speech_prompts():
  """Adaptive width in a recogniser of telephone prompts, by budget."""
  return study_tables.speech(studied('speech'))


@table
def compose_digits():
  """Pruning, routing and adaptive width on the digits, alone and together."""
  return study_tables.composition(studied('compose_digits'))


@table
def experts_recipe():
  """Experts and Mixture-of-Depths in language models, at equal FLOPs."""
  return study_tables.experts(studied('experts_recipe'))


@table
def recovery():
  """What routed blocks recover of the worth of dense ones."""
  return study_tables.recovery(studied('recovery'))


@table
def recovery_multipliers():
  """How many times their FLOPs deeper models are worth."""
  # These runs have about 1e13 FLOPs, between the two budgets.
  gain = dense_gain(8e12, 2.5e13)
  return study_tables.recovery_multipliers(studied('recovery'), gain)


@table
def recovery_rates():
  """The same models at other learning rates."""
  return study_tables.recovery_rates(studied('recovery'))


@table
def conversion():
  """What a dense language model is worth, made routed."""
  return study_tables.conversion(studied('conversion'))


@table
def converted():
  """SmolLM2-135M made routed in several ways."""
  return study_tables.converted(studied('convert_smollm2'))


@table
def converted_tasks():
  """What SmolLM2-135M, made routed, answers on tasks from held-out text."""

  def share(task, metric='acc'):
    value, error = (task[f'{x},none'] for x in (metric, f'{metric}_stderr'))
    return f'{100 * value:.1f}% ± {100 * error:.1f}'

  rows = []
  names = {
    'dense_at_first': 'dense, at first',
    'dense': 'dense',
    'deleted': 'half as many deleted',
    'mod': 'MoD 50%, by threshold',
  }
  for file, name in names.items():
    path = ROOT / 'results' / 'convert_smollm2' / f'{file}.json'
    tasks = json.loads(path.read_text())
    next_sentence = tasks['next_sentence']
    rows.append(
      [
        *(name, share(next_sentence), share(next_sentence, 'acc_norm')),
        share(tasks['last_word']),
      ]
    )
  header = ['model', 'next sentence', 'per character', 'last word']
  return markdown(header, rows)


@table
def openclipart():
  """What weights and balanced sampling do where classes are unequal."""
  return study_tables.imbalance(studied('openclipart'))


@table
def vlm_scenes():
  """Questions about scenes: dense, and fewer image tokens by several ways."""
  return study_tables.pictures_asked(studied('vlm_scenes'))


@table
def vlm_scenes_kinds():
  """The same by kind of question."""
  return study_tables.kinds_asked(studied('vlm_scenes'))


@table
def detection_scenes():
  """Detection on scenes, dense and routed."""
  return study_tables.detection(studied('detection_scenes'))
