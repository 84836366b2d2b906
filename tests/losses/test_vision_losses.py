"""Losses of images: against numpy, at extremes, and what they differentiate."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mod_jax import losses

classification_loss = jax.jit(losses.classification_loss)
multi_label_loss = jax.jit(losses.multi_label_loss)
top_k_accuracy = jax.jit(losses.top_k_accuracy, static_argnames='k')
logit_distillation = jax.jit(losses.logit_distillation)
token_distillation = jax.jit(losses.token_distillation)
ratio_loss = jax.jit(losses.ratio_loss, static_argnums=1)


def test_equations_are_those_of_the_published_paper():
  """Token distillation 13, ratio 15, total 16; for the rest, sections."""
  root = pathlib.Path(__file__).parents[2]
  cited = set()
  for path in (*root.glob('mod_jax/**/*.py'), *root.glob('configs/**/*.py')):
    text = ' '.join(path.read_text().split())
    for place in re.findall(r'Rao et al\.,? \(?2021\)?(.{,40})', text):
      for equation in re.findall(r'Eqs?\. (\d+)', place):
        assert 'section 3.4' in place
        cited.add(int(equation))
  assert cited == {13, 15, 16}


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def softmax(x):
  x = np.exp(x - x.max(axis=-1, keepdims=True))
  return x / x.sum(axis=-1, keepdims=True)


class TestMultiLabelLoss:
  def test_is_the_binary_cross_entropy_of_each_label(self, rng):
    logits, target = rng.normal(size=(4, 3)), rng.random((4, 3))
    weight, class_weight = np.array([1, 1, 0, 1]), np.array([1.0, 3.0, 0.5])
    probability = 1 / (1 + np.exp(-logits))
    true = -target * np.log(probability)
    false = -(1 - target) * np.log(1 - probability)
    total, count = multi_label_loss(logits, target)
    np.testing.assert_allclose(total, (true + false).mean(-1).sum(), rtol=1e-5)
    assert count == 4
    total, count = multi_label_loss(logits, target, weight, class_weight)
    nats = (class_weight * true + false).mean(-1)
    np.testing.assert_allclose(total, (weight * nats).sum(), rtol=1e-5)
    assert count == 3

  def test_is_finite_where_probabilities_round_to_0_or_1(self):
    logits = np.array([[200.0, -200.0], [-200.0, 200.0]])
    total, _ = multi_label_loss(logits, np.array([[1, 0], [1, 0]]))
    np.testing.assert_allclose(total, 200, rtol=1e-6)


class TestClassificationLoss:
  def test_is_the_cross_entropy_with_soft_targets(self, rng):
    logits, target = rng.normal(size=(5, 4)), softmax(rng.normal(size=(5, 4)))
    total, count = classification_loss(logits, target)
    want = -(target * np.log(softmax(logits))).sum()
    np.testing.assert_allclose(total, want, rtol=1e-5)
    assert count == 5

  def test_class_weights_give_a_weighted_mean(self, rng):
    logits, label = rng.normal(size=(5, 3)), np.array([0, 1, 2, 1, 0])
    class_weight, weight = np.array([3.0, 0.5, 1.0]), np.array([1, 1, 1, 1, 0])
    total, count = classification_loss(
      logits, np.eye(3)[label], weight, class_weight
    )
    nats = -np.log(softmax(logits))[np.arange(5), label]
    factor = class_weight[label] * weight
    np.testing.assert_allclose(total, (factor * nats).sum(), rtol=1e-5)
    np.testing.assert_allclose(count, factor.sum(), rtol=1e-6)
    # Of mixed pictures, each class counts by its part.
    target = softmax(rng.normal(size=(5, 3)))
    total, count = classification_loss(logits, target, None, class_weight)
    terms = -class_weight * target * np.log(softmax(logits))
    np.testing.assert_allclose(total, terms.sum(), rtol=1e-5)
    np.testing.assert_allclose(count, (class_weight * target).sum(), rtol=1e-5)

  def test_is_float32_for_bfloat16_logits(self):
    logits = jnp.zeros((300, 3), jnp.bfloat16)
    total, count = classification_loss(logits, jnp.eye(3)[np.zeros(300, int)])
    assert total.dtype == jnp.float32
    assert count == 300
    assert float(total) == pytest.approx(300 * np.log(3), rel=1e-5)

  def test_large_logits_stay_finite(self):
    logits, target = jnp.array([[1e4, -1e4, 0.0]]), jnp.array([[0.0, 1.0, 0.0]])
    loss, grad = jax.jit(
      jax.value_and_grad(lambda x: losses.classification_loss(x, target)[0])
    )(logits)
    assert loss == 2e4
    np.testing.assert_allclose(grad, [[1.0, -1.0, 0.0]])


@pytest.mark.parametrize(
  ('logits', 'labels', 'k', 'right'),
  [
    ([[3, 2, 1]] * 3, [0, 1, 2], 1, 1),
    ([[3, 2, 1]] * 3, [0, 1, 2], 2, 2),
    # Constant logits score chance, and those that are no number nothing.
    ([[0, 0, 0, 0]] * 4, [0, 1, 2, 3], 2, 2),
    ([[np.nan] * 3, [np.nan, 1, 0]], [0, 0], 3, 0),
  ],
)
def test_top_k_accuracy(logits, labels, k, right):
  logits, labels = jnp.float32(logits), jnp.array(labels)
  assert top_k_accuracy(logits, labels, k) == (right, len(labels))
  padded = jnp.zeros(len(labels)).at[0].set(1)
  first, count = top_k_accuracy(logits, labels, k, padded)
  assert (first, count) == (float(right > 0), 1)


class TestLogitDistillation:
  def test_is_the_divergence_from_the_teacher(self, rng):
    student, teacher = rng.normal(size=(2, 5, 4))
    total, count = logit_distillation(student, teacher)
    p, q = softmax(teacher), softmax(student)
    np.testing.assert_allclose(total, (p * np.log(p / q)).sum(), rtol=1e-5)
    # The other direction is another number.
    assert abs(total - (q * np.log(q / p)).sum()) > 0.1
    assert count == 5

  def test_only_the_student_learns(self, rng):
    student, teacher = rng.normal(size=(2, 3, 4))
    of_student, of_teacher = jax.jit(
      jax.grad(lambda s, t: losses.logit_distillation(s, t)[0], (0, 1))
    )(jnp.array(student), jnp.array(teacher))
    np.testing.assert_allclose(
      of_student, softmax(student) - softmax(teacher), atol=1e-6
    )
    assert not of_teacher.any()

  def test_large_logits_stay_finite(self):
    student, teacher = jnp.array([[1e4, -1e4]]), jnp.array([[-1e4, 1e4]])
    loss, grad = jax.jit(
      jax.value_and_grad(lambda s: losses.logit_distillation(s, teacher)[0])
    )(student)
    assert loss == 2e4
    np.testing.assert_allclose(grad, [[1.0, -1.0]])


class TestTokenDistillation:
  def test_is_a_mean_over_kept_patches_and_channels(self, rng):
    student, teacher = rng.normal(size=(2, 3, 5, 4))
    keep = rng.random((3, 5)) < 0.5
    nothing = token_distillation(student, teacher, jnp.zeros((3, 5)))
    assert [float(x) for x in nothing] == [0, 0]
    total, count = token_distillation(student, teacher, keep.astype(np.float32))
    want = ((student - teacher)[keep] ** 2).mean()
    np.testing.assert_allclose(total / count, want, rtol=1e-5)
    assert count == keep.sum()

  def test_only_the_kept_features_learn(self, rng):
    student, teacher = rng.normal(size=(2, 2, 3, 4))
    keep = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    of_student, of_teacher, of_keep = jax.jit(
      jax.grad(lambda s, t, k: losses.token_distillation(s, t, k)[0], (0, 1, 2))
    )(*map(jnp.array, (student, teacher, keep)))
    np.testing.assert_allclose(
      of_student, (student - teacher) * keep[..., None] / 2, atol=1e-6
    )
    assert not of_teacher.any()
    assert not of_keep.any()

  def test_bfloat16_features_are_subtracted_in_float32(self):
    # Their difference, 2⁻¹⁰ above 1, is no bfloat16.
    student = jnp.full((1, 1, 2), 1.0, jnp.bfloat16)
    teacher = jnp.full((1, 1, 2), -(2.0**-10), jnp.bfloat16)
    total, _ = token_distillation(student, teacher, jnp.ones((1, 1)))
    assert float(total) == pytest.approx((1 + 2**-10) ** 2, abs=1e-7)


class TestRatioLoss:
  def test_is_the_mean_squared_error_over_stages(self):
    keep = np.zeros((2, 3, 10), np.float32)
    for (stage, row), kept in np.ndenumerate([[7, 10, 0], [4, 5, 0]]):
      keep[stage, row, :kept] = 1
    total, count = ratio_loss(keep, (0.7, 0.5))
    want = [(0 + 0.01) / 2, (0.09 + 0) / 2, (0.49 + 0.25) / 2]
    np.testing.assert_allclose(total, sum(want), rtol=1e-5)
    assert count == 3

  def test_pulls_decisions_towards_the_target(self):
    gradient = jax.jit(jax.grad(lambda x: losses.ratio_loss(x, (0.5,))[0]))

    def grad(kept):
      return np.asarray(gradient((np.arange(4) < kept)[None, None] * 1.0))

    assert (grad(4) > 0).all()
    assert (grad(0) < 0).all()
    assert not grad(2).any()
