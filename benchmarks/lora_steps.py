"""Takes training steps of a converted language model, on request.

`lora.py` runs this script once for each variant of `configs/lm/convert.py`, to
measure the memory of each. Each input line asks for one step; output lines are
JSON with the seconds that it took and the peak memory of the process in MiB.
Arguments: variant, folder of the model, rows and tokens of a batch.
"""

import json
import resource
import sys
import time

import jax
import machine
import numpy as np

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.tasks import make_task
from mod_jax.train import state as state_lib
from mod_jax.train.step import jit_step


def build(variant: str, folder: str, rows: int, length: int):
  """Returns the task of a variant, at the capacity that it ends with."""
  recipe = machine.configs('lm/convert.py')
  # The texts are random tokens, so any will do for the config.
  changes = {
    'init': folder,
    'data.source': 'stdlib',
    'data.files': '',
    'data.length': length,
    'train.batch_size': rows,
  }
  config = config_lib.replace(recipe.get_config(variant), changes)
  config = recipe.complete(config)
  return make_task(
    config_lib.replace(config, {'train.capacity_warmup_steps': 0})
  )


def num_bytes(tree) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, 'nbytes'))


def main():
  variant, folder, *sizes = sys.argv[1:]
  task = build(variant, folder, *map(int, sizes))
  config, mesh = task.config, parallel.make_mesh(parallel.MeshConfig())
  with jax.set_mesh(mesh):
    optimizer, abstract = state_lib.of_run(task, mesh)
    state = state_lib.create_state(0, task, optimizer, abstract)
    params = state_lib.with_frozen(state.params, abstract.frozen)
    weights = task.start(params, state.model_state, folder)
    state = state_lib.with_weights(state, abstract, *weights)
    del params, weights
    rng = np.random.default_rng(0)
    shapes = task.modality.batch_shapes()
    tokens = rng.integers(0, config.model.vocab_size, shapes['tokens'].shape)
    batch = parallel.put_batch(
      {
        'tokens': tokens.astype(np.int32),
        'targets': np.roll(tokens, -1, axis=1).astype(np.int32),
        'weights': np.ones(tokens.shape, np.float32),
      },
      mesh,
    )
    step = jit_step(
      abstract,
      task=task,
      optimizer=optimizer,
      static_args=0.0,
      config=config.train,
    )
    compiled = step.lower(state, batch, None).compile()
    trained = num_bytes(state.params)
    about = {
      'parameters': sum(x.size for x in jax.tree.leaves(state.all_params)),
      'trained': sum(x.size for x in jax.tree.leaves(state.params)),
      # Gradients are as large as what is trained.
      'training_bytes': 2 * trained + num_bytes(state.opt_state),
      'frozen_bytes': num_bytes(state.frozen),
      'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
      'flops': task.flops_per_step(0.0),
      'jax': jax.__version__,
    }
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
      start = time.perf_counter()
      state, sums = compiled(state, batch, None)
      total, count = jax.device_get(sums['loss'])
      seconds = time.perf_counter() - start
      peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
      line = {'seconds': seconds, 'peak': peak, 'loss': float(total / count)}
      print(json.dumps(line), flush=True)


if __name__ == '__main__':
  main()
