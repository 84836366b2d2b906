"""Rivals written from public names compute what their papers say."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import rival_tasks
import rivals
import tiny

from mod_jax import flops
from mod_jax.data.images import ImageDataConfig
from mod_jax.layers.mlp import MLP, MLPConfig
from mod_jax.tasks.experiment import ExperimentConfig

BACKBONE = dataclasses.replace(
  tiny.VIT, image_size=16, patch_size=4, num_classes=5, num_layers=4
)


images = functools.partial(tiny.images, size=16)


def initialised(module, *args):
  """Returns the variables, with random values where they start at 0."""
  variables = nn.unbox(jax.jit(module.init)(jax.random.key(0), *args))
  rng = np.random.default_rng(2)
  return jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), variables)


def test_halted_tokens_may_be_masked_or_removed():
  masked = rivals.AViTConfig(backbone=BACKBONE, gamma=3.0, beta=0.5)
  variables = initialised(masked.build(), images(1))
  apply = jax.jit(
    lambda config, x: config.build().apply(variables, x), static_argnums=0
  )
  trained = apply(masked, images(3))
  running_BI = np.asarray(trained.running_BI)
  # Tokens halt at all depths.
  assert (np.diff(running_BI, axis=1) < 0).any(axis=0).all()
  slots = tuple(running_BI.max(axis=0).tolist())
  compact = dataclasses.replace(masked, slots=slots)
  removed = apply(compact, images(3))
  np.testing.assert_allclose(removed.logits_BV, trained.logits_BV, atol=1e-5)
  np.testing.assert_array_equal(removed.running_BI, running_BI)
  assert not removed.overflow_B.any()
  assert compact.block_flops() < masked.block_flops()
  # With a slot too few, tokens are lost, and that is told.
  fewer = dataclasses.replace(
    masked, slots=(*slots[:1], slots[1] - 1, *slots[2:])
  )
  lost = apply(fewer, images(3))
  assert lost.overflow_B.max() >= 1
  assert np.abs(lost.logits_BV - trained.logits_BV).max() > 1e-4


def test_halting_learns_to_stop_earlier():
  config = rivals.AViTConfig(backbone=BACKBONE, gamma=3.0, beta=0.5)
  variables = initialised(config.build(), images(1))

  def loss(variables):
    output = config.build(train=True).apply(variables, images(2))
    return rivals.halting_loss(output, 1.0, 0.0, 2.0), output.ponder_BL.mean()

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, before), gradient = step(variables)
  after = jax.tree.map(lambda x, dx: x - 0.02 * dx, variables, gradient)
  assert step(after)[0][1] < before
  halting_I = jnp.array([0.1, 0.5, 0.3, 0.1])
  output = rivals.AViTOutput(None, jnp.zeros(1), halting_I, None, None)
  near, far = (
    rivals.halting_loss(output, 0.0, 1.0, depth) for depth in (2.3, 4.0)
  )
  assert 0 < near < far


def test_all_experts_are_the_feed_forward():
  width, hidden, experts = 6, 12, 4
  mlp = MLPConfig(width=width, hidden=hidden, kind='relu', bias=True)
  x_BLD = jax.random.normal(jax.random.key(3), (2, 5, width))

  params = initialised(MLP(mlp), x_BLD)['params']
  # Neurons that point the same way in threes, in mixed order.
  rng = np.random.default_rng(0)
  kind_F = rng.permutation(np.repeat(np.arange(experts), hidden // experts))
  centre_ED = np.linalg.qr(rng.normal(size=(width, width)))[0][:experts]
  up_DF = (centre_ED[kind_F] + 0.05 * rng.normal(size=(hidden, width))).T
  params = {**params, 'up': {**params['up'], 'kernel': jnp.float32(up_DF)}}
  neuron_EF = rivals.split_neurons(up_DF, experts)
  assert sorted(neuron_EF.ravel()) == list(range(hidden))
  assert all(len(set(kind_F[row])) == 1 for row in neuron_EF)

  expected = MLP(mlp).apply({'params': params}, x_BLD)
  slot = rivals.MoEfied(
    width=width, hidden=hidden, num_experts=experts, k=experts
  )
  assert slot.flops(1)['mlp'] == mlp.flops(1)['mlp']

  def run(slot, variables):
    return rivals.MoEfiedMLP(slot).apply(variables, x_BLD)

  variables = rivals.MoEfiedMLP(slot).init(jax.random.key(4), x_BLD)
  of_experts = rivals.moefied_params(params, neuron_EF)
  variables = {'params': {**nn.unbox(variables)['params'], **of_experts}}
  y_BLD, aux = run(slot, variables)
  np.testing.assert_allclose(y_BLD, expected, atol=1e-5)
  # One expert of each token: its own, by hand.
  one = dataclasses.replace(slot, k=1)
  y_BLD, aux = run(one, variables)
  score_BLE, _ = aux['moefied']
  best_BL = score_BLE.argmax(axis=-1)
  assert len(set(best_BL.ravel().tolist())) > 1
  for b, length in np.ndindex(best_BL.shape):
    chosen = neuron_EF[best_BL[b, length]]
    units = x_BLD[b, length] @ up_DF[:, chosen] + params['up']['bias'][chosen]
    by_hand = jax.nn.relu(units) @ params['down']['kernel'][chosen]
    by_hand += params['down']['bias']
    np.testing.assert_allclose(y_BLD[b, length], by_hand, atol=1e-5)

  # The router's loss trains the router alone.
  def scores(x_BLD):
    return rivals.MoEfiedMLP(one).apply(variables, x_BLD)[1]['moefied'][0].sum()

  assert not jax.grad(scores)(x_BLD).any()
  assert np.isfinite(rivals.router_loss(score_BLE, x_BLD, of_experts))
  assert slot.num_params == sum(x.size for x in jax.tree.leaves(variables))


def test_leaving_early_is_what_all_exits_say():
  config = rivals.ZTWConfig(backbone=BACKBONE, hidden=6)
  variables = initialised(config.build(), images(1))
  batch = images(5)
  log_BIV = jax.jit(config.build().apply)(variables, batch)
  backbone = {
    name: x
    for name, x in variables['params'].items()
    if not name.startswith(('hidden', 'logit_norm', 'exit', 'weight', 'bias'))
  }
  logits_BV = jax.jit(BACKBONE.build().apply)(
    {'params': backbone}, batch
  ).logits_BV
  best_BI = np.exp(log_BIV).max(axis=-1)
  middle = float(np.median(best_BI[:, :2]))
  for threshold, chunk in ((1.0, 2), (0.0, 2), (middle, 2), (middle, 1)):
    log_BV, left_B = rivals.leave_early(
      config, variables, batch, threshold, chunk
    )
    leaves_BI = best_BI > threshold
    leaves_BI[:, -1] = True
    expected_B = leaves_BI.argmax(axis=1)
    np.testing.assert_array_equal(left_B, expected_B)
    np.testing.assert_allclose(
      log_BV, log_BIV[np.arange(5), expected_B], atol=1e-5
    )
    if threshold == 1:
      np.testing.assert_allclose(
        np.exp(log_BV), jax.nn.softmax(logits_BV), atol=1e-5
      )
    if threshold == middle:
      assert len(set(expected_B.tolist())) > 1


def test_halted_tokens_cost_nothing():
  data = ImageDataConfig(image_size=BACKBONE.image_size)
  task = rival_tasks.Halting(
    ExperimentConfig(model=BACKBONE, data=data), depth=2.0
  )
  running_BI = jnp.array([[17, 17, 17, 17], [17, 9, 9, 0]])
  all_run, some = 1e6 * task.mflops(running_BI)
  np.testing.assert_allclose(all_run, flops.forward(BACKBONE), rtol=1e-5)
  saved = sum(
    flops.products(BACKBONE.block_flops(i, 17))
    - flops.products(BACKBONE.block_flops(i, left))
    for i, left in ((1, 9), (2, 9), (3, 0))
  )
  np.testing.assert_allclose(all_run - some, saved, rtol=1e-4)


def test_a_picture_that_stays_costs_all_blocks_and_heads():
  config = rivals.ZTWConfig(backbone=BACKBONE, hidden=6)
  after_I = config.exit_flops()
  heads = [2 * (8 * 6 + 6 * 5 + 5)]  # Hidden units, logits and their mean.
  heads += [2 * (8 * 6 + (6 + 5) * 5 + i * 5) for i in (2, 3)]
  assert after_I[-1] == flops.forward(BACKBONE) + sum(heads)
  block = flops.products(BACKBONE.block_flops(2, BACKBONE.num_tokens))
  assert after_I[2] - after_I[1] == block + heads[2]
