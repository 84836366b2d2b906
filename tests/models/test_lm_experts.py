"""Language models with experts, beside and within routed blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.experts import Assigned, ExpertsConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.losses import sums
from mod_jax.tasks import make_task, plain
from mod_jax.tasks.experiment import ExperimentConfig

pytestmark = pytest.mark.slow

B, L, VOCAB = 2, 8, 11
TOKENS_BL = jax.random.randint(jax.random.key(3), (B, L), 0, VOCAB)
PLAIN = dataclasses.replace(tiny.LM, vocab_size=VOCAB)
MOD = MoDConfig(capacity=0.5, threshold_decay=0.5)
EXPERTS = ExpertsConfig(num_experts=3, num_nulls=1, capacity_factor=1.0)
CHOOSING = ExpertsConfig(num_experts=3, choice='expert', threshold_decay=0.5)
INTEGRATED = dataclasses.replace(PLAIN, experts=EXPERTS)
STAGED = dataclasses.replace(INTEGRATED, routing=MOD)


variables_of = functools.cache(tiny.variables)


def forward(config, variables, tokens_BL, mode='top_k', train=False):
  model = config.build(train=train)
  return tiny.apply(model, variables, tokens_BL, mode=mode)


def test_one_expert_of_weight_1_is_mixture_of_depths():
  mod = dataclasses.replace(PLAIN, routing=MOD)
  one = ExpertsConfig(num_experts=1, capacity_factor=1.0)
  staged = dataclasses.replace(mod, experts=one)
  variables = variables_of(mod)
  params = dict(variables['params'])
  for i in range(2):
    block = dict(params[f'block_{i}'])
    block['mlp_experts'] = jax.tree.map(lambda x: x[None], block.pop('mlp'))
    block['mlp_experts']['router'] = {'kernel': jnp.ones((8, 1))}
    params[f'block_{i}'] = block
  want = forward(mod, variables, TOKENS_BL)
  for train in (True, False):
    got = forward(staged, {'params': params}, TOKENS_BL, train=train)
    np.testing.assert_allclose(got.logits_BLV, want.logits_BLV, atol=1e-5)
    for a, b in zip(got.routing, want.routing, strict=True):
      np.testing.assert_array_equal(a.chosen_BL, b.chosen_BL)


class TestRules:
  def test_of_each_kind(self):
    choose = dataclasses.replace(INTEGRATED, experts=CHOOSING)
    untrained = dataclasses.replace(CHOOSING, threshold_decay=0.0)
    deaf = dataclasses.replace(INTEGRATED, experts=untrained)
    assert INTEGRATED.rules == ()
    assert STAGED.rules == ('top_k', 'threshold', 'router')
    assert choose.rules == ('top_k', 'threshold')
    assert deaf.rules == ('top_k',)
    both = dataclasses.replace(STAGED, experts=untrained)
    assert both.rules == ('top_k',)
    for config in (deaf, both):
      with pytest.raises(UserError, match=r'experts\.threshold_decay'):
        _ = config.decoding_mode
      with pytest.raises(UserError, match="rule='threshold'"):
        forward(config, variables_of(config), TOKENS_BL, 'threshold')

  def test_beside_blocks_that_choose_among_kinds(self):
    routing = MoDConfig(kinds=('image',), router_loss=0.0)
    config = dataclasses.replace(PLAIN, routing=routing, experts=CHOOSING)
    assert config.decoding_mode.rule == 'threshold'  # Of the experts alone.
    got = forward(config, variables_of(config), TOKENS_BL, 'threshold')
    assert got.routing[0].chosen_BL.all()  # None of the tokens is an image's.
    untrained = dataclasses.replace(CHOOSING, threshold_decay=0.0)
    with pytest.raises(UserError, match=r'experts\.threshold_decay'):
      _ = dataclasses.replace(config, experts=untrained).decoding_mode


class TestTraining:
  def loss_of(self, model, variables):
    batch = {'tokens': TOKENS_BL, 'targets': (TOKENS_BL + 1) % VOCAB}
    params = variables['params']
    state = {k: v for k, v in variables.items() if k != 'params'}
    config = ExperimentConfig(model=model, data=TextDataConfig(length=L))
    loss = make_task(config).loss
    return jax.jit(
      jax.value_and_grad(
        lambda params: loss(params, state, batch, jax.random.key(0), 0.0),
        has_aux=True,
      )
    )(params)

  def test_losses_are_added_once_however_often_layers_are_computed(self):
    # Losses that layers put away on the side would count twice.
    variables = variables_of(STAGED)
    # The mean over layers of the z-loss is not that over all their tokens.
    experts = dataclasses.replace(EXPERTS, z_loss=0.0)
    staged = dataclasses.replace(STAGED, experts=experts)
    (total, (found, _)), grads = self.loss_of(staged, variables)
    again = dataclasses.replace(staged, remat='full')
    (other, _), other_grads = self.loss_of(again, variables)
    assert total == pytest.approx(float(other), rel=1e-6)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
      *(grads, other_grads),
    )
    # The metrics hold what was added: next token, choice and balance.
    mean = {name: float(a / b) for name, (a, b) in found.items() if b}
    want = mean['loss'] + 0.01 * mean['router/bce']
    want += 0.01 * mean['experts/balance']
    assert total == pytest.approx(want, rel=1e-3)

  def test_nothing_is_chosen_again_for_the_backward_pass(self):
    # Rounded otherwise, it might be another choice.
    def choices(model):
      params = variables_of(INTEGRATED)['params']
      grad = jax.grad(
        lambda params: (
          model.build(train=True)
          .apply({'params': params}, TOKENS_BL, targets_BL=TOKENS_BL)
          .loss[0]
        )
      )
      return str(jax.make_jaxpr(grad)(params)).count('argmax[')

    assert choices(INTEGRATED) == INTEGRATED.num_layers
    again = dataclasses.replace(INTEGRATED, remat='full')
    assert choices(again) == INTEGRATED.num_layers

  def test_only_tokens_that_reach_a_layer_count(self):
    output = forward(STAGED, variables_of(STAGED), TOKENS_BL, train=True)
    every, routed = output.experts
    assert every.valid_BL.shape == (B, L)
    assert routed.valid_BL.shape == (B, L // 2)
    chosen_BL = output.routing[0].chosen_BL
    for b in range(B):
      want = np.flatnonzero(chosen_BL[b])
      np.testing.assert_array_equal(routed.index_BL[b], want)

  def test_one_layers_imbalance_does_not_make_up_for_anothers(self):
    def collapsed(expert):
      one_BLX = jax.nn.one_hot(jnp.full((1, 4), expert), 2, dtype=bool)
      ones_BL = jnp.ones((1, 4), bool)
      return Assigned(9.0 * one_BLX, one_BLX, one_BLX, ones_BL)

    config = ExpertsConfig(num_experts=2, balance_loss=1.0, z_loss=0.0)
    pairs, found = plain.expert_losses(config, [collapsed(0), collapsed(1)])
    assert sums.sum_of_means(pairs) == pytest.approx(2, rel=1e-3)
    total, weight = found['experts/busiest']
    assert total / weight == 2
