"""Training of models that are pruned, routed and adaptive at once."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from mod_jax import flops, trees
from mod_jax.layers import stack
from mod_jax.layers.acm import FFNS, AdaptiveConfig
from mod_jax.layers.routing_config import MoDConfig, VisionRoutingConfig
from mod_jax.models import acm
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.pretrained import export
from mod_jax.pretrained import load as load_lib
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.experiment import (
  ACMObjective,
  PhaseConfig,
  PruningObjective,
)
from mod_jax.train import evaluation

pytestmark = pytest.mark.slow

ADAPTIVE = AdaptiveConfig(num_learners=2, replace=(FFNS,))
ROUTED = dataclasses.replace(
  tiny.VIT, routing=VisionRoutingConfig(capacity=0.5)
)
PRUNED = DynamicViTConfig(backbone=ROUTED, stages=(0,), keep=0.7)
MODEL = PRUNED.with_parts(adaptive=ADAPTIVE)
LEFT, CHOSEN = 12, 6  # Tokens after the stage, and of these in block 1.
MODULE = acm.modules(MODEL)['block_0/mlp']  # As the other one.


def random_params(model, seed=0):
  """Returns parameters that tell things apart, gates above all."""
  params = tiny.random_params(model, seed)
  for name, x in trees.flatten(params).items():
    if re.search(r'gate.*logits.*kernel', name):
      x *= 3
  return jax.tree.map(jnp.asarray, params)


PARAMS = random_params(MODEL)


@functools.cache
def make(model=MODEL, **changes):
  fields = {
    'objective': ACMObjective(phase='end_to_end'),
    'evaluation.batch_size': 50,
  }
  return make_task(tiny.experiment(model, **fields | changes))


MODES = ('', 'never/', 'k1/', 'k2/')
NUMBERS = ('loss', 'accuracy', 'mean_recall', 'top5')


@pytest.fixture(scope='module')
def held_out():
  modes = dict(list(make().eval_modes().items())[:2])  # Each one compiles.
  mesh = tiny.one_device()
  with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
    patch.setattr(
      Adaptive, 'eval_modes', lambda self, *, more=False: {} if more else modes
    )
    return evaluation.held_out(make(), PARAMS, {}, mesh)


@pytest.fixture(scope='module')
def output():
  """Returns what the model says of the held-out images."""
  (batch,) = make().modality.eval_batches(batch_size=50, num_batches=1)
  return jax.jit(MODEL.build().apply)({'params': PARAMS}, batch['image'])


def saved(path, model, seed, **fields):
  """Returns a run's directory, as far as others look at it."""
  config = make(model, **fields).config
  return tiny.save_run(path, config, random_params(model, seed))


class TestOrder:
  """Each part learns from the run of the model without it."""

  def test_pruning_beside_the_routed_model(self, tmp_path):
    routed = saved(tmp_path, ROUTED, 1, objective=None)
    task = make(PRUNED, objective=PruningObjective(), init=str(tmp_path))
    teacher = task.teacher(None)
    tiny.same(teacher['params'], routed)
    started, _ = task.start(random_params(PRUNED, 2), {}, str(tmp_path))
    for name, value in trees.flatten(started).items():
      same = np.array_equal(value, routed.get(name))
      assert same != name.startswith('prediction_'), name
    # The student masks, so it costs what the routed teacher does, and a head
    # of four linear maps on each of 16 patches.
    head = 16 * 2 * (8 * 8 + 8 * 4 + 4 * 2 + 2 * 2)
    student, teacher = flops.forward(ROUTED) + head, flops.forward(ROUTED)
    assert task.flops_per_step(0.0) == 8 * (3 * student + teacher)

  def test_adaptive_modules_from_the_pruned_routed_model(self, tmp_path):
    pruned = saved(tmp_path, PRUNED, 1, objective=None)
    objective = ACMObjective(phase='learners')
    task = make(objective=objective, init=str(tmp_path))
    tiny.same(task.teacher(None)['params'], pruned)
    started, _ = task.start(PARAMS, {}, str(tmp_path))
    for name, value in trees.flatten(started).items():
      own = re.fullmatch(acm.PARAMETERS, name) is not None
      assert np.array_equal(value, pruned.get(name)) != own, name
    teacher_cost = flops.forward(PRUNED)
    learners = (LEFT + CHOSEN) * MODULE.flops(1)['learners']
    assert task.flops_per_step(0.0) == 8 * (teacher_cost + 3 * learners)

  def test_weight_decay_does_not_move_what_has_no_gradient(self):
    skipped = PhaseConfig(num_steps=0, batch_size=4, learning_rate=1e-3)
    objective = ACMObjective(
      phase='end_to_end', learners=skipped, gates=skipped
    )
    config = make(objective=objective, init='somewhere').config
    ((_, run),) = phases.expand(config, 'runs/none')
    assert run.optimizer.rules[0] == ('^(prediction|pattern)_', 0.0, 0)


class TestEndToEnd:
  @pytest.fixture(scope='class')
  @staticmethod
  def step():
    rng = np.random.default_rng(0)
    image = rng.normal(size=(4, 8, 8, 3)).astype(np.float32)
    batch = {'image': image, 'target': np.eye(10, dtype=np.float32)[:4]}
    task = make()

    @jax.jit
    def step(params):
      run = functools.partial(task.loss, static_args=True)
      grads, (metric_sums, _) = jax.grad(run, has_aux=True)(
        params, {}, batch, jax.random.key(0)
      )
      output, _ = task.forward(
        *(MODEL, params, {}, batch, jax.random.key(0)),
        learners='train',
        masks=False,
      )
      return grads, metric_sums, output

    return jax.device_get(step(PARAMS))

  def test_tokens_are_dropped_and_not_masked(self, step):
    grads, metric_sums, output = step
    assert output.features_BLD.shape[1] == LEFT
    for name, grad in trees.flatten(grads).items():
      assert np.any(grad) != name.startswith('prediction_'), name
    # The budget is of the tokens that reach the modules, and not of all 17
    # tokens of an image in both blocks.
    found = stack.collect(output.aux, 'adaptive')
    ran = {name: x.learners_BL.sum() for name, x in found.items()}
    total, count = metric_sums['load']
    want = sum(ran.values()) / (4 * (LEFT + CHOSEN) * 2)
    assert total / count == pytest.approx(want, rel=1e-5)
    assert len(set(ran.values())) == 2


class TestEvaluation:
  def test_load_and_cost(self, held_out, output):
    assert tuple(make().eval_modes()) == MODES
    assert set(held_out) == {
      *(f'{p}{n}' for p in MODES[:2] for n in NUMBERS),
      *('load', 'load_std', 'token_std', 'budget_error', 'gmacs'),
    }
    gated = stack.collect(output.aux, 'adaptive')
    ran_B = sum(x.learners_BL.sum(axis=-1) for x in gated.values())
    load_B = np.asarray(ran_B) / (2 * (LEFT + CHOSEN))
    assert load_B.std() > 0.01
    assert held_out['load'] == pytest.approx(load_B.mean(), rel=1e-4)
    assert held_out['load_std'] == pytest.approx(load_B.std(), abs=1e-4)
    # Of tokens, each by the modules that it reaches.
    spent_BL, whole_BL = map(np.asarray, make()._compute(gated))
    assert sorted(set(whole_BL.ravel() / (2 * MODULE.learner_flops))) == [
      *(0, 1, 2)
    ]
    share_N = (spent_BL / np.maximum(whole_BL, 1))[whole_BL > 0]
    weight_N = whole_BL[whole_BL > 0]
    mean = np.average(share_N, weights=weight_N)
    std = np.average((share_N - mean) ** 2, weights=weight_N) ** 0.5
    assert held_out['token_std'] == pytest.approx(std, abs=1e-3)
    # Learners that do not run are all that is saved within the routed, pruned
    # model.
    idle = (1 - held_out['load']) * (LEFT + CHOSEN) * 2 * MODULE.learner_flops
    saved = flops.published_macs(MODEL) - held_out['gmacs'] * 1e9
    assert saved == pytest.approx(idle / 2, rel=1e-5)
    titles = [row.split()[0] for row in make().summary(held_out).splitlines()]
    assert titles[1:5] == ['gated', 'never', 'k', 'k']

  def test_routing_is_drawn_where_the_patches_lie(self, output):
    left_BL = make().modality._left(output, 1)
    assert left_BL.sum(axis=-1).tolist() == [LEFT] * 50
    np.testing.assert_array_equal(left_BL[:, 1:], output.keep_SBN[0] > 0)

  def test_loads_predicts_and_exports_itself_alone(self, tmp_path):
    flat = saved(tmp_path / 'run', MODEL, 0)
    run = load_lib.load(tmp_path / 'run')
    export.export(run, tmp_path / 'ours')
    again = load_lib.load(tmp_path / 'ours')
    assert again.config == MODEL
    tiny.same(dict(again.variables)['params'], flat)
    picture = np.zeros((8, 8, 3), np.uint8)
    assert len(again.predict(picture)[0]) == 5


class TestLanguage:
  """Mixture-of-Depths with adaptive feed-forwards."""

  MODEL = dataclasses.replace(
    tiny.LM, routing=MoDConfig(capacity=0.5), adaptive=ADAPTIVE
  )

  def task(self, phase):
    objective = ACMObjective(phase=phase)
    return make_task(tiny.experiment(self.MODEL, objective=objective))

  @pytest.mark.parametrize('phase', ['learners', 'gates', 'end_to_end'])
  def test_padding_counts_for_nothing(self, phase):
    task = self.task(phase)
    rng = np.random.default_rng(0)
    full = {
      'tokens': rng.integers(1, 100, (2, 12), dtype=np.int32),
      'targets': rng.integers(1, 100, (2, 12), dtype=np.int32),
      'weights': np.ones((2, 12), np.float32),
      'segments': np.ones((2, 12), np.int32),
    }
    # Four places more in each row, and a third row of nothing else: slots of
    # the routed block stay empty.
    padded = {k: np.pad(v, ((0, 1), (0, 4))) for k, v in full.items()}
    params = random_params(self.MODEL)
    teacher = {'params': random_params(acm.without(self.MODEL), 1)}

    @jax.jit
    def step(batch):
      (_, (metric_sums, _)), grads = jax.value_and_grad(
        task.loss, has_aux=True
      )(params, {}, batch, jax.random.key(0), False, teacher)
      return {k: total / n for k, (total, n) in metric_sums.items()}, grads

    want, want_grads = step(full)
    found, grads = step(padded)
    for name, value in want.items():
      assert found[name] == pytest.approx(float(value), rel=1e-4), name
    want_grads, grads = map(trees.flatten, (want_grads, grads))
    for name, grad in want_grads.items():
      np.testing.assert_allclose(
        grads[name], grad, rtol=1e-3, atol=1e-5, err_msg=name
      )
    if phase == 'end_to_end':
      # Top-k stays foreseeable: the router's own loss is there.
      assert {'router/bce', 'load', 'entropy'} <= set(want)
      assert np.any(want_grads['block_1/router/kernel'])

  def test_is_evaluated_by_each_rule(self):
    modes = self.task('end_to_end').eval_modes()
    assert list(modes) == ['', 'router/', 'never/', 'k1/', 'k2/']
    assert modes['router/'].routing.rule == 'router'
