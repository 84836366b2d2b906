"""Losses of adaptive modules: by hand, and which way each of them pulls."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mod_jax.layers.acm import ACM, ACMConfig
from mod_jax.losses import acm as losses
from mod_jax.losses.acm import Learners


def one_hot(learners, least, most):
  return jnp.asarray(np.eye(most + 1)[np.asarray(learners)][..., least:])


class TestDistillation:
  def test_every_k_but_none_at_once(self):
    sums_KBLD = np.random.default_rng(0).normal(size=(4, 2, 3, 5))
    target_BLD = np.random.default_rng(1).normal(size=(2, 3, 5))
    total, count = losses.distillation(jnp.array(sums_KBLD), target_BLD)
    each_K = ((sums_KBLD - target_BLD) ** 2).mean(axis=(1, 2, 3))
    assert count == 2
    assert float(total / count) == pytest.approx(each_K[1:].mean(), rel=1e-5)
    assert each_K.mean() != pytest.approx(each_K[1:].mean(), rel=1e-3)

  def test_no_gradient_to_the_teacher(self):
    sums_KBLD = jnp.ones((3, 1, 2, 2))
    grads = jax.grad(
      lambda *args: losses.distillation(*args)[0], argnums=(0, 1)
    )(sums_KBLD, jnp.zeros((1, 2, 2)))
    assert not jnp.any(grads[1])
    assert not jnp.any(grads[0][0])
    assert jnp.all(grads[0][1:] > 0)

  def test_distances_are_norms(self):
    sums_KBLD = jnp.array([[[[4.0, 5.0]]], [[[1.0, 1.0]]], [[[1.0, 3.0]]]])
    distance_KBL = losses.distances(sums_KBLD, jnp.array([[[1.0, 1.0]]]))
    # Neither squared (25, 0, 4) nor a mean over the two features.
    np.testing.assert_allclose(distance_KBL[:, 0, 0], [5, 0, 2], rtol=1e-6)


class TestGateLabels:
  @pytest.mark.parametrize(
    ('distance', 'tau', 'label'),
    [
      # d(0), d(1), …, d(N): each column of the paper's Eq. 5.
      ((9, 8, 7, 6, 5), 1.2, 2),  # One more never gains enough.
      ((9, 8, 4, 3.9, 3), 1.2, 3),
      ((9, 8, 4, 2, 1.9), 1.2, 4),
      ((9, 8, 4, 2, 1), 1.2, 4),  # Every one does: N.
      ((9, 9, 9, 9, 9), 1.2, 2),  # Nothing helps.
      ((9, 1, 2, 4, 8), 1.2, 2),  # More harms.
      ((9, 3, 2, 1, 1), 1.5, 4),  # 3/2 is not less than 1.5.
      ((0, 8, 4, 2, 1), 1.2, 4),  # d(0) is not looked at.
      ((9, 8, 0, 0, 0), 1.2, 3),  # Perfect with two: no gain by a third.
      ((9, 8, 4, 2, 0), 1.2, 4),  # Infinitely better by the last.
      ((0, 0, 0, 0, 0), 1.2, 2),
      ((9, 8, 4), 1.2, 2),  # N = 2: there is no other.
      ((9, 8), 1.2, 1),  # N = 1: all of it.
    ],
  )
  def test_by_hand(self, distance, tau, label):
    distance_KBL = jnp.array(distance, jnp.float32)[:, None, None]
    label_BL = losses.gate_labels(distance_KBL, tau)
    assert label_BL.dtype == jnp.int32
    assert label_BL.tolist() == [[label]]

  @pytest.mark.parametrize(('first', 'label'), [(1.15, 2), (1.25, 4)])
  def test_tau_divides_the_norm_and_not_its_square(self, first, label):
    # Distances of `first`, 1, 1, …: where τ divided the square, a second
    # learner that takes the norm from 1.15 to 1 would seem worth its cost.
    assert 1.15**2 > 1.2
    sums_KBLD = jnp.array([9.0, first, 1.0, 1 / 1.3, 1 / 1.3**2])
    distance_KBL = losses.distances(
      sums_KBLD[:, None, None, None], jnp.zeros((1, 1, 1))
    )
    assert losses.gate_labels(distance_KBL, 1.2).tolist() == [[label]]


class TestGateLoss:
  @pytest.mark.parametrize('least', [0, 1])
  def test_by_hand(self, least):
    rng = np.random.default_rng(0)
    logits_BLM = rng.normal(size=(2, 3, 5 - least))
    label_BL = np.array([[2, 3, 4], [4, 2, 2]])
    total, count = losses.gate_loss(
      jnp.array(logits_BLM), jnp.array(label_BL), least, 0.8
    )
    p_BLM = scipy.special.softmax(logits_BLM / 0.8, axis=-1)
    of_label_BL1 = np.take_along_axis(p_BLM, label_BL[..., None] - least, -1)
    assert count == 2
    want = -np.log(of_label_BL1).mean()
    assert float(total / count) == pytest.approx(want, rel=1e-5)

  def test_labels_below_the_least_count_as_it(self):
    logits_BLM = jnp.array([[[1.0, 3.0]]])
    low, least = (
      losses.gate_loss(logits_BLM, jnp.array([[label]]), 1, 1.0)[0]
      for label in (0, 1)
    )
    assert low == least == pytest.approx(math.log(1 + math.exp(2)))


MODULES = {'mlp': Learners(0, 2, 3.0), 'query': Learners(1, 4, 0.5)}


CHOSEN = {
  'mlp': one_hot([[0, 2], [1, 1]], 0, 2),
  'query': one_hot([[1, 4], [2, 1]], 1, 4),
}


def test_load_per_image_by_hand():
  load_B = losses.load_per_image(CHOSEN, MODULES)
  # All learners: 2 tokens · (2 · 3 + 4 · .5) = 16.
  np.testing.assert_allclose(
    load_B, [(2 * 3 + 5 * 0.5) / 16, (2 * 3 + 3 * 0.5) / 16]
  )
  ends = [
    {'mlp': one_hot([[n]], 0, 2), 'query': one_hot([[m]], 1, 4)}
    for n, m in ((0, 1), (2, 4))
  ]
  low, high = (losses.load_per_image(x, MODULES)[0] for x in ends)
  assert (low, high) == (0.5 / 8, 1)


def test_learners_per_image_counts_them_at_any_cost():
  # All learners: 2 tokens · (2 + 4) = 12.
  fraction_B = losses.learners_per_image(CHOSEN, MODULES)
  np.testing.assert_allclose(fraction_B, [7 / 12, 5 / 12])


def test_budget_loss_is_of_the_mean():
  assert losses.budget_loss(jnp.array([0.1, 0.7]), 0.4) == pytest.approx(0)
  assert losses.budget_loss(jnp.array([0.1, 0.3]), 0.4) == pytest.approx(0.2)
  assert losses.budget_loss(jnp.array([0.5, 0.9]), 0.4) == pytest.approx(0.3)


class TestEntropyLoss:
  def test_normalised_by_a_modules_own_number_of_choices(self):
    even = {
      'mlp': one_hot([[0, 1, 2]], 0, 2),
      'query': one_hot([[1, 2, 3, 4]], 1, 4),
    }
    for name, chosen in even.items():
      assert losses.entropy_loss({name: chosen}) == pytest.approx(-1, abs=1e-4)
    assert losses.entropy_loss(even) == pytest.approx(-1, abs=1e-4)
    # Two of four choices, and one of three.
    half = {'query': one_hot([[1, 1, 3, 3]], 1, 4)}
    assert losses.entropy_loss(half) == pytest.approx(-0.5, abs=1e-4)
    none = {'mlp': one_hot([[2, 2, 2]], 0, 2)}
    assert losses.entropy_loss(none) == pytest.approx(0, abs=1e-4)
    assert losses.entropy_loss(half | none) == pytest.approx(-0.25, abs=1e-4)

  def test_over_the_tokens_of_each_image(self):
    # Between images alone there is no entropy.
    apart = {'mlp': one_hot([[0, 0], [1, 1]], 0, 2)}
    assert losses.entropy_loss(apart) == pytest.approx(0, abs=1e-4)

  def test_without_a_choice_there_is_nothing_to_spread(self):
    assert losses.entropy_loss({'query': one_hot([[1, 1]], 1, 1)}) == 0

  def test_finite_where_choices_are_never_made(self):
    grad = jax.grad(lambda x: losses.entropy_loss({'mlp': x}))(
      one_hot([[0, 0]], 0, 2)
    )
    assert jnp.isfinite(grad).all()
    # Less of what is always chosen, more of the others.
    assert (grad[..., 0] > grad[..., 1]).all()


def test_diversity_loss_by_hand():
  # Ordered pairs, each image with itself included.
  loss = losses.diversity_loss(jnp.array([0.1, 0.4, 0.4]))
  assert loss == pytest.approx(-4 * 0.3 / 9)
  assert losses.diversity_loss(jnp.full(3, 0.4)) == 0
  assert losses.diversity_loss(jnp.array([0.4])) == 0


class TestWhichWayTheyPull:
  @pytest.mark.parametrize(('budget', 'sign'), [(0.4, 1), (0.6, -1)])
  def test_budget_pulls_the_load_to_it(self, budget, sign):
    def loss(chosen):
      return losses.budget_loss(losses.load_per_image(chosen, MODULES), budget)

    grads = jax.grad(loss)(CHOSEN)
    # The mean load is a half; all learners of an image cost 16.
    for name, learners in MODULES.items():
      cost_M = learners.cost * np.arange(learners.min, learners.max + 1)
      want_BLM = np.broadcast_to(sign * cost_M / 16 / 2, CHOSEN[name].shape)
      np.testing.assert_allclose(grads[name], want_BLM, rtol=1e-5)

  def test_diversity_pulls_images_apart(self):
    grad_B = jax.grad(losses.diversity_loss)(jnp.array([0.1, 0.4, 0.4]))
    np.testing.assert_allclose(grad_B, [4 / 9, -2 / 9, -2 / 9], rtol=1e-5)

  def test_what_pulls_at_the_choices_pulls_at_the_gate(self):
    config = ACMConfig(
      inputs=4, outputs=2, hidden=1, num_learners=3, min_learners=0
    )
    module, z_BLD = ACM(config, mode='train'), jnp.ones((2, 5, 4))
    params = nn.unbox(ACM(config).init(jax.random.key(0), z_BLD))['params']

    def load(params):
      _, choice = module.apply(
        {'params': params}, z_BLD, rngs={'gumbel': jax.random.key(1)}
      )
      chosen = {'mlp': choice.one_hot_BLM}
      return losses.load_per_image(chosen, {'mlp': Learners(0, 3, 2.0)}).mean()

    grads = jax.jit(jax.grad(load))(params)
    slope_M = grads['gate']['logits']['bias']
    assert slope_M[0] < 0 < slope_M[-1]
