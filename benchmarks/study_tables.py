"""Tables of studies with seeds, for the scripts that train and for the docs.

The functions that return Markdown take the results of a study by name,
`model/seed`, as `study.read` returns them.
"""

from collections.abc import Mapping
import itertools
import re
import statistics

from machine import cell, markdown, spread
import numpy as np
from scipy import stats

# Runs of `conversion.py` that the table treats specially: the baseline of all
# others, which `convert_smollm2.py` has too, and the one without routed blocks.
PARENT, PRUNED = 'dense, at first', 'without the block'
# Runs of `speech_words.py` from which others start.
FIRST_PHASES = ('learners', 'gates')
# The models of `recovery.py`.
FEW, MANY = 'dense, 4 blocks', 'dense, 8 blocks'
ROUTED = 'MoD, 4 full and 4 routed blocks'


def by_model(found: Mapping[str, dict]) -> dict[str, dict[str, dict]]:
  """Returns the results by model and seed, in the order of the file."""
  models = {}
  for run, line in found.items():
    model, seed = run.rsplit('/', 1)
    models.setdefault(model, {})[seed] = line
  return models


def of_whole_seeds(found: Mapping[str, dict]) -> dict[str, list[dict]]:
  """Returns the results by model, for the seeds that all models have."""
  models = by_model(found)
  common_seeds = (
    set.intersection(*map(set, models.values())) if models else set()
  )
  return {
    model: [of_seed[seed] for seed in sorted(common_seeds)]
    for model, of_seed in models.items()
  }


def over_seeds(runs: list[dict], key: str, *scale_and_digits) -> str:
  """Returns mean (lowest–highest) of a number, or '' if no run has it."""
  values = [run[key] for run in runs if run.get(key) is not None]
  return cell(spread(values), *scale_and_digits) if values else ''


# Comparisons in `routing_recipe.py`: label by group and name of its runs.
_RECIPES = {
  'equal steps': {
    ('gate', 'dense, 4 blocks'): 'dense, 4 blocks',
    ('auxiliary loss', 'sigmoid, no aux'): 'sigmoid, no auxiliary loss',
    ('gate', 'sigmoid'): 'sigmoid, auxiliary loss 0.01',
    ('auxiliary loss', 'one_plus_tanh'): '1 + tanh',
    ('auxiliary loss', 'raw, no aux'): 'raw (Eq. 1), no auxiliary loss',
    ('auxiliary loss', 'alpha_sigmoid'): '2 · sigmoid',
    ('gate', 'raw'): 'raw, auxiliary loss 0.01',
    ('auxiliary loss', 'gaussian'): 'control: random tokens',
    ('auxiliary loss', 'stride'): 'control: every eighth token',
    ('gate', 'dense, 2 blocks'): 'dense, 2 blocks',
  },
  'equal training FLOPs': {
    ('equal FLOPs', 'MoD, 2 blocks'): 'MoD, 2 blocks, 1 of them routed',
    ('equal FLOPs', 'dense, 1 block'): 'dense, 1 block',
    ('equal FLOPs', 'dense, 2 blocks'): 'dense, 2 blocks',
    ('equal FLOPs', 'MoD, 4 blocks'): 'MoD, 4 blocks, 2 of them routed',
    ('equal FLOPs', 'MoD raw, 2 blocks'): 'MoD, 2 blocks, raw gate',
  },
}


def recipes(groups) -> dict[str, dict[str, list[dict]]]:
  """Returns the results by comparison and label.

  `groups` are those of the study by group, name and seed.
  """
  return {
    equal: {text: groups[g][name] for (g, name), text in names.items()}
    for equal, names in _RECIPES.items()
  }


def conversion(found: Mapping[str, dict]) -> str:
  """Table of converted language models: losses, and costs over dense ones."""
  models = by_model(found)
  rows = []
  for name, of_seed in models.items():
    # The pruned model is evaluated without the routed blocks.
    key = 'without_routed_blocks' if name == PRUNED else 'loss'
    losses = {seed: line[key] for seed, line in of_seed.items()}
    differences = [
      x - models[PARENT][seed]['loss'] for seed, x in losses.items()
    ]
    line = next(iter(of_seed.values()))
    dense = next(iter(models[PARENT].values()))
    ratio = line['forward_flops'] / dense['forward_flops']
    rows.append(
      [
        *(name, str(len(losses)), cell(spread(list(losses.values())))),
        *(cell(spread(differences)), '' if name == PRUNED else f'{ratio:.3f}'),
      ]
    )
  header = ['model', 'seeds', 'nats per token', 'over the dense model at first']
  return markdown([*header, 'forward FLOPs over its'], rows)


# Ways that have fewer blocks, those of least influence left out.
DELETED = (
  'least influence, half as many deleted',
  'least influence, deleted',
)


def _converted_loss(way: str) -> str:
  """Returns the key of the loss by which a model is judged."""
  return 'without_routed_blocks' if way.endswith('deleted') else 'loss'


def converted_losses(found: Mapping[str, dict]) -> dict:
  """Returns length of training -> way -> seed -> loss, from best to worst.

  The model before any training is among those of each length.
  """
  models, lengths = by_model(found), {}
  for name, of_seed in models.items():
    way, _, trained = name.rpartition(', ')
    if name != PARENT:
      ways = lengths.setdefault(trained, {PARENT: models[PARENT]})
      ways[way] = of_seed
  losses = {
    trained: {
      way: {seed: line[_converted_loss(way)] for seed, line in of_seed.items()}
      for way, of_seed in ways.items()
    }
    for trained, ways in lengths.items()
  }
  return {
    trained: dict(
      sorted(ways.items(), key=lambda x: statistics.mean(x[1].values()))
    )
    for trained, ways in losses.items()
  }


def converted(found: Mapping[str, dict]) -> str:
  """Table of ways to convert a pretrained language model: losses and costs.

  Differences are to the best of the dense models that were trained on for as
  long, from the same seed. Models whose blocks are deleted are judged without
  them, and tell by straight lines between them what deletion loses at as many
  FLOPs as another way takes. Such differences are by seed, too; a model that
  has not been trained with a seed counts with the mean over its seeds.
  """
  models, rows = by_model(found), []

  for trained, losses in converted_losses(found).items():
    runs = {
      way: [*models[PARENT if way == PARENT else f'{way}, {trained}'].values()]
      for way in losses
    }
    cost = {
      way: lines[0]['forward_flops'] / found[f'{PARENT}/0']['forward_flops']
      for way, lines in runs.items()
    }
    best = next(
      (x for x in losses if re.match('dense(?!, at first)', x)), PARENT
    )
    twins = sorted({best, *DELETED} & losses.keys(), key=cost.get)
    for way, of_seed in losses.items():
      more = [
        x - losses[best][seed]
        for seed, x in of_seed.items()
        if seed in losses[best]
      ]
      of_twin = []
      if cost[twins[0]] <= cost[way] < 1 and way not in DELETED:
        for seed, loss in of_seed.items():
          at = [
            losses[x].get(seed, statistics.mean(losses[x].values()))
            for x in twins
          ]
          of_twin.append(
            loss - np.interp(cost[way], [cost[x] for x in twins], at)
          )
      rows.append(
        [
          *(way, 'not' if way == PARENT else trained, str(len(of_seed))),
          cell(spread([*of_seed.values()])),
          cell(spread(more)) if more else '',
          over_seeds(runs[way], 'router_rule'),
          over_seeds(runs[way], 'threshold_rule'),
          over_seeds(runs[way], 'without_routed_blocks'),
          f'{cost[way]:.3f}',
          cell(spread(of_twin)) if of_twin else '',
          over_seeds(runs[way], 'cpu_seconds', 1 / 60, 0),
        ]
      )
  header = ['model', 'trained', 'seeds', 'nats per token', 'over dense']
  header += ['by router', 'by threshold', 'without routed blocks']
  header += ['forward FLOPs of dense', 'over deletion at as many']
  return markdown([*header, 'CPU minutes'], rows)


def recovery_name(
  width: int, length: int, kind: str, factor: float = 1.0
) -> str:
  """Returns the name of a model of `recovery.py`, without its seed."""
  rate = '' if factor == 1 else f', rate × {factor:g}'
  return f'width {width}, rows of {length}, {kind}{rate}'


def recovery_arms(found: Mapping[str, dict]) -> dict[tuple[int, int], dict]:
  """Returns width, row length -> kind -> runs of the seeds that all kinds have.

  Only plans with two such seeds or more.
  """
  models, plans = by_model(found), {}
  for width, length in itertools.product((64, 96), (32, 128, 512)):
    arms = {
      kind: models.get(recovery_name(width, length, kind), {})
      for kind in (FEW, ROUTED, MANY)
    }
    seeds = sorted(set.intersection(*map(set, arms.values())))
    if len(seeds) > 1:
      plans[width, length] = {
        kind: [arm[seed] for seed in seeds] for kind, arm in arms.items()
      }
  return plans


def recovery(found: Mapping[str, dict]) -> str:
  """Table of what routed blocks recover of the worth of dense ones.

  All columns are of the seeds that all three models have. Errors are standard
  errors over seeds, of pairs; that of the ratio is by linearisation.
  """
  rows = []
  for (width, length), arms in recovery_arms(found).items():
    few_S, many_S = (
      np.array([run['loss'] for run in arms[kind]]) for kind in (FEW, MANY)
    )
    few, routed, many = (runs[0]['forward_flops'] for runs in arms.values())
    row = [str(width), str(length), str(len(few_S))]
    row += [over_seeds(runs, 'loss') for runs in arms.values()]
    gain_S = few_S - many_S
    row.append(f'{gain_S.mean():.3f} ± {_error(gain_S):.3f}')
    row.append(f'{(routed - few) / (many - few):.0%}')
    for rule in ('loss', 'threshold_rule'):
      routed_S = np.array([run[rule] for run in arms[ROUTED]])
      part = (few_S - routed_S).mean() / gain_S.mean()
      error = _error(few_S - routed_S - part * gain_S) / abs(gain_S.mean())
      row.append(f'{part:.0%} ± {error:.0%}')
    rows.append(row)
  header = [
    *('width', 'rows of', 'seeds', FEW, ROUTED, MANY),
    *('gain of dense blocks', 'cost of routed ones, of theirs'),
    *('recovered, top-k', 'recovered, threshold'),
  ]
  return markdown(header, rows)


def _error(values_S: np.ndarray) -> float:
  return float(values_S.std(ddof=1) / np.sqrt(len(values_S)))


def recovery_multipliers(found: Mapping[str, dict], slope: float) -> str:
  """Table of how many times their FLOPs deeper models are worth.

  That is the FLOPs with which models of four dense blocks, made larger and
  trained for longer, would be expected to have the same loss, over the FLOPs
  that were spent; 1 is break-even. Such models gain `slope` nats per token for
  e times the FLOPs. Errors are standard errors over seeds, of pairs.
  """
  rows = []
  for (width, length), arms in recovery_arms(found).items():
    few = arms[FEW]
    row = [str(width), str(length), str(len(few))]
    for kind, rule in (
      (MANY, 'loss'),
      (ROUTED, 'loss'),
      (ROUTED, 'threshold_rule'),
    ):
      gain_S = np.array(
        [
          dense['loss'] - deep[rule]
          for dense, deep in zip(few, arms[kind], strict=True)
        ]
      )
      cost = arms[kind][0]['forward_flops'] / few[0]['forward_flops']
      worth = np.exp(gain_S.mean() / slope) / cost
      row.append(f'{worth:.2f} ± {worth * _error(gain_S) / slope:.2f}')
    rows.append(row)
  header = [
    *('width', 'rows of', 'seeds', MANY, f'{ROUTED}, top-k'),
    'the same, threshold',
  ]
  return markdown(header, rows)


def recovery_rates(found: Mapping[str, dict]) -> str:
  """Table of the losses of seed 0 at other learning rates."""
  factors = (0.5, 1.0, 2.0)
  rows = []
  for width, kind in itertools.product((64, 96), (FEW, ROUTED, MANY)):
    lines = [
      found.get(f'{recovery_name(width, 128, kind, factor)}/0')
      for factor in factors
    ]
    if all(lines):
      rows.append([str(width), kind, *(f'{x["loss"]:.3f}' for x in lines)])
  header = ['width', 'rows of 128, seed 0', *(f'rate × {f:g}' for f in factors)]
  return markdown(header, rows)


def experts(found: Mapping[str, dict]) -> str:
  """Table of language models with experts: losses, sizes and expert loads."""
  rows = []
  for name, of_seed in by_model(found).items():
    runs = list(of_seed.values())
    loads = [run['experts'] for run in runs]
    rows.append(
      [
        *(name, str(len(runs)), over_seeds(runs, 'loss')),
        f'{runs[0]["params"] / 1e6:.2f}',
        f'{runs[0]["forward_flops"] / 1e6:.0f}',
        str(runs[0]['steps']),
        over_seeds(loads, 'null', 1, 2),
        over_seeds(loads, 'busiest', 1, 2),
      ]
    )
  header = ['model', 'seeds', 'nats per token', 'parameters, M']
  header += ['forward MFLOPs', 'steps', 'no-ops', 'busiest over mean']
  return markdown(header, rows)


def composition(found: Mapping[str, dict]) -> str:
  """Table of pruning, routing and adaptive width: costs and accuracies."""
  models = of_whole_seeds(found)
  dense = spread([run['forward_flops'] for run in models['dense']])['mean']
  rows = [
    [
      *(name, str(len(runs)), over_seeds(runs, 'forward_flops', 1e-6, 1)),
      over_seeds(runs, 'forward_flops', 1 / dense, 2),
      over_seeds(runs, 'load'),
      over_seeds(runs, 'accuracy', 100, 1),
    ]
    for name, runs in models.items()
  ]
  header = ['model', 'seeds', 'MFLOPs', 'of dense', 'load', 'accuracy, %']
  return markdown(header, rows)


def adapted(found: Mapping[str, dict]) -> str:
  """Table of adapted vision models: costs, accuracies before and after."""
  rows = []
  for name, of_seed in by_model(found).items():
    runs = list(of_seed.values())
    rows.append(
      [
        *(name, f'{1e3 * runs[0]["gmacs"]:.1f}', f'{runs[0]["params"]:,}'),
        *(over_seeds(runs, when, 100, 1) for when in ('before', 'after')),
      ]
    )
  header = ['model', 'MMACs', 'parameters', 'adapted, %', 'fine-tuned, %']
  return markdown(header, rows)


def adaptive(found: Mapping[str, dict]) -> str:
  """Table of adaptive width: costs, accuracies, deviations of the load."""
  rows = [
    [
      *(name.replace('= .', '= 0.'), str(len(runs))),
      over_seeds(runs, 'gmacs', 1e3, 1),
      over_seeds(runs, 'load'),
      over_seeds(runs, 'accuracy', 100, 1),
      *(over_seeds(runs, part) for part in ('load_std', 'token_std')),
    ]
    for name, of_seed in by_model(found).items()
    if not name.startswith(FIRST_PHASES) and (runs := list(of_seed.values()))
  ]
  header = ['model', 'seeds', 'MMACs', 'load', 'accuracy, %']
  return markdown([*header, 'deviation, images', 'deviation, tokens'], rows)


def speech(found: Mapping[str, dict]) -> str:
  """Table of recognisers: costs, error rates, and learners on silence."""
  rows = [
    [
      *(name, str(len(runs)), over_seeds(runs, 'gmacs_per_second', 1e3, 1)),
      over_seeds(runs, 'load'),
      *(over_seeds(runs, rate, 100, 1) for rate in ('wer', 'cer')),
      *(over_seeds(runs, part, 1, 2) for part in ('silence', 'speech')),
    ]
    for name, of_seed in by_model(found).items()
    if not name.startswith(FIRST_PHASES) and (runs := list(of_seed.values()))
  ]
  header = ['model', 'seeds', 'MMACs per second', 'load', 'WER, %', 'CER, %']
  return markdown([*header, 'learners, silence', 'learners, speech'], rows)


def detection(found: Mapping[str, dict]) -> str:
  """Table of detectors: costs and mean average precisions."""
  models = by_model(found)
  dense = [run['forward_flops'] for run in models.get('dense', {}).values()]
  rows = []
  for name, of_seed in models.items():
    runs = list(of_seed.values())
    count = runs[0]['forward_flops']
    rows.append(
      [
        *(name, str(len(runs)), f'{count / 1e6:.1f}'),
        f'{count / dense[0]:.2f}' if dense else '',
        *(over_seeds(runs, x, 100, 1) for x in ('mAP50', 'mAP')),
        over_seeds(runs, 'cpu_seconds', 1 / 60, 1),
      ]
    )
  header = ['model', 'seeds', 'MFLOPs', 'of dense', 'mAP@.5, %', 'mAP, %']
  return markdown([*header, 'CPU minutes'], rows)


# What one answer always would score in `vlm_scenes.py`, by kind of question.
_GUESSED = {
  **dict.fromkeys(('leftmost', 'rightmost', 'highest', 'lowest'), 1 / 10),
  **{'count': 1 / 3, 'presence': 1 / 2, 'sum': 1 / 16},
}


def pictures_asked(found: Mapping[str, dict]) -> str:
  """Table of models that answer questions about scenes: costs and accuracy."""
  models = _asked(found)
  dense = [run['forward_flops'] for run in models.get('dense', {}).values()]
  rows = []
  for name, of_seed in models.items():
    runs = list(of_seed.values())
    cost = runs[0]['forward_flops']
    rows.append(
      [
        *(name, str(len(runs)), f'{cost / 1e6:.1f}'),
        f'{cost / dense[0]:.2f}' if dense else '',
        str(runs[0]['steps'] or ''),
        over_seeds(runs, 'accuracy', 100, 1),
        '' if name == 'dense' else _paired(models, name, 'dense'),
        over_seeds(runs, 'cpu_seconds', 1 / 60, 1),
      ]
    )
  mean = sum(_GUESSED.values()) / len(_GUESSED)
  rows.append(['one answer always', *[''] * 4, f'{100 * mean:.1f}', '', ''])
  header = ['model', 'seeds', 'MFLOPs', 'of dense', 'steps', 'right, %']
  return markdown([*header, 'over dense, points', 'CPU minutes'], rows)


def kinds_asked(found: Mapping[str, dict]) -> str:
  """Table of models that answer questions about scenes, by kind of question."""
  rows = []
  for name, of_seed in _asked(found).items():
    runs = list(of_seed.values())
    right = [over_seeds(runs, f'accuracy/{x}', 100, 1) for x in _GUESSED]
    rows.append([name, *right])
  chance = [f'{100 * x:.1f}' for x in _GUESSED.values()]
  rows.append(['one answer always', *chance])
  return markdown(['right, %', *_GUESSED], rows)


def _asked(found: Mapping[str, dict]) -> dict[str, dict[str, dict]]:
  """Returns results by model and seed, of those that were asked questions."""
  answered = f'accuracy/{next(iter(_GUESSED))}'
  return by_model({k: run for k, run in found.items() if answered in run})


# Methods whose accuracies are compared by seed, in `vit_methods.py`.
_TRAINED_ON = 'dense, trained on'
_PAIRS = (
  *(('A-MoD 50%', x) for x in ('MoD 50%', 'random 50%', 'dense, 4 blocks')),
  ('MoD 50%', 'random 50%'),
  ('A-MoD 12.5%', 'random 12.5%'),
  *(('DynamicViT .7', x) for x in ('patches dropped at random', 'pooling')),
  ('EViT .7', 'dense, 4 blocks'),
)


def methods(found: Mapping[str, dict]) -> str:
  """Table of methods that skip work: costs and accuracies."""
  models = by_model(found)
  dense = [run['forward_flops'] for run in models.get('dense', {}).values()]
  rows = []
  for name, of_seed in models.items():
    runs = list(of_seed.values())
    rows.append(
      [
        *(name, str(len(runs)), over_seeds(runs, 'forward_flops', 1e-6, 1)),
        over_seeds(runs, 'forward_flops', 1 / dense[0], 2) if dense else '',
        *(over_seeds(runs, x, 100, 1) for x in ('before', 'accuracy')),
        '' if name == _TRAINED_ON else _paired(models, name, _TRAINED_ON),
      ]
    )
  header = ['model', 'seeds', 'MFLOPs', 'of dense', 'at first, %', 'trained, %']
  return markdown([*header, f'over "{_TRAINED_ON}", points'], rows)


def method_pairs(found: Mapping[str, dict]) -> str:
  """Differences between methods, by seed."""
  models = by_model(found)
  rows = [
    [*pair, *(_paired(models, *pair, key) for key in ('before', 'accuracy'))]
    for pair in _PAIRS
  ]
  return markdown(['', 'over', 'at first, points', 'trained, points'], rows)


def convergence(found: Mapping[str, dict]) -> str:
  """Table of accuracies during further training, means over seeds.

  A model is close to its best where it is within two points of it, as the paper
  of A-MoD counts epochs.
  """
  models = by_model(found)
  steps = next(iter(models[_TRAINED_ON].values()))['curve'].keys()
  rows = []
  for name, of_seed in models.items():
    curves = [run['curve'] for run in of_seed.values()]
    if curves[0].keys() != steps:  # It is trained in other phases.
      continue
    close = [
      next(int(x) for x in steps if curve[x] >= max(curve.values()) - 0.02)
      for curve in curves
    ]
    means = (np.mean([curve[x] for curve in curves]) for x in steps)
    text = cell(spread(close), 1, 0)
    rows.append([name, *(f'{100 * x:.1f}' for x in means), text])
  header = ['right, % after steps', *steps]
  return markdown([*header, 'steps until close to its best'], rows)


def _paired(models, name: str, other: str, key: str = 'accuracy') -> str:
  """Returns the mean difference of accuracies by seed, and its 95% interval.

  Of fewer than three seeds it returns the differences.
  """
  seeds = sorted(models.get(name, {}).keys() & models.get(other, {}).keys())
  differences = [
    100 * (models[name][x][key] - models[other][x][key]) for x in seeds
  ]
  if len(differences) < 3:  # An interval would say nothing.
    return ', '.join(f'{x:.1f}' for x in differences)
  t = stats.t.ppf(0.975, len(differences) - 1)
  half = t * np.std(differences, ddof=1) / len(differences) ** 0.5
  return f'{np.mean(differences):.1f} ± {half:.1f}'


def imbalance(found: Mapping[str, dict]) -> str:
  """Accuracy and mean recall with and without weights, on Open Clip Art."""
  rows = [
    [
      model,
      str(len(runs)),
      over_seeds(runs, 'accuracy', 100, 1),
      over_seeds(runs, 'mean_recall', 100, 1),
    ]
    for model, runs in of_whole_seeds(found).items()
  ]
  return markdown(['', 'seeds', 'accuracy, %', 'mean recall, %'], rows)
