"""Two hosts, as two processes on this machine, train as one would."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax.runs import checkpoints, metrics
from mod_jax.tasks import phases

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3
SMALL = {
  'model.num_layers': 1,
  'model.width': 16,
  'model.num_heads': 2,
  'model.mlp_dim': 16,
  'evaluation.sample_tokens': 0,
  'log.tensorboard': False,
}
ROUTED = SMALL | {'model.routing.period': 1, 'model.routing.offset': 0}


def free_port():
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


def start_two(config, workdir, *args, small=SMALL):
  environment = {
    **os.environ,
    'JAX_NUM_CPU_DEVICES': '1',
    'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port()}',
    'JAX_NUM_PROCESSES': '2',
  }
  command = [
    *(sys.executable, ROOT / 'train.py', '--distributed'),
    f'--config={ROOT}/configs/{config}.py:tiny',
    f'--workdir={workdir}',
    *(f'--config.{name}={value}' for name, value in small.items()),
    *args,
  ]
  return [
    subprocess.Popen(
      command,
      env={**environment, 'JAX_PROCESS_ID': str(i)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(2)
  ]


@pytest.mark.slow
@pytest.mark.usefixtures('no_report', 'one_device')
def test_two_hosts_equal_one_and_each_continues_the_other(
  tmp_path, load_config_file
):
  config = config_lib.replace(
    load_config_file('configs/lm/mod.py', 'tiny'),
    ROUTED | {'train.num_steps': STEPS},
  )
  phases.train(config, tmp_path / 'one')
  phases.train(config, tmp_path / 'two', max_steps=1)
  hosts = start_two(
    'lm/mod',
    tmp_path / 'two',
    f'--config.train.num_steps={STEPS}',
    # At once: at each step that both look.
    '--config.checkpoint.every_minutes=1e-9',
    '--config.log.every=2',
    small=ROUTED,
  )
  outputs = [host.communicate(timeout=180)[0] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], outputs
  assert 'continues at step 1' in outputs[0]
  assert '2 cpu device(s)' in outputs[0]
  assert 'step' not in outputs[1]  # The first host alone tells.
  saved = tmp_path / 'two' / 'checkpoints'
  assert checkpoints.steps(saved) == [1, 2, 3]
  check_same(tmp_path)

  # What two hosts saved, and hashed, a single one goes on with.
  names = json.loads((saved / '2' / 'manifest.json').read_text())
  for i in range(2):
    assert any(f'ocdbt.process_{i}/' in name for name in names)
  shutil.rmtree(saved / '3')
  phases.train(config, tmp_path / 'two')
  check_same(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures('no_report', 'one_device')
def test_two_hosts_judge_as_one(tmp_path, load_config_file):
  """Of balanced draws, by a metric of all rows, to an early end."""
  small = {
    'model.num_layers': 1,
    'train.num_steps': 60,
    'train.early_stop': 2,
    'evaluation.every': 2,
    'evaluation.batches': 0,
    'data.sampling': 'balanced',
    'data.class_weights': 'balanced',
    'checkpoint.best': 'mean_recall',
    'checkpoint.keep': 1,
    'log.tensorboard': False,
  }
  config = config_lib.replace(
    load_config_file('configs/vit/digits.py', 'tiny'), small
  )
  one = phases.train(config, tmp_path / 'one')
  assert 4 < one.step < 60
  phases.train(config, tmp_path / 'two', max_steps=3)
  hosts = start_two('vit/digits', tmp_path / 'two', small=small)
  outputs = [host.communicate(timeout=240)[0] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], outputs
  both = [metrics.read(tmp_path / name) for name in ('one', 'two')]
  for lines in zip(*both, strict=True):
    a, b = lines
    assert a.keys() == b.keys()
    assert list(a.values())[2:] == pytest.approx(list(b.values())[2:], rel=1e-3)
  best = [
    json.loads((tmp_path / name / 'best.json').read_text())
    for name in ('one', 'two')
  ]
  assert best[0] == best[1]
  saved = checkpoints.steps(tmp_path / 'two' / 'checkpoints')
  assert saved == sorted({best[0]['step'], one.step})


SHARED_ROWS = """
import sys
import jax
import numpy as np
from mod_jax import parallel
from mod_jax.errors import UserError
address, host = sys.argv[1:]
jax.distributed.initialize(address, 2, int(host))
rows = np.arange(6)
for tensor, parts in (1, 2), (3, 2), (6, 1):
  mesh = parallel.make_mesh(parallel.MeshConfig(tensor=tensor))
  index, count = parallel.row_shard(mesh)
  assert count == parts, (tensor, index, count)
  placed = parallel.put_batch(np.split(rows, count)[index], mesh)
  assert placed.shape == rows.shape, (tensor, placed.shape)
  for shard in placed.addressable_shards:
    np.testing.assert_array_equal(shard.data, rows[shard.index])
try:
  parallel.make_mesh(parallel.MeshConfig(tensor=2))
except UserError as error:
  assert 'mesh.tensor' in str(error)
else:
  raise AssertionError('the second of three pairs is of two hosts')
"""


@pytest.mark.slow
def test_hosts_that_share_rows_read_the_same_ones():
  """Where `tensor` spans hosts, each has all the rows of the others."""
  address = f'127.0.0.1:{free_port()}'
  hosts = [
    subprocess.Popen(
      [sys.executable, '-c', SHARED_ROWS, address, str(host)],
      env={**os.environ, 'JAX_NUM_CPU_DEVICES': '3'},
      stderr=subprocess.PIPE,
      text=True,
    )
    for host in range(2)
  ]
  outputs = [host.communicate(timeout=180)[1] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], outputs


def check_same(folder):
  both = [metrics.read(folder / name) for name in ('one', 'two')]
  losses = [
    [record['loss'] for record in records if record['kind'] == 'train']
    for records in both
  ]
  assert len(losses[0]) == STEPS
  np.testing.assert_allclose(*losses, rtol=1e-5)
  held_out = [records[-1]['top_k/loss'] for records in both]
  np.testing.assert_allclose(*held_out, rtol=1e-5)


@pytest.mark.slow
def test_a_host_that_dies_ends_the_others_in_one_sentence(tmp_path):
  limit = 8
  runs = []
  for victim in range(2):  # The first one is also JAX's coordinator.
    workdir = tmp_path / str(victim)
    hosts = start_two(
      'lm/dense',  # Nothing here depends on the model.
      workdir,
      '--config.train.num_steps=100000',
      '--config.evaluation.every=0',
      f'--host_timeout={limit}',
    )
    runs.append((workdir, hosts[victim], hosts[1 - victim]))
  try:
    for workdir, victim, _ in runs:
      while victim.poll() is None and len(metrics.read(workdir)) < 20:
        time.sleep(0.1)
      victim.kill()
    killed = time.monotonic()
    for _, victim, other in runs:
      out = other.communicate(timeout=120)[0]
      seconds = time.monotonic() - killed
      assert other.returncode != 0
      assert out.splitlines()[-1].startswith('error: another host of this run')
      assert 'continues.' in out.splitlines()[-1]
      assert '***' not in out
      assert 'Traceback' not in out
      assert seconds < 30, out  # By default it would be about 60.
      victim.communicate()
  finally:
    for _, *hosts in runs:
      for host in hosts:
        host.kill()
