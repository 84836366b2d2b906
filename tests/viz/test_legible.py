"""No text of a picture meets another or leaves it, with awkward data either."""

import re

import numpy as np
import pytest

from mod_jax import viz

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings('error'),
]

ODD = '$a$ 漢\x00\n🙂 and a long text that must be wrapped or cut somewhere'
TITLE = 'At $5 and $6, ' + 'the title is long ' * 20
CURVE = {'adaptive': [0.9, 0.5], 'dense': [0.8, 0.4], 'load': [0.4, 0.5]}
CORRELATION = {'pearson': 0.5, 'pearson_p': 1e-7}
CORRELATION |= {'spearman': -0.5, 'spearman_p': 0.01}


def photos(rng, count, height=8, width=8):
  return rng.integers(0, 200, (count, height, width, 3), dtype=np.uint8)


def crowd(rng):
  """Nearly equal models, and one far away."""
  places = [(3, 0.8)] * 20 + [(9, 0.9)]
  points = [
    {
      'name': f'model number {i}',
      'group': f'{i % 3}',
      'flops': flops + rng.normal() * 0.02,
      'accuracy': accuracy + rng.normal() * 0.002,
    }
    for i, (flops, accuracy) in enumerate(places)
  ]
  return viz.accuracy_flops(points, pareto=True)


def patches(rng, count, routed, size):
  return viz.patch_maps(
    photos(rng, count, *size),
    rng.random((routed, count, 16)) < 0.5,
    layers=range(100, 100 + routed),
    grid=(4, 4),
    num_layers=200,
    title=TITLE,
    labels=[ODD, 'W' * 40, '', 'x', *['label'] * 8][:count],
  )


def attention(rng):
  (image,), maps_RHL = photos(rng, 1), rng.random((2, 16, 16))
  return viz.attention_maps(
    image, maps_RHL, layers=(2, 11), grid=(4, 4), title=TITLE
  )


def load(rng, count):
  labels = [ODD, 'W' * 40, *'cdefgh'][:count]
  load_BL = rng.random((count, 16))
  return viz.load_map(
    photos(rng, count),
    load_BL,
    grid=(4, 4),
    labels=labels,
    unit=ODD,
    title=TITLE,
  )


def extremes(rng):
  load_B, load_BL = rng.random(9), rng.random((9, 16))
  return viz.compute_extremes(
    photos(rng, 9), load_B, load_BL, grid=(4, 4), labels=[ODD] * 9
  )


def scores(rng, routed):
  score_RBL = rng.normal(size=(routed, 2, 60))
  layers = range(100, 100 + routed)
  return viz.score_histogram(
    *(score_RBL, score_RBL > 1), layers=layers, thresholds=[1] * routed
  )


def importance(rng, routed):
  score_RN = rng.random((routed, 20)) * 1e-4
  return viz.importance_scatter(
    *(-score_RN, score_RN),
    layers=range(routed),
    correlations=[CORRELATION] * routed,
    title=TITLE,
  )


def curves(rules):
  series = {f'{rule}/loss': 2.0 for rule in rules}
  for name in ('accuracy', 'never_route'):
    series |= {f'{r}/{name}': 0.9 - i / 50 for i, r in enumerate(rules)}
  records = [{'step': s, 'kind': 'eval', **series} for s in (0, 500)]
  records += [{'step': s, 'kind': 'train', 'loss': 3.0} for s in range(500)]
  return viz.loss_curves(records, title=TITLE)


def seeds():
  rows = {'a name so long that it must be cut ' * 2: [1, 2], 'W' * 60: [1.5]}
  groups = {'g $1$': rows, 'second': {'x': [1]}}
  return viz.seed_dots(groups, xlabel='loss ' * 20, title=TITLE)


def isoflop(groups, budgets):
  x = np.array([1e5, 3e5, 1e6])
  curves_ = [
    {
      'group': f'a group ${i}$ ' * 3,
      'budget': 10.0 ** (12 + j),
      'params': x * 2**j,
      'loss': 4 - 0.4 * j + 0.05 * i + np.array([0.1, 0, 0.1]),
      'flops': x / 3e5,
      'line': (x * 2**j, 4 - 0.4 * j + np.array([0.1, 0, 0.1])),
      'minimum': (3e5 * 2**j, 4 - 0.4 * j),
      'interval': ((2e5 * 2**j, 4e5 * 2**j), (3.9 - 0.4 * j, 4.1 - 0.4 * j)),
      'flops_line': x / 3e5,
      'flops_minimum': 1.0,
      'flops_interval': np.array([0.8, 1.2]),
    }
    for i in range(groups)
    for j in range(budgets)
  ]
  return viz.isoflop(curves_, title=TITLE)


def compared(count):
  records = [{'step': s, 'kind': 'train', 'loss': 9 / s} for s in range(1, 99)]
  records.append({'step': 98, 'kind': 'eval', 'loss': 0.3})
  runs = [
    {
      'name': f'{ODD} {i}',
      'records': records,
      'flops_S': 1e12 * (i + 1) * np.arange(99.0),
      'seconds_per_step': 0.5,
    }
    for i in range(count)
  ]
  return viz.compared_curves(runs, title=TITLE)


def recordings(rng, *seconds):
  # Letters in neighbouring frames, and a pause after them.
  heard = [(letter, i * 2 // 3) for i, letter in enumerate('$wmm漢')]
  return viz.load_over_time(
    [
      (rng.normal(size=int(8000 * x)), rng.random(int(50 * x)), ODD[:30], heard)
      for x in seconds
    ],
    rate=8000,
    unit='$x$',
    title=TITLE,
  )


def expert_map(rng, num_experts, pieces):
  expert_RL = rng.integers(-2, num_experts, (3, len(pieces)))
  marked = {'more_RL': expert_RL >= 0, 'dropped_RL': expert_RL == -1}
  return viz.expert_map(
    expert_RL,
    pieces,
    layers=(1, 2, 3),
    num_experts=num_experts,
    num_layers=4,
    title=TITLE,
    **marked,
  )


def expert_patches(rng, num_experts, labels, routed=2):
  count = len(labels)
  expert_RBL = rng.integers(-2, num_experts, (routed, count, 16))
  return viz.expert_patches(
    photos(rng, count),
    expert_RBL,
    layers=range(100, 100 + routed),
    grid=(4, 4),
    num_experts=num_experts,
    more_RBL=expert_RBL >= 0,
    labels=labels,
    num_layers=200,
    title=TITLE,
  )


def expert_load(rng, num_experts, nulls):
  choices = num_experts + nulls
  return viz.expert_load(
    rng.random((5, choices)),
    layers=range(100, 105),
    num_experts=num_experts,
    targets_X=[0.1] * choices,
    none_R=[0.1] * 5,
    title=TITLE,
  )


def confusion(rng, classes):
  names = [ODD, 'W' * 40, *(f'class {i}' for i in range(classes))][:classes]
  count_VV = rng.integers(0, 10**6, (classes, classes))
  return viz.confusion_matrix(count_VV, names, title=TITLE)


def worst(rng, count):
  above = [ODD, f'true {"W" * 40} → predicted {ODD}', *['x'] * count][:count]
  below = [f'12.34 nats {"folder/" * 9}0.png', *['y'] * count][:count]
  return viz.worst_pictures(
    photos(rng, count), above, below, title=TITLE, subtitle=TITLE
  )


def expert_curves():
  names = ('busiest', 'null', 'dropped', 'balance')
  train = {f'experts/{name}': 0.5 for name in names}
  held_out = {f'{rule}/{k}': 0.4 for rule in viz.RULES for k in train}
  records = [{'step': 10**6, 'kind': 'train', **train}]
  records.append({'step': 10**6, 'kind': 'eval', **held_out})
  return viz.expert_curves(records, null_target=0.5, title=TITLE)


DRAWN = {
  'confusion of twenty': lambda rng: confusion(rng, 20),
  'confusion of many': lambda rng: confusion(rng, 500),
  'the worst pictures': lambda rng: worst(rng, 24),
  'one patch map': lambda rng: patches(rng, 1, 1, (8, 8)),
  'many blocks, narrow': lambda rng: patches(rng, 2, 12, (32, 4)),
  'a wrong class': lambda rng: viz.patch_maps(
    photos(rng, 5, 64, 64),
    rng.random((2, 5, 16)) < 0.5,
    layers=(1, 3),
    grid=(4, 4),
    num_layers=4,
    labels=['true square → predicted circle', *['circle'] * 4],
  ),
  'many images': lambda rng: patches(rng, 8, 3, (8, 8)),
  'stages': lambda rng: viz.token_stages(
    photos(rng, 1, 32, 32),
    rng.random((12, 1, 1024)) < 0.5,
    grid=(32, 32),
    blocks=range(100, 112),
  ),
  'attention': attention,
  'six stages': lambda rng: viz.keep_probability(
    rng.random((6, 12)), grid=(3, 4), blocks=range(6), count=9
  ),
  'six loads': lambda rng: load(rng, 6),
  'extremes': extremes,
  'patches of experts': lambda rng: expert_patches(rng, 64, [ODD, 'W' * 40]),
  'many short labels': lambda rng: expert_patches(rng, 4, ['a'] * 8, 1),
  'five blocks': lambda rng: scores(rng, 5),
  'importance in five': lambda rng: importance(rng, 5),
  'histogram': lambda rng: viz.compute_histogram(
    rng.random(9), budget=0.3, title=ODD
  ),
  'huge errors': lambda _: viz.error_by_learners(
    [[1, 1e-300], [0.5, 1e300]], title=ODD, module=ODD
  ),
  'curves': lambda _: curves(list(viz.RULES)[:4]),
  'seeds': lambda _: seeds(),
  'robustness': lambda _: viz.corruption_curves(
    {f'a rather $long$ name {i}' * 2: CURVE for i in range(5)}, budget=0.4
  ),
  'token load': lambda rng: viz.token_load(
    *(rng.random((3, 60)), [f' $word{i}$' for i in range(60)]),
    layers=(1, 3, 5),
    unit='$x$',
    title=TITLE,
  ),
  'recordings': lambda rng: recordings(rng, 1, 9.5),
  'many ranks': lambda rng: viz.attention_ranks(
    rng.random(200),
    routed=range(1, 200, 2),
    suggested=[0],
    facts='16 held-out rows of 256 tokens',
    title=TITLE,
  ),
  'isoflop, many': lambda _: isoflop(9, 4),
  'no isoflop': lambda _: isoflop(0, 0),
  'compared': lambda _: compared(7),
  'a crowd of models': crowd,
  'experts': lambda rng: expert_map(rng, 64, [ODD] * 9),
  'load of many experts': lambda rng: expert_load(rng, 64, 1),
  'experts over training': lambda _: expert_curves(),
}


@pytest.mark.parametrize('name', DRAWN)
def test_nothing_overlaps(rng, seen, name):
  seen.assert_legible(DRAWN[name](rng))


@pytest.mark.parametrize(
  'draw',
  [
    lambda: viz.loss_curves([]),
    lambda: viz.expert_curves([]),
    lambda: viz.compared_curves([]),
    lambda: viz.accuracy_flops(iter([]), pareto=True),
    lambda: viz.error_by_learners(np.zeros((3, 7)), title='', module='m'),
    lambda: viz.seed_dots({'group': {'a': []}}, xlabel='x', title=''),
    lambda: viz.score_histogram([[np.nan] * 4], [[0] * 4], layers=[1]),
    lambda: viz.engagement(
      *({0: [1.0]}, {}), blocks=1, listed=2, facts='', title=''
    ),
  ],
)
def test_says_that_there_is_nothing(seen, draw):
  figure = draw()
  seen.assert_legible(figure)
  assert re.search('Nothing to show|No ', seen.words(figure))
