"""The language model: its properties, in every mode of routing."""

import collections
import dataclasses

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import errors, losses
from mod_jax.layers import stack
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models import lm
from mod_jax.models.lm import LanguageModel, LMCache, LMConfig
from mod_jax_kernels.attention import choice

B, L = 3, 10
TOKENS_BL = jax.random.randint(jax.random.key(7), (B, L), 0, 11)
# Left padding, right padding, and a hole between prompt and continuation.
VALID_BL = (
  np.array(
    [
      [0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
      [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
      [1, 1, 1, 1, 0, 1, 1, 1, 1, 1],
    ]
  )
  > 0
)


def chosen(out):
  """[R, B, L]: what each routed layer processed."""
  return np.stack([told.chosen_BL for told in out.routing])


class TestForward:
  def test_bfloat16_with_float32_parameters_router_and_logits(self, config):
    config = dataclasses.replace(config, tied_head=False)
    variables = tiny.variables(config)
    half = dataclasses.replace(config, dtype='bfloat16')
    shapes = jax.eval_shape(
      LanguageModel(half).init, jax.random.key(0), TOKENS_BL
    )
    assert jax.tree.structure(nn.unbox(shapes)) == jax.tree.structure(variables)
    assert all(x.dtype == 'float32' for x in jax.tree.leaves(shapes))
    out = tiny.apply(half, variables, TOKENS_BL)
    assert out.logits_BLV.dtype == jnp.float32
    # Not merely converted: they carry more digits than bfloat16 has.
    rounded_BLV = out.logits_BLV.astype('bfloat16').astype('float32')
    assert (out.logits_BLV != rounded_BLV).mean() > 0.9
    for told in out.routing:
      assert told.score_BL.dtype == told.weight_BL.dtype == jnp.float32

  def test_short_rows_choose_at_least_one_token(self, config, variables):
    out = tiny.apply(config, variables, TOKENS_BL[:, :2])
    assert (chosen(out).sum(axis=-1) == 1).all()


class TestDecoding:
  """Prefill and steps ≡ the whole row in the same causal mode."""

  # The others are in the tests of generation.
  @pytest.mark.parametrize(
    ('rule', 'overflow', 'chunk'),
    [
      ('router', 'drop', 2),
      ('predictor', 'drop', 1),
      ('threshold', 'exact', 0),
    ],
  )
  def test_equals_the_full_forward(
    self, config, variables, generate, rule, overflow, chunk
  ):
    mode = RoutingMode(rule=rule, overflow=overflow, slack=1.0)
    valid_BL = jnp.array(VALID_BL)
    logits_BLV, chosen_RBL, cache = generate(
      config,
      variables,
      TOKENS_BL,
      valid_BL,
      mode=dataclasses.replace(mode, chunk=chunk),
      prompt=5,
    )
    full = tiny.apply(
      config, variables, TOKENS_BL, valid_BL=valid_BL, mode=mode
    )
    np.testing.assert_array_equal(chosen_RBL, chosen(full))
    np.testing.assert_allclose(
      logits_BLV[VALID_BL], full.logits_BLV[VALID_BL], atol=1e-4
    )
    counts_B = VALID_BL.sum(axis=-1)
    assert cache.length_B.tolist() == counts_B.tolist()
    routed = (cache.blocks[0], cache.blocks[2])
    for block, chosen_BL in zip(routed, chosen_RBL, strict=True):
      lengths_B = chosen_BL.sum(axis=-1)
      np.testing.assert_array_equal(block.length_B, lengths_B)
      assert (lengths_B < counts_B).any()  # Something was skipped.
    np.testing.assert_array_equal(cache.blocks[1].length_B, counts_B)
    assert cache.blocks[0].slots == (3 if overflow == 'drop' else L)
    assert cache.blocks[1].slots == L

  def test_no_block_of_a_gpu_asks_how_much_of_its_cache_to_read(
    self, config, variables, monkeypatch
  ):
    mode = RoutingMode(rule='router', chunk=0)
    cache = LMCache.empty(config, B, 512, mode)

    def step(tokens_BL, cache):
      return tiny.apply(config, variables, tokens_BL, mode=mode, cache=cache)

    cache = step(TOKENS_BL, cache).cache
    args = TOKENS_BL[:, :1], cache
    on_cpu, expected = str(jax.make_jaxpr(step)(*args)), step(*args)
    monkeypatch.setattr(choice, 'platform', lambda: 'cuda')
    monkeypatch.setattr(choice, 'capability', lambda: 9.0)
    jax.clear_caches()  # Else what was traced before is taken.
    on_gpu, found = str(jax.make_jaxpr(step)(*args)), step(*args)
    assert on_cpu.count('cond[') - on_gpu.count('cond[') == 2
    np.testing.assert_allclose(found.logits_BLV, expected.logits_BLV, atol=1e-5)

  def test_one_token_cannot_be_chosen_by_top_k(self, config, variables):
    cache = LMCache.empty(config, B, L, RoutingMode())
    with pytest.raises(errors.UserError, match="top_k.*'router'"):
      LanguageModel(config).apply(variables, TOKENS_BL[:, :1], cache=cache)


# Other forms of routing, each trained by a causal rule with few slots: tokens
# that choose for themselves by a two-layer router of all blocks, with weights
# on both paths; and a block's result in place of its input.
FORMS = {
  'token choice': {
    'gate': 'sigmoid',
    'train_rule': 'router',
    'balance_loss': 0.01,
    'router_loss': 0.0,
    'shared_router': True,
    'router_width': 5,
    'router_bias': True,
    'combine': 'weigh_bypass',
  },
  'replace': {
    'gate': 'one_plus_tanh',
    'train_rule': 'router',
    'combine': 'replace',
  },
}


class TestForms:
  @pytest.mark.parametrize('form', FORMS)
  def test_decodes_to_the_full_forward(self, config, generate, form):
    routing = MoDConfig(
      capacity=0.3, period=1, offset=0, train_slack=1.0, **FORMS[form]
    )
    config = dataclasses.replace(config, num_layers=2, routing=routing)
    variables = tiny.variables(config)
    if routing.shared_router:
      biases = {'bias': 0.3, 'hidden_bias': np.linspace(-1, 1, 5)}
      variables['params']['router'] |= jax.tree.map(jnp.float32, biases)
      assert 'router' not in variables['params']['block_0']
    mode = routing.train_mode
    full = tiny.apply(config, variables, TOKENS_BL, mode=mode)
    assert any(told.overflow_B.any() for told in full.routing)
    logits_BLV, chosen_RBL, _ = generate(
      *(config, variables, TOKENS_BL, jnp.ones((B, L), bool)),
      mode=mode,
      prompt=4,
    )
    np.testing.assert_array_equal(chosen_RBL, chosen(full))
    assert chosen_RBL[..., 4:].any()
    np.testing.assert_allclose(logits_BLV, full.logits_BLV, atol=1e-4)

  @pytest.mark.parametrize('part', ['attention', 'mlp'])
  def test_half_a_block_decodes_to_the_full_forward(
    self, config, variables, generate, part
  ):
    routing = dataclasses.replace(config.routing, part=part)
    config = dataclasses.replace(config, routing=routing)
    mode = RoutingMode(rule='router', chunk=2)
    full = tiny.apply(config, variables, TOKENS_BL, mode=mode)
    logits_BLV, chosen_RBL, cache = generate(
      *(config, variables, TOKENS_BL, jnp.ones((B, L), bool)),
      mode=mode,
      prompt=4,
    )
    np.testing.assert_array_equal(chosen_RBL, chosen(full))
    counts_B = chosen_RBL[0].sum(axis=-1)
    assert (counts_B < L).any()
    assert chosen_RBL[..., 4:].any()
    np.testing.assert_allclose(logits_BLV, full.logits_BLV, atol=1e-4)
    # The attention of a block whose feed-forward alone is routed sees all.
    lengths = [L] * B if part == 'mlp' else counts_B.tolist()
    assert cache.blocks[0].length_B.tolist() == lengths
    assert cache.blocks[0].slots == L

  @pytest.mark.slow
  def test_a_shared_router_gets_the_sum_of_all_gradients(self, config):
    """Also where the layers are scanned."""
    routing = MoDConfig(capacity=0.3, period=1, offset=0)
    config = dataclasses.replace(config, num_layers=2, routing=routing)
    routing = dataclasses.replace(routing, shared_router=True)
    shared = dataclasses.replace(config, routing=routing)
    one = tiny.variables(shared)['params']
    blocks = ('block_0', 'block_1')
    own = one | {name: one[name] | {'router': one['router']} for name in blocks}
    del own['router']

    def grads(config, params):
      return jax.jit(jax.value_and_grad(_loss(config)))(params)

    want, each = grads(config, own)
    each_RD = [each[name]['router']['kernel'] for name in blocks]
    assert all(grad_D.any() for grad_D in each_RD)
    for case in ((shared, one), lm.scanned(shared, one)):
      loss, found = grads(*case)
      np.testing.assert_allclose(loss, want, rtol=1e-5)
      np.testing.assert_allclose(
        found['router']['kernel'], sum(each_RD), atol=1e-4, rtol=1e-4
      )


class TestRows:
  """A row is what it is, whatever stands beside it."""

  def test_packed_documents_equal_separate_rows(self, config, variables):
    rule = 'router'
    segment_BL = jnp.array([[1] * 4 + [2] * 6] * B)
    packed = tiny.apply(
      config, variables, TOKENS_BL, segment_BL=segment_BL, mode=rule
    )
    # As rows of one length, padded at the right, in one batch.
    documents = [TOKENS_BL[:, :4], TOKENS_BL[:, 4:]]
    rows_BL = jnp.concatenate(
      [jnp.pad(x, ((0, 0), (0, L - x.shape[1]))) for x in documents]
    )
    lengths_B1 = np.array([[4]] * B + [[6]] * B)
    valid_BL = jnp.array(np.arange(L) < lengths_B1)
    alone = tiny.apply(config, variables, rows_BL, valid_BL=valid_BL, mode=rule)
    logits_BLV = alone.logits_BLV
    np.testing.assert_allclose(
      packed.logits_BLV,
      jnp.concatenate([logits_BLV[:B, :4], logits_BLV[B:, :6]], axis=1),
      atol=1e-4,
    )
    assert chosen(packed).any()
    # Without segments, the second document sees the first.
    merged = tiny.apply(config, variables, TOKENS_BL, mode=rule)
    difference = abs(merged.logits_BLV - packed.logits_BLV)
    assert difference[:, :4].max() < 1e-4 < difference[:, 4:].max()

  @pytest.mark.parametrize(
    ('rule', 'overflow', 'side'),
    [
      ('top_k', 'exact', 'left'),
      ('fixed', 'exact', 'left'),
      ('router', 'exact', 'right'),
      ('router', 'drop', 'left'),
    ],
  )
  def test_padding_changes_nothing(
    self, config_of, variables, rule, overflow, side
  ):
    config = config_of(rule)
    mode = RoutingMode(rule=rule, overflow=overflow)
    alone = tiny.apply(config, variables, TOKENS_BL[:, :7], mode=mode)
    if overflow == 'drop':
      # The padded array has a slot more, and a token that would take it.
      slots = [mode.slots(0.3, n) for n in (7, L)]
      assert slots == [3, 4]
      assert any(told.overflow_B.any() for told in alone.routing)
    real = slice(3, L) if side == 'left' else slice(7)
    valid_BL = jnp.zeros((B, L), bool).at[:, real].set(True)
    # What stands in the padding does not matter.
    padded_BL = TOKENS_BL.at[:, real].set(TOKENS_BL[:, :7])
    padded = tiny.apply(
      config, variables, padded_BL, valid_BL=valid_BL, mode=mode
    )
    np.testing.assert_array_equal(chosen(padded)[..., real], chosen(alone))
    assert not chosen(padded)[:, ~np.array(valid_BL)].any()
    np.testing.assert_allclose(
      padded.logits_BLV[:, real], alone.logits_BLV, atol=1e-4
    )
    assert jnp.isfinite(padded.logits_BLV).all()


@pytest.fixture(scope='module')
def four(config):
  """Two groups to scan over."""
  return dataclasses.replace(config, num_layers=4)


@pytest.fixture(scope='module')
def four_variables(four):
  return tiny.variables(four)


class TestLayouts:
  """Scanned ≡ unrolled; rematerialised ≡ not."""

  def test_scanned_equals_unrolled(self, four, four_variables):
    scanned_config, params = lm.scanned(four, four_variables['params'])
    assert scanned_config.scan_layers
    moving = stack.scanned(scanned_config.stack, four_variables['moving'])
    scanned_variables = {'params': params, 'moving': moving}
    a, b = (
      tiny.apply(config, variables, TOKENS_BL, mode='threshold')
      for config, variables in (
        (four, four_variables),
        (scanned_config, scanned_variables),
      )
    )
    np.testing.assert_allclose(a.logits_BLV, b.logits_BLV, atol=1e-5)
    # Four layers, two groups: the order of the routed ones is kept.
    assert len(a.routing) == len(b.routing) == 2
    chex.assert_trees_all_close(a.routing, b.routing, atol=1e-5)
    assert (chosen(a)[0] != chosen(a)[1]).any()

  def test_converters_undo_each_other(self, four, four_variables):
    params = four_variables['params']
    scanned_config, stacked = lm.scanned(four, params)
    config, again = lm.unrolled(scanned_config, stacked)
    assert config == four
    chex.assert_trees_all_equal(again, params)
    assert lm.unrolled(four, params) == (four, params)
    assert lm.scanned(scanned_config, stacked) == (scanned_config, stacked)
    # And a scanned model asks for just these parameters.
    chex.assert_trees_all_equal_shapes(
      tiny.shapes(scanned_config)['params'], stacked
    )

  def test_scanned_layers_start_different(self, four):
    model = LanguageModel(dataclasses.replace(four, scan_layers=True))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS_BL)['params']
    params = nn.unbox(params)
    for leaf in (
      params['layers']['block_0']['router']['kernel'],
      params['layers']['block_1']['mlp']['up']['kernel'],
    ):
      assert (leaf[0] != leaf[1]).all()

  @pytest.mark.slow
  def test_remat_changes_neither_values_nor_gradients(
    self, four, four_variables, count
  ):
    scanned, stacked = lm.scanned(four, four_variables['params'])
    want = jax.jit(jax.value_and_grad(_loss(four)))(four_variables['params'])
    for config, params in (
      (four, four_variables['params']),
      (scanned, stacked),
    ):
      counts = []
      for remat in ('none', 'dots', 'full'):
        loss = _loss(dataclasses.replace(config, remat=remat))
        traced = jax.jit(jax.value_and_grad(loss)).trace(params)
        counts.append(count(traced.jaxpr.jaxpr))
        if remat == 'full' or (remat == 'dots' and config.scan_layers):
          loss, grads = traced.lower().compile()(params)
          _, grads = lm.unrolled(config, grads)
          chex.assert_trees_all_close((loss, grads), want, atol=1e-5, rtol=1e-4)
      # The backward pass computes features again, but chooses no tokens again.
      none, dots, full = counts
      assert none['top_k'] == dots['top_k'] == full['top_k'] > 0
      assert none['sort'] == dots['sort'] == full['sort'] > 0
      assert none['dot_general'] < dots['dot_general'] < full['dot_general']


def test_loss_of_targets_is_that_of_the_logits(config, variables):
  model = LanguageModel(dataclasses.replace(config, dtype='bfloat16'))
  targets_BL = jnp.roll(TOKENS_BL, -1, axis=1)
  weights_BL = VALID_BL.astype(jnp.float32)
  plain = tiny.apply(model, variables, TOKENS_BL)
  assert plain.loss is None
  for given, weights in (
    ({}, jnp.ones((B, L))),
    ({'weights_BL': weights_BL}, weights_BL),
  ):
    out = tiny.apply(
      model, variables, TOKENS_BL, targets_BL=targets_BL, **given
    )
    assert out.logits_BLV is None
    want = losses.next_token_loss(plain.logits_BLV, targets_BL, weights)
    np.testing.assert_allclose(out.loss, want, rtol=1e-6)


def _loss(config, mode='top_k'):
  def loss(params):
    out = LanguageModel(config).apply(
      {'params': params}, TOKENS_BL[:, :-1], mode=mode
    )
    total, weight = losses.next_token_loss(
      out.logits_BLV, TOKENS_BL[:, 1:], jnp.ones((B, L - 1))
    )
    for told in out.routing:
      total += losses.choice_bce(told.score_BL, told.top_k_BL)[0]
    return total / weight

  return loss


@pytest.fixture(scope='module')
def count(equations):
  """Returns a function that counts operations, those inside others too."""
  return lambda jaxpr: collections.Counter(
    equation.primitive.name for equation in equations(jaxpr)
  )


class TestThreshold:
  @pytest.mark.slow
  def test_moves_alike_scanned_and_rematerialised(self, four, four_variables):
    def train(config, variables):
      def loss(params):
        out, moved = LanguageModel(config).apply(
          variables | {'params': params}, TOKENS_BL, mutable=['moving']
        )
        return jnp.sum(out.logits_BLV**2), moved['moving']

      # As a step does, where what is computed again could move it again.
      _, moved = jax.jit(jax.grad(loss, has_aux=True))(variables['params'])
      return stack.unrolled(config.stack, moved)

    want = train(four, four_variables)
    assert set(want) == {'block_0', 'block_2'}
    looped, _ = lm.scanned(four, four_variables['params'])
    looped = dataclasses.replace(looped, remat='full')
    scanned_variables = {
      name: stack.scanned(looped.stack, collection)
      for name, collection in four_variables.items()
    }
    chex.assert_trees_all_close(
      train(looped, scanned_variables), want, atol=1e-5
    )


@pytest.fixture(scope='module')
def gaussian(config):
  return dataclasses.replace(
    config,
    num_layers=4,
    routing=MoDConfig(capacity=0.3, offset=0, score='gaussian'),
  )


class TestGaussian:
  def test_new_draw_for_each_key_and_layer(self, gaussian, four_variables):
    config, params = lm.scanned(gaussian, four_variables['params'])
    variables = {'params': params}

    def scores(seed):
      rngs = {'routing': jax.random.key(seed)}
      out = tiny.apply(config, variables, TOKENS_BL, rngs=rngs)
      assert all((told.weight_BL == 1).all() for told in out.routing)
      assert (chosen(out).sum(axis=-1) == 3).all()
      return [np.asarray(told.score_BL) for told in out.routing]

    first, other = scores(0), scores(1)
    np.testing.assert_array_equal(first, scores(0))
    assert (first[0] != first[1]).all()
    assert (first[0] != other[0]).all()
    assert (first[0][0] != first[0][1]).all()

  def test_remat_draws_the_same_twice(self, gaussian, four_variables):
    config = dataclasses.replace(gaussian, num_layers=1)
    params = four_variables['params']
    rngs = {'routing': jax.random.key(0)}
    grads = []
    for remat in ('none', 'full'):
      model = LanguageModel(dataclasses.replace(config, remat=remat))

      def loss(params, model=model):
        out = model.apply({'params': params}, TOKENS_BL, rngs=rngs)
        return jnp.sum(out.logits_BLV**2)

      grads.append(jax.jit(jax.grad(loss))(params))
    chex.assert_trees_all_close(*grads, atol=1e-4, rtol=1e-4)


def test_sizes_left_open():
  block = LMConfig(width=192, num_heads=6).block
  assert block.attention.head_dim == 32
  assert block.attention.num_kv_heads == 6
  assert block.mlp.hidden == 512
  assert LMConfig(mlp='gelu').block.mlp.hidden == 4 * 192
  assert LMConfig(width=200, num_heads=4).block.mlp.hidden == 544


def test_padding_may_hold_any_number(config, variables):
  tokens_BL = np.where(VALID_BL, TOKENS_BL, -7)
  jax.eval_shape(
    lambda: LanguageModel(config).apply(variables, tokens_BL, valid_BL=VALID_BL)
  )
