"""What cannot be drawn is refused in a sentence, and no data is said to be."""

import math

import numpy as np
import pytest

from mod_jax import viz
from mod_jax.errors import UserError

pytestmark = pytest.mark.filterwarnings('error')

PHOTOS = np.zeros((2, 8, 8, 3), np.uint8)
CORRELATION = dict.fromkeys(
  ('pearson', 'pearson_p', 'spearman', 'spearman_p'), 0.5
)
POINT = {'name': 'a', 'flops': 4.0, 'accuracy': 0.7, 'spread': 0.01}
EFFECT = dict.fromkeys(('accuracy', 'load_mean', 'load_std', 'token_std'), 0.4)
CURVE = {name: [0.9, 0.7, 0.2] for name in ('adaptive', 'dense', 'load')}


def masks(name, shape, **more):
  given = {'images_BHWC': PHOTOS, name: np.ones(shape), 'grid': (4, 4)}
  return given | more


# What would be drawn.
FINE = {
  'patch_maps': masks('processed_RBL', (1, 2, 16), layers=[1], num_layers=6),
  'token_stages': masks('kept_SBL', (2, 2, 16), blocks=(3, 6)),
  'attention_maps': {
    'image_HWC': PHOTOS[0],
    'maps_RHL': np.zeros((1, 2, 16)),
    'layers': [0],
    'grid': (4, 4),
  },
  'keep_probability': {
    'mean_SL': np.zeros((1, 4)),
    'grid': (2, 2),
    'blocks': [3],
    'count': 9,
  },
  'load_map': masks('load_BL', (2, 16)),
  'compute_extremes': masks('load_BL', (2, 16), load_B=[0.1, 0.2]),
  'importance_scatter': {
    'importance_RN': np.zeros((1, 4)),
    'score_RN': np.zeros((1, 4)),
    'layers': [1],
    'correlations': [CORRELATION],
  },
  'accuracy_flops': {'points': [POINT]},
  'routing_map': {
    'chosen_RL': np.ones((3, 8)),
    'pieces': 'x' * 8,
    'layers': (1, 3, 5),
    'num_layers': 7,
  },
  'expert_map': {
    'expert_RL': np.zeros((2, 8), int),
    'pieces': 'x' * 8,
    'layers': (1, 3),
    'num_experts': 4,
  },
  'expert_patches': masks('expert_RBL', (1, 2, 16), layers=[1], num_experts=4)
  | {'expert_RBL': np.zeros((1, 2, 16), int)},
  'expert_load': {
    'share_RX': np.full((2, 3), 0.3),
    'layers': (1, 3),
    'num_experts': 2,
    'targets_X': [0.3] * 3,
    'none_R': [0.3] * 2,
  },
  'score_histogram': {
    'score_RBL': np.zeros((2, 3, 4)),
    'chosen_RBL': np.zeros((2, 3, 4)),
    'layers': [1, 2],
  },
  'compute_histogram': {'load_B': [0.5]},
  'error_by_learners': {'distance_KT': np.ones((2, 3))},
  'loss_effects': {'rows': [EFFECT]},
  'corruption_curves': {'curves': {'noise': CURVE}, 'budget': 0.4},
  'token_load': {
    'share_RL': np.full((2, 8), 0.5),
    'pieces': 'x' * 8,
    'layers': (1, 3),
    'unit': 'share of all learners',
  },
  'attention_ranks': {'shares': [0.2, 0.4], 'routed': [1], 'suggested': [0]},
  'engagement': {
    'groups': {0: [1.0, 2.0], 1: [3.0]},
    'pieces': {'a': 0.5},
    'blocks': 1,
    'listed': 2,
  },
}


def images(shape, dtype=np.uint8):
  return {'images_BHWC': np.zeros(shape, dtype)}


def point(**change):
  return {'points': [POINT | change]}


def correlation(**change):
  return {'correlations': [CORRELATION | change]}


def effect(**change):
  return {'rows': [EFFECT, EFFECT | {'name': 'odd'} | change]}


def curve(**change):
  return {'curves': {'noise': CURVE | change}}


REFUSED = {
  'patch_maps': [
    (images((2, 8, 8, 3), float), 'float64.*expected shape.*uint8'),
    (images((2, 8, 8, 1)), r'\(2, 8, 8, 1\)'),
    (images((0, 8, 8, 3)), 'none of them 0'),
    ({'grid': (3, 4)}, '8 x 8 pixels do not divide into 3 x 4 patches'),
    ({'grid': (0, 4)}, r'grid=\(0, 4\): expected two whole numbers'),
    ({'grid': 16}, 'grid=16: expected two'),
    (
      {'processed_RBL': np.ones((1, 2, 17))},
      r'\(1, 2, 17\).*\(1, 2, 16\).*class',
    ),
    ({'processed_RBL': np.full((1, 2, 16), 7)}, 'such as 7.*not the positions'),
    ({'processed_RBL': np.full((1, 2, 16), np.nan)}, 'such as nan'),
    ({'layers': [1.5]}, r'layers=\[1.5\]'),
    ({'layers': [9]}, 'from 0 to 5'),
    ({'layers': [-1], 'num_layers': None}, 'numbers from 0 on'),
    ({'labels': ['one']}, 'labels of 2 images'),
    ({'labels': 'ab'}, "'ab' as labels"),
    (
      images((400, 8, 8, 3)) | {'processed_RBL': np.ones((1, 400, 16))},
      '400 rows.*limit of 200: draw fewer',
    ),
  ],
  'token_stages': [
    ({'kept_SBL': np.ones((3, 2, 16))}, 'for 2 blocks, 2 images'),
    ({'blocks': (3, 3)}, r'blocks=\[3, 3\]'),
  ],
  'attention_maps': [
    (
      {'maps_RHL': np.zeros((1, 2, 17))},
      r'\(1, 2, 17\) for 1 blocks.*\(1, heads, 16\)',
    ),
    ({'maps_RHL': np.zeros((2, 2, 16))}, r'\(2, 2, 16\)'),
    ({'maps_RHL': np.zeros((1, 0, 16))}, 'one head at least'),
    (
      {'maps_RHL': np.where(np.arange(16) == 5, np.nan, np.zeros((1, 1, 16)))},
      r'hold nan at \(0, 0, 5\) and 1 such',
    ),
    ({'image_HWC': PHOTOS}, r'shape \(2, 8, 8, 3\)'),
  ],
  'keep_probability': [
    ({'mean_SL': np.full((1, 4), 1.5)}, 'probability of 1.5.*from 0 to'),
    ({'mean_SL': np.array([[0.5, -0.2, 0, 1]])}, 'probability of -0.2'),
    ({'mean_SL': np.zeros((1, 5))}, r'\(1, 5\) for 1 stages.*\(1, 4\)'),
    ({'mean_SL': np.zeros((0, 4)), 'blocks': []}, 'one stage at least'),
    ({'count': 0}, 'count=0'),
  ],
  'load_map': [
    ({'load_BL': np.full((2, 16), -1)}, 'load of -1: expected 0 or more'),
    (
      {'load_BL': np.full((2, 16), 5), 'maximum': 4},
      'load of 5 is over maximum=4',
    ),
    ({'maximum': 0}, 'maximum=0'),
    ({'maximum': math.nan}, 'maximum=nan'),
    ({'load_BL': np.ones((2, 17))}, r'\(2, 17\).*expected shape \(2, 16\)'),
  ],
  'compute_extremes': [
    ({'load_B': [0.5] * 3}, '3 loads for images of shape'),
    ({'load_BL': np.ones((3, 16))}, r'patch loads of shape \(3, 16\)'),
    ({'count': 0}, 'count=0: expected a whole number of images'),
    ({'count': 1.5}, 'count=1.5'),
    ({'labels': 'ab'}, "'ab' as labels of 2 images"),
    (
      images((1, 8, 8, 3)) | {'load_B': [0.5], 'load_BL': np.ones((1, 16))},
      '1 image: expected two at least',
    ),
  ],
  'importance_scatter': [
    (
      {'importance_RN': np.zeros((1, 5))},
      r'\(1, 5\).*\(1, 4\).*\(1, tokens\)',
    ),
    ({'importance_RN': np.full((1, 4), np.nan)}, 'importances hold nan'),
    ({'correlations': []}, '0 correlations for 1'),
    ({'correlations': [{'pearson': 0.5}]}, 'block 1 are.*spearman_p'),
    (correlation(pearson=1.5), 'pearson 1.5 with p 0.5'),
    (correlation(pearson_p=2), 'with p 2'),
  ],
  'accuracy_flops': [
    (point(flops=None), r"point 0 \('a'\) has flops None.*finite"),
    (point(flops=-1), 'flops -1: expected 0 or more'),
    (point(accuracy=math.nan), 'accuracy nan'),
    (point(accuracy='0.5'), "accuracy '0.5'"),
    (point(spread=-0.1), 'spread -0.1: expected 0'),
    (point(spread=math.inf), 'spread inf'),
    (point(spread=(0.1, -0.2)), 'spread -0.2: expected 0'),
    (point(spread=(0.1, 0.1, 0.1)), 'a pair of them, down and up'),
    (
      {'points': [POINT | {'group': str(i)} for i in range(64)]},
      '64 groups of points: at most 63',
    ),
  ],
  'routing_map': [
    ({'pieces': 'abc'}, r'shape \(3, 8\).*3 pieces.*expected shape \(3, 3\)'),
    ({'pieces': ''}, 'no text'),
    ({'layers': (1, 3, 3)}, r'layers=\[1, 3, 3\]'),
    ({'layers': (1, 3, 9)}, 'from 0 to 6'),
    ({'num_layers': 0}, 'num_layers=0'),
    ({'columns': 0}, 'columns=0'),
    ({'weights_RL': np.zeros((3, 7))}, r'weights of shape \(3, 7\)'),
    ({'chosen_RL': np.arange(24).reshape(3, 8)}, 'such as 2:'),
    (
      {
        'columns': 5000,
        'pieces': 'x' * 5000,
        'chosen_RL': np.ones((3, 5000)),
      },
      '5000 tokens in.*draw fewer',
    ),
  ],
  'expert_map': [
    (
      {'pieces': 'abc'},
      r'experts of shape \(2, 8\).*with experts and 3 pieces',
    ),
    ({'expert_RL': np.zeros((0, 8), int), 'layers': ()}, 'one block with'),
    (
      {'expert_RL': np.full((2, 8), 4)},
      'expert 4 of num_experts=4.*from 0 to 3',
    ),
    ({'expert_RL': np.full((2, 8), 0.5)}, 'experts of type float64'),
    ({'num_experts': 0}, 'num_experts=0'),
    ({'more_RL': np.ones((2, 7))}, r'more of shape \(2, 7\)'),
    ({'dropped_RL': np.full((2, 8), 7)}, 'such as 7'),
  ],
  'expert_patches': [
    ({'expert_RBL': np.zeros((1, 2, 17), int)}, r'\(1, 2, 17\).*class token'),
    ({'more_RBL': np.ones((1, 2, 17))}, r'more of shape \(1, 2, 17\)'),
    ({'labels': 'ab'}, "'ab' as labels"),
  ],
  'expert_load': [
    ({'targets_X': [0.3] * 2}, r'\(2, 3\), 2 targets and 2 shares.*2 blocks'),
    ({'share_RX': np.full((2, 3), np.nan)}, 'shares hold nan'),
    ({'layers': ()}, 'one block with'),
  ],
  'score_histogram': [
    ({'layers': [1]}, r'\(2, 3, 4\).*1 routed blocks'),
    ({'chosen_RBL': np.zeros((2, 3, 3))}, r'\(2, 3, 3\)'),
    ({'thresholds': [0]}, r'thresholds of shape \(1,\)'),
  ],
  'compute_histogram': [
    ({'load_B': [0.5, 1.2]}, 'loads: 1.2 is no share; expected numbers from 0'),
    ({'load_B': [-0.1]}, 'loads: -0.1'),
    ({'load_B': [[0.5]]}, r'loads of shape \(1, 1\)'),
    ({'budget': 40}, 'budget: 40 is no share'),
  ],
  'error_by_learners': [
    (
      {'distance_KT': np.ones((1, 3))},
      r'\(1, 3\): expected shape \(N \+ 1, tokens\)',
    ),
    ({'distance_KT': [[1], [-2]]}, 'a distance of -2: expected 0 or more'),
  ],
  'loss_effects': [
    (effect(accuracy=93), r"row 1 \('odd'\) has accuracy 93: expected a"),
    (effect(load_std=-0.1), 'load_std -0.1'),
    (effect(token_std=math.nan), 'token_std nan'),
    (effect(load_mean=None), 'load_mean None'),
    (effect(load_mean='0.5'), "load_mean '0.5'"),
    ({'rows': [EFFECT] * 1000}, '1000 rows.*draw fewer'),
  ],
  'corruption_curves': [
    (curve(dense=[0.1]), "noise: 1 numbers of 'dense'"),
    (curve(load=[]), "noise: 3 numbers of 'adaptive'"),
    (curve(adaptive=[0.1, 1.2, 0.3]), "noise, 'adaptive': 1.2 is no share"),
    ({'curves': {'noise': {}}}, "noise: 0 numbers of 'adaptive'"),
    (
      {'curves': dict.fromkeys(map(str, range(13)), CURVE)},
      '13 corruptions: at most 12',
    ),
  ],
  'token_load': [
    ({'pieces': 'abc'}, r'shares of shape \(2, 8\).*2 blocks and 3 pieces'),
    ({'pieces': ''}, 'no text'),
    ({'share_RL': np.zeros((0, 8)), 'layers': ()}, 'no blocks to draw'),
    ({'share_RL': np.full((2, 8), 5)}, '5 is no share'),
  ],
  'attention_ranks': [
    ({'shares': []}, 'no blocks to draw'),
    ({'shares': [0.2, math.nan]}, 'shares hold nan'),
    ({'suggested': [2]}, r'suggested=\[2\].*from 0 to 1'),
  ],
}


@pytest.mark.parametrize(
  ('name', 'change', 'words'),
  [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_refuses_what_does_not_fit(name, change, words):
  with pytest.raises(UserError, match=words):
    getattr(viz, name)(**(FINE[name] | change))


@pytest.mark.parametrize('name', FINE)
def test_draws_what_fits(name):
  getattr(viz, name)(**FINE[name]).draw_without_rendering()


@pytest.mark.parametrize(
  ('name', 'change', 'words'),
  [
    (
      'patch_maps',
      {'processed_RBL': np.zeros((0, 2, 16)), 'layers': []},
      'No block is routed',
    ),
    (
      'routing_map',
      {'chosen_RL': np.zeros((0, 8)), 'layers': []},
      'No block is routed',
    ),
    (
      'score_histogram',
      dict.fromkeys(('score_RBL', 'chosen_RBL'), np.zeros((0, 4)))
      | {'layers': []},
      'No block is routed',
    ),
    (
      'score_histogram',
      {'score_RBL': np.full((2, 3, 4), np.nan)},
      'No finite weights',
    ),
    (
      'importance_scatter',
      dict.fromkeys(('importance_RN', 'score_RN'), np.zeros((0, 0)))
      | {'layers': [], 'correlations': []},
      'No block is routed',
    ),
    (
      'importance_scatter',
      dict.fromkeys(('importance_RN', 'score_RN'), np.zeros((1, 0))),
      'No tokens',
    ),
    ('importance_scatter', correlation(pearson=math.nan), 'Pearson undefined'),
    ('accuracy_flops', {'points': iter([])}, 'No models measured yet'),
    ('accuracy_flops', {'points': [], 'pareto': True}, 'No models measured'),
    ('compute_histogram', {'load_B': []}, 'No images measured yet'),
    ('error_by_learners', {'distance_KT': np.ones((3, 0))}, 'No tokens'),
    ('error_by_learners', {'distance_KT': np.zeros((3, 2))}, 'has an error'),
    ('loss_effects', {'rows': []}, 'No runs measured yet'),
    ('corruption_curves', {'curves': {}}, 'No corruption measured yet'),
    ('engagement', {'groups': {}}, 'No tokens measured yet'),
    ('engagement', {'pieces': {}}, 'No token comes often enough'),
  ],
)
def test_says_that_there_is_nothing(seen, name, change, words):
  figure = getattr(viz, name)(**(FINE[name] | change))
  figure.draw_without_rendering()
  assert words in seen.said(figure)
