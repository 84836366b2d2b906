"""The vision tasks: losses, held-out numbers, and weights to start from."""

import dataclasses
import functools
import logging
import pathlib

from absl import logging as absl_logging
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import special
import tiny

from mod_jax import config as config_lib
from mod_jax import flops, losses, trees, viz
from mod_jax.convert import files
from mod_jax.convert import vit as convert_vit
from mod_jax.data import images as images_lib
from mod_jax.data.images import ImageDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.reduction import ToMe
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.layers.stem import ConvStemConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.vit import ViTConfig, resize_positions
from mod_jax.runs import metrics as metrics_lib
from mod_jax.tasks import make_task, phases, plain, warm_start
from mod_jax.tasks.experiment import PruningObjective
from mod_jax.train import evaluation, loop

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
DENSE = tiny.VIT
AMOD = dataclasses.replace(DENSE, routing=VisionRoutingConfig(capacity=0.5))
MOD = dataclasses.replace(
  DENSE, routing=VisionRoutingConfig(score='learned', router_std=1.0)
)
TOME = dataclasses.replace(DENSE, reduction=ToMe(r=4))
DYNAMIC = DynamicViTConfig(backbone=DENSE, stages=(0, 1), keep=0.7)
SHALLOW = DynamicViTConfig(
  backbone=dataclasses.replace(DENSE, num_layers=1), stages=(0,)
)
HELD_OUT = 355  # Of the digits: 5 batches of 71, without padding.
ALONE = PruningObjective(token_distillation=0.0, logit_distillation=0.0)


def make(model=DENSE, **changes):
  """Returns the task of a model on the digits; changes by dotted path."""
  small = {
    'optimizer.learning_rate': 1e-2,
    'optimizer.warmup_steps': 0,
    'train.num_steps': 8,
    'evaluation.batches': 0,
    'evaluation.batch_size': 71,
    'evaluation.final_batches': 0,
  }
  config = tiny.experiment(DENSE, **small)
  return _make_task(config_lib.replace(config, {'model': model, **changes}))


_make_task = functools.cache(make_task)  # With what they have compiled.


def make_alone(model):
  """Returns the task of a model without a teacher, whether it prunes or not."""
  prunes = isinstance(model, DynamicViTConfig)
  return make(model, **({'objective': ALONE} if prunes else {}))


def init(task, seed=0):
  """Returns parameters and model_state, large enough to tell things apart."""
  return _init(task.config.model, seed)


@functools.cache
def _init(model, seed):
  shapes = tiny.shapes(model)
  del shapes['params']
  state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  return tiny.random_params(model, seed, mean=0.1), state


def random_batch():
  rng = np.random.default_rng(0)
  return {
    'image': rng.normal(size=(4, 8, 8, 3)).astype(np.float32),
    # As mixup and cutmix leave them.
    'target': rng.dirichlet(np.ones(10), 4).astype(np.float32),
  }


def cross_entropy(logits_BV, target_BV):
  log_p_BV = special.log_softmax(np.float64(logits_BV), axis=-1)
  return -(target_BV * log_p_BV).sum(axis=-1)


@functools.cache
def _loss(task, static_args):
  return jax.jit(functools.partial(task.loss, static_args=static_args))


def loss_of(task, params, model_state, batch, seed=0, static_args=0.0):
  return _loss(task, static_args)(
    params, model_state, batch, jax.random.key(seed)
  )


class TestImageLoss:
  def test_is_the_cross_entropy_of_mixed_targets(self):
    task = make()
    params, model_state = init(task)
    batch = random_batch()
    scalar, (metric_sums, after) = loss_of(task, params, model_state, batch)
    output = jax.jit(DENSE.build().apply)({'params': params}, batch['image'])
    nats_B = cross_entropy(output.logits_BV, batch['target'])
    assert metric_sums.keys() == {'loss'}
    assert metric_sums['loss'][0] == pytest.approx(nats_B.sum(), rel=1e-5)
    assert metric_sums['loss'][1] == 4
    assert scalar == pytest.approx(nats_B.mean(), rel=1e-5)
    assert after == {}

  def test_stochastic_depth_and_the_statistics_of_a_stem(self):
    model = dataclasses.replace(
      DENSE, stem=ConvStemConfig(width=4), stochastic_depth=0.9
    )
    task = make(model)
    params, model_state = init(task)
    before = jax.device_get(model_state)
    runs = [
      loss_of(task, params, model_state, random_batch(), seed)
      for seed in (0, 0, 1, 2, 3)
    ]
    first, again, *others = (float(loss) for loss, _ in runs)
    assert first == again
    assert max(abs(first - other) for other in others) > 1e-3
    after = runs[0][1][1]
    assert jax.tree.structure(after) == jax.tree.structure(before)
    changed = jax.tree.map(
      lambda a, b: np.abs(a - b).max() > 1e-4, after, before
    )
    assert all(jax.tree.leaves(changed))

  def test_warm_up_of_the_capacity(self):
    task = make(
      AMOD,
      **{'train.capacity_warmup_steps': 4, 'train.capacity_warmup_stages': 2},
    )
    floors = [task.static_args(step) for step in range(6)]
    assert floors == [1, 1, 0.5, 0.5, 0, 0]
    assert task.flops_per_step(1.0) == make().flops_per_step(0.0)
    assert task.flops_per_step(0.0) == 8 * 3 * flops.forward(AMOD)
    assert task.flops_per_step(0.0) < task.flops_per_step(1.0)
    params, _ = init(make())
    batch = random_batch()
    dense, _ = loss_of(make(), params, {}, batch)
    first, _ = loss_of(task, params, {}, batch, static_args=1.0)
    later, _ = loss_of(task, params, {}, batch)
    assert first == pytest.approx(float(dense), rel=1e-6)
    assert abs(later - dense) > 1e-4

  def test_warm_up_keeps_to_the_floor_of_the_model(self):
    routing = dataclasses.replace(AMOD.routing, capacity_floor=0.75)
    model = AMOD.with_parts(routing=routing)
    assert plain.at_floor(model, 0.5) == model


@functools.cache
def pruning(model=DYNAMIC, teacher=True, **objective):
  """Returns a task whose teacher is never read."""
  given = objective if teacher else dataclasses.asdict(ALONE) | objective
  given = PruningObjective(
    **{k: v for k, v in given.items() if k != 'teacher'}, teacher='/nowhere'
  )
  return make(model, objective=given)


@functools.cache
def pruned(task, gradients=False):
  """Returns loss, metric sums, both outputs, gradients."""
  params, model_state = init(task)
  dense = task.config.model.dense_twin()
  teacher, _ = _init(dense, seed=1)
  batch, rng = random_batch(), jax.random.key(0)

  def loss(params, teacher):
    return task.loss(params, model_state, batch, rng, 0.0, teacher)

  @jax.jit
  def run(params, teacher):
    grads = None
    if gradients:
      (total, (metric_sums, _)), grads = jax.value_and_grad(
        loss, argnums=(0, 1), has_aux=True
      )(params, teacher)
    else:
      total, (metric_sums, _) = loss(params, teacher)
    output, _ = task.forward(task.config.model, params, model_state, batch, rng)
    taught = dense.build().apply(teacher, batch['image'])
    return total, metric_sums, output, taught, grads

  return jax.device_get(run(params, {'params': teacher}))


class TestPruningLoss:
  WEIGHTS = {
    'classification': 1.5,
    'ratio': 2.5,
    'token_distillation': 0.3,
    'logit_distillation': 0.7,
  }

  @pytest.mark.slow
  def test_is_the_weighted_sum_of_its_terms(self):
    task = pruning(**self.WEIGHTS)
    loss, metric_sums, output, taught, grads = pruned(task, gradients=True)
    of_student, of_teacher = grads
    keep_SBN = output.keep_SBN
    assert 0 < keep_SBN[1].mean() < keep_SBN[0].mean() < 1
    patches, of_taught = (x.features_BLD[:, 1:] for x in (output, taught))
    target_BV, logits_BV = random_batch()['target'], output.logits_BV
    terms = {
      'loss': losses.classification_loss(logits_BV, target_BV),
      'ratio': losses.ratio_loss(keep_SBN, (0.7, 0.49)),
      'logit_distillation': losses.logit_distillation(
        logits_BV, taught.logits_BV
      ),
      'token_distillation': losses.token_distillation(
        patches, of_taught, keep_SBN[1]
      ),
    }
    for stage in range(2):
      terms[f'kept_{stage}'] = keep_SBN[stage].sum(), 4 * 16
    assert metric_sums.keys() == terms.keys()
    for name, pair in terms.items():
      np.testing.assert_allclose(metric_sums[name], pair, rtol=1e-4)
      assert pair[0] / pair[1] > 1e-3
    # All weights differ, so that none can stand for another.
    weights = self.WEIGHTS | {'loss': self.WEIGHTS['classification']}
    del weights['classification']
    np.testing.assert_allclose(
      *(loss, sum(w * terms[k][0] / terms[k][1] for k, w in weights.items())),
      rtol=1e-4,
    )

    # The teacher learns nothing; all else does, the prediction heads included.
    assert not any(np.any(x) for x in jax.tree.leaves(of_teacher))
    for name, x in trees.flatten(of_student).items():
      assert np.isfinite(x).all()
      # A bias of the keys shifts all scores of a query alike.
      if not name.endswith('key/bias'):
        assert np.any(x), name

  def test_patches_that_are_removed(self):
    model = dataclasses.replace(DYNAMIC, score='class_attention', stages=(1,))
    _, metric_sums, output, taught, _ = pruned(pruning(model, **self.WEIGHTS))
    kept = model.kept[-1]
    assert output.features_BLD.shape[1] == 1 + kept < 17
    # No decision is learnt, so there is no ratio to aim at.
    assert 'ratio' not in metric_sums
    squares = []
    for b in range(4):
      places = np.flatnonzero(output.keep_SBN[0, b])
      mine = output.features_BLD[b, 1:]
      squares.append(np.mean((mine - taught.features_BLD[b, 1 + places]) ** 2))
    total, count = metric_sums['token_distillation']
    assert count == 4 * kept
    assert total / count == pytest.approx(np.mean(squares), rel=1e-4)
    assert metric_sums['kept_0'] == (4 * model.kept[0], 64)

  def test_pooled_patches_have_no_counterparts(self):
    model = dataclasses.replace(SHALLOW, score='structural')
    _, metric_sums, *_ = pruned(pruning(model, **self.WEIGHTS))
    assert metric_sums.keys() == {'loss', 'logit_distillation'}

  def test_flops_of_a_step(self):
    dense, model = flops.forward(DENSE), DYNAMIC
    # Masks save nothing; the teacher does one pass.
    heads = sum(
      model.prediction_flops(model.backbone.num_patches) for _ in model.stages
    )
    student = 8 * 3 * (dense + heads)
    weighed = pruning(**self.WEIGHTS)
    assert weighed.flops_per_step(0.0) == student + 8 * dense
    told = f'step of this run    {student / 8 + dense:.4e} FLOPs'
    assert told in weighed.flops_report()
    assert 'teacher' not in pruning(teacher=False).flops_report()
    rules = (('head', 1.0, 0), ('.*', 0.0, 0))
    frozen = {'train.frozen': 'float32', 'optimizer.rules': rules}
    assert 'step of this run' not in make(**frozen).flops_report()
    assert pruning(teacher=False).flops_per_step(0.0) == student
    model = dataclasses.replace(DYNAMIC, score='random')
    assert pruning(model, teacher=False).flops_per_step(0.0) == (
      8 * 3 * flops.forward(model)
    )
    # What is frozen has no gradient.
    rules = (('^prediction_', 1.0, 0), ('.*', 0.0, 0))
    frozen = {'optimizer.rules': rules, 'train.frozen': 'float32'}
    task = make(DYNAMIC, objective=ALONE, **frozen)
    assert task.flops_per_step(0.0) == 8 * flops.train(
      DYNAMIC, frozen=lambda name: not name.startswith('prediction_')
    )
    assert task.flops_per_step(0.0) < student

  def test_the_teacher_has_no_adapters(self, tmp_path):
    tiny.export_dense(make().config, tmp_path)
    model = DYNAMIC.with_parts(lora=LoRAConfig(rank=2))
    task = make(model, objective=PruningObjective(), init=str(tmp_path))
    names = trees.flatten(task.teacher(None)['params'])
    assert names.keys() == trees.flatten(tiny.shapes(DENSE)['params']).keys()


def held_out(task, params, **kwargs):
  return evaluation.held_out(task, params, {}, tiny.one_device(), **kwargs)


@functools.cache
def digits():
  """Returns all held-out digits, in batches without padding."""
  config = ImageDataConfig(image_size=8)
  batches = list(images_lib.eval_batches(config, batch_size=71))
  joined = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
  assert joined['weight'].all()
  assert len(joined['label']) == HELD_OUT
  return joined


@functools.cache
def _apply(model, **kwargs):
  return jax.jit(model.build(**kwargs).apply)


def oracle(logits_BV, label_B, classes=10):
  """Returns loss, accuracies and mean recall, in numpy alone."""
  order = np.argsort(-logits_BV, axis=-1, kind='stable')
  hit_B = order[:, 0] == label_B
  recall_V = [hit_B[label_B == v].mean() for v in range(classes)]
  return {
    'mean_recall': np.mean(recall_V),
    'loss': cross_entropy(logits_BV, np.eye(classes)[label_B]).mean(),
    'accuracy': np.mean(order[:, 0] == label_B),
    'top5': np.mean((order[:, :5] == label_B[:, None]).any(axis=1)),
  }


class TestEvaluate:
  @pytest.mark.slow
  @pytest.mark.parametrize(
    'model', [DENSE, DYNAMIC, AMOD], ids=['dense', 'pruned', 'routed']
  )
  def test_all_that_is_held_out(self, model):
    # The last batch is padded.
    objective = ALONE if model == DYNAMIC else None
    changes = {'evaluation.batch_size': 64, 'objective': objective}
    task = make(model, **changes)
    params, _ = init(task)
    metrics = held_out(task, params)
    seen = digits()

    def expect(model, params):
      output = _apply(model)({'params': params}, seen['image'])
      return oracle(np.asarray(output.logits_BV), seen['label'])

    expected = expect(model, params)
    assert 0 < expected['accuracy'] < expected['top5'] < 1
    main = task.main_metrics(metrics)
    assert {'loss', 'accuracy', 'top5'} <= main.keys()
    assert main.items() <= metrics.items()
    if model == AMOD:
      # Without its routed block 1, it is a model of one.
      left = {k: v for k, v in params.items() if k != 'block_1'}
      never = expect(dataclasses.replace(DENSE, num_layers=1), left)
      expected |= {f'never/{k}': v for k, v in never.items()}
      assert abs(metrics['loss'] - metrics['never/loss']) > 1e-3
      table = task.summary(metrics)
      assert f'{metrics["never/accuracy"]:.4f}' in table
      assert f'{flops.published_macs(AMOD) / 1e9:.4f}' in table
    assert metrics == pytest.approx(expected, rel=1e-5)

  def test_few_classes_have_no_top5(self, folder):
    model = dataclasses.replace(DENSE, num_classes=3)
    task = make(model, data=in_folder(folder))
    params, _ = init(task)
    metrics = held_out(task, params)
    # Six images in a batch of 71; a row that only fills it is no image.
    (batch,) = images_lib.eval_batches(task.config.data, batch_size=6)
    output = _apply(model)({'params': params}, batch['image'])
    expected = oracle(np.asarray(output.logits_BV), batch['label'], 3)
    del expected['top5']
    assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Pictures of three classes: 4 to train on and 2 held out, of each."""
  root = tmp_path_factory.mktemp('pictures')
  return tiny.pictures(root, ('cat', 'dog', 'emu'), {'train': 4, 'eval': 2})


def in_folder(folder):
  return ImageDataConfig(source='folder', path=str(folder), image_size=8)


def test_epochs_and_what_the_data_are(folder, tmp_path):
  model = dataclasses.replace(DENSE, num_classes=3)
  epochs = {'train.num_epochs': 2.5, 'train.batch_size': 4}
  # Of `num_steps`, which do not matter, it would leave nothing.
  warm = {'train.num_epochs': 12, 'train.capacity_warmup_steps': 10}
  config = make(AMOD, data=in_folder(folder), **warm).config
  ((_, run),) = phases.expand(config, tmp_path)
  assert config.train.num_steps == 8 < run.train.num_steps == 18
  task = make(model, data=in_folder(folder), **epochs)
  assert task.modality.data_summary() == (
    '12 images for training, 6 held out, 3 classes: cat, dog, emu'
  )
  ((_, run),) = phases.expand(task.config, tmp_path)
  assert (run.train.num_steps, run.train.num_epochs) == (7, None)
  with pytest.raises(UserError, match='phases.train derives'):
    loop.train(task, task.config, tmp_path)


@pytest.fixture(scope='module')
def dense_run(tmp_path_factory, on_one_device, no_report):
  """A dense run, and its held-out metrics: those of its averages."""
  workdir = tmp_path_factory.mktemp('runs') / 'dense'
  config = make(**{'train.ema_decay': 0.6, 'train.num_steps': 6}).config
  with on_one_device():
    result = phases.train(config, workdir)
  params = result.state.eval_params
  assert not np.array_equal(
    params['head']['kernel'], result.state.params['head']['kernel']
  )
  return workdir, result.metrics, jax.device_get(params)


def adapt(task, path):
  """Returns flat parameters: fresh ones, and those that a run starts with."""
  fresh, model_state = init(task)
  params, _ = task.start(fresh, model_state, str(path))
  shapes = jax.tree.map(jnp.shape, fresh)
  assert jax.tree.map(jnp.shape, params) == shapes
  return trees.flatten(fresh), trees.flatten(params)


class TestStart:
  @pytest.mark.slow
  @pytest.mark.parametrize(
    ('model', 'new'),
    [
      (AMOD, ''),
      (MOD, 'block_1/router/kernel'),
      (DYNAMIC, 'prediction_'),
      (dataclasses.replace(DYNAMIC, score='static'), 'pattern_'),
      (AMOD.isoflop_twin(1), ''),
    ],
    ids=['amod', 'mod', 'dynamic', 'static', 'isoflop'],
  )
  def test_from_a_dense_run(self, dense_run, model, new):
    workdir, _, trained = dense_run
    fresh, params = adapt(make_alone(model), workdir)
    added = {k: x for k, x in fresh.items() if new and k.startswith(new)}
    assert bool(added) == bool(new)
    known = trees.flatten(trained)
    tiny.same(params, {k: added.get(k, known.get(k)) for k in fresh})

  def test_a_routed_run_becomes_dense(self, tmp_path):
    task = make(MOD)
    routed = tiny.save_run(tmp_path, task.config, init(task)[0])
    _, params = adapt(make(), tmp_path)
    del routed['block_1/router/kernel']
    tiny.same(params, routed)

  @pytest.mark.parametrize('flag', ['data.image_size', 'model.image_size'])
  def test_another_resolution_and_other_classes(
    self, dense_run, folder, caplog, flag
  ):
    workdir, _, trained = dense_run
    model = dataclasses.replace(AMOD, num_classes=3)
    config = make(model, data=in_folder(folder)).config
    task = make_task(config_lib.replace(config, {flag: 12}))
    assert task.config.model.image_size == task.config.data.image_size == 12
    absl_logging.use_python_logging(quiet=True)
    with caplog.at_level(logging.WARNING, logger='absl'):
      fresh, params = adapt(task, workdir)
    assert '4 x 4 patches are interpolated to 6 x 6, for image_' in caplog.text
    assert 'made new, for num_classes=3; the model there has 10' in caplog.text
    position = params.pop('position')
    expected = resize_positions(jnp.asarray(trained['position']), 1, 6)
    np.testing.assert_allclose(position, expected, atol=1e-6)
    np.testing.assert_array_equal(position[0], trained['position'][0])
    head = {k: x for k, x in fresh.items() if k.startswith('head')}
    known = trees.flatten(trained) | head
    del known['position']
    tiny.same(params, known)

  def test_files_of_lv_vit_and_dynamic_vit(self, tmp_path, caplog):
    """Statistics and prediction heads come along; a lost head alone is new."""
    sizes = {'image_size': 32, 'patch_size': 8, 'width': 18, 'num_heads': 3}
    plain = ViTConfig(**sizes, mlp_dim=28, num_layers=2, num_classes=10)
    pruned = DynamicViTConfig(backbone=plain, stages=(0, 1))
    lv_vit = dataclasses.replace(
      plain,
      stem=ConvStemConfig(width=5),
      residual_scale=0.5,
      token_head=True,
      qkv_bias=False,
    )
    lost = files.read(GOLDEN / 'vit_lvvit.pth.tar')
    del lost['aux_head.weight'], lost['aux_head.bias']
    files.write(tmp_path / 'lost.npz', lost)
    absl_logging.use_python_logging(quiet=True)
    for model, path, new in (
      (pruned, GOLDEN / 'vit_dynamicvit.pth', set()),
      (lv_vit, GOLDEN / 'vit_lvvit.pth.tar', set()),
      (lv_vit, tmp_path / 'lost.npz', {'head_tokens'}),
    ):
      caplog.clear()
      fresh = tiny.shapes(model)
      params = fresh.pop('params')
      params, model_state = warm_start.load_weights(
        str(path), model, params, fresh
      )
      expected = convert_vit.read(path, model)
      found = trees.flatten({**params, **model_state})
      for name, value in found.items():
        if name.split('/')[0] in new:
          assert name not in expected
          assert isinstance(value, jax.ShapeDtypeStruct)  # As it was.
        else:
          np.testing.assert_array_equal(value, expected[name])
      told = [r.message for r in caplog.records if 'is made new' in r.message]
      assert all(any(head in line for head in new) for line in told)
      assert bool(told) == bool(new)


class TestTeacher:
  def task(self, init, teacher=None, **changes):
    return make(
      changes.pop('model', DYNAMIC),
      init=str(init),
      objective=PruningObjective(teacher=teacher and str(teacher)),
      **changes,
    )

  def test_is_that_of_init_or_another(self, dense_run, tmp_path):
    workdir, _, trained = dense_run
    teacher = self.task(workdir).teacher(None)
    tiny.same(teacher['params'], trained)
    other, _ = init(make(), seed=5)
    convert_vit.save(tmp_path / 'other.npz', other, DENSE)
    teacher = self.task(workdir, tmp_path / 'other.npz').teacher(None)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-7),
      *(dict(teacher['params']), other),
    )

  @pytest.mark.slow
  def test_it_stands_beside_the_state(
    self, dense_run, tmp_path, monkeypatch, one_device
  ):
    workdir, dense, trained = dense_run
    model = dataclasses.replace(DYNAMIC, stages=(1,))
    changes = {'evaluation.final_batches': 1}
    task = self.task(workdir, model=model, **changes)
    monkeypatch.setattr(phases, 'make_task', lambda *args: task)
    result = phases.train(task.config, tmp_path, max_steps=0)
    params = result.state.params
    flat = trees.flatten(params)
    assert sum(x.size for x in flat.values()) == flops.num_params(model)
    taught = trees.flatten(trained)
    tiny.same({k: flat[k] for k in taught}, taught)
    # What is saved of a run is its state, and the teacher is no part of that:
    # it holds each parameter and its two moments.
    assert result.state.model_state == {}
    arrays = [x for x in jax.tree.leaves(result.state) if x.ndim]
    assert len(arrays) == 3 * len(flat)

    (first,) = metrics_lib.read(tmp_path)
    # Straight after adaptation.
    assert (first.pop('step'), first.pop('kind')) == (0, 'eval')
    expected = held_out(task, params, batches=1)
    assert {k: first[k] for k in expected} == pytest.approx(expected, rel=1e-6)
    assert expected['loss'] != dense['loss']


PICTURES = {
  'amod': (AMOD, {'routing', 'attention'}),
  'tome': (TOME, {'merged', 'attention'}),
  # No block sees all tokens, so there is no map of them either.
  'every_block': (
    config_lib.replace(MOD, {'routing.period': 1, 'routing.offset': 0}),
    {'routing'},
  ),
  # Nor one of the rows that enter, which a loop computes.
  'sequences': (
    dataclasses.replace(
      DENSE,
      routing=VisionRoutingConfig(
        **{'period': 1, 'offset': 0, 'score': 'learned'},
        **{'per_sequence': True, 'balance_loss': 0.1},
      ),
    ),
    {'routing'},
  ),
  'experts': (
    dataclasses.replace(DENSE, experts=ExpertsConfig(num_experts=2)),
    {'attention', 'expert_map', 'expert_load'},
  ),
  'dynamic': (DYNAMIC, {'stages', 'keep_probability'}),
}


@pytest.mark.slow
@pytest.mark.parametrize('which', PICTURES)
def test_pictures(which):
  model, names = PICTURES[which]
  task = make_alone(model)
  params, model_state = init(task)
  figures = task.pictures(params, model_state)
  assert figures.keys() == names
  for figure in figures.values():
    figure.canvas.draw()
    plt.close(figure)
  studies = {'confusion', 'throughput'}
  if 'routing' in names:
    studies.add('importance')
  assert set(task.studies()) == studies


def test_attention_to_merged_patches_is_drawn_by_their_number(monkeypatch):
  task = make_alone(TOME)
  params = jax.tree.map(lambda x: x, init(task)[0])
  attention = params['block_1']['attention']  # Where all keys are alike.
  attention['query'] = jax.tree.map(jnp.zeros_like, attention['query'])
  drawn = []
  monkeypatch.setattr(viz, 'attention_maps', lambda _, x, **__: drawn.append(x))
  shown_BHWC, _, output, intermediates = task.modality.look(task, params, {})
  places = output.places
  task.modality._draw_attention(shown_BHWC[0], intermediates, places)
  place_L = np.asarray(places['block_0'][0])
  size_L = np.bincount(place_L)[place_L]
  assert size_L.max() > 1
  _, map_HL = drawn[0]
  np.testing.assert_allclose(map_HL, [size_L[1:] / 17] * 2, rtol=1e-5)


def test_never_is_no_look_at_experts_that_choose():
  # They would choose by averages, so the rest of the model were another, too.
  for choice, modes in (('token', ['', 'never/']), ('expert', [''])):
    experts = ExpertsConfig(num_experts=2, choice=choice)
    model = dataclasses.replace(
      DENSE, experts=experts, routing=VisionRoutingConfig()
    )
    assert list(make_alone(model).modality.modes()) == modes


def test_rows_that_fill_a_batch_have_no_part_in_the_load_of_experts():
  experts = ExpertsConfig(num_experts=2, num_nulls=1)
  task = make_alone(dataclasses.replace(DENSE, experts=experts))
  params, model_state = init(task)
  # All that is real in the first batch is all that there is in the second.
  images = random_batch()['image']
  step = jax.jit(task.eval_step, static_argnums=4)
  found = [
    step(
      *(params, model_state),
      dict(image=image, label=jnp.zeros(4, int), weight=jnp.array(weight)),
      *(jax.random.key(0), task.eval_modes()['']),
    )
    for image, weight in (
      (images, [1.0, 1, 0, 0]),
      (images[jnp.array([0, 1, 0, 1])], [1.0, 1, 1, 1]),
    )
  ]
  tokens = 2 * (1 + 16)  # Two rows of a class token and 4 x 4 patches.
  assert found[0]['experts/null'][1] == tokens * DENSE.num_layers
  for name in ('null', 'busiest', 'dropped'):
    pairs = [sums[f'experts/{name}'] for sums in found]
    np.testing.assert_allclose(*[a / b for a, b in pairs], rtol=1e-6)
