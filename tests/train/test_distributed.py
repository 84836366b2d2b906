"""Two hosts, as two processes on this machine, train as one would."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from mod_jax import config as config_lib
from mod_jax.train import loop
from mod_jax.train import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3


def free_port():
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


@pytest.mark.slow
def test_two_hosts_equal_one(tmp_path, load_config_file):
  environment = {
    **os.environ,
    'XLA_FLAGS': '',  # One device each.
    'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{free_port()}',
    'JAX_NUM_PROCESSES': '2',
  }
  command = [
    *(sys.executable, ROOT / 'train.py', '--distributed'),
    f'--config={ROOT}/configs/lm/mod.py:tiny',
    f'--workdir={tmp_path}/two',
    f'--config.train.num_steps={STEPS}',
    '--config.log.tensorboard=False',
  ]
  hosts = [
    subprocess.Popen(
      command,
      env={**environment, 'JAX_PROCESS_ID': str(i)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(2)
  ]
  outputs = [host.communicate(timeout=180)[0] for host in hosts]
  assert [host.returncode for host in hosts] == [0, 0], outputs
  assert '2 cpu device(s)' in outputs[0]
  assert 'step' not in outputs[1]  # The first host alone tells.

  config = config_lib.replace(
    load_config_file('configs/lm/mod.py', 'tiny'),
    {'train.num_steps': STEPS, 'log.tensorboard': False},
  )
  loop.train(config, tmp_path / 'one')
  both = [metrics.read(tmp_path / name) for name in ('one', 'two')]
  losses = [
    [record['loss'] for record in records if record['kind'] == 'train']
    for records in both
  ]
  assert len(losses[0]) == STEPS
  np.testing.assert_allclose(*losses, rtol=1e-5)
  held_out = [records[-1]['top_k/loss'] for records in both]
  np.testing.assert_allclose(*held_out, rtol=1e-5)
