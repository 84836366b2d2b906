"""Runs side by side: what the table, the file and the picture tell."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
import tiny

from mod_jax import config as config_lib
from mod_jax import flops
from mod_jax.data import prepare, text
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.runs.metrics import MetricWriter
from mod_jax.runs.run_config import TrainConfig
from mod_jax.sweeps import compare
from mod_jax.tasks.experiment import ExperimentConfig

DENSE = ExperimentConfig(
  model=LMConfig(num_layers=2, width=16, num_heads=1, routing=None),
  data=TextDataConfig(length=16),
  train=TrainConfig(num_steps=4, batch_size=2),
)
ROUTED = config_lib.replace(
  DENSE, {'model.routing': MoDConfig(), 'name': 'another'}
)


def leave(folder, config, losses, held_out, events=()):
  """Leaves the files of a run."""
  workdir_lib.claim(folder, config)
  with MetricWriter(folder, tensorboard=False) as writer:
    for step, loss in enumerate(losses, 1):
      writer.write(step, 'train', {'loss': loss})
    writer.write(len(losses), 'eval', held_out)
    for name, time, step in events:
      writer.event(name, step, time=time)


@pytest.fixture
def runs(tmp_path):
  """A dense run, and a routed one that was killed and continued."""
  lives = [
    *(('start', 0, 0), ('first_step', 10, 1)),  # And killed.
    *(('start', 50, 0), ('first_step', 60, 2), ('end', 72, 4)),
    # Killed in its last evaluation, of which alone the next life consists.
    *(('start', 80, 3), ('first_step', 90, 4)),
    *(('start', 900, 4), ('end', 990, 4)),
  ]
  folders = tmp_path / 'a' / 'run', tmp_path / 'b' / 'run'
  leave(folders[0], DENSE, [5.0, 4.0, 3.5, 3.2], {'loss': 3.4})
  held_out = {'top_k/loss': 3.3, 'never/loss': 3.6}
  leave(folders[1], ROUTED, [5.0, 4.1, 3.4, 3.1], held_out, lives)
  return folders


def test_command_line(runs, tmp_path, command):
  status, out, _ = command('compare', *runs, f'--out={tmp_path}/out')
  assert status == 0
  assert 'b/run differs from a/run in\n  model.routing: None -> MoDCo' in out
  assert 'name:' not in out
  with (tmp_path / 'out/compare.csv').open() as file:
    dense, routed = csv.DictReader(file)
  assert (dense['run'], routed['run']) == ('a/run', 'b/run')
  assert dense['hours'] == ''
  assert float(dense['difference']) == 0
  assert float(routed['difference']) == pytest.approx(-0.1)
  assert float(routed['steps_per_second']) == pytest.approx(2 / 12)
  assert float(routed['hours']) == pytest.approx(4 * 6 / 3600)
  for row, config in ((dense, DENSE), (routed, ROUTED)):
    spent = 4 * 2 * flops.train(config.model, 16)
    assert float(row['train_flops']) == spent
    assert int(row['params']) == flops.num_params(config.model)
  assert (tmp_path / 'out/compare.png').stat().st_size > 10_000


@pytest.mark.parametrize('kind', ['subwords', 'images'])
def test_losses_of_another_kind_are_not_compared(runs, tmp_path, kind):
  config = tiny.experiment(tiny.VIT)
  if kind == 'subwords':
    tiny.texts(tmp_path, a=2000, b=2000)
    data = TextDataConfig(
      source='files',
      files=f'{tmp_path}/*.txt',
      length=16,
      eval_fraction=0.5,
      tokenizer='bpe',
      tokenizer_vocab_size=260,
      cache_dir=str(tmp_path),
    )
    config = config_lib.replace(DENSE, {'data': data, 'model.vocab_size': 260})
  leave(tmp_path / 'other', config, [2.0, 1.0], {'loss': 1.0})
  found = compare.compare([*runs, tmp_path / 'other'])
  differences = [row['difference'] for row in found.rows]
  assert differences == [0, pytest.approx(-0.1), None]
  assert str(found).count('and so not compared') == 1


def keep(folder, data):
  """Leaves what a checkpoint says of the data."""
  told = {'step': 4, 'metadata': {'data': data}}
  workdir_lib.write_text(
    workdir_lib.checkpoints(folder) / '4/metadata/metadata', json.dumps(told)
  )


@pytest.mark.parametrize('part', ['train', 'held_out'])
def test_losses_of_other_held_out_data_are_not_compared(runs, part):
  for folder in runs:
    keep(
      folder, {'train': 'same', 'held_out': 'same', part: folder.parent.name}
    )
  found = compare.compare(runs)
  comparable = part == 'train'
  assert (found.rows[1]['difference'] is not None) == comparable
  assert ('and so not compared' not in str(found)) == comparable


def test_texts_are_the_same_directly_and_prepared(tmp_path):
  tiny.texts(tmp_path, a=2000, b=2000, c=2000)
  direct = TextDataConfig(
    source='files', files=f'{tmp_path}/*.txt', length=16, eval_fraction=0.5
  )
  sources = {'direct': direct}
  for size in (1000, 10_000):
    prepare.prepare(direct, f'{tmp_path}/{size}', shard_bytes=size)
    sources[f'of_{size}'] = TextDataConfig(
      source='prepared', path=f'{tmp_path}/{size}', length=16
    )
  for name, data in sources.items():
    config = config_lib.replace(DENSE, {'data': data})
    leave(tmp_path / name, config, [2.0], {'loss': 1.0})
    keep(tmp_path / name, text.fingerprint(data))
  folders = [tmp_path / name for name in sources]
  found = compare.compare(folders)
  assert [row['difference'] for row in found.rows] == [0, 0, 0]
  assert 'and so not compared' not in str(found)
  # What is held out is another part of the texts.
  other = dataclasses.replace(direct, eval_fraction=0.2)
  shutil.rmtree(tmp_path / '1000')
  prepare.prepare(other, f'{tmp_path}/1000', shard_bytes=1000)
  keep(folders[1], text.fingerprint(sources['of_1000']))
  found = compare.compare(folders)
  assert [row['difference'] for row in found.rows] == [0, None, 0]


def test_a_capacity_warmup_costs_more(tmp_path):
  changes = {
    'train.capacity_warmup_steps': 2,
    'train.capacity_warmup_stages': 1,
  }
  config = config_lib.replace(ROUTED, changes)
  leave(tmp_path / 'run', config, [5.0, 4.1, 3.4, 3.1], {'top_k/loss': 3.3})
  found = compare.read(tmp_path / 'run')
  dense, routed = (flops.train(c.model, 16) for c in (DENSE, ROUTED))
  steps = [0, 2 * dense, 2 * dense, 2 * routed, 2 * routed]
  # At full capacity there is a router besides.
  np.testing.assert_allclose(found.flops_S, np.cumsum(steps), rtol=0.01)
  assert dense > 1.2 * routed


def test_refused(runs, tmp_path, command):
  status, _, err = command('compare', runs[0])
  assert (status, err.count('\n')) == (2, 1)
  assert 'expected at least two runs, got 1' in err
  workdir_lib.claim(tmp_path / 'new', DENSE)
  for name, message in (('', 'holds no run'), ('new', 'no metrics yet')):
    with pytest.raises(UserError, match=message):
      compare.read(tmp_path / name)
  assert compare.names(['x/a/b', 'x/c/b']) == ['a/b', 'c/b']
