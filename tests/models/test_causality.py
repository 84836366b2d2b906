"""What the library calls causal is causal: no output depends on later tokens.

One table for training and evaluation: each form of routing with each content of
a block. A mechanism that the table lacks fails `TestTable`: add it here.
"""

import dataclasses
import functools
import inspect
import itertools
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import errors
from mod_jax.layers import acm, rules
from mod_jax.layers.acm import AdaptiveConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.rope import RopeScaling
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.layers.scores import SCORES, Score
from mod_jax.layers.slots import Slot
from mod_jax.models.lm import LMConfig
import mod_jax_kernels

B, L, VOCAB = 128, 16, 29
RNG = np.random.default_rng(0)
TOKENS_BL = RNG.integers(0, VOCAB, (B, L))
# Rows of 12 to 16 tokens: how long they are is known from the start.
LENGTH_B1 = L - np.arange(B)[:, None] % 5
VALID_BL = np.arange(L) < LENGTH_B1
# Each even row changes from another position on, and the odd ones as a whole.
START_B1 = np.arange(B)[:, None] % (L // 2) + 3
SAME_BL = (np.arange(L) < START_B1) & (np.arange(B)[:, None] % 2 == 0)
OTHER_BL = np.where(SAME_BL, TOKENS_BL, RNG.integers(0, VOCAB, (B, L)))

mod = functools.partial(MoDConfig, capacity=0.5, period=1, offset=0)
ROUTING = {
  'none': None,
  'top-k': mod(
    **{'router_loss': 0.01, 'predictor_width': 4, 'threshold_decay': 0.5},
    gate='alpha_tanh',
  ),
  'router': mod(
    **{'train_rule': 'router', 'router_loss': 0.0, 'balance_loss': 0.01},
    **{'gate': 'sigmoid', 'combine': 'weigh_bypass', 'shared_router': True},
    **{'router_width': 5, 'router_bias': True, 'train_slack': 1.0},
  ),
  'predictor': mod(
    **{'train_rule': 'predictor', 'router_loss': 0.0, 'predictor_width': 4},
    **{'gate': 'one_plus_tanh', 'combine': 'replace', 'router_norm': True},
    part='mlp',
  ),
  'threshold': mod(
    **{'train_rule': 'threshold', 'router_loss': 0.0, 'threshold_decay': 0.5},
    gate='alpha_sigmoid',
  ),
  'own rule': mod(
    **{'train_rule': rules.Positive(), 'router_loss': 0.0, 'gate': 'raw'},
    part='attention',
  ),
  'gaussian': mod(score='gaussian', train_rule='fixed', gate='none'),
  'stride': mod(score='stride', train_rule='fixed'),
}
EXPERTS = ExpertsConfig(num_experts=8, capacity_factor=1.0)
CHOOSING = ExpertsConfig(num_experts=4, choice='expert', threshold_decay=0.5)
PROJECTIONS = AdaptiveConfig(replace=(acm.PROJECTIONS,), num_learners=2)
BLOCKS = {
  'plain': {},
  'other attention': {
    **{'window': 5, 'qk_norm': True, 'qkv_bias': True, 'tied_head': False},
    **{'num_kv_heads': 1, 'head_dim': 6, 'mlp': 'gelu', 'early_exit': 1},
    'rope_scaling': RopeScaling(kind='linear', factor=2.0),
    'lora': LoRAConfig(rank=2),
  },
  'experts': {'experts': EXPERTS},
  'experts, several choices': {
    'experts': ExpertsConfig(num_experts=4, per_token=2, num_nulls=1),
    'mlp': 'gelu_tanh',
  },
  'experts choose': {'experts': CHOOSING},
  'learners': {'adaptive': AdaptiveConfig(num_learners=2)},
  'experts and learners': {'experts': EXPERTS, 'adaptive': PROJECTIONS},
}


def config_of(routing, block):
  return LMConfig(
    **{'vocab_size': VOCAB, 'num_layers': 2, 'width': 8, 'num_heads': 2},
    mlp_dim=16,
    routing=ROUTING[routing],
    **BLOCKS[block],
  )


def table():
  """Yields each config that fits together, and each pass called causal."""
  pairs = itertools.count()
  for routing, block in itertools.product(ROUTING, BLOCKS):
    try:
      config = config_of(routing, block)
    except errors.UserError:  # No model has both.
      continue
    if config.num_routed:
      modes = [(config.routing_mode(rule), False) for rule in config.rules[1:]]
      if routing == 'top-k':
        modes.append((RoutingMode(rule='never'), False))
        # Rules other than top-k drop tokens in training.
        modes += [
          (dataclasses.replace(mode, overflow='drop', slack=1.0), False)
          for mode, _ in modes
        ]
      else:
        modes.append((config.routing.train_mode, True))
    elif config.rules:  # Experts that choose do not train by a causal rule.
      modes = [(RoutingMode(rule='threshold'), False)]
    else:
      modes = [(RoutingMode(), False), (RoutingMode(), True)]
    # Each form with a plain block, and each block unrouted, in every mode. The
    # other pairs are slow tests, each in one of its modes, taken in turns.
    alone = block == 'plain' or routing == 'none'
    if not alone:
      modes = [modes[next(pairs) % len(modes)]]
    for mode, trains in modes:
      name = getattr(mode.rule, 'name', mode.rule)
      how = 'train' if trains else mode.overflow
      yield pytest.param(
        *(routing, block, mode, trains),
        id=f'{routing}-{block}-{name}-{how}',
        marks=[] if alone else pytest.mark.slow,
      )


@functools.cache
def variables_of(routing, block):
  return tiny.variables(config_of(routing, block))


@pytest.fixture(scope='module', autouse=True)
def compiled_loops():
  """The two operations that are loops compile once for each shape."""
  with pytest.MonkeyPatch.context() as patch:
    for name in ('grouped_dot', 'acm_mlp'):
      function = getattr(mod_jax_kernels, name)
      static = ('implementation', 'activation')[: 1 + (name == 'acm_mlp')]
      compiled = jax.jit(function, static_argnames=static)
      patch.setattr(mod_jax_kernels, name, compiled)
    yield


def run(routing, block, mode, trains, tokens_BL):
  """Returns the output, operation by operation: compiling takes longer.

  Learners are chosen without noise. Noise is drawn for slots, and which slot a
  token has depends on later tokens, so outputs would differ. This is no leak:
  noise is independent of the tokens, so a model cannot learn anything from it.
  """
  kwargs = {'learners': 'train', 'noise': False} if trains else {}
  model = config_of(routing, block).build(train=trains, **kwargs)
  return model.apply(
    variables_of(routing, block),
    jnp.asarray(tokens_BL),
    valid_BL=jnp.asarray(VALID_BL),
    mode=mode,
    rngs={name: jax.random.key(0) for name in ('routing', 'gumbel')},
  )


def difference(*args):
  """Returns which tokens' outputs and choices differ when others change."""
  one, other = (run(*args, tokens_BL) for tokens_BL in (TOKENS_BL, OTHER_BL))
  apart_BL = jnp.abs(one.logits_BLV - other.logits_BLV).max(axis=-1) > 1e-4
  for a, b in zip(one.routing, other.routing, strict=True):
    apart_BL |= a.chosen_BL != b.chosen_BL
  return np.asarray(apart_BL) & VALID_BL


@pytest.mark.parametrize(('routing', 'block', 'mode', 'trains'), list(table()))
def test_only_what_comes_before_changes_an_output(routing, block, mode, trains):
  apart_BL = difference(routing, block, mode, trains)
  assert not (apart_BL & SAME_BL).any()
  assert (apart_BL | SAME_BL | ~VALID_BL).mean() > 0.9


@pytest.mark.parametrize('block', ['plain', 'experts', 'experts choose'])
def test_top_k_looks_ahead(block):
  assert (difference('top-k', block, RoutingMode(), False) & SAME_BL).any()


@pytest.mark.slow
def test_padding_takes_no_experts_slots():
  """A padded row in training is the row alone, at its own length."""
  mode = ROUTING['router'].train_mode
  model = config_of('router', 'experts').build(train=True, routing=mode)
  apply = functools.partial(model.apply, variables_of('router', 'experts'))
  padded = apply(jnp.asarray(TOKENS_BL), valid_BL=jnp.asarray(VALID_BL))
  rows = LENGTH_B1[:, 0] == 13
  alone = apply(jnp.asarray(TOKENS_BL[rows, :13]))
  dropped = [
    a.wanted_BLX[..., :8].sum() - a.ran_BLE.sum() for a in alone.experts
  ]
  assert all(count > 0 for count in dropped)
  np.testing.assert_allclose(
    alone.logits_BLV, padded.logits_BLV[rows, :13], atol=1e-5
  )


@pytest.mark.parametrize(
  ('routing', 'block', 'rule'),
  [
    ('top-k', 'plain', 'router'),
    ('top-k', 'plain', 'predictor'),
    ('top-k', 'plain', 'threshold'),
    ('none', 'experts choose', 'threshold'),
  ],
)
def test_a_router_of_nan_is_not_passed_by(routing, block, rule):
  variables = variables_of(routing, block)
  part = 'predictor' if rule == 'predictor' else 'router'
  broken = jax.tree_util.tree_map_with_path(
    lambda path, x: x * jnp.nan if part in str(path) else x,
    variables['params'],
  )
  output = tiny.apply(
    *(config_of(routing, block), variables | {'params': broken}),
    jnp.asarray(TOKENS_BL[:2]),
    mode=rule,
  )
  assert all(told.chosen_BL.all() for told in output.routing)
  assert jnp.isnan(output.logits_BLV).all() == (part == 'router')


# Fields that the table may lack: they change no token's choice, or belong to a
# mechanism that it has.
EXEMPT = {
  # Layouts, whose results are compared with the plain one's elsewhere.
  *('scan_layers', 'remat', 'dtype', 'attention'),
  # Sizes, initial values, weights of losses, constants of single functions.
  *('rope_theta', 'norm_epsilon', 'gate_alpha', 'router_std', 'early_loss'),
  *('balance_loss', 'router_loss'),
  *('router_activation', 'z_loss', 'hidden', 'temperature', 'compute_share'),
  # Which blocks, and how many tokens of each.
  *('capacity_decay', 'capacity_schedule', 'capacity_floor', 'capacity_factor'),
  *('first', 'layers', 'period', 'offset'),
  'feed_forward',  # Anybody's own.
  'train_rule',  # Which rules there are is compared below.
  # They are not called causal: `causal_rules` has none.
  *('per_sequence', 'kinds'),
}


def choices(kind):
  """Returns the values that a type lists: of literals, and of booleans."""
  if kind is bool:
    return {True, False}
  if typing.get_origin(kind) is typing.Literal:
    return set(typing.get_args(kind))
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    return set().union(*map(choices, typing.get_args(kind)))
  return set()


def ours(base):
  """Yields the subclasses that the library has and that can be built."""
  for kind in base.__subclasses__():
    is_ours = kind.__module__.startswith('mod_jax.layers')
    if is_ours and not inspect.isabstract(kind):
      yield kind
    yield from ours(kind)


class TestTable:
  CASES = [config_of(*case.values[:2]) for case in table()]

  @pytest.mark.parametrize(
    ('part', 'kind'),
    [
      ('', LMConfig),
      ('routing', MoDConfig),
      ('experts', ExpertsConfig),
      ('adaptive', AdaptiveConfig),
    ],
  )
  def test_has_every_choice_of_a_config(self, part, kind):
    used = [getattr(case, part) if part else case for case in self.CASES]
    used = [config for config in used if config is not None]
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
      if field.name in EXEMPT:
        continue
      values = {getattr(config, field.name) for config in used}
      # Scores of attention are for image tokens, see `kinds`.
      attentive = {k for k, score in SCORES.items() if score.needs_attention}
      missing = choices(hints[field.name]) - values - attentive
      assert not missing, f'{kind.__name__}.{field.name}: no case has {missing}'
      assert values != {field.default}, f'no case sets {field.name}'

  def test_has_every_rule_score_and_slot(self):
    run = {case.values[2].causal_rule for case in table()} - {None}
    assert set(rules.RULES.values()) <= run
    routed = [case.routing for case in self.CASES if case.routing]
    causal = {kind for kind in ours(Score) if not kind.needs_attention}
    assert causal == {type(routing.scorer) for routing in routed}
    layers = [layer for case in self.CASES for layer in case.stack.layers]
    slots = {type(x) for layer in layers for x in layer.block.slots.values()}
    assert slots == set(ours(Slot))
