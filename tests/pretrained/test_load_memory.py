"""How much memory reading a model takes: array by array, and not all twice."""

import subprocess
import sys

from flax import linen as nn
import jax
import numpy as np
import pytest

import mod_jax
from mod_jax.convert import lm as convert_lm
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.pretrained.load import Run
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig

CONFIG = LMConfig(
  vocab_size=8192, num_layers=6, width=768, num_heads=12, routing=MoDConfig()
)
# Prints how far memory rose above what it was before, and what was read.
CHILD = """
import sys
import jax, jax.numpy as jnp
import mod_jax.pretrained.load

def memory(name):
  lines = open('/proc/self/status').read().splitlines()
  return int(next(x for x in lines if x.startswith(name)).split()[1]) * 1024

jnp.zeros(1).block_until_ready()
before = memory('VmRSS')
variables = mod_jax.load(sys.argv[1]).variables
jax.block_until_ready(variables)
size = sum(x.nbytes for x in jax.tree.leaves(variables))
print(memory('VmHWM') - before, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('kind', ['of Hugging Face', 'of ours'])
def test_a_folder_is_read_array_by_array(kind, tmp_path):
  variables = jax.tree.map(
    # Numbers that no file could hold in fewer bytes.
    lambda x: np.random.default_rng(0).random(x.shape, np.float32),
    nn.unbox(
      jax.eval_shape(CONFIG.build().init, jax.random.key(0), CONFIG.example())
    ),
  )
  if kind == 'of ours':
    task = make_task(ExperimentConfig(model=CONFIG))
    run = Run(config=CONFIG, variables=variables, task=task)
    mod_jax.export(run, tmp_path)
  else:
    convert_lm.save(tmp_path, variables['params'], CONFIG)
  done = subprocess.run(
    [sys.executable, '-c', CHILD, tmp_path],
    capture_output=True,
    check=True,
    text=True,
  )
  risen, size = map(int, done.stdout.split())
  assert size > 150e6
  # Twice the size, and more, if all of it were on the host before.
  assert risen < 1.6 * size
