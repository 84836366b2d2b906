"""Training that only leaves traces."""

import json
import types

import pytest

from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.metrics import MetricWriter
from mod_jax.train import loop


@pytest.fixture
def trained(monkeypatch):
  """Replaces training by its traces; returns the seeds that were trained."""
  seeds = []

  def train(task, config, workdir, **kwargs):
    seeds.append(config.seed)
    if config.seed == 13:
      raise loop.TrainingDiverged('loss is nan at step 3')
    workdir_lib.claim(workdir, config)
    last = config.train.num_steps
    metrics = {'top_k/loss': config.seed / 10, 'top_k/routed': 0.5}
    told = {'step': last, 'metadata': {}}
    workdir_lib.write_text(
      workdir_lib.checkpoints(workdir) / f'{last}/metadata/metadata',
      json.dumps(told),
    )
    with MetricWriter(workdir, tensorboard=False) as writer:
      writer.write(last, 'eval', metrics)
    (workdir / 'eval.json').write_text(json.dumps({'step': last}))
    return types.SimpleNamespace(finished=config.seed != 99, metrics=metrics)

  monkeypatch.setattr(loop, 'train', train)
  return seeds
