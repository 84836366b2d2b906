"""The layers' own FLOP counts: against facts, by hand, and XLA's count."""

import collections
import dataclasses
import itertools
import re
import types

import jax
import jax.numpy as jnp
import pytest
import tiny

from mod_jax import flops
from mod_jax.errors import UserError
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.attention import AttentionConfig
from mod_jax.layers.routed import LayerConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.layers.slots import Slot
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import CONVOLUTIONS, Wav2Vec2Config

MOD = MoDConfig(capacity=0.125)


def _ratio(config, length):
  return flops.forward(config, length) / flops.forward(
    config.dense_twin(), length
  )


def test_steps_come_nearest_to_a_budget():
  config = LMConfig(vocab_size=256, num_layers=2, width=64, num_heads=2)
  step = 4 * 3 * flops.forward(config, 32)
  assert flops.train(config, 32) * 4 == step
  for budget, steps in ((2.4 * step, 2), (2.6 * step, 3), (0.1 * step, 1)):
    assert flops.steps_within(budget, config, 4, 32) == steps


class TestIdealRatio:
  """GELU MLP of width 4D; the head counts whether or not it is tied."""

  @pytest.mark.parametrize(
    ('width', 'length', 'vocab', 'layers', 'want'),
    [(256, 512, 256, 8, 0.559), (1024, 2048, 32_000, 24, 0.593)],
  )
  @pytest.mark.parametrize('tied', [True, False])
  def test_matches_the_known_numbers(
    self, width, length, vocab, layers, want, tied
  ):
    config = LMConfig(
      width=width,
      vocab_size=vocab,
      num_layers=layers,
      num_heads=width // 64,
      mlp='gelu',
      tied_head=tied,
      routing=MOD,
    )
    assert config.block.mlp.hidden == 4 * width
    assert round(_ratio(config, length), 3) == want

  def test_full_attention_pairs_give_another_number(self):
    config = LMConfig(
      width=1024, vocab_size=32_000, num_layers=24, num_heads=16, mlp='gelu'
    )
    total, dense = (
      sum(sum(p.values()) for _, p in c.flops_table(2048, full_pairs=True))
      for c in (config, config.dense_twin())
    )
    assert round(total / dense, 3) != 0.593


class TestParts:
  """Every term written out for odd sizes: D=30, H=3, G=1, C=8, F=50."""

  config = LMConfig(
    vocab_size=70,
    num_layers=3,
    width=30,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    mlp='swiglu',
    mlp_dim=50,
    routing=MoDConfig(capacity=0.3, predictor_width=6),
  )

  def test_each_part_is_what_its_matmuls_cost(self):
    length, width, kept = 21, 30, 6  # floor(0.3 · 21)

    def block(tokens, pairs):
      query_and_out = 2 * 2 * tokens * width * 3 * 8
      key_and_value = 2 * 2 * tokens * width * 1 * 8
      return {
        'attention': query_and_out + key_and_value + 2 * 2 * 3 * 8 * pairs,
        'mlp': 3 * 2 * tokens * width * 50,
      }

    routed = block(kept, kept * (kept + 1) // 2) | {
      'router': 2 * length * width,
      'predictor': 2 * length * (width * 6 + 6),
    }
    dense = block(length, length * (length + 1) // 2)
    head = {'head': 2 * length * width * 70}
    assert self.config.flops_table(length) == [
      ('block_0', dense),
      ('block_1 (routed)', routed),
      ('block_2', dense),
      ('head', head),
    ]
    total = sum(map(sum, (x.values() for x in (dense, routed, dense, head))))
    assert flops.forward(self.config, length) == total
    assert flops.published_macs(self.config, length) * 2 == total
    assert flops.train(self.config, length) == 3 * total

  def test_half_a_routed_block_costs_less(self):
    length, block = 21, self.config.block
    dense, routed = block.flops(length), block.flops(7)
    for part, other in (('attention', 'mlp'), ('mlp', 'attention')):
      routing = MoDConfig(capacity=1 / 3, part=part, predictor_width=6)
      layer = LayerConfig(block=block, routing=routing, capacity=1 / 3)
      parts = layer.flops(length)
      assert parts[part] == routed[part] < dense[part]
      assert parts[other] == dense[other]
      config = dataclasses.replace(self.config, routing=routing)
      # Of frozen weights of a block that has a gradient for its router.
      whole, frozen = (
        flops.train(config, length, lambda name, p=p: p in name)
        for p in ('nothing', 'block_1/mlp/')
      )
      assert whole - frozen == (routed if part == 'mlp' else dense)['mlp']


def test_training_only_masks_patches_except_with_learners():
  pruned = DynamicViTConfig(backbone=tiny.VIT, stages=(1,))
  whole = dataclasses.replace(pruned, keep=1.0)
  assert flops.train(pruned) == 3 * flops.forward(whole)
  assert flops.forward(pruned) < flops.forward(whole)
  static = dataclasses.replace(pruned, score='random')
  assert flops.train(static) == 3 * flops.forward(static)
  adaptive = pruned.with_parts(adaptive=AdaptiveConfig())
  assert flops.train(adaptive) == 3 * flops.forward(adaptive)


class TestFrozen:
  """What is frozen needs no gradient, and what lies below it no pass."""

  detr = DETRConfig(
    **{'image_size': (16, 16), 'patch_size': 2, 'num_classes': 5},
    **{'num_layers': 2, 'num_decoder_layers': 2, 'num_queries': 6},
    **{'width': 16, 'num_heads': 2, 'mlp_dim': 32},
    backbone=ConvStemConfig(width=8),
  )
  speech = Wav2Vec2Config(num_layers=2, width=32, num_heads=2)
  # Reads a picture and six other tokens.
  sees = VLMConfig(
    tower=dataclasses.replace(tiny.VIT, image_size=4),
    language=dataclasses.replace(tiny.LM, num_layers=4),
  )
  pruned = DynamicViTConfig(backbone=tiny.VIT, stages=(1,))
  lengths = {Wav2Vec2Config: (20,), VLMConfig: (10, 1)}

  def rows(self, config):
    """Returns the forward FLOPs of each row, in training."""
    if isinstance(config, DynamicViTConfig):
      config = config.masked
    rows = collections.Counter()
    for row, parts in flops._train_table(
      config, self.lengths.get(type(config))
    ):
      rows[row.split()[0]] += flops.products(parts)
    return rows

  def below(self, config, *rows):
    """Returns the forward FLOPs of the rows whose names begin so."""
    found = self.rows(config)
    return sum(found[row] for row in found if row.startswith(rows))

  def saved(self, config, frozen):
    """Returns what frozen parameters save, by a pattern of their names."""
    length = self.lengths.get(type(config))
    return flops.train(config, length) - flops.train(
      config, length, lambda name: bool(re.search(frozen, name))
    )

  def test_a_frozen_head_is_passed_through_twice_at_an_early_exit(self):
    once = dataclasses.replace(tiny.LM, num_layers=4)
    twice = dataclasses.replace(once, early_exit=2)
    head = flops.products(dict(once.flops_table(8))['head'])
    for is_frozen, passes in (
      (('head', 'embedding'), 2),
      (('block', 'embedding'), 2),  # Only the norm is trained.
      ('x', 3),
    ):
      trained, more = (
        flops.train(config, 8, lambda name, f=is_frozen: name.startswith(f))
        for config in (once, twice)
      )
      assert more - trained == passes * head

  def test_the_heads_of_a_detector_read_each_block_of_the_decoder(self):
    config = dataclasses.replace(self.detr, num_decoder_layers=3)
    head = flops.products(dict(config.flops_table())['head'])
    assert flops.train(config) == 3 * (flops.forward(config) + 2 * head)

  @pytest.mark.parametrize('config', [detr, speech, sees, pruned])
  def test_nothing_and_all(self, config):
    assert self.saved(config, '^$') == 0
    assert self.saved(config, '.') == 2 * sum(self.rows(config).values())

  @pytest.mark.parametrize(
    ('config', 'frozen', 'below'),
    [
      (detr, '^backbone/', 'backbone'),
      (
        *(detr, '^(backbone|project|encoder/block_0)/'),
        'backbone embed encoder/block_0',
      ),
      (detr, '^(?!classes|box)', 'backbone embed encoder decoder'),
      (speech, CONVOLUTIONS, 'convolutions'),
      (
        *(speech, '^(conv_|feature_norm|project|mask_|position_conv|norm)'),
        'convolutions embed',
      ),
      (pruned, '^(?!prediction_0|block_1|norm|head)', 'embed block_0'),
    ],
  )
  def test_gradients_stop_at_the_first_trained_row(self, config, frozen, below):
    below = self.below(config, *below.split())
    assert self.saved(config, frozen) == 2 * below

  def test_queries_are_trained_through_a_frozen_decoder(self):
    width, tokens, queries = 16, self.detr.num_tokens, 6
    pairs = 2 * 4 * width * queries * (queries + tokens)
    weights = self.below(self.detr, 'decoder', 'head') - pairs
    below = self.below(self.detr, 'backbone', 'embed', 'encoder')
    assert self.saved(self.detr, '^(?!queries)') == 2 * below + weights

  def test_keys_of_the_memory_that_is_read(self):
    config = dataclasses.replace(
      self.detr, routing=VisionRoutingConfig(), routed=('memory',)
    )
    tokens = config.num_tokens + config.num_tokens // 2
    saved = self.saved(config, '^decoder/.*/cross_attention/key/')
    assert saved == 2 * 16**2 * tokens

  @pytest.mark.parametrize('scan', [False, True])
  def test_text_with_pictures(self, scan):
    language = dataclasses.replace(self.sees.language, scan_layers=scan)
    config = dataclasses.replace(self.sees, language=language)
    below = self.below(config, 'tower', 'projector')
    assert self.saved(config, '^(tower|projector)/') == 2 * below
    # The embedding, which is the head as well, is trained through all blocks.
    pairs = 4 * 4 * 8 * 10 * 11 // 2
    weights = self.below(config, 'language/block') - pairs
    frozen = '^(?!language/embedding)'
    assert self.saved(config, frozen) == 2 * below + weights

  def test_a_shared_router_is_that_of_the_first_routed_block(self):
    routing = MoDConfig(capacity=0.5, shared_router=True)
    config = self.sees.with_parts(routing=routing)
    own = self.sees.with_parts(routing=MoDConfig(capacity=0.5))
    saved = self.saved(config, '^(?!language/router)')
    assert saved == self.saved(own, '^(?!language/block_1/router)')
    below = self.below(config, 'tower', 'projector', 'language/block_0')
    assert 2 * below < saved < 2 * sum(self.rows(config).values())


_WIDE = {'width': 1024, 'num_heads': 8, 'num_layers': 2, 'vocab_size': 512}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everywhere(Slot):
  """Something in a block whose parts have all the names that are taken."""

  inputs: tuple[int, ...] = ()
  outputs: tuple[int, ...] = ()

  def run(self, x, info, *, name, dtype, mode):
    raise NotImplementedError

  def flops(self, tokens):
    names = 'attention linear mlp experts learners gate router predictor norm'
    return dict.fromkeys(names.split(), tokens)

  @property
  def num_params(self):
    return 0


def test_no_part_of_a_table_is_overwritten():
  routing = MoDConfig(capacity=0.5, period=1, offset=0, predictor_width=5)
  config = LMConfig(num_layers=1, routing=routing, feed_forward=Everywhere())
  names = tuple(config.block.slots)
  block = config.block.with_slots(dict.fromkeys(names, Everywhere()))
  layer = LayerConfig(block=block, routing=routing, capacity=0.5)
  length, k, width = 16, 8, config.width
  pairs = 4 * width * k * (k + 1) // 2
  routed = 2 * length * width + 2 * length * 5 * (width + 1)
  want = pairs + len(names) * 9 * k + routed
  assert sum(layer.flops(length).values()) == want
  # A vision transformer adds norms.
  stack = types.SimpleNamespace(layers=[layer])
  vit = types.SimpleNamespace(stack=stack, width=width)
  parts = ViTConfig.block_flops(vit, 0, length)
  assert sum(parts.values()) == want + 2 * 2 * 5 * k * width


def test_a_window_counts_the_expected_pairs_of_chosen_tokens():
  config = AttentionConfig(
    width=8, num_heads=1, num_kv_heads=1, head_dim=1, window=3
  )
  length, k = 7, 4
  choices = list(itertools.combinations(range(length), k))
  seen = sum(
    0 <= a - b < 3 for choice in choices for a in choice for b in choice
  )
  linear = sum(slot.flops(k)['linear'] for slot in config.projections.values())
  pairs = (config.flops(k, of=length)['attention'] - linear) / 4
  assert pairs == round(seen / len(choices))
  assert pairs < (config.flops(k)['attention'] - linear) / 4


class TestAgainstXla:
  """On unrolled, kernel-free models, wide enough for matmuls to be all.

  XLA counts elementwise work too, so its number is the larger one; and all
  query-key pairs, as plain attention multiplies them. Nothing is compiled.
  """

  @pytest.mark.parametrize(
    'changes',
    {
      'mod_swiglu': {},
      'dense_swiglu': {'routing': None},
      # The polynomial of the exact GELU is long: more width to drown it.
      'mod_gelu': {'mlp': 'gelu', 'width': 2048},
      'grouped_queries': {'num_kv_heads': 2, 'head_dim': 64},
      'untied_head': {'tied_head': False, 'vocab_size': 4096},
      'predictor': {'routing': MoDConfig(capacity=0.25, predictor_width=256)},
      'capacity_list': {
        'routing': MoDConfig(capacity=(0.75, 0.125), period=1, offset=0)
      },
    }.items(),
    ids=lambda item: item[0],
  )
  def test_agrees_within_a_percent(self, changes):
    length = 48
    config = LMConfig(**(_WIDE | {'routing': MOD} | changes[1]))
    table = config.flops_table(length, full_pairs=True)
    ours = sum(sum(parts.values()) for _, parts in table)
    ratio = _xla_flops(config, length) / ours
    assert 1 <= ratio < 1.01


def _xla_flops(config, length):
  model = config.build()
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
  # All of the output: a predictor that nobody reads would be dropped.
  lowered = jax.jit(model.apply).lower(tiny.shapes(config), tokens)
  return lowered.cost_analysis()['flops']


class TestNumParams:
  def test_by_hand(self):
    config = LMConfig(
      vocab_size=11, num_layers=2, width=8, num_heads=2, mlp_dim=12
    )
    block = 2 * 8 + 4 * 8 * 8 + 3 * 8 * 12
    dense = dataclasses.replace(config, routing=None)
    assert flops.num_params(dense) == 11 * 8 + 2 * block + 8
    assert flops.num_params(config) == flops.num_params(dense) + 8
    scanned = dataclasses.replace(config, scan_layers=True)
    assert flops.num_params(scanned) == flops.num_params(config)
    # Nothing is drawn, so it needs no key either.
    drawn = dataclasses.replace(config, routing=MoDConfig(score='gaussian'))
    assert flops.num_params(drawn) == flops.num_params(dense)


class TestReport:
  config = dataclasses.replace(
    tiny.LM, num_layers=4, routing=MoDConfig(capacity=(0.5, 0.125))
  )

  def numbers(self, report, start):
    """Returns the numbers of the line that begins so."""
    line = next(x for x in report.splitlines() if x.startswith(start))
    return [
      float(x.replace(',', ''))
      for x in re.findall(r'(?<![\w.])[\d,]+\.?\d*(?:e[+-]\d+)?', line)
    ]

  def test_shows_layers_and_totals_beside_their_twins(self):
    length = 100
    report = flops.report(self.config, length)
    twin = self.config.dense_twin()
    dense = dict(twin.flops_table(length))
    for name, parts in self.config.flops_table(length):
      both = [sum(x.values()) / 1e6 for x in (parts, dense[name.split()[0]])]
      found = self.numbers(report, f'{name} ')[-2:]
      assert found == pytest.approx(both, abs=0.006)
    assert 'block 1: 50, block 3: 12 of 100' in report
    *parts, total, _ = self.numbers(report, 'total')
    assert sum(parts) == pytest.approx(total, abs=0.03)
    total, dense = (flops.forward(x, length) for x in (self.config, twin))
    for start, expected in (
      ('forward', [total, total / 2]),
      ('dense twin forward', [dense, dense / 2]),
      ('ratio to dense', [total / dense]),
      ('training step', [3 * total, 3 * dense]),
      ('parameters', [flops.num_params(self.config)]),
    ):
      found = self.numbers(report, start)
      assert found == pytest.approx(expected, rel=2e-4), start

  def test_queries_of_a_decoder_are_counted_apart(self):
    assert 'all of 16; all of 6\n' in flops.report(TestFrozen.detr)
    routed = dataclasses.replace(
      TestFrozen.detr, routing=VisionRoutingConfig(capacity=0.5)
    )
    assert 'block 1: 8 of 16; block 3: 3 of 6' in flops.report(routed)


@pytest.mark.parametrize(
  'count', [flops.forward, flops.published_macs, flops.report]
)
def test_a_language_model_needs_a_length(count):
  for config in (LMConfig(), LMConfig(adaptive=AdaptiveConfig(), mlp_dim=256)):
    with pytest.raises(UserError, match='LMConfig without a length: .*length='):
      count(config)
