"""Training steps with experts over the dense twin's, in time and in FLOPs.

    python benchmarks/experts.py

Times, in turn, training steps of a dense language model and of models with
Mixture-of-Depths, with experts (eight, of which a token runs one, so that
active FLOPs are the dense model's), with half of the experts' slots, and with
both kinds of Mixture-of-Depths-and-Experts. All slots count as FLOPs, filled or
not. Then the steps of a larger model are compiled for a slice of TPUs, with the
experts spread over chips, to report what each chip holds, computes and sends.
The result is written beside this file as JSON.
"""

import dataclasses

from absl import app, flags
from flax import linen as nn
import jax
import machine

from mod_jax import flops, timing
from mod_jax.data.text import TextDataConfig
from mod_jax.layers.experts import ExpertsConfig
from mod_jax.layers.routing_config import MoDConfig
from mod_jax.models.lm import LMConfig
from mod_jax.optimizer import make_optimizer
from mod_jax.parallel import MeshConfig
from mod_jax.prove import prove, slices
from mod_jax.runs.run_config import TrainConfig
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig
import results as results_lib

_WIDTH = flags.DEFINE_integer('width', 256, 'D')
_LAYERS = flags.DEFINE_integer('layers', 4, 'Number of blocks.')
_LENGTH = flags.DEFINE_integer('length', 512, 'Tokens of a sequence.')
_BATCH = flags.DEFINE_integer('batch', 8, 'Sequences of a step.')
_ROUNDS = flags.DEFINE_integer('rounds', 15, 'Timed steps of each.')
_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x4', 'A slice; or none: "".')

MOD = MoDConfig(capacity=0.125)
EXPERTS = ExpertsConfig(num_experts=8, capacity_factor=1.25)
REDUCED = dataclasses.replace(EXPERTS, capacity_factor=0.5)
NULLS = dataclasses.replace(EXPERTS, num_nulls=1, compute_share=0.5)
# Without a no-op, but with as many slots as NULLS leaves to experts.
SAME_SLOTS = dataclasses.replace(
  EXPERTS, capacity_factor=EXPERTS.capacity_factor * NULLS.share
)
PARTS = {
  'dense': (None, None),
  'MoD': (MOD, None),
  'experts': (None, EXPERTS),
  'experts, half of the slots': (None, REDUCED),
  'staged': (MOD, EXPERTS),
  'integrated': (None, NULLS),
}


def experiments(base: LMConfig, batch: int, length: int, parts=PARTS, **more):
  """Returns the runs by name; keywords are fields of the experiment."""
  return {
    name: ExperimentConfig(
      name=name,
      model=dataclasses.replace(base, routing=mod, experts=experts),
      data=TextDataConfig(length=length),
      train=TrainConfig(batch_size=batch),
      **more,
    )
    for name, (mod, experts) in parts.items()
  }


def step_function(config: ExperimentConfig):
  """Returns a function that takes one training step and blocks.

  Gradients are clipped by their norm, as in any run. Without that, XLA would
  copy the parameters in every step, to update some while others are read.
  """
  task = make_task(config)
  key = jax.random.key(0)
  variables = nn.unbox(task.init(key))
  params = variables.pop('params')
  tokens_BL = jax.random.randint(
    key,
    (config.train.batch_size, config.data.length + 1),
    *(0, config.model.vocab_size),
  )
  batch = {'tokens': tokens_BL[:, :-1], 'targets': tokens_BL[:, 1:]}

  def loss(params, batch):
    return task.loss(params, variables, batch, key, task.static_args(0))[0]

  optimizer = make_optimizer(config.optimizer, config.train.num_steps)
  return machine.train_step(loss, params, optimizer, batch)


def on_a_slice(topology: str) -> dict[str, dict]:
  """Returns the proofs of a larger model's steps on a slice, by name."""
  base = LMConfig(
    vocab_size=32_768,
    num_layers=8,
    width=1024,
    num_heads=16,
    dtype='bfloat16',
    attention='splash',
  )
  (topology_slice,) = slices.parse(topology)
  chips = topology_slice.num_chips
  rows = {}
  for name, config in experiments(base, 4 * chips, 2048).items():
    experts = 1 if config.model.experts is None else 8
    mesh = MeshConfig(data=1, fsdp=chips // experts, expert=experts)
    config = dataclasses.replace(config, mesh=mesh)
    rows[name] = dataclasses.asdict(prove.prove(config, topology_slice))
    print(name, rows[name], flush=True)
  return rows


def main(_):
  machine.with_malloc(machine.KEPT)
  base = LMConfig(
    vocab_size=256,
    num_layers=_LAYERS.value,
    width=_WIDTH.value,
    num_heads=_WIDTH.value // 64,
  )
  same = 'as many slots, without no-ops'
  parts = PARTS | {same: (None, SAME_SLOTS)}
  configs = experiments(base, _BATCH.value, _LENGTH.value, parts)
  steps = {name: step_function(config) for name, config in configs.items()}
  seconds = timing.interleaved(steps, rounds=_ROUNDS.value, warmup=2)
  counts = {
    name: flops.train(config.model, _LENGTH.value)
    for name, config in configs.items()
  }
  # No-ops should save time as well as FLOPs: compare with a model without them
  # that has the same number of slots.
  no_ops = {
    name: results_lib.over(seconds, counts, 'integrated', name)
    for name in ('experts', same)
  }
  results_lib.save(
    __file__,
    {
      'config': {
        'batch': _BATCH.value,
        'length': _LENGTH.value,
        **dataclasses.asdict(base),
      },
      'rounds': _ROUNDS.value,
      'models': results_lib.over_dense(seconds, counts),
      'integrated_over': no_ops,
      'topology': _TOPOLOGY.value,
      'on_a_slice': on_a_slice(_TOPOLOGY.value) if _TOPOLOGY.value else {},
      'seconds': seconds,
    },
  )


if __name__ == '__main__':
  app.run(main)
