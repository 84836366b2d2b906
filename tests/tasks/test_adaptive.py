"""The adaptive task: gradients, held-out numbers, costs, pictures."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
import tiny

from mod_jax import config as config_lib
from mod_jax import flops, trees, viz
from mod_jax.convert import vit as convert_vit
from mod_jax.convert.files import Lazy
from mod_jax.data.text import TextDataConfig
from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.lora import LoRAConfig
from mod_jax.layers.mode import Mode
from mod_jax.models import acm
from mod_jax.studies import adaptive as adaptive_studies
from mod_jax.tasks import make_task
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.experiment import ACMObjective
from mod_jax.train import evaluation

pytestmark = pytest.mark.slow

DENSE = dataclasses.replace(tiny.VIT, patch_size=4, num_layers=1)
# One module of each kind.
MODEL = dataclasses.replace(
  DENSE,
  adaptive=AdaptiveConfig(
    num_learners=2, replace=(FFNS, r'block_\d+/attention/query')
  ),
)
MODULES = acm.modules(MODEL)


def telling(model):
  """Returns parameters whose gates say something else of every token."""
  params = tiny.random_params(model)
  for name in acm.modules(model):
    logits = acm.subtree(params, name)['gate']['logits']
    logits['kernel'] *= 3
    logits['bias'] *= 0
  return params


PARAMS = telling(MODEL)
TEACHER = {'params': tiny.random_params(DENSE, seed=1)}
IMAGE = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
BATCH = {'image': IMAGE, 'target': np.eye(10, dtype=np.float32)[:4]}


@functools.cache  # With what it has compiled.
def make(phase='end_to_end', **objective):
  sizes = {'evaluation.batches': 2, 'evaluation.batch_size': 50}
  objective = ACMObjective(phase=phase, **objective)
  return make_task(tiny.experiment(MODEL, objective=objective, **sizes))


@functools.cache
def gradients(task):
  """Returns loss, means of the metrics, and gradients of a step."""
  teacher = None if task.objective.phase == 'end_to_end' else TEACHER

  @jax.jit
  def step(params):
    return jax.value_and_grad(task.loss, has_aux=True)(
      params, {}, BATCH, jax.random.key(0), task.static_args(0), teacher
    )

  (loss, (metric_sums, _)), grads = jax.device_get(step(PARAMS))
  means = {name: total / count for name, (total, count) in metric_sums.items()}
  return float(loss), means, trees.flatten(grads)


@functools.cache
def held_out(task):
  mesh = tiny.one_device()
  with jax.set_mesh(mesh):
    return evaluation.held_out(task, PARAMS, {}, mesh)


def is_adaptive(name):
  return re.fullmatch(acm.PARAMETERS, name) is not None


def started(own, dense):
  """Returns what a run starts from: the dense model's, but for the new."""
  own = trees.flatten(own)
  return {n: own[n] if is_adaptive(n) else dense[n] for n in own}


def choices(output):
  return stack.collect(output.aux, 'adaptive')


class TestPhases:
  @pytest.mark.parametrize('phase', ['learners', 'gates'])
  def test_the_first_two_are_means_over_the_modules(self, phase):
    task = make(phase)
    loss, means, grads = gradients(task)
    captured = acm.capture(MODEL, TEACHER, IMAGE)
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
    assert loss == pytest.approx(means['loss'], rel=1e-5)
    for name, grad in grads.items():
      gate = re.fullmatch(acm.GATES, name) is not None
      trained = is_adaptive(name) and gate == (phase == 'gates')
      assert np.any(grad) == trained, name

  def test_the_second_stands_perfect_and_useless_learners(self):
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

  def test_the_last_is_a_weighted_sum_that_trains_everything(self):
    weights = {
      'budget_weight': 0.7,
      'entropy_weight': 0.3,
      'diversity_weight': 0.2,
    }
    loss, mean, grads = gradients(make(budget=0.9, **weights))
    for name, grad in grads.items():
      assert np.isfinite(grad).all()
      if '/gate/' in name or not is_adaptive(name):
        # A key's bias cancels in the softmax.
        assert np.any(grad) or name.endswith('key/bias'), name
    want = mean['loss'] + sum(
      weights[f'{name}_weight'] * mean[name]
      for name in ('budget', 'entropy', 'diversity')
    )
    assert loss == pytest.approx(want, rel=1e-5)
    assert mean['budget'] == pytest.approx(abs(mean['load'] - 0.9), rel=1e-5)
    assert mean['entropy'] < 0

    # What the step draws, once more: diversity counts learners, and the budget
    # their cost.
    output = jax.jit(MODEL.build(train=True, learners='train').apply)(
      {'params': PARAMS},
      IMAGE,
      rngs={'gumbel': jax.random.split(jax.random.key(0), 3)[2]},
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
    assert mean['load'] == pytest.approx(load_B.mean(), rel=1e-5)
    assert mean['diversity'] == pytest.approx(apart(fraction_B), rel=1e-4)

  def test_the_noise_of_the_last_ends_where_it_should(self):
    task = make(noise_until=0.25)
    steps = task.config.train.num_steps
    drawn = [task.static_args(step) for step in range(steps)]
    assert drawn == [step < steps / 4 for step in range(steps)]
    # The others know one program.
    task = make('gates', noise_until=0.25)
    assert task.static_args(0) == task.static_args(steps)

  def test_static_learners_are_so_many_without_a_gate(self):
    task = make(static_learners=1)
    loss, means, grads = gradients(task)
    assert means == {'loss': pytest.approx(loss)}
    for name, grad in grads.items():
      if '/gate/' in name:
        assert not grad.any()
      elif name.endswith('/up'):
        assert grad[0].any()
        assert not grad[1].any()
    assert task.flops_per_step(False) == pytest.approx(
      6 * 8 * task.macs(learners=1)
    )


class TestEvaluate:
  def test_under_the_gates_and_for_every_k(self):
    task = make()
    metrics = held_out(task)
    per_mode = {'loss', 'accuracy', 'mean_recall', 'top5'}
    assert set(metrics) == {
      *per_mode,
      *(f'k{k}/{name}' for k in (1, 2) for name in per_mode),
      *('load', 'load_std', 'token_std', 'budget_error', 'gmacs'),
    }
    assert metrics['gmacs'] == task.macs(metrics['load']) / 1e9
    assert metrics['k1/loss'] != pytest.approx(metrics['k2/loss'], rel=1e-3)
    rows = [line.split() for line in task.summary(metrics).splitlines()]
    assert [row[0] for row in rows[1:4]] == ['gated', 'k', 'k']
    assert f'{metrics["load"]:.4f}' in rows[1]
    assert f'{metrics["k1/accuracy"]:.4f}' in rows[2]

  def test_without_gates(self):
    for task, kinds in (
      (make('learners'), {'k1', 'k2'}),
      (make(static_learners=1), {'k1'}),
    ):
      metrics = held_out(task)
      assert {name.split('/')[0] for name in metrics} == kinds
      assert metrics['k1/loss'] == pytest.approx(held_out(make())['k1/loss'])
      assert set(task.main_metrics(metrics)) == {
        f'{max(kinds)}/{name}' for name in ('loss', 'accuracy', 'top5')
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


def test_costs():
  task, table = make(), MODEL.flops_table()
  gates = sum(row.get('gate', 0) for _, row in table)
  learners = sum(row.get('learners', 0) for _, row in table)
  assert task.macs() == task.macs(1.0) == flops.published_macs(MODEL)
  assert task.macs(learners=2) == flops.published_macs(MODEL) - gates / 2
  assert task.macs(1.0) - task.macs(0.25) == pytest.approx(learners * 3 / 8)
  assert task.macs(learners=1) == task.macs(0.5) - gates / 2
  # Of a step of 8 rows.
  assert task.flops_per_step(0.0) == 8 * flops.train(MODEL)
  # Gates are not part of the first phase, nor do they change learners.
  for phase, own in (
    ('learners', 3 * learners),
    ('gates', learners + 3 * gates),
  ):
    cost = make(phase).flops_per_step(0.0)
    assert cost == 8 * (flops.forward(DENSE) + own)


def test_starts_from_a_checkpoint_file_of_the_dense_model(tmp_path):
  path = tmp_path / 'dense.safetensors'
  convert_vit.save(path, TEACHER['params'], DENSE, naming='timm')
  task = make()
  params, model_state = task.start(PARAMS, {}, str(path))
  assert model_state == {}
  dense = trees.flatten(TEACHER['params'])
  tiny.same(params, started(PARAMS, dense))
  # Adapters are learned beside it.
  for lora in (None, LoRAConfig(rank=2)):
    other = {'objective.teacher': str(path), 'model.lora': lora}
    loaded = make_task(config_lib.replace(task.config, other)).converted()
    tiny.same(loaded['params'], dense)


@pytest.fixture
def teacher_at_hand(monkeypatch):
  # As those of weights in a file, its arrays are read when they are asked for.
  teacher = jax.tree.map(
    lambda x: Lazy(x.shape, functools.partial(np.asarray, x)), TEACHER
  )
  monkeypatch.setattr(Adaptive, 'converted', lambda self: teacher)


def draw(task, params=PARAMS):
  figures = task.pictures(params, {})
  for figure in figures.values():
    figure.canvas.draw()
    plt.close(figure)
  return set(figures)


@pytest.mark.usefixtures('teacher_at_hand')
def test_all_is_drawn():
  assert draw(make('learners')) == {'error_by_learners'}
  gated = {'error_by_learners', 'load', 'compute', 'extremes'}
  assert draw(make('gates')) == gated


def test_the_dense_model_may_have_gone_when_pictures_are_drawn():
  assert make()._error_map(PARAMS) == {}


@pytest.mark.usefixtures('teacher_at_hand')
def test_robustness(monkeypatch):
  monkeypatch.setattr(adaptive_studies, '_IMAGES', 20)
  found = make().studies()['robustness'](PARAMS, {}, tiny.one_device())
  clean = {
    json.dumps(value)
    for name, value in found.metrics.items()
    if name.endswith('/0')
  }
  assert len(clean) == 1
  assert set(json.loads(clean.pop())) == {'adaptive', 'dense', 'load'}
  assert len(found.metrics) % 6 == 0
  assert found.text.count('\n') == len(found.metrics) + 1


def test_other_data_are_measured_by_its_own_budget(monkeypatch, on_one_device):
  monkeypatch.setattr(Adaptive, 'eval_modes', lambda *_, **__: {'': Mode()})
  config = make(budget=0.25).config
  run = tiny.run(config)
  run = dataclasses.replace(run, preprocess=config.data.preprocess)
  with on_one_device():
    metrics = run.evaluate(config.data, batches=1)
  assert metrics['load'] - metrics['budget_error'] == pytest.approx(0.25)


class TestLanguage:
  """The same of a language model: its layers scanned and rematerialised."""

  MODEL = dataclasses.replace(
    tiny.LM,
    adaptive=AdaptiveConfig(num_learners=2, replace=(FFNS,)),
    scan_layers=True,
    remat='full',
  )
  FLAT = dataclasses.replace(MODEL, scan_layers=False, remat='none')

  @pytest.fixture(scope='class')
  @staticmethod
  def params():
    return stack.scanned(TestLanguage.MODEL.stack, telling(TestLanguage.FLAT))

  @pytest.fixture(scope='class')
  @staticmethod
  def teacher():
    twin = TestLanguage.MODEL.dense_twin()
    return {'params': tiny.random_params(twin, seed=1)}

  @pytest.fixture(scope='class')
  @staticmethod
  def make(tmp_path_factory):
    # Of 59 tokens to predict, the last row has 11.
    folder = tiny.texts(tmp_path_factory.mktemp('texts'), train=400, held=60)
    data = TextDataConfig(
      source='files',
      files=f'{folder}/train.txt',
      eval_files=f'{folder}/held.txt',
      length=16,
      max_epochs=1000,
    )
    sizes = {
      'evaluation.batches': 0,
      'evaluation.batch_size': 8,
      'evaluation.sample_tokens': 4,
    }

    @functools.cache
    def make(phase, model=TestLanguage.MODEL):
      objective = ACMObjective(phase=phase)
      return make_task(
        tiny.experiment(model, data, objective=objective, **sizes)
      )

    return make

  @pytest.mark.parametrize('phase', ['learners', 'gates'])
  def test_phases_look_into_the_loop(self, make, params, teacher, phase):
    batch = next(make(phase).modality.train_iterator())

    def step(task, params, teacher):
      def loss(params):
        return task.loss(
          params, {}, batch, jax.random.key(0), task.static_args(0), teacher
        )[0]

      return jax.jit(jax.value_and_grad(loss))(params)

    unrolled = functools.partial(stack.unrolled, self.MODEL.stack)
    loss, grads = step(make(phase), params, teacher)
    want, want_grads = step(
      make(phase, self.FLAT),
      unrolled(params),
      {'params': unrolled(teacher['params'])},
    )
    assert loss == pytest.approx(float(want), rel=1e-5)
    grads, want_grads = map(trees.flatten, (unrolled(grads), want_grads))
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
      np.testing.assert_allclose(
        grad, want_grads[name], rtol=1e-3, atol=1e-5, err_msg=name
      )
      gate = re.fullmatch(acm.GATES, name) is not None
      trained = is_adaptive(name) and gate == (phase == 'gates')
      assert jnp.any(grad) == trained, name

  def test_an_early_exit_is_trained(self, make):
    task = make('end_to_end', dataclasses.replace(self.FLAT, early_exit=1))
    batch = next(task.modality.train_iterator())

    def loss(key):
      params = task.init(key)['params']
      return task.loss(params, {}, batch, key, task.static_args(0))

    _, (sums, _) = jax.eval_shape(loss, jax.random.key(0))
    assert 'early_loss' in sums

  def test_is_evaluated_and_drawn(self, make, params, teacher, monkeypatch):
    monkeypatch.setattr(Adaptive, 'converted', lambda self: teacher)
    task = make('end_to_end')
    metrics = evaluation.held_out(task, params, {}, tiny.one_device())
    for prefix in ('', 'k1/', 'k2/'):
      assert metrics[f'{prefix}perplexity'] == pytest.approx(
        np.exp(metrics[f'{prefix}loss'])
      )
    # Of each row alone, without the padding of the last one.
    (batch,) = task.modality.eval_batches(batch_size=8, num_batches=None)
    apply = jax.jit(self.FLAT.build().apply)
    variables = {'params': stack.unrolled(self.MODEL.stack, params)}
    rows = []
    for tokens_L, weight_L in zip(
      batch['tokens'], batch['weights'], strict=True
    ):
      if length := int((weight_L > 0).sum()):
        found = choices(apply(variables, tokens_L[None, :length]))
        rows.append(np.asarray(task.share_per_token(found))[0])
    assert [len(row) for row in rows] == [16, 16, 16, 11]
    means, tokens = [row.mean() for row in rows], np.concatenate(rows)
    assert metrics['load'] == pytest.approx(np.mean(means), rel=1e-4)
    assert metrics['load_std'] == pytest.approx(np.std(means), abs=1e-3)
    assert tokens.std() > 0.05
    assert metrics['token_std'] == pytest.approx(tokens.std(), abs=1e-4)
    assert set(task.main_metrics(metrics)) == {
      *('loss', 'load', 'load_std', 'gmacs')
    }
    drawn, histogram = [], viz.compute_histogram
    monkeypatch.setattr(
      *(viz, 'compute_histogram'),
      lambda load_B, **kwargs: (
        drawn.append(load_B) or histogram(load_B, **kwargs)
      ),
    )
    assert draw(task, params) == {'load', 'compute'}
    np.testing.assert_allclose(drawn[0], means, rtol=1e-4)
    (sample,) = task.finish(params, {})
    words = task.modality._held_out_words()
    assert sample.startswith(words)
    assert len(sample) > len(words)
