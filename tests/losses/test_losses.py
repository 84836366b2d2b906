"""Losses against plain numpy, and sums that add up over microbatches."""

import functools

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from mod_jax import losses, parallel
from mod_jax.layers import dense


def _inputs(seed, batch=4, length=6, vocab=5):
  rng = np.random.default_rng(seed)
  logits_BLV = 3 * rng.normal(size=(batch, length, vocab)).astype(np.float32)
  targets_BL = rng.integers(0, vocab, (batch, length))
  weights_BL = rng.choice([0.0, 0.5, 1.0], (batch, length)).astype(np.float32)
  return logits_BLV, targets_BL, weights_BL


def _masks(seed, batch=4, length=12):
  """decided, chosen and valid, all different, some outside the valid."""
  rng = np.random.default_rng(seed)
  return tuple(rng.random((batch, length)) < p for p in (0.4, 0.3, 0.7))


class TestNextTokenLoss:
  def test_is_the_weighted_negative_log_probability(self):
    logits_BLV, targets_BL, weights_BL = _inputs(0)
    total, weight = losses.next_token_loss(logits_BLV, targets_BL, weights_BL)
    log_prob_BLV = scipy.special.log_softmax(np.float64(logits_BLV), axis=-1)
    told_BL1 = np.take_along_axis(log_prob_BLV, targets_BL[..., None], -1)
    want = -(weights_BL * told_BL1[..., 0]).sum()
    np.testing.assert_allclose(total, want, rtol=1e-5)
    np.testing.assert_allclose(weight, weights_BL.sum(), rtol=1e-6)

  def test_microbatches_add_up_to_the_whole(self):
    arrays = _inputs(2)
    whole = np.array(losses.next_token_loss(*arrays))
    halves = [
      np.array(losses.next_token_loss(*(x[rows] for x in arrays)))
      for rows in (slice(0, 1), slice(1, None))
    ]
    assert halves[0][1] != halves[1][1]  # A mean of means would be wrong.
    np.testing.assert_allclose(sum(halves), whole, rtol=1e-5)

  def test_is_summed_in_float32_for_bfloat16_logits(self):
    logits_BLV, targets_BL, weights_BL = _inputs(3, length=64)
    logits_BLV = jnp.asarray(logits_BLV, jnp.bfloat16)
    rounded_BLV = np.asarray(logits_BLV, np.float32)
    total, _ = losses.next_token_loss(logits_BLV, targets_BL, weights_BL)
    want, _ = losses.next_token_loss(rounded_BLV, targets_BL, weights_BL)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, want, rtol=1e-6)


def _head_inputs(dtype='float32', batch=4, length=10, width=16, vocab=24):
  keys = jax.random.split(jax.random.key(5), 4)
  return (
    jax.random.normal(keys[0], (batch, length, width), dtype),
    jax.random.normal(keys[1], (width, vocab)) / 2,
    jax.random.randint(keys[2], (batch, length), 0, vocab),
    jax.random.uniform(keys[3], (batch, length)).round(1),
  )


def _plain(x_BLD, kernel_DV, targets_BL, weights_BL):
  logits_BLV = dense.einsum('BLD,DV->BLV', x_BLD, kernel_DV, 'float32')
  total, weight = losses.next_token_loss(logits_BLV, targets_BL, weights_BL)
  return total / weight


def _chunked(*args, **kwargs):
  total, weight = losses.head_loss(*args, **kwargs)
  return total / weight


class TestHeadLoss:
  # Of 40 tokens: one by one, a last chunk to fill up, and all at once.
  @pytest.mark.parametrize(
    ('dtype', 'chunk'),
    [('float32', 1), ('float32', 7), ('float32', None), ('bfloat16', 7)],
  )
  def test_equals_the_loss_of_the_logits(self, dtype, chunk):
    args = _head_inputs(dtype)
    chunked = functools.partial(_chunked, chunk=chunk)
    want, want_grads = jax.value_and_grad(_plain, (0, 1, 3))(*args)
    value, grads = jax.jit(jax.value_and_grad(chunked, (0, 1, 3)))(*args)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    # Gradients of the logits are rounded to the dtype of the features.
    rounded = 1e-5 if dtype == 'float32' else 1e-3
    tolerances = (rounded, rounded, 1e-5)
    for grad, one, atol in zip(grads, want_grads, tolerances, strict=True):
      assert grad.dtype == one.dtype
      assert abs(one).max() > 1e-3
      grad, one = map(np.float32, (grad, one))
      np.testing.assert_allclose(grad, one, atol=atol)
      # They by at most 2^-9 of themselves, and so the result again.
      assert np.linalg.norm(grad - one) < 2**-8 * np.linalg.norm(one)

  def test_products_are_in_the_dtype_of_the_features(self):
    args = _head_inputs('bfloat16')
    text = jax.jit(jax.grad(_chunked, (0, 1))).lower(*args).as_text()
    dots = [x for x in text.splitlines() if 'stablehlo.dot_general' in x]
    assert len(dots) == 3
    for dot in dots:
      operands, result = dot.rsplit(': ', 1)[1].split(' -> ')
      assert operands.count('xbf16>') == 2
      assert 'xf32>' in result

  @pytest.mark.parametrize(
    'sizes', [{'data': 2, 'fsdp': 2, 'tensor': 2}, {'data': 1, 'tensor': 8}]
  )
  def test_over_devices_that_split_tokens_and_vocabulary(self, sizes):
    args = _head_inputs()
    mesh = parallel.make_mesh(parallel.MeshConfig(**sizes))
    names = (('batch',), ('embed', 'vocab'), ('batch',), ('batch',))
    want, want_grads = jax.value_and_grad(_plain, (0, 1))(*args)
    with jax.set_mesh(mesh):
      placed = (
        jax.device_put(x, jax.NamedSharding(mesh, parallel.spec(axes)))
        for x, axes in zip(args, names, strict=True)
      )
      chunked = functools.partial(_chunked, chunk=3)
      value, grads = jax.jit(jax.value_and_grad(chunked, (0, 1)))(*placed)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for grad, one in zip(grads, want_grads, strict=True):
      np.testing.assert_allclose(grad, one, atol=1e-5)

  def test_computes_no_gradient_of_a_frozen_head(self):
    args = _head_inputs(width=64, vocab=128)
    want, want_dx = jax.value_and_grad(_plain)(*args)

    def compiled(which):
      return jax.jit(jax.value_and_grad(_chunked, which)).lower(*args).compile()

    alone, both = compiled(0), compiled((0, 1))
    value, dx_BLD = alone(*args)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(dx_BLD, want_dx, atol=1e-5)
    product = 2 * 40 * 64 * 128
    saved = both.cost_analysis()['flops'] - alone.cost_analysis()['flops']
    assert saved == pytest.approx(product, rel=0.1)


class TestPathBalance:
  @pytest.mark.parametrize('padded', [False, True])
  def test_is_the_sum_over_both_paths(self, padded):
    *_, valid_BL = _masks(4)
    logit_BL = np.random.default_rng(5).normal(size=valid_BL.shape) - 0.5
    seen_N = logit_BL[valid_BL] if padded else logit_BL.ravel()
    into, past = (seen_N > 0).mean(), (seen_N <= 0).mean()
    probability = (1 / (1 + np.exp(-seen_N))).mean()
    want = into * probability / 0.2 + past * (1 - probability) / 0.8
    total, count = losses.path_balance(
      jnp.float32(logit_BL), 0.2, valid_BL if padded else None
    )
    assert count == seen_N.size
    np.testing.assert_allclose(total / count, want, rtol=1e-5)

  @pytest.mark.parametrize(
    ('logit', 'sign'), [(3.0, 1), (0.1, 1), (-0.1, -1), (-1.0, -1)]
  )
  def test_leads_back_where_all_or_none_want_in(self, logit, sign):
    """Though each token's own probability is far from a half, or near it."""
    *_, valid_BL = _masks(6)
    grad_BL = jax.grad(lambda x: losses.path_balance(x, 0.25, valid_BL)[0])(
      jnp.full(valid_BL.shape, logit)
    )
    assert (np.sign(grad_BL[valid_BL]) == sign).all()
    np.testing.assert_array_equal(grad_BL[~valid_BL], 0)

  @pytest.mark.parametrize('capacity', [1.0, 1e-9])
  def test_is_finite_at_the_ends(self, capacity):
    *_, valid_BL = _masks(7)
    for valid in (valid_BL, jnp.zeros_like(valid_BL)):
      value, grad_BL = jax.value_and_grad(
        lambda x, valid=valid: losses.path_balance(x, capacity, valid)[0]
      )(jnp.ones(valid_BL.shape))
      assert jnp.isfinite(value)
      assert jnp.isfinite(grad_BL).all()


class TestChoiceBce:
  @pytest.mark.parametrize('padded', [False, True])
  def test_is_the_binary_cross_entropy(self, padded):
    _, chosen_BL, valid_BL = _masks(0)
    valid_BL = valid_BL if padded else None
    logit_BL = np.random.default_rng(1).normal(size=chosen_BL.shape) * 3
    p_BL = 1 / (1 + np.exp(-logit_BL))
    nats_N = -np.log(np.where(chosen_BL, p_BL, 1 - p_BL))[valid_BL].ravel()
    got = losses.choice_bce(jnp.float32(logit_BL), chosen_BL, valid_BL)
    np.testing.assert_allclose(got, (nats_N.sum(), nats_N.size), rtol=1e-5)

  def test_no_gradient_passes_the_targets(self):
    _, chosen_BL, valid_BL = _masks(2)
    logit_BL = np.random.default_rng(3).normal(size=chosen_BL.shape)
    gradient = jax.grad(
      lambda *args: losses.choice_bce(*args, valid_BL)[0], argnums=(0, 1)
    )(jnp.float32(logit_BL), chosen_BL.astype(np.float32))
    want_BL = valid_BL * (1 / (1 + np.exp(-logit_BL)) - chosen_BL)
    np.testing.assert_allclose(gradient[0], want_BL, atol=1e-6)
    np.testing.assert_array_equal(gradient[1], 0)


def _agreement(decided_BL, chosen_BL, valid_BL):
  """The definitions, token by token and row by row."""
  decided_N, chosen_N = decided_BL[valid_BL], chosen_BL[valid_BL]
  right_N = decided_N == chosen_N
  rows = zip(decided_BL, chosen_BL, valid_BL, strict=True)
  errors = [abs(int(d[v].sum()) - int(c[v].sum())) for d, c, v in rows]
  return {
    'accuracy': (right_N.sum(), right_N.size),
    'precision': (right_N[decided_N].sum(), decided_N.sum()),
    'recall': (right_N[chosen_N].sum(), chosen_N.sum()),
    'count_error': (sum(errors), chosen_N.sum()),
    'routed': (decided_N.sum(), decided_N.size),
    'never_route': ((~chosen_N).sum(), chosen_N.size),
  }


class TestChoiceAgreement:
  @given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
  def test_is_what_counting_by_hand_gives(self, seed, batch, length):
    decided_BL, chosen_BL, valid_BL = _masks(seed, batch, length)
    every_BL = np.ones_like(valid_BL)
    for given_BL, used_BL in ((valid_BL, valid_BL), (None, every_BL)):
      got = losses.choice_agreement(decided_BL, chosen_BL, given_BL)
      want = _agreement(decided_BL, chosen_BL, used_BL)
      assert set(got) == set(want)
      for name, pair in want.items():
        np.testing.assert_array_equal(got[name], pair, err_msg=name)

  def test_never_routing_scores_one_less_capacity(self):
    # 12.5%: two of sixteen in each row.
    chosen_BL = np.zeros((3, 16), bool)
    chosen_BL[:, [3, 9]] = True
    never_BL = np.zeros_like(chosen_BL)
    got = losses.choice_agreement(never_BL, chosen_BL)
    ratio = {k: float(t / w) for k, (t, w) in got.items() if w}
    assert ratio['never_route'] == ratio['accuracy'] == 1 - 1 / 8
    assert ratio['recall'] == 0
    assert ratio['count_error'] == 1
    assert 'precision' not in ratio  # Nothing was decided for.
    # And a rule that is right is told apart from it.
    got = losses.choice_agreement(chosen_BL, chosen_BL)
    ratio = {k: float(t / w) for k, (t, w) in got.items()}
    assert ratio['accuracy'] == ratio['precision'] == ratio['recall'] == 1
    assert ratio['never_route'] == 1 - 1 / 8
    assert ratio['count_error'] == 0
