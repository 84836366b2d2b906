"""The command line of the sweeps, and training that only leaves traces."""

import json
import types

from absl import flags
import pytest

from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.metrics import MetricWriter
from mod_jax.sweeps import __main__ as sweeps
from mod_jax.train import loop


@pytest.fixture
def command(capsys):
  """Returns a function of arguments; it gives status, output and errors."""
  known = set(flags.FLAGS)

  def call(*arguments):
    capsys.readouterr()
    try:
      with pytest.raises(SystemExit) as ended:
        sweeps.main(['mod_jax.sweeps', *map(str, arguments)])
    finally:
      # Each call defines the flags of its own command.
      for name in set(flags.FLAGS) - known:
        delattr(flags.FLAGS, name)
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err

  return call


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
