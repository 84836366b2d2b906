"""The adaptive task: gradients, held-out numbers, costs, pictures."""

import dataclasses
import functools
import json
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax import flops, parallel, trees
from mod_jax.convert import vit as convert_vit
from mod_jax.convert.files import Lazy
from mod_jax.data.images import ImageDataConfig
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.losses import acm as acm_losses
from mod_jax.models import acm
from mod_jax.models.lm import LMConfig
from mod_jax.models.vit import ViTConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.checkpoints import Checkpointer
from mod_jax.runs.run_config import EvaluationConfig
from mod_jax.studies import adaptive as adaptive_studies
from mod_jax.tasks import make_task
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.experiment import (
  ACMObjective,
  ExperimentConfig,
  PhaseConfig,
  PruningObjective,
)
from mod_jax.train import evaluation

DENSE = ViTConfig(
  image_size=8,
  patch_size=4,
  num_classes=10,
  num_layers=1,
  width=8,
  num_heads=2,
)
# One module of each kind.
MODEL = dataclasses.replace(
  DENSE,
  adaptive=AdaptiveConfig(
    num_learners=2, replace=(FFNS, r'block_\d+/attention/query')
  ),
)
MODULES = acm.modules(MODEL)


def random_params(model, seed=0):
  shapes = nn.unbox(
    jax.eval_shape(
      lambda: model.build().init(jax.random.key(0), model.example())
    )
  )['params']
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0, 0.4, x.shape).astype(np.float32), shapes
  )


def telling(model):
  """Returns parameters whose gates say something else of every token."""
  params = random_params(model)
  for name in acm.modules(model):
    logits = acm.subtree(params, name)['gate']['logits']
    logits['kernel'] *= 3
    logits['bias'] *= 0
  return params


PARAMS = telling(MODEL)
TEACHER = {'params': random_params(DENSE, seed=1)}


@functools.cache  # With what it has compiled.
def make(phase='end_to_end', **objective):
  config = ExperimentConfig(
    model=MODEL,
    data=ImageDataConfig(image_size=8),
    objective=ACMObjective(phase=phase, **objective),
    evaluation=EvaluationConfig(
      every=0, batches=2, batch_size=50, final_batches=2
    ),
  )
  return make_task(config)


@functools.cache
def gradients(task, with_teacher):
  """Returns (loss, metric sums, gradients) of a step."""
  rng = np.random.default_rng(0)
  image = rng.normal(size=(4, 8, 8, 3)).astype(np.float32)
  batch = {'image': image, 'target': np.eye(10, dtype=np.float32)[:4]}

  @jax.jit
  def step(params):
    teacher = TEACHER if with_teacher else None
    return jax.value_and_grad(task.loss, has_aux=True)(
      params, {}, batch, jax.random.key(0), task.static_args(0), teacher
    )

  (loss, (metric_sums, _)), grads = jax.device_get(step(PARAMS))
  return float(loss), metric_sums, trees.flatten(grads)


def mesh():
  return parallel.make_mesh(parallel.MeshConfig(), jax.devices()[:1])


@functools.cache
def held_out(task):
  with jax.set_mesh(mesh()):
    return evaluation.held_out(task, PARAMS, {}, mesh())


def is_adaptive(name):
  return re.fullmatch(acm.PARAMETERS, name) is not None


def choices(output):
  return stack.collect(output.aux, 'adaptive')


WEIGHTED = {
  'budget': 0.9,
  'budget_weight': 0.7,
  'entropy_weight': 0.3,
  'diversity_weight': 0.2,
}


class TestLoss:
  def test_the_first_phase_is_the_learners_alone(self):
    loss, metric_sums, grads = gradients(make('learners'), True)
    for name, grad in grads.items():
      trained = is_adaptive(name) and '/gate/' not in name
      assert jnp.any(grad) == trained, name
    total, count = metric_sums['loss']
    assert count == 4
    assert loss == pytest.approx(total / count, rel=1e-5)

  @pytest.mark.parametrize('phase', ['learners', 'gates'])
  def test_the_first_two_are_means_over_the_modules(self, phase):
    task = make(phase)
    loss, _, grads = gradients(task, True)
    image_BHWC = np.random.default_rng(0).normal(size=(4, 8, 8, 3))
    captured = acm.capture(MODEL, TEACHER, image_BHWC.astype(np.float32))
    each = []
    for name, module in MODULES.items():

      def alone(params, module=module, seen=captured[name]):
        total, count = task._module_loss(module, params, seen)
        return total / count

      value, grad = jax.jit(jax.value_and_grad(alone))(
        acm.subtree(PARAMS, name)
      )
      each.append(float(value))
      # What meets the clipping: a half of what a module alone would send.
      for path, leaf in trees.flatten(grad).items():
        np.testing.assert_allclose(
          grads[f'{name}_acm/{path}'], leaf / 2, rtol=1e-3, atol=1e-6
        )
    assert len(each) == 2
    assert each[0] != pytest.approx(each[1], rel=1e-2)
    assert loss == pytest.approx(np.mean(each), rel=1e-5)

  def test_the_second_phase_is_finite_and_moderate(self):
    loss, _, grads = gradients(make('gates'), True)
    gates = {n: g for n, g in grads.items() if '/gate/' in n}
    assert jnp.isfinite(loss)
    for name, grad in gates.items():
      assert jnp.isfinite(grad).all()
      assert 1e-4 < jnp.abs(grad).max() < 10, name
    for name in grads.keys() - gates.keys():
      assert not jnp.any(grads[name]), name

  def test_the_second_phase_stands_perfect_and_useless_learners(self):
    # Distances of 0, or all alike: labels from quotients would be no numbers.
    task = make('gates')
    z_BLD = jnp.ones((2, 5, 8))
    for name, module in MODULES.items():
      params = jax.tree.map(jnp.zeros_like, acm.subtree(PARAMS, name))
      run = jax.jit(functools.partial(task._module_loss, module))
      for y_BLD in (jnp.zeros((2, 5, 8)), 1e6 * jnp.ones((2, 5, 8))):
        loss, _ = run(params, acm.Captured(z_BLD, y_BLD))
        want = 2 * np.log(module.num_choices)
        assert float(loss) == pytest.approx(want, rel=1e-5)

  def test_the_last_phase_trains_everything(self):
    _, metric_sums, grads = gradients(make(**WEIGHTED), False)
    assert all(jnp.isfinite(g).all() for g in grads.values())
    for name in grads:
      if '/gate/' in name or not is_adaptive(name):
        # A key's bias cancels in the softmax.
        assert jnp.any(grads[name]) or name.endswith('key/bias'), name
    assert set(metric_sums) == {
      'loss',
      'load',
      'budget',
      'entropy',
      'diversity',
    }

  def test_the_task_loss_alone_reaches_the_gates(self):
    alone = {f'{n}_weight': 0.0 for n in ('budget', 'entropy', 'diversity')}
    loss, metric_sums, grads = gradients(make(**alone), False)
    assert loss == pytest.approx(
      metric_sums['loss'][0] / metric_sums['loss'][1]
    )
    gates = [g for n, g in grads.items() if n.endswith('logits/bias')]
    assert len(gates) == 2
    assert all(jnp.abs(g).max() > 1e-5 for g in gates)

  def test_the_last_loss_is_the_weighted_sum(self):
    loss, metric_sums, _ = gradients(make(**WEIGHTED), False)
    mean = {name: total / count for name, (total, count) in metric_sums.items()}
    want = mean['loss'] + sum(
      WEIGHTED[f'{name}_weight'] * mean[name]
      for name in ('budget', 'entropy', 'diversity')
    )
    assert loss == pytest.approx(want, rel=1e-5)
    assert mean['budget'] == pytest.approx(abs(mean['load'] - 0.9), rel=1e-5)
    assert mean['entropy'] < 0

  def test_diversity_counts_learners_and_the_budget_their_cost(self):
    task = make(**WEIGHTED)
    _, metric_sums, _ = gradients(task, False)
    # What the step above draws, once more.
    image_BHWC = np.random.default_rng(0).normal(size=(4, 8, 8, 3))
    gumbel = jax.random.split(jax.random.key(0), 3)[2]
    output = jax.jit(MODEL.build(train=True, learners='train').apply)(
      {'params': PARAMS},
      image_BHWC.astype(np.float32),
      rngs={'gumbel': gumbel},
    )
    found = choices(output)
    chosen_BLK = np.stack(
      [np.asarray(c.learners_BL) for c in found.values()], axis=-1
    )
    cost_K = [MODULES[name].learner_flops for name in found]
    fraction_B = chosen_BLK.mean(axis=(1, 2)) / 2
    load_B = chosen_BLK.mean(axis=1) @ cost_K / sum(cost_K) / 2

    def apart(x_B):
      return -np.abs(x_B[:, None] - x_B).mean()

    assert apart(fraction_B) != pytest.approx(apart(load_B), rel=0.05)
    mean = {name: total / count for name, (total, count) in metric_sums.items()}
    assert mean['load'] == pytest.approx(load_B.mean(), rel=1e-5)
    assert mean['diversity'] == pytest.approx(apart(fraction_B), rel=1e-4)


class TestNoise:
  def test_it_ends_where_it_should(self):
    task = make(noise_until=0.25)
    steps = task.config.train.num_steps
    drawn = [task.static_args(step) for step in range(steps)]
    assert drawn == [step < steps / 4 for step in range(steps)]

  def test_other_phases_know_one_program(self):
    task = make('gates', noise_until=0.25)
    assert len({task.static_args(step) for step in (0, 10_000)}) == 1


class TestStatic:
  def test_trains_so_many_learners_and_no_gate(self):
    task = make(static_learners=1)
    loss, metric_sums, grads = gradients(task, False)
    assert set(metric_sums) == {'loss'}
    assert loss == pytest.approx(
      metric_sums['loss'][0] / metric_sums['loss'][1]
    )
    for name, grad in grads.items():
      if '/gate/' in name:
        assert not grad.any()
      elif name.endswith('/up'):
        assert grad[0].any()
        assert not grad[1].any()

  def test_is_evaluated_as_it_is(self):
    task = make(static_learners=1)
    metrics = held_out(task)
    names = {'k1/loss', 'k1/accuracy', 'k1/top5'}
    assert set(metrics) == names | {'k1/mean_recall'}
    assert metrics['k1/loss'] == pytest.approx(held_out(make())['k1/loss'])
    assert set(task.main_metrics(metrics)) == names
    assert len(task.summary(metrics).splitlines()) == 2
    assert task.flops_per_step(False) == pytest.approx(
      6 * 16 * task.macs(learners=1)
    )


class TestEvaluate:
  def test_numbers_under_the_gates_and_for_every_k(self):
    metrics = held_out(make())
    per_mode = {'loss', 'accuracy', 'mean_recall', 'top5'}
    assert set(metrics) == {
      *per_mode,
      *(f'k{k}/{name}' for k in (1, 2) for name in per_mode),
      *('load', 'load_std', 'token_std', 'budget_error', 'gmacs'),
    }
    assert metrics['gmacs'] == make().macs(metrics['load']) / 1e9
    assert metrics['k1/loss'] != pytest.approx(metrics['k2/loss'], rel=1e-3)

  def test_fixed_numbers_only_before_there_are_gates(self):
    metrics = held_out(make('learners'))
    assert {name.split('/')[0] for name in metrics} == {'k1', 'k2'}
    assert metrics['k1/loss'] == pytest.approx(held_out(make())['k1/loss'])
    assert set(make('learners').main_metrics(metrics)) == {
      *('k2/loss', 'k2/accuracy', 'k2/top5')
    }

  def test_load_and_its_spread(self):
    task = make()
    metrics = held_out(task)
    image_BHWC = task.modality.examples(100)['image']
    apply = jax.jit(MODEL.build().apply)
    found = choices(jax.device_get(apply({'params': PARAMS}, image_BHWC)))
    costs = {n: m.learner_flops for n, m in MODULES.items()}
    assert len(set(costs.values())) == 2
    load_BL = sum(
      costs[n] * np.asarray(c.learners_BL) for n, c in found.items()
    ) / (2 * sum(costs.values()))
    np.testing.assert_allclose(task.share_per_token(found), load_BL, atol=1e-6)
    load_B = load_BL.mean(axis=1)
    np.testing.assert_allclose(task.load_per_row(found), load_B, atol=1e-6)
    assert 0.02 < load_B.std() < load_BL.std()
    assert metrics['load'] == pytest.approx(load_B.mean(), rel=1e-4)
    assert metrics['load_std'] == pytest.approx(load_B.std(), abs=1e-3)
    assert metrics['token_std'] == pytest.approx(load_BL.std(), abs=1e-3)
    assert metrics['budget_error'] == pytest.approx(metrics['load'] - 0.5)
    one_hot = {
      n: jax.nn.one_hot(
        c.learners_BL - MODULES[n].min_learners,
        MODULES[n].num_choices,
      )
      for n, c in found.items()
    }
    np.testing.assert_allclose(
      acm_losses.load_per_image(one_hot, task.learners), load_B, atol=1e-5
    )


class TestCosts:
  def test_macs(self):
    task = make()
    table = MODEL.flops_table()
    gates = sum(row.get('gate', 0) for _, row in table) / 2
    assert task.macs() == task.macs(1.0) == flops.published_macs(MODEL)
    assert task.macs(learners=2) == flops.published_macs(MODEL) - gates
    learners = sum(row.get('learners', 0) for _, row in table) / 2
    assert task.macs(1.0) - task.macs(0.0) == learners
    assert task.macs(0.25) - task.macs(0.0) == pytest.approx(learners / 4)
    assert task.macs(learners=1) == task.macs(0.5) - gates

  def test_of_a_step(self):
    # Batches of 16, here and below.
    assert make().flops_per_step(0.0) == 16 * flops.train(MODEL)
    trained = 3 * sum(
      row.get(part, 0)
      for _, row in MODEL.flops_table()
      for part in ('learners', 'gate')
    )
    assert make('gates').flops_per_step(0.0) == 16 * (
      flops.forward(DENSE) + trained
    )

  def test_report(self):
    report = make().flops_report()
    assert 'block_*/mlp' in report
    assert 'ratio to dense' in report


class TestSummary:
  def test_a_row_for_each_way_to_run(self):
    task = make()
    table = task.summary(held_out(task))
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows[1:4]] == ['gated', 'k', 'k']
    metrics = held_out(task)
    assert f'{metrics["load"]:.4f}' in rows[1]
    assert f'{metrics["k1/accuracy"]:.4f}' in rows[2]
    assert f'{task.macs(metrics["load"]) / 1e9:.4f}' in rows[1]
    assert 'budget 0.500' in table
    assert f'{metrics["budget_error"]:+.4f}' in table

  def test_without_gates(self):
    table = make('learners').summary(held_out(make('learners')))
    assert 'gated' not in table
    assert 'budget' not in table


class TestWeights:
  def test_a_checkpoint_file_of_the_dense_model(self, tmp_path):
    path = tmp_path / 'dense.safetensors'
    convert_vit.save(path, TEACHER['params'], DENSE, naming='timm')
    task = make()
    params, model_state = task.start(PARAMS, {}, str(path))
    assert model_state == {}
    before, dense, after = map(
      trees.flatten, (PARAMS, TEACHER['params'], params)
    )
    for name, value in after.items():
      source = before if is_adaptive(name) else dense
      np.testing.assert_array_equal(value, source[name], err_msg=name)
    loaded = make_task(
      config_lib.replace(
        task.config, {'objective.teacher': str(path), 'init': 'elsewhere'}
      )
    ).converted()
    for name, value in trees.flatten(loaded['params']).items():
      np.testing.assert_array_equal(value, dense[name], err_msg=name)

  def test_nobody_to_learn_from(self):
    for phase in ('learners', 'gates'):
      with pytest.raises(UserError, match='init is missing.*--config.init'):
        make(phase).teacher(None)
    assert make().teacher(None) is None

  @pytest.mark.parametrize(
    ('changes', 'message'),
    [
      ({'objective': PruningObjective()}, 'PruningObjective.*ACMObjective'),
      (
        {'objective.phase': 'all', 'optimizer.rules': (('.', 1.0, 0),)},
        "objective.phase='all' and optimizer.rules",
      ),
      (
        {
          'model.routing': VisionRoutingConfig(score='learned', layers=(0,)),
          'dense': PhaseConfig(num_steps=1, batch_size=1, learning_rate=1e-3),
        },
        'dense and model.routing and model.adaptive: .*a run of its own',
      ),
      (
        {
          'model.routing': VisionRoutingConfig(score='learned', layers=(0,)),
          'train.capacity_warmup_steps': 2,
        },
        'train.capacity_warmup_steps=2 and model.routing and model.adaptive',
      ),
      (
        {'model.adaptive': None},
        'objective=ACMObjective and model=ViTConfig: .*objective=None',
      ),
      (
        {'objective.static_learners': 3},
        'objective.static_learners=3: expected at most .*num_learners=2',
      ),
      (
        {'data.image_size': 16, 'model.image_size': 8},
        r'model\.image_size=8 and data\.image_size=16',
      ),
    ],
  )
  def test_what_does_not_fit(self, changes, message):
    with pytest.raises(UserError, match=message):
      config_lib.replace(make().config, changes)


@pytest.fixture
def teacher_at_hand(monkeypatch):
  # As those of weights in a file, its arrays are read when they are asked for.
  teacher = jax.tree.map(
    lambda x: Lazy(x.shape, functools.partial(np.asarray, x)), TEACHER
  )
  monkeypatch.setattr(Adaptive, 'converted', lambda self: teacher)


class TestPictures:
  def draw(self, task, params=PARAMS):
    figures = task.pictures(params, {})
    for figure in figures.values():
      assert isinstance(figure, matplotlib.figure.Figure)
      figure.canvas.draw()
      plt.close(figure)
    return set(figures)

  @pytest.mark.usefixtures('teacher_at_hand')
  @pytest.mark.parametrize(
    ('phase', 'names'),
    [
      ('learners', {'error_by_learners'}),
      ('gates', {'error_by_learners', 'load', 'compute', 'extremes'}),
      # Learners no longer imitate.
      ('end_to_end', {'load', 'compute', 'extremes'}),
    ],
  )
  def test_all_are_drawn(self, phase, names):
    assert self.draw(make(phase)) == names

  def test_when_the_dense_model_has_gone(self):
    assert make()._error_map(PARAMS) == {}

  @pytest.mark.usefixtures('teacher_at_hand')
  def test_robustness(self, monkeypatch):
    monkeypatch.setattr(adaptive_studies, '_IMAGES', 20)
    found = make().studies()['robustness'](PARAMS, {}, mesh())
    clean = {
      json.dumps(value)
      for name, value in found.metrics.items()
      if name.endswith('/0')
    }
    assert len(clean) == 1
    assert set(json.loads(clean.pop())) == {'adaptive', 'dense', 'load'}
    assert len(found.metrics) % 6 == 0
    assert found.text.count('\n') == len(found.metrics) + 1


class TestLanguage:
  """The same of a language model: its layers scanned and rematerialised."""

  MODEL = LMConfig(
    num_layers=2,
    width=8,
    num_heads=2,
    mlp_dim=8,
    routing=None,
    adaptive=AdaptiveConfig(num_learners=2, replace=(FFNS,)),
    scan_layers=True,
    remat='full',
  )

  @pytest.fixture(scope='class')
  @staticmethod
  def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp('texts')
    rng = np.random.default_rng(0)
    for name, size in (('train', 400), ('held', 60)):
      letters = bytes(rng.integers(97, 110, size, dtype=np.uint8))
      (folder / f'{name}.txt').write_bytes(letters)

    @functools.cache
    def make(phase, **model):
      config = ExperimentConfig(
        model=dataclasses.replace(TestLanguage.MODEL, **model),
        data=TextDataConfig(
          source='files',
          files=f'{folder}/train.txt',
          eval_files=f'{folder}/held.txt',
          length=16,
          max_epochs=1000,
        ),
        objective=ACMObjective(phase=phase),
        # Of 59 tokens to predict, the last row has 11.
        evaluation=EvaluationConfig(
          every=0, batches=0, batch_size=8, sample_tokens=4
        ),
      )
      return make_task(config)

    return make

  @pytest.fixture(scope='class')
  @staticmethod
  def params():
    flat = dataclasses.replace(TestLanguage.MODEL, scan_layers=False)
    return flat, stack.scanned(TestLanguage.MODEL.stack, telling(flat))

  @pytest.fixture(scope='class')
  @staticmethod
  def teacher():
    return {'params': random_params(TestLanguage.MODEL.dense_twin(), seed=1)}

  @pytest.mark.parametrize('phase', ['learners', 'gates'])
  def test_phases_look_into_the_loop(self, make, params, teacher, phase):
    flat, scanned = params
    batch = next(make(phase).modality.train_iterator())

    def step(task, params, teacher):
      def loss(params):
        return task.loss(
          params, {}, batch, jax.random.key(0), task.static_args(0), teacher
        )[0]

      return jax.jit(jax.value_and_grad(loss))(params)

    loss, grads = step(make(phase), scanned, teacher)
    plain = make(phase, scan_layers=False, remat='none')
    want, want_grads = step(
      plain,
      stack.unrolled(self.MODEL.stack, scanned),
      {'params': stack.unrolled(self.MODEL.stack, teacher['params'])},
    )
    assert plain.config.model == dataclasses.replace(flat, remat='none')
    assert loss == pytest.approx(float(want), rel=1e-5)
    grads = trees.flatten(stack.unrolled(self.MODEL.stack, grads))
    want_grads = trees.flatten(want_grads)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
      np.testing.assert_allclose(
        grad, want_grads[name], rtol=1e-3, atol=1e-5, err_msg=name
      )
      gate = re.fullmatch(acm.GATES, name) is not None
      trained = is_adaptive(name) and gate == (phase == 'gates')
      assert jnp.any(grad) == trained, name

  def test_end_to_end_trains_everything(self, make, params):
    task = make('end_to_end')
    batch = next(task.modality.train_iterator())

    def loss(params):
      return task.loss(params, {}, batch, jax.random.key(0), True)

    grads, (metric_sums, _) = jax.jit(jax.grad(loss, has_aux=True))(params[1])
    assert {'loss', 'load', 'budget', 'entropy', 'diversity'} == set(
      metric_sums
    )
    for name, grad in trees.flatten(grads).items():
      assert jnp.isfinite(grad).all(), name
      assert jnp.any(grad), name

  def test_an_early_exit_is_trained(self, make):
    task = make('end_to_end', early_exit=1, scan_layers=False, remat='none')
    batch = next(task.modality.train_iterator())

    def loss(key):
      params = task.init(key)['params']
      return task.loss(params, {}, batch, key, task.static_args(0))

    _, (sums, _) = jax.eval_shape(loss, jax.random.key(0))
    assert 'early_loss' in sums

  def test_starts_from_a_dense_run(self, make, params, teacher, tmp_path):
    task = make('learners')
    dense = dataclasses.replace(
      task.config, model=task.config.model.dense_twin(), objective=None
    )
    workdir_lib.claim(tmp_path, dense)
    directory = workdir_lib.checkpoints(tmp_path)
    with Checkpointer(directory, dense.checkpoint) as saver:
      saver.save(1, {'params': teacher['params'], 'model_state': {}})
    fresh = params[1]
    started, model_state = task.start(fresh, {}, str(tmp_path))
    assert model_state == {}
    before, taught = map(trees.flatten, (fresh, teacher['params']))
    for name, value in trees.flatten(started).items():
      source = before if is_adaptive(name) else taught
      np.testing.assert_array_equal(value, source[name], err_msg=name)
    converted = config_lib.replace(task.config, {'init': str(tmp_path)})
    jax.tree.map(
      np.testing.assert_array_equal,
      make_task(converted).converted(),
      teacher,
    )

  def test_is_evaluated_and_drawn(self, make, params, monkeypatch, teacher):
    monkeypatch.setattr(Adaptive, 'converted', lambda self: teacher)
    task, (flat, scanned) = make('end_to_end'), params
    metrics = evaluation.held_out(task, scanned, {}, mesh())
    per_mode = {'loss', 'perplexity', 'bits_per_byte'}
    assert set(metrics) == {
      *per_mode,
      *(f'k{k}/{name}' for k in (1, 2) for name in per_mode),
      *('load', 'load_std', 'token_std', 'budget_error', 'gmacs'),
    }
    for prefix in ('', 'k1/', 'k2/'):
      assert metrics[f'{prefix}perplexity'] == pytest.approx(
        np.exp(metrics[f'{prefix}loss'])
      )
    # Of each row alone, without the padding of the last one.
    (batch,) = task.modality.eval_batches(batch_size=8, num_batches=None)
    apply = jax.jit(flat.build().apply)
    variables = {'params': stack.unrolled(self.MODEL.stack, scanned)}
    rows = []
    for tokens_L, weight_L in zip(
      batch['tokens'], batch['weights'], strict=True
    ):
      if length := int((weight_L > 0).sum()):
        found = choices(apply(variables, tokens_L[None, :length]))
        rows.append(np.asarray(task.share_per_token(found))[0])
    assert [len(row) for row in rows] == [16, 16, 16, 11]
    means = [row.mean() for row in rows]
    assert metrics['load'] == pytest.approx(np.mean(means), rel=1e-4)
    assert metrics['load_std'] == pytest.approx(np.std(means), abs=1e-3)
    assert np.std(np.concatenate(rows)) > 0.05
    assert metrics['token_std'] == pytest.approx(
      np.std(np.concatenate(rows)), abs=1e-4
    )
    assert set(task.main_metrics(metrics)) == {
      *('loss', 'load', 'load_std', 'gmacs')
    }
    table = task.summary(metrics).splitlines()
    assert [row.split()[0] for row in table[1:4]] == ['gated', 'k', 'k']
    assert 'perplexity' in table[0]
    assert 'over sequences' in table[-1]
    assert TestPictures().draw(task, scanned) == {'load', 'compute'}
    (sample,) = task.finish(scanned, {})
    words = task.modality._held_out_words()
    assert sample.startswith(words)
    assert len(sample) > len(words)
    assert 'block_*/mlp' in task.flops_report()
