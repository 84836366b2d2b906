"""The language model: its properties, in every mode of routing."""

import collections
import dataclasses
import functools

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import config as config_lib
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
HOLES = ['0011111111', '1111110000', '1111011111']
VALID_BL = np.array([list(row) for row in HOLES]) == '1'
# Routed, dense, routed; trained for every learned causal rule.
MOD = MoDConfig(capacity=0.3, offset=0, predictor_width=4, threshold_decay=0.5)
CONFIG = dataclasses.replace(
  tiny.LM,
  vocab_size=11,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  routing=MOD,
)
# They also fit fixed choices: what these do not ask for is left alone.
VARIABLES = tiny.variables(CONFIG)


def fixed(score, num_layers=3):
  routing = MoDConfig(capacity=0.3, offset=0, score=score)
  return dataclasses.replace(CONFIG, num_layers=num_layers, routing=routing)


def run(*inputs, config=CONFIG, variables=VARIABLES, **kwargs):
  return tiny.apply(config, variables, *inputs, **kwargs)


def chosen(out):
  """[R, B, L]: what each routed layer processed."""
  return jnp.stack([told.chosen_BL for told in out.routing])


@functools.partial(jax.jit, static_argnames=('config', 'mode', 'prompt'))
def generate(config, variables, tokens_BL, valid_BL, mode, prompt):
  """Returns logits_BLV, what each layer chose [R, B, L], and the cache."""
  batch, length = tokens_BL.shape
  length_B = valid_BL.sum(axis=-1)
  cache = LMCache.empty(config, batch, length, mode, length_B)
  apply = functools.partial(LanguageModel(config).apply, variables, mode=mode)
  first = apply(
    tokens_BL[:, :prompt], valid_BL=valid_BL[:, :prompt], cache=cache
  )

  def step(cache, column):
    token_B, valid_B = column
    out = apply(token_B[:, None], valid_BL=valid_B[:, None], cache=cache)
    return out.cache, (out.logits_BLV[:, 0], chosen(out)[..., 0])

  cache, (logits_TBV, chosen_TRB) = jax.lax.scan(
    step, first.cache, (tokens_BL[:, prompt:].T, valid_BL[:, prompt:].T)
  )
  logits_BLV = jnp.concatenate(
    [first.logits_BLV, logits_TBV.swapaxes(0, 1)], axis=1
  )
  chosen_RBL = jnp.concatenate(
    [chosen(first), jnp.moveaxis(chosen_TRB, 0, 2)], axis=2
  )
  return logits_BLV, chosen_RBL, cache


class TestForward:
  def test_a_bfloat16_model_has_float32_logits(self):
    untied = dataclasses.replace(CONFIG, tied_head=False)
    half = dataclasses.replace(untied, dtype='bfloat16')
    out = tiny.apply(half, tiny.variables(untied), TOKENS_BL)
    assert out.logits_BLV.dtype == jnp.float32
    # Not merely converted: they carry more digits than bfloat16 has.
    rounded_BLV = out.logits_BLV.astype('bfloat16').astype('float32')
    assert (out.logits_BLV != rounded_BLV).mean() > 0.9

  def test_short_rows_choose_at_least_one_token(self):
    out = run(TOKENS_BL[:, :2])
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
  def test_equals_the_full_forward(self, rule, overflow, chunk):
    mode = RoutingMode(rule=rule, overflow=overflow, slack=1.0)
    valid_BL = jnp.array(VALID_BL)
    logits_BLV, chosen_RBL, cache = generate(
      *(CONFIG, VARIABLES, TOKENS_BL, valid_BL),
      mode=dataclasses.replace(mode, chunk=chunk),
      prompt=5,
    )
    full = run(TOKENS_BL, valid_BL=valid_BL, mode=mode)
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
    assert cache.blocks[0].num_slots == (3 if overflow == 'drop' else L)
    assert cache.blocks[1].num_slots == L

  @pytest.mark.parametrize(
    ('capacity', 'batch', 'in_turns'),
    [(0.5, 8, False), (0.5, 2, True), (0.125, 8, True), (0.125, 64, True)],
  )
  def test_rows_are_masked_where_all_are_expected(
    self, capacity, batch, in_turns
  ):
    config = config_lib.replace(CONFIG, {'routing.capacity': capacity})
    mode = RoutingMode(rule='router')
    cache = jax.eval_shape(lambda: LMCache.empty(config, batch, L, mode))

    def step(variables, tokens_BL, cache):
      apply = LanguageModel(config).apply
      return apply(variables, tokens_BL, mode=mode, cache=cache).logits_BLV

    tokens_B1 = jnp.zeros((batch, 1), int)
    text = str(jax.make_jaxpr(step)(VARIABLES, tokens_B1, cache))
    assert ('while[' in text) == in_turns

  def test_no_block_of_a_gpu_asks_how_much_of_its_cache_to_read(
    self, monkeypatch
  ):
    mode = RoutingMode(rule='router', chunk=0)
    cache = LMCache.empty(CONFIG, B, 512, mode)

    def step(tokens_BL, cache):
      return run(tokens_BL, mode=mode, cache=cache)

    cache = step(TOKENS_BL, cache).cache
    args = TOKENS_BL[:, :1], cache
    on_cpu, expected = str(jax.make_jaxpr(step)(*args)), step(*args)
    monkeypatch.setattr(choice, 'platform', lambda: 'cuda')
    monkeypatch.setattr(choice, 'capability', lambda: 9.0)
    jax.clear_caches()  # Else what was traced before is taken.
    on_gpu, found = str(jax.make_jaxpr(step)(*args)), step(*args)
    assert on_cpu.count('cond[') - on_gpu.count('cond[') == 2
    np.testing.assert_allclose(found.logits_BLV, expected.logits_BLV, atol=1e-5)

  def test_one_token_cannot_be_chosen_by_top_k(self):
    cache = LMCache.empty(CONFIG, B, L, RoutingMode())
    with pytest.raises(errors.UserError, match='top_k.*one of threshold, '):
      LanguageModel(CONFIG).apply(VARIABLES, TOKENS_BL[:, :1], cache=cache)


# Other forms of routing, each with few slots: tokens that choose for themselves
# by a two-layer router of all blocks, with weights on both paths; a block's
# result in place of its input; half a block.
FORMS = {
  'token choice': {
    'gate': 'sigmoid',
    'balance_loss': 0.01,
    'router_loss': 0.0,
    'shared_router': True,
    'router_width': 5,
    'router_bias': True,
    'combine': 'weigh_bypass',
  },
  'replace': {'gate': 'one_plus_tanh', 'combine': 'replace'},
  'attention': {'part': 'attention'},
  'mlp': {'part': 'mlp'},
}


class TestForms:
  @pytest.mark.parametrize('form', FORMS)
  def test_decodes_to_the_full_forward(self, form):
    routing = MoDConfig(
      **{'capacity': 0.3, 'period': 1, 'offset': 0},
      **{'train_rule': 'router', 'train_slack': 1.0, **FORMS[form]},
    )
    config = dataclasses.replace(CONFIG, num_layers=2, routing=routing)
    variables = tiny.variables(config)
    if routing.shared_router:
      biases = {'bias': 0.3, 'hidden_bias': np.linspace(-1, 1, 5)}
      variables['params']['router'] |= jax.tree.map(jnp.float32, biases)
      assert 'router' not in variables['params']['block_0']
    mode = routing.train_mode
    full = tiny.apply(config, variables, TOKENS_BL, mode=mode)
    assert any(told.overflow_B.any() for told in full.routing)
    logits_BLV, chosen_RBL, cache = generate(
      *(config, variables, TOKENS_BL, jnp.ones((B, L), bool)),
      mode=mode,
      prompt=4,
    )
    np.testing.assert_array_equal(chosen_RBL, chosen(full))
    assert chosen_RBL[..., 4:].any()
    np.testing.assert_allclose(logits_BLV, full.logits_BLV, atol=1e-4)
    # The attention of a block whose feed-forward alone is routed sees all.
    lengths_B = [L] * B if form == 'mlp' else chosen_RBL[0].sum(axis=-1)
    np.testing.assert_array_equal(cache.blocks[0].length_B, lengths_B)

  @pytest.mark.slow
  def test_a_shared_router_gets_the_sum_of_all_gradients(self):
    """Also where the layers are scanned."""
    routing = MoDConfig(capacity=0.3, period=1, offset=0)
    config = dataclasses.replace(CONFIG, num_layers=2, routing=routing)
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

  def test_packed_documents_equal_separate_rows(self):
    rule = 'router'
    segment_BL = jnp.array([[1] * 4 + [2] * 6] * B)
    packed = run(TOKENS_BL, segment_BL=segment_BL, mode=rule)
    # As rows of one length, padded at the right, in one batch.
    documents = [TOKENS_BL[:, :4], TOKENS_BL[:, 4:]]
    rows_BL = jnp.concatenate(
      [jnp.pad(x, ((0, 0), (0, L - x.shape[1]))) for x in documents]
    )
    lengths_B1 = np.array([[4]] * B + [[6]] * B)
    valid_BL = jnp.array(np.arange(L) < lengths_B1)
    alone = run(rows_BL, valid_BL=valid_BL, mode=rule)
    logits_BLV = alone.logits_BLV
    np.testing.assert_allclose(
      packed.logits_BLV,
      jnp.concatenate([logits_BLV[:B, :4], logits_BLV[B:, :6]], axis=1),
      atol=1e-4,
    )
    assert chosen(packed).any()
    # Without segments, the second document sees the first.
    merged = run(TOKENS_BL, mode=rule)
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
  def test_padding_changes_nothing(self, rule, overflow, side):
    config = fixed('stride') if rule == 'fixed' else CONFIG
    mode = RoutingMode(rule=rule, overflow=overflow)
    alone = run(TOKENS_BL[:, :7], config=config, mode=mode)
    if overflow == 'drop':
      # The padded array has a slot more, and a token that would take it.
      slots = [mode.num_slots(0.3, n) for n in (7, L)]
      assert slots == [3, 4]
      assert any(told.overflow_B.any() for told in alone.routing)
    real = slice(3, L) if side == 'left' else slice(7)
    valid_BL = jnp.zeros((B, L), bool).at[:, real].set(True)
    # What stands in the padding does not matter.
    padded_BL = TOKENS_BL.at[:, real].set(TOKENS_BL[:, :7])
    padded = run(padded_BL, config=config, valid_BL=valid_BL, mode=mode)
    np.testing.assert_array_equal(chosen(padded)[..., real], chosen(alone))
    assert not chosen(padded)[:, ~np.array(valid_BL)].any()
    np.testing.assert_allclose(
      padded.logits_BLV[:, real], alone.logits_BLV, atol=1e-4
    )
    assert jnp.isfinite(padded.logits_BLV).all()


# Two groups to scan over.
FOUR = dataclasses.replace(CONFIG, num_layers=4)
FOUR_VARIABLES = tiny.variables(FOUR)


class TestLayouts:
  """Scanned ≡ unrolled; rematerialised ≡ not."""

  def test_scanned_equals_unrolled(self):
    scanned, params = lm.scanned(FOUR, FOUR_VARIABLES['params'])
    assert scanned.scan_layers
    moving = stack.scanned(scanned.stack, FOUR_VARIABLES['moving'])
    looped = {'params': params, 'moving': moving}
    a, b = (
      run(TOKENS_BL, config=config, variables=variables, mode='threshold')
      for config, variables in ((FOUR, FOUR_VARIABLES), (scanned, looped))
    )
    np.testing.assert_allclose(a.logits_BLV, b.logits_BLV, atol=1e-5)
    # Four layers, two groups: the order of the routed ones is kept.
    assert len(a.routing) == len(b.routing) == 2
    chex.assert_trees_all_close(a.routing, b.routing, atol=1e-5)
    assert (chosen(a)[0] != chosen(a)[1]).any()

  def test_converters_undo_each_other(self):
    params = FOUR_VARIABLES['params']
    scanned_config, stacked = lm.scanned(FOUR, params)
    config, again = lm.unrolled(scanned_config, stacked)
    assert config == FOUR
    chex.assert_trees_all_equal(again, params)
    assert lm.unrolled(FOUR, params) == (FOUR, params)
    assert lm.scanned(scanned_config, stacked) == (scanned_config, stacked)
    # And a scanned model asks for just these parameters.
    chex.assert_trees_all_equal_shapes(
      tiny.shapes(scanned_config)['params'], stacked
    )

  def test_scanned_layers_start_different(self):
    model = LanguageModel(dataclasses.replace(FOUR, scan_layers=True))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS_BL)['params']
    params = nn.unbox(params)
    for leaf in (
      params['layers']['block_0']['router']['kernel'],
      params['layers']['block_1']['mlp']['up']['kernel'],
    ):
      assert (leaf[0] != leaf[1]).all()

  @pytest.mark.slow
  def test_remat_changes_neither_values_nor_gradients(self, equations):
    scanned, stacked = lm.scanned(FOUR, FOUR_VARIABLES['params'])
    want = jax.jit(jax.value_and_grad(_loss(FOUR)))(FOUR_VARIABLES['params'])
    for config, params in (
      (FOUR, FOUR_VARIABLES['params']),
      (scanned, stacked),
    ):
      counts = []
      for remat in ('none', 'dots', 'full'):
        loss = _loss(dataclasses.replace(config, remat=remat))
        traced = jax.jit(jax.value_and_grad(loss)).trace(params)
        counts.append(count(equations, traced.jaxpr.jaxpr))
        if remat == 'full' or (remat == 'dots' and config.scan_layers):
          loss, grads = traced.lower().compile()(params)
          _, grads = lm.unrolled(config, grads)
          chex.assert_trees_all_close((loss, grads), want, atol=1e-5, rtol=1e-4)
      # The backward pass computes features again, but chooses no tokens again.
      none, dots, full = counts
      assert none['top_k'] == dots['top_k'] == full['top_k'] > 0
      assert none['sort'] == dots['sort'] == full['sort'] > 0
      assert none['dot_general'] < dots['dot_general'] < full['dot_general']


def test_loss_of_targets_is_that_of_the_logits():
  half = dataclasses.replace(CONFIG, dtype='bfloat16')
  targets_BL = jnp.roll(TOKENS_BL, -1, axis=1)
  weights_BL = VALID_BL.astype(jnp.float32)
  plain = run(TOKENS_BL, config=half)
  assert plain.loss is None
  for given, weights in (
    ({}, jnp.ones((B, L))),
    ({'weights_BL': weights_BL}, weights_BL),
  ):
    out = run(TOKENS_BL, config=half, targets_BL=targets_BL, **given)
    assert out.logits_BLV is None
    want = losses.next_token_loss(plain.logits_BLV, targets_BL, weights)
    np.testing.assert_allclose(out.loss, want, rtol=1e-6)


def _loss(config):
  def loss(params):
    out = LanguageModel(config).apply({'params': params}, TOKENS_BL[:, :-1])
    total, weight = losses.next_token_loss(
      out.logits_BLV, TOKENS_BL[:, 1:], jnp.ones((B, L - 1))
    )
    for told in out.routing:
      total += losses.choice_bce(told.score_BL, told.top_k_BL)[0]
    return total / weight

  return loss


def count(equations, jaxpr):
  """Returns how many operations there are, those inside others too."""
  return collections.Counter(x.primitive.name for x in equations(jaxpr))


class TestThreshold:
  @pytest.mark.slow
  def test_moves_alike_scanned_and_rematerialised(self):
    def train(config, variables):
      def loss(params):
        out, moved = LanguageModel(config).apply(
          variables | {'params': params}, TOKENS_BL, mutable=['moving']
        )
        return jnp.sum(out.logits_BLV**2), moved['moving']

      # As a step does, where what is computed again could move it again.
      _, moved = jax.jit(jax.grad(loss, has_aux=True))(variables['params'])
      return stack.unrolled(config.stack, moved)

    want = train(FOUR, FOUR_VARIABLES)
    assert set(want) == {'block_0', 'block_2'}
    looped, _ = lm.scanned(FOUR, FOUR_VARIABLES['params'])
    looped = dataclasses.replace(looped, remat='full')
    scanned_variables = {
      name: stack.scanned(looped.stack, collection)
      for name, collection in FOUR_VARIABLES.items()
    }
    chex.assert_trees_all_close(
      train(looped, scanned_variables), want, atol=1e-5
    )


def test_gaussian_scores_are_new_for_each_key_and_layer():
  config, params = lm.scanned(
    fixed('gaussian', num_layers=4), FOUR_VARIABLES['params']
  )

  def scores(seed):
    out = run(
      TOKENS_BL,
      config=config,
      variables={'params': params},
      rngs={'routing': jax.random.key(seed)},
    )
    assert all((told.weight_BL == 1).all() for told in out.routing)
    assert (chosen(out).sum(axis=-1) == 3).all()
    return [np.asarray(told.score_BL) for told in out.routing]

  first, other = scores(0), scores(1)
  np.testing.assert_array_equal(first, scores(0))
  assert (first[0] != first[1]).all()
  assert (first[0] != other[0]).all()
  assert (first[0][0] != first[0][1]).all()


def test_sizes_left_open():
  block = LMConfig(width=200, num_heads=4).block
  assert block.attention.head_dim == 50
  assert block.attention.num_kv_heads == 4
  assert block.mlp.hidden == 544


# The second takes rows out of a batch.
@pytest.mark.parametrize(
  'routing',
  [
    MOD,
    MoDConfig(offset=0, per_sequence=True, balance_loss=0.1, router_loss=0.0),
  ],
)
def test_padding_may_hold_any_number_and_arrays_be_numpys(routing):
  model = LanguageModel(dataclasses.replace(CONFIG, routing=routing))
  tokens_BL = np.where(VALID_BL, TOKENS_BL, -7)
  jax.eval_shape(lambda: model.apply(VARIABLES, tokens_BL, valid_BL=VALID_BL))
