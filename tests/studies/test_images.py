"""Studies of vision models against counting by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats
import tiny

from mod_jax import flops, timing, trees
from mod_jax.layers.routing_config import VisionRoutingConfig
from mod_jax.studies import images as image_studies
from mod_jax.tasks import make_task

pytestmark = pytest.mark.slow

DENSE = dataclasses.replace(tiny.VIT, patch_size=4, num_layers=3)
TOKENS = 5
ROUTINGS = {
  'amod': VisionRoutingConfig(capacity=0.5),
  # Multiplied, and in the last block: its score weighs what it adds.
  'mod': VisionRoutingConfig(score='learned', layers=(1, 2)),
  'gaussian': VisionRoutingConfig(score='gaussian', layers=(1, 2)),
}


@functools.cache
def make(model):
  """Returns a task and parameters, large enough to tell things apart."""
  params = tiny.random_params(model, mean=0.1)
  return make_task(tiny.experiment(model)), jax.tree.map(jnp.asarray, params)


def routed(which):
  return dataclasses.replace(DENSE, routing=ROUTINGS[which])


class TestImportance:
  @pytest.fixture(autouse=True)
  def two_images(self, monkeypatch):
    monkeypatch.setattr(image_studies, '_IMAGES', 2)

  @pytest.mark.parametrize('which', ['amod', 'mod'])
  def test_each_token_left_out_by_hand(self, which, monkeypatch):
    task, params = make(routed(which))
    batch = task.modality.examples(2)
    assert len(batch['label']) == 2
    seen = {}

    def scatter(importance_RN, score_RN, **kwargs):
      seen['importance'], seen['score'] = importance_RN, score_RN
      return plt.figure()

    monkeypatch.setattr(image_studies.viz, 'importance_scatter', scatter)
    study = task.studies()['importance'](params, {}, None)
    plt.close(study.figures['scatter'])

    model = task.config.model
    layers = [1] if which == 'amod' else [1, 2]
    assert list(study.metrics) == [str(layer) for layer in layers]
    for row, layer in enumerate(layers):
      expected, scores = by_hand(model, params, layer, batch)
      found = seen['importance'][row].reshape(2, TOKENS)
      np.testing.assert_allclose(found, expected, atol=2e-5)
      assert np.abs(expected).max() > 1e-3
      np.testing.assert_allclose(
        seen['score'][row].reshape(2, TOKENS), scores, rtol=1e-4
      )
      correlation = study.metrics[str(layer)]
      r, p = stats.pearsonr(expected.ravel(), scores.ravel())
      assert correlation['pearson'] == pytest.approx(r, abs=1e-2)
      assert correlation['pearson_p'] == pytest.approx(p, abs=1e-2)
      assert -1 <= correlation['spearman'] <= 1

  def test_scores_by_chance(self):
    task, params = make(routed('gaussian'))
    # Block 1 adds nothing, so no token of it matters, whatever block 2 draws.
    silent = {
      name: jnp.zeros_like(x) if 'out/' in name or 'down/' in name else x
      for name, x in trees.flatten(params['block_1']).items()
    }
    params = params | {'block_1': trees.unflatten(silent)}
    study = task.studies()['importance'](params, {}, None)
    assert np.isnan(study.metrics['1']['pearson'])
    assert np.isfinite(study.metrics['2']['pearson'])
    plt.close(study.figures['scatter'])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def call(model, method, static, params, *arrays):
  """Calls a method of the model of a config; `static` are no arrays."""
  return model.build().apply(
    {'params': params}, *static, *arrays, method=method
  )


def by_hand(model, params, layer, batch):
  """Returns importance_BL and score_BL, one image and one token at a time."""

  def method(model, name, *static):
    return functools.partial(call, model, name, static, params)

  dense = functools.partial(method, model.dense_twin())
  routed = functools.partial(method, model)
  importance, scores = [], []
  for image, label in zip(batch['image'], batch['label'], strict=True):
    x_1LD = dense('embed')(image[None])
    for i in range(layer):
      x_1LD = dense('step', i)(x_1LD).x_BLD

    def loss(places, x_1LD=x_1LD, label=label):
      x_LD = np.array(x_1LD[0])
      x_1KD = jnp.asarray(x_LD[places][None])
      x_LD[places] = dense('step', layer)(x_1KD).x_BLD[0]
      y_1LD = jnp.asarray(x_LD[None])
      for i in range(layer + 1, DENSE.num_layers):
        y_1LD = dense('step', i)(y_1LD).x_BLD
      logits = dense('classify')(y_1LD)[0][0]
      return -float(jax.nn.log_softmax(logits)[label])

    every = list(range(TOKENS))
    whole = loss(every)
    importance.append(
      [loss([n for n in every if n != j]) - whole for j in every]
    )
    # The scores are those of the routed model.
    x_1LD, score_1L = routed('embed')(image[None]), None
    for i in range(layer + 1):
      done = routed('step', i)(x_1LD, score_1L)
      x_1LD, score_1L = done.x_BLD, done.aux.get('attention')
    scores.append(done.aux['router'].score_BL[0])
  return np.array(importance), np.array(scores)


def test_throughput(monkeypatch):
  model = routed('amod')
  monkeypatch.setattr(image_studies, '_BATCHES', (1, 2))
  monkeypatch.setattr(image_studies, '_ROUNDS', 3)
  # One slow spell: the rounds' ratios are 1, 5 and 2.5, that of medians 5.
  seconds = {'model': [1.0, 5.0, 5.0], 'dense twin': [1.0, 1.0, 2.0]}
  interleaved = timing.interleaved

  def timed(functions, *, rounds):
    real = interleaved(functions, rounds=rounds)
    assert all(0 < s < 60 for times in real.values() for s in times)
    return seconds

  monkeypatch.setattr(image_studies.timing, 'interleaved', timed)
  task, params = make(model)
  study = task.studies()['throughput'](params, {}, None)
  ratio = flops.forward(model) / flops.forward(DENSE)
  assert study.metrics['flop_ratio'] == ratio
  assert ratio < 1
  assert list(study.metrics['batches']) == ['1', '2']
  for told in study.metrics['batches'].values():
    assert told['median_seconds'] == {'model': 5.0, 'dense twin': 1.0}
    # As the columns beside it say, which the median of 1, 5 and 2.5 would not.
    assert told['ratio'] == 5
    assert told['quartiles'] == [1.75, 3.75]
