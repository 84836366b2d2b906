"""Attention and blocks as images use them: masks, scores, extremes.

What a block computes is compared with other libraries: `convert/`.
"""

import dataclasses
import functools

import blocks
from flax import errors as flax_errors
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tiny

from mod_jax.layers.attention import (
  AttentionConfig,
  attention_map,
  masked_attention,
)
from mod_jax.layers.block import Block, BlockConfig
from mod_jax.layers.mlp import MLPConfig
from mod_jax.layers.mode import Mode
from mod_jax.layers.token_info import TokenInfo

B, L, D, H, C, F = 2, 6, 8, 2, 4, 12
masked = jax.jit(masked_attention)

KEEP_BL = np.array([[1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 1]], np.float32)


def draw(scale=1.0, dtype='float32'):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.array(factor * rng.normal(size=(B, L, H, C)), dtype)
    for factor in (scale, scale, 1.0)
  )


def attend(q, k, v, seen_BQS):
  """Returns weight_BHQS and out_BQHC in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  logit = np.einsum('bqhc,bshc->bhqs', q, k) / np.sqrt(q.shape[-1])
  logit = np.where(seen_BQS[:, None], logit, -np.inf)
  weight = scipy.special.softmax(logit, axis=-1)
  return weight, np.einsum('bhqs,bshc->bqhc', weight, v)


def seen(keep_BL):
  """Kept tokens, and each its own."""
  keep_BL = np.asarray(keep_BL) > 0
  return keep_BL[:, None, :] | np.eye(keep_BL.shape[1], dtype=bool)


class TestMaskedAttention:
  def test_epsilon_is_that_of_the_paper(self):
    q, k, v = draw()
    logit = np.einsum('bqhc,bshc->bhqs', q, k) / np.sqrt(C)
    shown = seen(KEEP_BL)[:, None]
    top = np.where(shown, logit, -np.inf).max(axis=-1, keepdims=True)
    weight = np.exp(logit - top) * shown
    weight = (weight + 0.5 / L) / (weight.sum(axis=-1, keepdims=True) + 0.5)
    want = np.einsum('bhqs,bshc->bqhc', weight, v)
    out = jax.jit(functools.partial(masked_attention, epsilon=0.5))(
      q, k, v, KEEP_BL
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert jnp.abs(out - masked(q, k, v, KEEP_BL)).max() > 0.01

  def test_gradients_are_those_of_the_formula(self):
    q, k, v = draw()
    along = np.random.default_rng(1).normal(size=(B, L, H, C))

    def naive(q, k, v, keep):
      logit = jnp.einsum('bqhc,bshc->bhqs', q, k) / C**0.5
      keep = keep[:, None, None]
      weight = jnp.exp(logit) * (keep + (1 - keep) * jnp.eye(L))
      weight /= weight.sum(axis=-1, keepdims=True)
      return jnp.einsum('bhqs,bshc->bqhc', weight, v)

    def grads(function):
      def loss(*args):
        return (function(*args) * along).sum()

      return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, jnp.array(KEEP_BL))

    ours, theirs = grads(masked_attention), grads(naive)
    for got, want in zip(ours, theirs, strict=True):
      assert jnp.abs(want).max() > 0.1
      np.testing.assert_allclose(got, want, atol=1e-4)
    # The decision to drop learns too, from what the token would have given.
    assert (ours[3][KEEP_BL == 0] != 0).all()

  @pytest.mark.parametrize('scale', [1.0, 100.0])
  @pytest.mark.parametrize('keep', ['none', 'one', 'some', 'all'])
  def test_nothing_is_nan_at_extremes(self, keep, scale):
    q, k, v = draw(scale)
    logit = np.einsum('bqhc,bshc->bhqs', q, k) / np.sqrt(C)
    assert scale == 1 or (logit.max() > 1e4 and logit.min() < -1e4)
    keep_BL = {
      'none': np.zeros((B, L)),
      'one': np.eye(L)[[0, 3]],
      'some': KEEP_BL,
      'all': np.ones((B, L)),
    }[keep].astype(np.float32)
    grads, out = _squared(q, k, v, keep_BL)
    _, want = attend(q, k, v, seen(keep_BL))
    np.testing.assert_allclose(out, want, atol=1e-4)
    assert all(jnp.isfinite(x).all() for x in grads)


@jax.jit
def _squared(q, k, v, keep_BL):
  def loss(*args):
    out = masked_attention(*args)
    return (out**2).sum(), out

  return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, keep_BL)


@pytest.mark.parametrize('keep_BL', [None, KEEP_BL])
def test_a_map_is_the_softmax_of_each_query(keep_BL):
  q, k, v = draw()
  weight = jax.jit(attention_map)(q[:, :3], k, keep_BL)
  shown = np.ones((B, L)) if keep_BL is None else keep_BL
  want, _ = attend(q, k, v, np.broadcast_to(shown[:, None] > 0, (B, L, L)))
  np.testing.assert_allclose(weight, want[:, :, :3], atol=1e-6)


CONFIG = BlockConfig(
  attention=AttentionConfig(
    width=D, num_heads=H, num_kv_heads=H, head_dim=C, causal=False, bias=True
  ),
  mlp=MLPConfig(width=D, hidden=F, kind='gelu', bias=True),
  norm='layer',
  norm_epsilon=0.1,
  residual_scale=0.5,
)


X_BLD = 2 * jax.random.normal(jax.random.key(1), (B, L, D)) + 1
INFO = blocks.info(B, L)
PARAMS = tiny.drawn(
  nn.unbox(jax.eval_shape(Block(CONFIG).init, jax.random.key(0), X_BLD, INFO))
)['params']


@functools.partial(jax.jit, static_argnums=0)
def apply(module, params, x_BLD, info, rngs=None):
  return module.apply({'params': params}, x_BLD, info, rngs=rngs)


def test_large_offsets_do_not_spoil_the_variance():
  # Mean square less squared mean would lose all digits here.
  x_BLD = jax.random.normal(jax.random.key(4), (B, L, D))
  done, want = (
    apply(Block(CONFIG), PARAMS, x + x_BLD, INFO) for x in (1e4, 0.0)
  )
  np.testing.assert_allclose(done.update_BLD, want.update_BLD, atol=0.02)


@pytest.mark.parametrize('score', ['mean', 'first'])
def test_scores_are_float32_under_bfloat16(score):
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  half_BLD = X_BLD.astype('bfloat16')
  done = apply(Block(config, score), PARAMS, half_BLD, INFO)
  assert done.update_BLD.dtype == jnp.bfloat16
  assert done.aux['attention'].dtype == jnp.float32
  np.testing.assert_allclose(done.aux['attention'].sum(axis=-1), 1, atol=1e-6)


RATE, MANY = 0.25, 2000


def dropping(rate, train=True):
  return Block(CONFIG, drop_rate=rate, mode=Mode(train=train))


# The same sequence many times over.
ROWS = (
  jnp.broadcast_to(X_BLD[:1, :2], (MANY, 2, D)),
  TokenInfo(jnp.zeros((MANY, 2), jnp.int32)),
)
RNGS = {'stochastic_depth': jax.random.key(5)}


class TestStochasticDepth:
  @pytest.mark.parametrize(
    ('silent', 'last'), [('mlp', 'down'), ('attention', 'out')]
  )
  def test_each_part_is_dropped_whole_and_kept_in_the_mean(self, silent, last):
    nothing = jax.tree.map(jnp.zeros_like, PARAMS[silent][last])
    params = PARAMS | {silent: PARAMS[silent] | {last: nothing}}
    update = np.asarray(apply(dropping(RATE), params, *ROWS, RNGS).update_BLD)
    alone = jax.tree.map(lambda x: x[:1], ROWS)
    one = apply(Block(CONFIG), params, *alone).update_BLD[0]
    dropped = (update == 0).all(axis=(1, 2))
    want = np.where(dropped[:, None, None], 0, one / (1 - RATE))
    np.testing.assert_allclose(update, want, atol=1e-5)
    # Five standard deviations of a binomial count.
    spread = 5 * np.sqrt(RATE * (1 - RATE) / MANY)
    assert dropped.mean() == pytest.approx(RATE, abs=spread)
    np.testing.assert_allclose(
      update.mean(axis=0), one, atol=float(jnp.abs(one).max()) * 0.1
    )

  def test_attention_and_mlp_are_drawn_apart(self):
    update = apply(dropping(RATE), PARAMS, *ROWS, RNGS).update_BLD
    assert len(np.unique(np.round(update[:, 0, 0], 3))) == 4

  def test_only_training_drops(self):
    with pytest.raises(flax_errors.InvalidRngError, match='stochastic_depth'):
      apply(dropping(0.5), PARAMS, X_BLD, INFO)
    done = apply(dropping(0.5, train=False), PARAMS, X_BLD, INFO)
    whole = apply(Block(CONFIG), PARAMS, X_BLD, INFO)
    np.testing.assert_array_equal(done.update_BLD, whole.update_BLD)
