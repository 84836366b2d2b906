"""Pictures in text, and blocks that choose among kinds of token."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax import flops, trees
from mod_jax.errors import UserError
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.reduction import EViT
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.layers.token_info import KINDS
from mod_jax.models import lm, lora, vlm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.pretrained.load import Run
from mod_jax.sampling import Draft, generate
from mod_jax.tasks import plain

DENSE = vlm.VLMConfig(
  tower=dataclasses.replace(tiny.VIT, image_size=4, num_classes=0),
  language=dataclasses.replace(tiny.LM, num_layers=3, vocab_size=16),
  image_token=15,
)
CONFIGS = config_lib.load(
  pathlib.Path(__file__).parents[2] / 'configs/vlm/scenes.py'
)
PMOD = CONFIGS.PMOD
GAMMA = dataclasses.replace(CONFIGS.GAMMA, layers=(1, 2))
# In the tiny model, the attention is that of the first block.
FASTV = dataclasses.replace(CONFIGS.FASTV, first=1)
ROUTED = {'p-MoD': PMOD, 'γ-MoD': GAMMA, 'FastV': FASTV}
IMAGE, TEXT, QUESTION, ANSWER = range(len(KINDS))
# Two pictures with text before and between; one; none.
ROWS = [[1, 15, 2, 15, 3, 4, 5], [15, 6, 7, 8], [9, 10, 11, 12, 13]]
OF_ROWS = [
  [TEXT, IMAGE, TEXT, IMAGE, QUESTION, QUESTION, ANSWER],
  [IMAGE, QUESTION, QUESTION, ANSWER],
  [TEXT, TEXT, QUESTION, QUESTION, ANSWER],
]
PICTURES = tiny.images(3, size=4)
OF_PICTURES = [PICTURES[:2], PICTURES[2:], []]


def routed(routing, **changes):
  return DENSE.with_parts(routing=dataclasses.replace(routing, **changes))


@functools.cache
def variables(config):
  return tiny.variables(config)


def output(config, inputs, values=None):
  args, kwargs = inputs.inputs
  return tiny.apply(config, values or variables(config), *args, **kwargs)


def placed(rows=ROWS, images=OF_PICTURES, kinds=OF_ROWS, **kwargs):
  kwargs = {'text': 6, 'count': 2} | kwargs
  return vlm.place_images(DENSE, rows, images, kinds, **kwargs)


def chosen(routing):
  config, inputs = routed(routing), placed()
  return config, inputs, output(config, inputs).routing


def test_p_mod_chooses_image_tokens_by_its_schedule_and_takes_all_text():
  config, inputs, layers = chosen(PMOD)
  # Half a cosine over three blocks, of which the first is dense.
  assert config.capacities == (None, pytest.approx(0.5), 0.15)
  is_image_BL = inputs.valid_BL & (inputs.kind_BL == IMAGE)
  images_B = is_image_BL.sum(axis=-1)
  np.testing.assert_array_equal(images_B, [8, 4, 0])
  for layer, capacity in zip(layers, config.capacities[1:], strict=True):
    chosen_BL = np.asarray(layer.chosen_BL)
    assert (chosen_BL == inputs.valid_BL)[~is_image_BL].all()
    expected_B = np.round(capacity * images_B, 9)
    expected_B = np.where(images_B, np.maximum(1, expected_B), 0)
    np.testing.assert_array_equal(
      (chosen_BL & is_image_BL).sum(axis=-1), expected_B.astype(int)
    )
    # The best of them, and no other token is weighed.
    score_BL = np.where(is_image_BL, layer.score_BL, np.nan)
    for score_L, taken_L in zip(score_BL[:2], chosen_BL[:2], strict=True):
      is_left_L = ~taken_L & ~np.isnan(score_L)
      assert np.nanmin(score_L[taken_L]) >= score_L[is_left_L].max()
    assert (np.asarray(layer.weight_BL)[~is_image_BL] == 1).all()
    assert (np.asarray(layer.weight_BL)[is_image_BL] != 1).all()
    assert not layer.overflow_B.any()


def test_gamma_mod_takes_all_questions_and_answers():
  _, inputs, layers = chosen(GAMMA)
  always_BL = inputs.valid_BL & (inputs.kind_BL >= QUESTION)
  among_BL = inputs.valid_BL & ~always_BL
  np.testing.assert_array_equal(among_BL.sum(axis=-1), [10, 4, 2])
  for layer in layers:
    chosen_BL = np.asarray(layer.chosen_BL)
    assert chosen_BL[always_BL].all()
    np.testing.assert_array_equal((chosen_BL & among_BL).sum(-1), [5, 2, 1])
    np.testing.assert_array_equal(layer.candidate_BL, among_BL)


@pytest.mark.parametrize('name', ROUTED)
def test_capacity_1_with_the_identity_gate_is_dense(name):
  gate = {} if name == 'FastV' else {'gate': 'alpha_tanh'}
  config = routed(ROUTED[name], capacity_floor=1.0, **gate)
  flat = trees.flatten(variables(config)['params'])
  routers = {n: 0 * x for n, x in flat.items() if 'router' in n}
  assert bool(routers) == (name != 'FastV')
  # A router of zeros: the gate is 1.
  params = trees.unflatten(flat | routers)
  inputs = placed()
  found = output(config, inputs, {'params': params}).logits_BLV
  dense = trees.unflatten({n: flat[n] for n in flat if n not in routers})
  expected = output(DENSE, inputs, {'params': dense}).logits_BLV
  real = inputs.valid_BL
  np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
  partly = routed(ROUTED[name], **gate)
  fewer = output(partly, inputs, {'params': params}).logits_BLV
  assert np.abs(fewer - expected)[real].max() > 1e-3


@pytest.mark.parametrize('name', ROUTED)
def test_later_text_and_other_rows_move_nothing(name):
  config, inputs = routed(ROUTED[name]), placed()
  logits_BLV = output(config, inputs).logits_BLV
  # The text after the pictures; FastV looks at the end of the prompt.
  tokens_BL = inputs.tokens_BL.copy()
  starts = [11 if name == 'FastV' else 10, 5, 3]
  for row, start in enumerate(starts):
    tokens_BL[row, start + 1 :] = (tokens_BL[row, start + 1 :] + 1) % 15
  changed = dataclasses.replace(inputs, tokens_BL=tokens_BL)
  later = output(config, changed).logits_BLV
  for row, start in enumerate(starts):
    np.testing.assert_allclose(
      later[row, : start + 1], logits_BLV[row, : start + 1], atol=1e-5
    )
    assert np.abs(later[row] - logits_BLV[row]).max() > 1e-2
  # Alone, with as much room, and with room for no picture.
  for row, count in ((1, 2), (2, 0)):
    one = slice(row, row + 1)
    alone = placed(ROWS[one], OF_PICTURES[one], OF_ROWS[one], count=count)
    found = output(config, alone).logits_BLV[0][alone.valid_BL[0]]
    expected = logits_BLV[row][inputs.valid_BL[row]]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', [*ROUTED, 'questions'])
def test_decoding_is_the_forward_pass(name):
  of_questions = dataclasses.replace(PMOD, kinds=('image', 'question'))
  config = routed({**ROUTED, 'questions': of_questions}[name])
  inputs, later = placed(side='left'), jnp.array([[3], [5], [7]])
  model, mode = config.build(), config.decoding_mode
  length = inputs.tokens_BL.shape[1]

  @jax.jit
  def decode(variables, inputs):
    cache = lm.LMCache.empty(
      config, len(later), length + 1, mode, image_places=8
    )
    args, kwargs = inputs.inputs
    out = model.apply(variables, *args, **kwargs, cache=cache, mode=mode)
    logits = [out.logits_BLV[:, -1]]
    for token_B in later.T:
      out = model.apply(variables, token_B[:, None], cache=out.cache, mode=mode)
      logits.append(out.logits_BLV[:, 0])
    return jnp.stack(logits, axis=1), out.cache

  found, cache = decode(variables(config), inputs)
  rows = [[*row, *more] for row, more in zip(ROWS, later.tolist(), strict=True)]
  kinds = [[*row, ANSWER] for row in OF_ROWS]
  whole = placed(rows=rows, kinds=kinds, side='left', text=7)
  expected = output(config, whole).logits_BLV[:, -2:]
  np.testing.assert_allclose(found, expected, atol=1e-4)
  # A routed block keeps places for the image tokens that it chooses.
  slots = [block.num_slots for block in cache.blocks]
  assert slots[0] == length + 1
  for capacity, count in zip(config.capacities, slots, strict=True):
    kept = 8 if capacity is None else max(1, int(round(8 * capacity, 9)))
    assert count == length + 1 - 8 + kept


def test_rows_with_fewer_pictures_have_room_for_their_text_or_are_refused():
  # Ten tokens in each row: two pictures and two others, or text alone.
  rows, images = [[15, 15, 1, 2], list(range(1, 11))], [PICTURES[:2], []]
  inputs = vlm.place_images(DENSE, rows, images, side='left')

  def run(config, **kwargs):
    args, given = inputs.inputs
    return generate(
      *(config.build(), variables(config), args[0], given['valid_BL']),
      **{'images_BIHWC': args[1], 'kind_BP': given['kind_BL']},
      **{'max_new_tokens': 4, 'temperature': 0.0},
      mode=config.decoding_mode,
      **kwargs,
    )

  config = routed(PMOD)
  expected, found = run(config), run(config, max_length=8 + 10 + 4)
  np.testing.assert_array_equal(found.tokens_BN, expected.tokens_BN)
  np.testing.assert_allclose(found.log_prob_BN, expected.log_prob_BN, atol=1e-4)
  assert found.overflow == 0
  # A block that takes all tokens needs no more than a row has.
  assert run(DENSE, max_length=10 + 4).overflow == 0
  for name in ROUTED:
    with pytest.raises(UserError, match='prompt=18, .* takes 8 places for pic'):
      run(routed(ROUTED[name]), max_length=8 + 10 + 4 - 1)
  for config in (DENSE, DENSE.with_parts(routing=MoDConfig())):
    with pytest.raises(UserError, match='prompt=10, .* size of the cache\\.'):
      run(config, max_length=10 + 4 - 1)


@pytest.mark.parametrize('name', ROUTED)
def test_an_added_token_with_the_id_of_a_placeholder_is_as_any_other(name):
  config, inputs = routed(ROUTED[name]), placed(side='left')
  params = dict(variables(config)['params'])
  embedding_VD = params['language']['embedding']
  # The placeholder and token 3 are embedded alike: both go on in the same way.
  embedding_VD = embedding_VD.at[config.image_token].set(embedding_VD[3])
  params['language'] = params['language'] | {'embedding': embedding_VD}
  values, model, mode = {'params': params}, config.build(), RoutingMode()
  (count, length), (args, kwargs) = inputs.tokens_BL.shape, inputs.inputs
  cache = lm.LMCache.empty(config, count, length + 4, mode, image_places=8)
  cache = tiny.apply(model, values, *args, **kwargs, cache=cache).cache

  def add(token, number):
    """Returns logits after four tokens, so many of which are read at a time."""
    logits, now = [], cache
    for _ in range(0, 4, number):
      tokens_BL = np.full((count, number), token)
      out = tiny.apply(model, values, tokens_BL, cache=now)
      assert all(layer.chosen_BL.all() for layer in out.routing)
      assert all((layer.weight_BL == 1).all() for layer in out.routing)
      logits.append(out.logits_BLV)
      now = out.cache
    return np.concatenate(logits, axis=1)

  expected = add(3, 1)
  np.testing.assert_allclose(add(15, 1), expected, atol=1e-4)
  np.testing.assert_allclose(add(15, 4), expected, atol=1e-4)
  # Nor is it refused outside of `jax.jit`, where ids are known.
  args = np.full((count, 1), 15)
  found = model.apply(values, args, cache=cache).logits_BLV
  np.testing.assert_allclose(found, expected[:, :1], atol=1e-4)


@pytest.mark.parametrize('window', [None, 4])
def test_fastv_drops_what_the_end_of_the_prompt_attends_to_least(window):
  config, inputs = routed(FASTV), placed()
  language = dataclasses.replace(config.language, window=window)
  config = dataclasses.replace(config, language=language)
  layers = output(config, inputs).routing
  args, kwargs = inputs.inputs
  _, state = config.build().apply(
    variables(config), *args, **kwargs, mutable=['intermediates']
  )
  sown = state['intermediates']['language']['block_0']['attention']
  q_BLHC, k_BLHC = (np.asarray(sown[x][0]) for x in ('queries', 'keys'))
  k_BLHC = np.repeat(k_BLHC, q_BLHC.shape[2] // k_BLHC.shape[2], axis=2)
  first, second = (np.asarray(layer.chosen_BL) for layer in layers)
  np.testing.assert_array_equal(first, second)
  for row, count in ((0, 8), (1, 4)):
    is_asked_L = inputs.valid_BL[row] & (inputs.kind_BL[row] != ANSWER)
    end = np.flatnonzero(is_asked_L)[-1]
    # What is further back than the window gets no attention.
    seen = slice(0 if window is None else end + 1 - window, end + 1)
    logit_HS = np.einsum('HC,SHC->HS', q_BLHC[row, end], k_BLHC[row, seen])
    logit_HS /= q_BLHC.shape[-1] ** 0.5
    score_L = np.zeros(inputs.tokens_BL.shape[1])
    score_L[seen] = jax.nn.softmax(logit_HS).mean(axis=0)
    places = np.flatnonzero(inputs.kind_BL[row] == IMAGE)
    assert len(places) == count
    assert score_L[places].any()
    np.testing.assert_allclose(
      layers[0].score_BL[row, places], score_L[places], atol=1e-6
    )
    best = np.argsort(-score_L[places], kind='stable')[: count // 2]
    is_left_N = np.isin(np.arange(count), best)
    np.testing.assert_array_equal(first[row, places], is_left_N)


def look(config, values):
  """Returns what a picture's patches become, and the tower's features."""
  model, tower = config.build(), config.tower.build()
  # Operation by operation: a whole program would round differently.
  looked_BTD, _ = model.apply(values, PICTURES[None], method=vlm.VLM.look)
  features_TLD = tower.apply(
    {'params': values['params']['tower']},
    *(PICTURES, config.tower_depth),
    method='features',
  )
  return looked_BTD[0], features_TLD[:, 1:]


def project(config, values, features_TLD):
  projector = vlm.Projector(config.language.width)
  return projector.apply(
    {'params': values['params']['projector']}, features_TLD
  )


def test_pooling_averages_squares_of_patches():
  pooled, values = dataclasses.replace(DENSE, pooling=2), variables(DENSE)
  assert (pooled.num_patches, DENSE.num_patches) == (1, 4)
  looked_TD, features_TLD = look(pooled, values)
  expected = project(DENSE, values, features_TLD.mean(axis=1))
  np.testing.assert_allclose(looked_TD, expected, atol=1e-5)
  table, whole = (dict(x.flops_table(12, 2)) for x in (pooled, DENSE))
  assert 4 * table['projector']['projector'] == whole['projector']['projector']


def test_a_tower_that_reduces_tokens_leaves_fewer_for_the_language_model():
  tower = dataclasses.replace(
    DENSE.tower, reduction=EViT(stages=(0,), keep=0.5)
  )
  config = dataclasses.replace(DENSE, tower=tower)
  # Of four patches, two are kept, and one is made of the others.
  assert config.num_patches == 3
  values = variables(DENSE)
  inputs = vlm.place_images(config, ROWS, OF_PICTURES)
  assert np.isfinite(output(config, inputs, values).logits_BLV).all()
  looked_TD, features_TLD = look(config, values)
  projected = project(config, values, features_TLD)
  assert projected.shape[1] == config.num_patches
  np.testing.assert_allclose(looked_TD.reshape(projected.shape), projected)
  parts, whole = (dict(x.flops_table(12)) for x in (config, DENSE))
  assert 4 * parts['projector']['projector'] == (
    3 * whole['projector']['projector']
  )
  assert sum(parts['tower'].values()) < sum(whole['tower'].values())


PRUNED = dataclasses.replace(
  DENSE,
  tower=DynamicViTConfig(
    backbone=dataclasses.replace(DENSE.tower, image_size=8),
    stages=(0,),
    keep=0.5,
  ),
)


def test_patches_that_a_tower_drops_reach_no_language_model():
  values, pictures = variables(PRUNED), tiny.images(24, size=8)
  tower = PRUNED.tower.build()
  tower_values = {'params': values['params']['tower']}
  features = type(tower).features
  of_all = PRUNED.vit.build().apply(
    tower_values, pictures, PRUNED.tower_depth, method='features'
  )
  left_TND, none = tower.apply(
    tower_values, pictures, PRUNED.tower_depth, method=features
  )
  assert none is None
  assert PRUNED.num_patches == left_TND.shape[1] == 8
  assert of_all.shape[1] == 1 + 16
  # In training there are as many, the kept ones among them as masking alone
  # leaves them.
  masked_TND, keep_STN = PRUNED.tower.build(train=True).apply(
    *(tower_values, pictures, PRUNED.tower_depth),
    method=features,
    rngs={'gumbel': jax.random.key(0)},
  )
  assert masked_TND.shape == left_TND.shape
  counts = keep_STN[0].sum(axis=-1)
  assert counts.min() < 8 < counts.max()
  all_TLD, *_ = tower.apply(
    *(tower_values, pictures, PRUNED.tower_depth, keep_STN), method='_blocks'
  )
  for masked_ND, all_LD, keep_N in zip(
    *map(np.asarray, (masked_TND, all_TLD, keep_STN[0])), strict=True
  ):
    kept_ND = all_LD[1:][keep_N > 0]
    is_zero_N = (masked_ND == 0).all(axis=-1)
    assert is_zero_N.sum() == max(0, 8 - len(kept_ND))
    for x_D in masked_ND[~is_zero_N]:
      assert np.isclose(kept_ND, x_D, atol=1e-5).all(axis=-1).any()


def test_the_answers_train_what_decides_which_patches_are_dropped():
  rows, pictures = [[15, 3, 4, 5]], [tiny.images(1, size=8)]
  args, kwargs = vlm.place_images(PRUNED, rows, pictures).inputs
  values = trees.flatten(variables(PRUNED))
  # Masked attention has a gradient of its own, which is none of this test.
  for name in ('kernel', 'bias'):
    values[f'params/tower/block_0/attention/out/{name}'] *= 0
  values = trees.unflatten(values)

  def loss(params):
    found = PRUNED.build(train=True).apply(
      {**values, 'params': params},
      *args,
      **kwargs,
      targets_BL=jnp.ones_like(args[0]),
      rngs={'gumbel': jax.random.key(0)},
    )
    return found.loss[0]

  heads = jax.grad(loss)(values['params'])['tower']['prediction_0']
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(heads))


def test_a_tower_that_only_masks_costs_more_in_training():
  masked = dataclasses.replace(PRUNED.tower, keep=1.0).flops_table()
  tower = sum(flops.products(parts) for _, parts in masked[:-2])
  table = dict(PRUNED.flops_table(12))
  others = flops.forward(PRUNED, 12) - flops.products(table['tower'])
  assert flops.products(table['tower']) < tower
  assert flops.train(PRUNED, 12) == 3 * (others + tower)


def test_the_dense_twin_reads_all_patches():
  routed = dataclasses.replace(
    PRUNED.vit, routing=VisionRoutingConfig(layers=(1,))
  )
  reduced = dataclasses.replace(
    PRUNED.vit, reduction=EViT(stages=(0,), keep=0.5)
  )
  dense = dataclasses.replace(DENSE, tower=PRUNED.vit)
  for tower in (routed, reduced, PRUNED.tower):
    config = dataclasses.replace(DENSE, tower=tower)
    assert config.dense_twin() == dense
  # Two pictures of 8 patches each, which the twin reads as 16, and 4 of text.
  report = flops.report(PRUNED, (20, 2))
  of_dense = flops.forward(dense, (36, 2))
  assert f'dense twin forward  {of_dense:.4e}' in report
  assert f'(dense twin {3 * of_dense:.4e})' in report
  assert 'block 0: 20, block 1: 20, block 2: 20 of 36' in report


def test_flops_are_those_of_the_tokens_that_enter():
  config = routed(PMOD)
  assert config.tokens_per_block(14, 2) == (14, 10, 7)
  table, dense = (dict(x.flops_table(14, 2)) for x in (config, DENSE))
  # Two pictures, each through the first block of the tower.
  whole = DENSE.tower.flops_table()
  products = sum(flops.products(parts) for _, parts in whole[:2])
  assert flops.products(table['tower']) == 2 * products
  mlp = table['language/block_1 (routed)']['mlp']
  assert mlp * 14 == dense['language/block_1']['mlp'] * 10


@pytest.mark.parametrize(
  ('rows', 'images', 'kwargs', 'sentence'),
  [
    ([[1]], [PICTURES[:1]], {}, 'row 0 has 1 pictures'),
    ([[1] * 7], [[]], {}, 'at most 6: shorten the row'),
    ([[15] * 3], [PICTURES], {}, 'pictures of a row=3: expected at most 2'),
    ([[15]], [tiny.images(1, size=8)], {}, r'\[4, 4, 3\], as the tower'),
  ],
)
def test_rows_that_do_not_fit_are_refused(rows, images, kwargs, sentence):
  with pytest.raises(UserError, match=sentence):
    placed(rows=rows, images=images, kinds=None, **kwargs)


def test_the_model_refuses_what_was_not_placed():
  model, values = DENSE.build(), variables(DENSE)
  with pytest.raises(UserError, match='placeholders of row 0=1: expected 4'):
    model.apply(values, jnp.array([[15, 1]]))
  config = routed(PMOD)
  with pytest.raises(UserError, match='tokens of text=6: expected at most 2'):
    config.build().apply(
      variables(config), jnp.ones((1, 6), int), PICTURES[None, :1]
    )


def test_an_example_has_no_placeholder():
  """So that `init` may be called with it outside of `jax.jit` as well."""
  for image_token in (0, 15):
    config = dataclasses.replace(DENSE, image_token=image_token)
    example = config.example()
    vlm.check_images(config, example, None, None)
    lm.check_tokens(config.language, example)


@pytest.mark.parametrize(
  'score', ['learned', 'last_attention', 'gaussian', 'stride']
)
def test_only_a_learned_router_has_a_loss_of_its_choice(score):
  _, inputs, layers = chosen(PMOD)
  config = MoDConfig(kinds=('image',), score=score)
  pairs, metrics = plain.routing_losses(config, layers, inputs.valid_BL)
  learned = score == 'learned'
  assert len(pairs) == len(layers) * learned
  assert set(metrics) == (
    {'router/bce', 'router/accuracy'} if learned else set()
  )


@pytest.mark.parametrize(
  ('make', 'sentence'),
  [
    (
      lambda: config_lib.replace(PRUNED, {'tower.stages': (1,)}),
      'feature_layer=-2: expected one behind the first 1 blocks',
    ),
    (lambda: dataclasses.replace(PRUNED, pooling=2), 'pooling=2: expected 1'),
    *(
      (
        lambda changes=changes: config_lib.replace(DENSE, changes),
        f'{name}=.*the language model alone',
      )
      for name, changes in {
        'tower.lora': {'tower.lora': LoRAConfig()},
        'tower.experts': {'tower.experts': ExpertsConfig()},
        'tower.routing.balance_loss': {
          'tower.routing': VisionRoutingConfig(
            score='learned', per_sequence=True, balance_loss=0.01
          )
        },
      }.items()
    ),
    (lambda: routed(PMOD, threshold_decay=0.9), 'threshold_decay=0'),
    (lambda: routed(FASTV, kinds=None), "kinds=.'image',."),
    (lambda: routed(FASTV, first=0), 'a block before the first routed one'),
    (
      lambda: Draft(kind='never').complete(routed(PMOD)),
      "draft='never': .*no routed blocks",
    ),
    (
      lambda: mod_jax.route(Run(config=DENSE, variables={})),
      "method='amod' is not for a model that sees and reads: take one of pmod",
    ),
  ],
)
def test_settings_that_do_not_fit_are_refused(make, sentence):
  with pytest.raises(UserError, match=sentence):
    make()


@pytest.mark.parametrize(
  ('method', 'fields'),
  [('pmod', {}), ('gamma', {'layers': (1, 2)})],
)
def test_route_keeps_the_dense_weights(method, fields):
  dense = Run(config=DENSE, variables=variables(DENSE))
  run = mod_jax.route(dense, method, **fields)
  assert run.config == routed({'pmod': PMOD, 'gamma': GAMMA}[method])
  flat = trees.flatten(run.variables['params'])
  routers = {name for name in flat if 'router' in name}
  assert routers
  kept = {name: x for name, x in flat.items() if name not in routers}
  tiny.same(kept, trees.flatten(dense.variables['params']))
  if method == 'pmod':  # Its gate starts as 1: what enters is not weighed.
    with pytest.raises(UserError, match='by a schedule; leave it out'):
      mod_jax.route(dense, method, capacity=0.5)
    assert not any(flat[name].any() for name in routers)


def test_adapters_of_the_language_model_merge_into_it():
  adapters = LoRAConfig(rank=2, maps=(r'block_\d+/attention/(query|value)',))
  config, inputs = DENSE.with_parts(lora=adapters), placed()
  params = variables(config)['params']
  named = lora.adapters(params)
  assert len(named) == 3 * 2 * 2
  assert all(name.startswith('language/block_') for name in named)
  merged, weights = lora.merge(config, params)
  assert merged == DENSE
  real = inputs.valid_BL
  found = output(config, inputs).logits_BLV[real]
  without = trees.unflatten(
    {n: x for n, x in trees.flatten(params).items() if n not in named}
  )
  base = output(DENSE, inputs, {'params': without}).logits_BLV[real]
  assert np.abs(found - base).max() > 1e-2
  again = output(DENSE, inputs, {'params': weights}).logits_BLV[real]
  np.testing.assert_allclose(again, found, atol=1e-4)
