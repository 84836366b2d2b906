"""Dropping of image tokens: masked in training, removed at inference."""

import dataclasses
import functools

import chex
from flax import errors as flax_errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
import tiny

from mod_jax import errors, losses
from mod_jax.layers.attention import attention_map
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models import dynamic_vit, vit
from mod_jax.models.dynamic_vit import DynamicViTConfig

B, N, V, D = 3, 16, tiny.VIT.num_classes, tiny.VIT.width
BACKBONE = dataclasses.replace(tiny.VIT, image_size=16, patch_size=4)
CONFIG = DynamicViTConfig(backbone=BACKBONE, stages=(0, 1))
SHALLOW = dataclasses.replace(BACKBONE, num_layers=1)
LV = dataclasses.replace(
  SHALLOW,
  stem=ConvStemConfig(width=4, depth=1),
  residual_scale=0.5,
  token_head=True,
  qkv_bias=False,
)
IMAGES = tiny.images(B, size=16)
EVERY_SBN = jnp.ones((2, B, N))
TRAINING = CONFIG.build(train=True)
init = functools.partial(tiny.variables, gain=2.0)


def shallow(score, backbone=SHALLOW):
  """One stage, before the last block."""
  return DynamicViTConfig(
    backbone=backbone,
    stages=(backbone.num_layers - 1,),
    keep=0.4,
    score=score,
  )


VARIABLES = init(CONFIG)


@functools.cache
def pruned():
  return tiny.apply(CONFIG, VARIABLES, IMAGES)


# With a second token before the patches, which is no patch.
DISTILLED = shallow(
  'class_attention', dataclasses.replace(BACKBONE, distilled=True)
)


GUMBEL = {'gumbel': jax.random.key(2)}


@functools.cache
def drawn():
  """What training does with decisions of its own."""
  return tiny.apply(TRAINING, VARIABLES, IMAGES, rngs=GUMBEL)


def assert_agree(config, pruned, masked):
  """What is left of the image is alike, whether masked or removed."""
  np.testing.assert_array_equal(pruned.keep_SBN, masked.keep_SBN)
  np.testing.assert_allclose(pruned.logits_BV, masked.logits_BV, atol=1e-5)
  prefix = config.backbone.num_prefix
  for row, keep_N in enumerate(np.asarray(pruned.keep_SBN[-1])):
    left = [*range(prefix), *(prefix + np.flatnonzero(keep_N))]
    assert pruned.features_BLD.shape[1] == len(left)
    np.testing.assert_allclose(
      pruned.features_BLD[row], masked.features_BLD[row, left], atol=1e-5
    )


class TestMaskedIsPruned:
  """On the same kept set."""

  def test_predicted(self):
    masked = tiny.apply(TRAINING, VARIABLES, IMAGES, pruned().keep_SBN)
    assert masked.features_BLD.shape == (B, 1 + N, D)
    assert_agree(CONFIG, pruned(), masked)
    np.testing.assert_allclose(
      pruned().probability_SBN, masked.probability_SBN, atol=1e-5
    )
    every = tiny.apply(TRAINING, VARIABLES, IMAGES, EVERY_SBN)
    apart_BV = jnp.abs(every.logits_BV - pruned().logits_BV)
    assert (apart_BV.max(axis=-1) > 0.1).all()

  def test_keeping_all_is_the_backbone(self):
    every = tiny.apply(TRAINING, VARIABLES, IMAGES, EVERY_SBN)
    want = tiny.apply(CONFIG.dense_twin(), VARIABLES, IMAGES)
    np.testing.assert_allclose(every.logits_BV, want.logits_BV, atol=1e-5)
    np.testing.assert_allclose(every.features_BLD, want.features_BLD, atol=1e-5)

  @pytest.mark.parametrize('config', [shallow('predicted', LV), DISTILLED])
  def test_of_other_backbones(self, config):
    variables = init(config)
    pruned = tiny.apply(config, variables, IMAGES)
    masked = tiny.apply(config, variables, IMAGES, pruned.keep_SBN)
    assert pruned.keep_SBN.sum(axis=-1).tolist() == [[6.0] * B]
    assert masked.features_BLD.shape[1] == config.backbone.num_prefix + N
    assert_agree(config, pruned, masked)


class TestPruned:
  def test_keeps_so_many_and_ever_fewer(self):
    assert CONFIG.kept == (11, 7)
    keep_SBN = np.asarray(pruned().keep_SBN)
    assert keep_SBN.sum(axis=-1).tolist() == [[11] * B, [7] * B]
    assert ((keep_SBN == 0) | (keep_SBN == 1)).all()
    # What was dropped stays dropped, and each image keeps its own.
    assert (keep_SBN[1] <= keep_SBN[0]).all()
    assert (keep_SBN[:, 0] != keep_SBN[:, 1]).any()
    assert pruned().features_BLD.shape == (B, 1 + 7, D)

  def test_keeps_the_likeliest(self):
    before_BN = np.ones((B, N), bool)
    for p_BN, keep_BN in zip(
      np.asarray(pruned().probability_SBN), pruned().keep_SBN > 0, strict=True
    ):
      assert ((p_BN > 0) == before_BN).all()
      assert (p_BN < 1).all()
      for p_N, keep_N, before_N in zip(p_BN, keep_BN, before_BN, strict=True):
        assert p_N[keep_N].min() > p_N[before_N & ~keep_N].max()
      before_BN = np.asarray(keep_BN)

  def test_patches_of_different_odds_do_not_tie_in_bfloat16(self):
    head = dynamic_vit.PredictionHead(dtype='bfloat16')
    x_BND = jax.random.normal(jax.random.key(0), (1, 2000, 32))
    log_BN2, _ = jax.jit(head.init_with_output)(
      jax.random.key(1), x_BND, jnp.ones(x_BND.shape[:2])
    )
    odds_N = log_BN2[0, :, 0] - log_BN2[0, :, 1]
    assert len(np.unique(odds_N)) > 1800

  def test_the_class_attention_of_the_block_before(self):
    output, sown = tiny.apply(
      DISTILLED, init(DISTILLED), IMAGES, mutable='intermediates'
    )
    heard = sown['intermediates']['block_0']['attention']
    weight = attention_map(heard['queries'][0], heard['keys'][0])
    score_BN = np.asarray(weight)[:, :, 0].mean(axis=1)[:, 2:]
    for keep_N, score_N in zip(output.keep_SBN[0], score_BN, strict=True):
      best = np.sort(np.argsort(-score_N)[:6])
      assert np.flatnonzero(keep_N).tolist() == best.tolist()
    assert output.probability_SBN is None

  def test_chance(self):
    config = shallow('random')
    variables = init(config)
    kept = []
    for seed in (0, 0, 1):
      rngs = {'routing': jax.random.key(seed)}
      output = tiny.apply(config, variables, IMAGES, rngs=rngs)
      assert output.features_BLD.shape == (B, 7, D)
      assert output.keep_SBN.sum(axis=-1).tolist() == [[6] * B]
      kept.append(np.asarray(output.keep_SBN[0]))
    assert (kept[0] == kept[1]).all()
    assert (kept[0] != kept[2]).any()
    assert (kept[0][0] != kept[0][1]).any()
    with pytest.raises(flax_errors.InvalidRngError, match='routing'):
      jax.eval_shape(config.build().apply, variables, IMAGES)

  def test_one_pattern_for_all_images(self):
    config = shallow('static')
    variables = init(config)
    output = tiny.apply(config, variables, IMAGES)
    pattern_N2 = np.asarray(variables['params']['pattern_0'])
    odds_N = pattern_N2[:, 0] - pattern_N2[:, 1]
    best = np.sort(np.argsort(-odds_N)[:6])
    for keep_N in output.keep_SBN[0]:
      assert np.flatnonzero(keep_N).tolist() == best.tolist()
    np.testing.assert_allclose(
      output.probability_SBN[0],
      np.tile(special.expit(odds_N), (B, 1)),
      atol=1e-6,
    )

  @pytest.mark.parametrize('side', [4, 3, 1])
  def test_pooling(self, side):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, side, side, 3)).astype(np.float32)
    half = -(-side // 2)
    want = np.stack(
      [
        x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean(axis=(1, 2))
        for i, j in np.ndindex(half, half)
      ],
      axis=1,
    )
    out = dynamic_vit._pool(jnp.array(x.reshape(2, -1, 3)))
    np.testing.assert_allclose(out, want, atol=1e-6)


class TestDecisions:
  def test_are_exact_and_multiply(self):
    keep_SBN = np.asarray(drawn().keep_SBN)
    assert set(np.unique(keep_SBN)) == {0, 1}
    assert (keep_SBN[1] <= keep_SBN[0]).all()
    assert (keep_SBN[1] < keep_SBN[0]).any()
    # Masks, so that all tokens are there; and as many as chance has it.
    assert drawn().features_BLD.shape == (B, 1 + N, D)
    assert len(set(keep_SBN[0].sum(axis=-1).tolist())) > 1

  def test_a_second_chance_is_none(self):
    rng = np.random.default_rng(5)
    decisions_SBN = (rng.random((2, B, N)) < 0.5).astype(np.float32)
    output = tiny.apply(TRAINING, VARIABLES, IMAGES, jnp.array(decisions_SBN))
    np.testing.assert_array_equal(
      output.keep_SBN, np.cumprod(decisions_SBN, axis=0)
    )

  def test_are_drawn_by_their_odds(self):
    config = shallow('static')
    variables = init(config)
    many = jnp.zeros((400, 16, 16, 3))
    output = tiny.apply(config.build(train=True), variables, many, rngs=GUMBEL)
    pattern_N2 = np.asarray(variables['params']['pattern_0']) * 1.0
    p_N = special.expit(pattern_N2[:, 0] - pattern_N2[:, 1])
    np.testing.assert_allclose(
      output.keep_SBN[0].mean(axis=0), p_N, atol=5 * 0.5 / 20
    )

  def test_training_needs_its_stream(self):
    with pytest.raises(flax_errors.InvalidRngError, match='gumbel'):
      jax.eval_shape(CONFIG.build(train=True).apply, VARIABLES, IMAGES)


@functools.partial(jax.jit, static_argnums=0)
def gradient(config, params, decisions_SBN=None):
  """Returns a loss of all that training looks at, what is kept, gradients."""

  def loss(params):
    output = config.build(train=True).apply(
      {'params': params}, IMAGES, decisions_SBN, rngs=GUMBEL
    )
    left_BLD = output.features_BLD[:, 1:] * output.keep_SBN[-1][..., None]
    total, _ = losses.ratio_loss(output.keep_SBN, config.targets)
    total += (output.logits_BV**2).sum() + (left_BLD**2).sum()
    return total, output.keep_SBN

  (total, keep_SBN), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return total, keep_SBN, grads


# Masks are drawn at an extreme ratio.
TENTH = dataclasses.replace(CONFIG, keep=0.1)


def _heads(params, bias):
  """Returns parameters whose heads are sure: bias is on keep, minus drop."""
  heads = {}
  for name in ('prediction_0', 'prediction_1'):
    last = params[name]['linear_3']
    last = last | {'bias': jnp.array([bias, -bias], jnp.float32)}
    heads[name] = params[name] | {'linear_3': last}
  return params | heads


class TestGradients:
  """Through all that training looks at; none is ever NaN."""

  def test_reach_every_head(self):
    assert TENTH.kept == (1, 1)
    total, keep_SBN, grads = gradient(TENTH, VARIABLES['params'])
    assert 0 < keep_SBN.mean() < 1
    chex.assert_tree_all_finite((total, grads))
    for name in ('prediction_0', 'prediction_1'):
      assert all(x.any() for x in jax.tree.leaves(grads[name]))
    assert grads['patch']['kernel'].any()

  @pytest.mark.parametrize('bias', [-1e4, 1e4])
  def test_heads_that_are_sure(self, bias):
    params = _heads(VARIABLES['params'], bias)
    total, keep_SBN, grads = gradient(TENTH, params)
    assert keep_SBN.mean() == (bias > 0)
    chex.assert_tree_all_finite((total, grads))
    assert grads['head']['kernel'].any()

  @pytest.mark.parametrize('left', ['none', 'one', 'none_at_last'])
  def test_decisions_that_leave_nothing(self, left):
    decisions_SBN = np.zeros((2, B, N), np.float32)
    if left == 'one':
      decisions_SBN[:, np.arange(B), [0, 3, 15]] = 1
    if left == 'none_at_last':
      decisions_SBN[0] = 1
    params = VARIABLES['params']
    total, keep_SBN, grads = gradient(CONFIG, params, decisions_SBN)
    np.testing.assert_array_equal(keep_SBN, decisions_SBN)
    chex.assert_tree_all_finite((total, grads))
    assert grads['class_token'].any()

  def test_lv_vit_s_largest_of_no_patches(self):
    variables = init(shallow('predicted', LV))
    x_BLD = jax.random.normal(jax.random.key(0), (B, 1 + N, D))

    @jax.jit
    def run(params, x_BLD):
      def loss(params, x_BLD):
        logits_BV, _ = LV.build().apply(
          {'params': params}, x_BLD, jnp.zeros((B, N)), method='classify'
        )
        return (logits_BV**2).sum()

      return jax.value_and_grad(loss, (0, 1))(params, x_BLD)

    loss, grads = run(variables['params'], x_BLD)
    chex.assert_tree_all_finite((loss, grads))
    assert not grads[0]['head_tokens']['kernel'].any()
    assert grads[0]['head']['kernel'].any()


class TestConfig:
  @pytest.mark.parametrize(
    ('size', 'kept'),
    [
      (224, (137, 96, 67)),
      (160, (70, 49, 34)),  # As floats, 0.7 · 0.7 · 100 is below 49.
    ],
  )
  def test_counts_follow_the_resolution(self, size, kept):
    config = DynamicViTConfig(backbone=vit.deit_small(image_size=size))
    assert config.kept == kept
    tokens = [config.num_tokens] * 3
    for count in kept:
      tokens += [1 + count] * 3
    assert list(config.tokens_per_block()) == tokens

  def test_runs_at_another_resolution(self):
    backbone = dataclasses.replace(SHALLOW, image_size=12)
    config = shallow('predicted', backbone)
    apply, variables = config.build().apply, init(config)
    output = jax.eval_shape(apply, variables, jnp.ones((1, 12, 12, 3)))
    assert config.kept == (3,)
    assert output.features_BLD.shape == (1, 4, D)
    with pytest.raises(
      errors.UserError, match=r'expected \[batch, 12, 12, 3\]'
    ):
      jax.eval_shape(apply, variables, jnp.ones((1, 16, 16, 3)))
