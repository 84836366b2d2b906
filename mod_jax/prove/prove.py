"""Proves that runs compile and fit on TPUs or GPUs, before renting them.

The real training step, sharded as in the run, is compiled ahead of time for a
slice that need not be present. The compiled program shows the memory, the
arithmetic and the communication of each chip.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import operator
import pathlib
import re

from absl import flags
import jax

from mod_jax import config as config_lib
from mod_jax import parallel, paths, peaks, tables
from mod_jax.errors import UserError
from mod_jax.prove import hlo, slices
from mod_jax.runs.run_config import fitted
from mod_jax.sweeps import manifest
from mod_jax.tasks import make_task, phases
from mod_jax.tasks.adaptive import Adaptive
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.tasks.plain import Plain
from mod_jax.train import state as state_lib
from mod_jax.train.step import jit_step
import mod_jax_kernels
from mod_jax_kernels.attention import choice

# Matches the compiler's out-of-memory errors, which give the bytes needed: in
# all ("Used"), or besides the state ("temporaries").
_TOO_LARGE = re.compile(r'(Used |temporaries \()([\d.]+)([KMG])')
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
  """The work of one chip in a training step, and the step's predicted time.

  If the step does not fit, all fields with a default value keep the default.
  """

  topology: str  # Name of the slice.
  chips: int
  # Sizes of the mesh axes.
  data: int
  fsdp: int
  expert: int
  tensor: int
  parameters: int  # Number of the model's parameters.
  # Bytes that the step needs on each chip. If the step was not compiled, or the
  # compiler's error does not give the bytes, those of the state alone.
  memory: int
  available: int  # Bytes of the chip's memory.
  fits: bool  # Whether the step compiled within that memory.
  # FLOPs of a step on all chips, as counted by `mod_jax.flops`.
  model_flops: float
  # FLOPs of a chip's program for the work that `model_flops` counts, which has
  # no recomputation, and only the causal pairs of attention.
  products: float = 0.0
  # The chip's other FLOPs: rematerialisation, and recomputation and masked
  # pairs in the attention kernel.
  again: float = 0.0
  # (Executions in a step, bytes that a chip sends), by kind of collective.
  collectives: dict[str, tuple[int, float]] = dataclasses.field(
    default_factory=dict
  )
  sent: float = 0.0  # Bytes that a chip sends in a step, in total.
  compute_seconds: float = 0.0  # Time of all products at the chip's peak rate.
  # Time of all communication, one operation after another, each at the full
  # rate of its links.
  network_seconds: float = 0.0
  # Time of everything that is launched on a GPU in a step, one after another,
  # each at the peak rate of the GPU's memory or of its products, whichever
  # takes longer; 0 on other chips.
  launch_seconds: float = 0.0
  # Kernels that the other fields leave out, and loops with an unknown trip
  # count, whose body they count once.
  uncounted: tuple[str, ...] = ()

  @property
  def step_seconds(self) -> float:
    """Predicted time of a step: compute, launches or network, the longest.

    This assumes that they overlap and nothing else takes time. The step may be
    faster if communication over different links overlaps.
    """
    computing = max(self.compute_seconds, self.launch_seconds)
    return max(computing, self.network_seconds)

  @property
  def bound(self) -> str:
    """Limit: 'memory' if the step does not fit, else 'compute' or 'network'."""
    if not self.fits:
      return 'memory'
    network = self.network_seconds == self.step_seconds
    return 'network' if network else 'compute'

  @property
  def bytes_per_flop(self) -> float:
    return self.sent / (self.products + self.again) if self.fits else 0.0

  @property
  def products_ratio(self) -> float:
    """All chips' `products`, over `model_flops`."""
    return self.products * self.chips / self.model_flops


def check(config: ExperimentConfig, topology: slices.Slice) -> Proof:
  """Checks that a slice suits a run's mesh and batches, without compiling.

  Returns a proof that has the memory of the state alone, and `fits` False.
  Raises UserError if the slice does not suit, or a teacher takes part in steps.
  """
  task = make_task(config)
  adapted = isinstance(task, Adaptive) and task.objective.phase == 'end_to_end'
  if type(task) is not Plain and not adapted:
    raise UserError(
      f'{config.name}: steps with a teacher, as of pruned models and of the'
      ' first two phases of adaptive ones, are not compiled ahead; take a'
      ' dense or routed model, or the phase end_to_end.'
    )
  sizes = config.mesh.sizes(topology.num_chips)
  mesh = jax.sharding.AbstractMesh(sizes, parallel.MESH_AXES)
  for name, rows in (
    ('train.batch_size / grad_accum_steps', config.train.rows),
    ('evaluation.batch_size', config.evaluation.batch_size),
  ):
    parallel.check_batch(rows, mesh, name)
  _, abstract = state_lib.of_run(task, mesh)
  return Proof(
    topology=topology.name,
    chips=topology.num_chips,
    **mesh.shape,
    parameters=sum(x.size for x in jax.tree.leaves(abstract.all_params)),
    memory=sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(abstract)
    ),
    available=topology.chip.memory,
    fits=False,
    model_flops=task.flops_per_step(_static_args(config, task)),
  )


def prove(
  config: ExperimentConfig, topology: slices.Slice, cache=None
) -> Proof:
  """Compiles a run's training step for a slice, and analyses the program.

  The run's mesh must suit the slice. If there is a directory `cache`, the proof
  is read from a file in it, which this writes if it is missing. If the state
  alone does not fit, nothing is compiled.
  """
  path = None
  if cache is not None:
    path = paths.expand(cache) / f'{_key(config, topology)}.json'
    if path.is_file():
      record = json.loads(path.read_text())
      return Proof(**record | {'uncounted': tuple(record['uncounted'])})
  proof = check(config, topology)
  if proof.memory <= proof.available:
    proof = _compiled(proof, config, topology)
  if path is not None:
    paths.write_bytes(path, json.dumps(dataclasses.asdict(proof)).encode())
  return proof


def smallest(
  config: ExperimentConfig, topologies: Sequence[slices.Slice], cache=None
) -> Proof:
  """Returns the proof for the smallest slice that a run fits on.

  The slices are in ascending order, and the run's mesh is adapted to each by
  `fitted`. If the run fits on no slice, the proof is for the largest slice that
  the mesh can be adapted to. Raises UserError if there is no such slice.
  """
  proof, refusal = None, None
  for topology in topologies:
    try:
      proof = prove(fitted(config, topology.num_chips), topology, cache)
    except UserError as error:
      refusal = error
      continue
    if proof.fits:
      break
  if proof is None:
    raise refusal
  return proof


def lower(config: ExperimentConfig, devices: Sequence[jax.Device]):
  """Returns the lowered training step of a run on the devices of its mesh."""
  task = make_task(config)
  mesh = parallel.make_mesh(config.mesh, devices)
  with jax.set_mesh(mesh), choice.made_for(devices[0]):
    optimizer, abstract = state_lib.of_run(task, mesh)
    batch = parallel.abstract_batch(task.modality.batch_shapes(), mesh)
    step = jit_step(
      abstract,
      task=task,
      optimizer=optimizer,
      static_args=_static_args(config, task),
      config=config.train,
    )
    return step.lower(abstract, batch, None)


def _static_args(config, task):
  """Returns the static arguments at the end of the run, after any warm-up."""
  return task.static_args(config.train.num_steps)


def run(
  runs: Iterable[tuple[str, ExperimentConfig]],
  topologies: Sequence[str],
  workdir,
) -> list[dict]:
  """Proves runs on slices, each with its dense twin, and prints the results.

  `WORKDIR/prove.csv`, with a line per run and slice, is rewritten after each.
  Proofs are cached in `WORKDIR/prove`, so an interrupted call can be repeated,
  and runs that differ only in their seeds are compiled once. Only the last of a
  run's phases is compiled. Meshes are adapted by `fitted`, and a topology that
  is only a kind of chip means the smallest slice that a run fits on. Raises
  UserError before anything is compiled if a run cannot be divided over a slice,
  and at the end if runs do not fit.
  """
  runs = [(name, phases.last(config)) for name, config in runs]
  pairs = list(itertools.product(map(slices.parse, topologies), runs))
  for candidates, (_, config) in pairs:
    if len(candidates) == 1:
      check(fitted(config, candidates[0].num_chips), candidates[0])
  workdir = paths.expand(workdir)
  rows = []
  for candidates, (name, config) in pairs:
    rows.append({'id': name} | _row(config, candidates, workdir / 'prove'))
    cells = _cells(rows[-1])
    if len(rows) == 1:
      print(_line(cells))
    print(_line(cells.values()), flush=True)
    paths.write_bytes(workdir / 'prove.csv', tables.csv_of(rows).encode())
  large = [row for row in rows if not row['fits']]
  if large:
    worst = max(large, key=lambda row: row['memory'] / row['available'])
    raise UserError(
      f'{len(large)} of {len(rows)} do not fit:'
      f' {", ".join(f"{row['id']} on {row['topology']}" for row in large)}. The'
      f' largest needs {_memory(worst)} GiB a chip: take a kind of chip with'
      ' more memory, smaller models or a smaller batch, or more of mesh.fsdp or'
      ' of model.remat.'
    )
  return rows


def _row(config, candidates, cache) -> dict:
  """Returns a run's line of `prove.csv`, with its dense twin's numbers."""
  proof = smallest(config, candidates, cache)
  derived = ('step_seconds', 'bound', 'bytes_per_flop', 'products_ratio')
  row = dataclasses.asdict(proof) | {
    'collectives': json.dumps(proof.collectives),
    'uncounted': ' '.join(proof.uncounted),
    **{name: getattr(proof, name) for name in derived},
  }
  model, dense = config.model.dense_twin(), None
  if model != config.model:
    twin = dataclasses.replace(config, model=model, objective=None)
    dense = smallest(twin, slices.parse(proof.topology), cache)
  row['dense_fits'] = dense.fits if dense else ''
  for name in ('products', 'again', 'sent', 'step_seconds'):
    row[f'dense_{name}'] = getattr(dense, name) if dense and dense.fits else ''
  return row


def _cells(row: Mapping) -> dict[str, str]:
  """Returns a row of `_row` as the texts that are printed, by column."""
  dense = row['dense_step_seconds']
  return {
    'id': row['id'],
    'slice': row['topology'],
    'mesh': 'x'.join(str(row[name]) for name in parallel.MESH_AXES),
    'GiB': _memory(row),
    'products': f'{row["products"]:.3e}',
    '/model': f'{row["products_ratio"]:.3f}',
    'again': f'{row["again"] / max(1, row["products"]):.2f}',
    'sent MB': f'{row["sent"] / 1e6:.0f}',
    'B/FLOP': f'{row["bytes_per_flop"]:.1e}',
    'compute ms': f'{1e3 * row["compute_seconds"]:.1f}',
    'network ms': f'{1e3 * row["network_seconds"]:.1f}',
    'bound by': row['bound'],
    'dense ms': '-' if dense == '' else f'{1e3 * dense:.1f}',
  }


def _line(cells: Iterable[str]) -> str:
  name, topology, *others = cells
  return f'{name:24}{topology:14}{"".join(cell.rjust(12) for cell in others)}'


def _memory(row: Mapping) -> str:
  return f'{row["memory"] / _GIB:.2f} of {row["available"] // _GIB}'


def report(config: ExperimentConfig, topology: str, cache=None) -> str:
  """Returns the proof of a run, or of its last phase, on a slice as text.

  Args:
    config: the run. Its mesh must suit the slice.
    topology: name of the slice; a kind of chip alone stands for the smallest
      slice that the run fits on, with the mesh adapted by `fitted`.
    cache: as for `prove`.

  Raises:
    UserError: as `prove` and `smallest`.
  """
  config, candidates = phases.last(config), slices.parse(topology)
  if len(candidates) == 1:
    proof = prove(config, candidates[0], cache)
  else:
    proof = smallest(config, candidates, cache)
  mesh = ', '.join(
    f'{name} {getattr(proof, name)}' for name in parallel.MESH_AXES
  )
  fits = 'fits' if proof.fits else 'DOES NOT FIT'
  lines = {
    'slice': f'{proof.topology}: {proof.chips} chips, mesh {mesh}',
    'parameters': f'{proof.parameters:,}',
    'memory': f'{_memory(vars(proof))} GiB a chip: {fits}',
  }
  if proof.fits:
    lines['products'] = (
      f'{proof.products:.4e} FLOPs a chip and step, {proof.products_ratio:.4f}'
      f" of the model's {proof.model_flops / proof.chips:.4e};"
      f' {proof.again:.3e} more are computed again'
    )
    for kind, (count, sent) in proof.collectives.items():
      megabytes = f'{sent / 1e6:,.1f} MB'
      lines[kind] = f'{count} in a step, {megabytes} sent by each chip'
    lines['network'] = (
      f'{proof.sent / 1e6:,.1f} MB, {proof.bytes_per_flop:.2e} bytes per FLOP'
    )
    lines['step'] = (
      f'{1e3 * proof.step_seconds:.4g} ms as predicted, bound by {proof.bound}:'
      f' {1e3 * proof.compute_seconds:.4g} ms of products at the peak rate,'
      f' {1e3 * proof.network_seconds:.4g} ms of communication'
    )
    if proof.launch_seconds:
      lines['launches'] = (
        f'{1e3 * proof.launch_seconds:.4g} ms one after another, each at the'
        ' peak rate of memory or products'
      )
  if proof.uncounted:
    lines['not counted'] = ', '.join(proof.uncounted)
  return '\n'.join(f'{name:<15} {text}' for name, text in lines.items())


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.', required=True)
  flags.DEFINE_list(
    'topology',
    None,
    'Slices of TPUs or GPUs of a host, such as v5e:4x4,v5p:4x4x4,h100:8; v5e'
    ' alone stands for the smallest of its slices that a run fits on.',
    required=True,
  )


def main(_) -> None:
  """`python -m mod_jax.sweeps prove`."""
  workdir = flags.FLAGS.workdir
  runs = [(entry.id, entry.config) for entry in manifest.read(workdir)[0]]
  run(runs, flags.FLAGS.topology, workdir)


def _key(config: ExperimentConfig, topology: slices.Slice) -> str:
  """Returns the cache key: a hash of all that the program depends on."""
  irrelevant = [
    *('name', 'seed', 'init', 'evaluation', 'checkpoint', 'log'),
    # These are only constants in the program and do not change its cost.
    *('optimizer.warmup_steps', 'optimizer.learning_rate'),
  ]
  if not config.train.capacity_warmup_steps:
    # With a warm-up, `_static_args` depends on the number of steps.
    irrelevant.append('train.num_steps')
  fields = json.loads(config_lib.to_json(config))
  for path in irrelevant:
    *parents, name = path.split('.')
    functools.reduce(operator.getitem, parents, fields).pop(name)
  versions = jax.__version__, topology.compiler()
  text = json.dumps([fields, topology.name, *versions, _code()])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
  """Returns a digest of the sources of `mod_jax` and `mod_jax_kernels`."""
  digest = hashlib.sha256()
  kernels = pathlib.Path(mod_jax_kernels.__file__).parent
  for folder in (pathlib.Path(__file__).parents[1], kernels):
    for path in sorted(folder.rglob('*.py')):
      digest.update(path.read_bytes())
  return digest.hexdigest()


def _compiled(proof: Proof, config, topology) -> Proof:
  """Compiles the step, and returns the completed proof."""
  devices = topology.devices()
  # A step that is too large if compiled quickly may fit if compiled as in a
  # run.
  for quick in (True, False):
    try:
      with slices.compiler(quick=quick):
        compiled = lower(config, devices).compile()
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      needed, compiled = _needed(str(error), proof.memory), None
      continue
    memory = compiled.memory_analysis()
    needed = (
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes
      + memory.temp_size_in_bytes
      + memory.generated_code_size_in_bytes
    )
    if needed <= proof.available:  # For GPUs, larger steps compile as well.
      break
  if compiled is None:
    return dataclasses.replace(proof, memory=needed)
  text = compiled.as_text()
  cost = hlo.cost(text)
  useful, again, uncounted = kernel_flops(cost.kernels)
  products = cost.flops - cost.again + useful
  again += cost.again
  mesh = parallel.make_mesh(config.mesh, devices).devices.flat
  collectives, network = {}, 0.0
  for part in cost.collectives:
    count, sent = collectives.get(part.kind, (0, 0.0))
    collectives[part.kind] = (count + part.count, sent + part.sent)
    network += part.sent / topology.bandwidth([mesh[i] for i in part.group])
  launch_seconds = 0.0
  peak = peaks.of(mesh[0], make_task(config).dtype)
  if isinstance(topology.chip, slices.Gpu):
    bandwidth = topology.chip.memory_bandwidth
    launch_seconds = math.fsum(
      x.count * max(x.bytes / bandwidth, x.flops / peak)
      for x in hlo.launches(text)
    )
  return dataclasses.replace(
    proof,
    memory=needed,
    fits=needed <= proof.available,
    products=products,
    again=again,
    collectives=dict(sorted(collectives.items())),
    sent=sum(sent for _, sent in collectives.values()),
    compute_seconds=(products + again) / peak,
    network_seconds=network,
    launch_seconds=launch_seconds,
    uncounted=(*uncounted, *cost.endless),
  )


def _needed(refusal: str, state: int) -> int:
  """Returns the bytes that a program needs, by the compiler's error message.

  `state`, the bytes of the state, is the result if the message has no number.
  """
  match = _TOO_LARGE.search(refusal)
  if match is None:
    return state
  what, number, unit = match.groups()
  used = int(float(number) * 2 ** {'K': 10, 'M': 20, 'G': 30}[unit])
  return used if what == 'Used ' else used + state


# For each kernel of splash attention and of cuDNN: the number of its matrix
# products that `model_flops` counts, and the number that it computes. Backward
# kernels recompute the attention weights, and `dkv` also their gradient.
_ATTENTION = {
  'splash_mha_fwd': (2, 2),
  'splash_mha_dq': (2, 3),
  'splash_mha_dkv': (2, 4),
  'dot_product_attention_fwd': (2, 2),
  'dot_product_attention_bwd': (4, 5),
}
# The backward kernel of each forward kernel. A forward kernel that runs more
# often than its backward kernel does so for rematerialisation.
_BACKWARD = {
  'splash_mha_fwd': 'splash_mha_dq',
  'dot_product_attention_fwd': 'dot_product_attention_bwd',
}


def kernel_flops(
  kernels: Iterable[hlo.Kernel],
) -> tuple[int, int, tuple[str, ...]]:
  """Computes the FLOPs of attention kernels by formula.

  Returns the FLOPs that `model_flops` includes (causal pairs only, each product
  once), all other FLOPs of these kernels, and the names of the kernels that are
  not attention.
  """
  counts, others = collections.Counter(), {}
  for kernel in kernels:
    part = next((p for p in _ATTENTION if kernel.name.startswith(p)), None)
    if part is None:
      others[kernel.name] = None
    else:
      counts[part, *_product_flops(kernel)] += kernel.count
  useful, total = 0, 0
  for (part, needed, computed), count in counts.items():
    useful_products, all_products = _ATTENTION[part]
    total += count * all_products * computed
    if part in _BACKWARD:
      backward = counts[_BACKWARD[part], needed, computed]
      count = min(count, backward or count)
    useful += count * useful_products * needed
  return useful, total - useful, tuple(others)


def _product_flops(kernel: hlo.Kernel) -> tuple[int, int]:
  """Returns (needed, computed) FLOPs of one matrix product of attention."""
  # int8 operands are block masks of a causal mask. The first two floating-point
  # operands are q and k.
  masks = [shape for dtype, shape in kernel.operands if dtype == 's8']
  arrays = [s for dtype, s in kernel.operands if dtype in ('bf16', 'f32')]
  (*batch, queries, channels), (*_, keys, _), *_ = arrays
  # cuDNN's q and k are [batch, length, heads, channels].
  if kernel.name.startswith('dot_product_attention'):
    *batch, queries, heads, channels = arrays[0]
    batch, keys = (*batch, heads), arrays[1][1]
  needed = computed = queries * keys
  if kernel.causal:  # cuDNN computes few masked pairs; count none.
    needed = computed = queries * (queries + 1) // 2
  if masks:
    _, rows, columns = masks[0]
    block_q, block_k = queries // rows, keys // columns
    needed = queries * (queries + 1) // 2
    computed = sum(
      block_q * block_k
      for i, j in itertools.product(range(rows), range(columns))
      if (i + 1) * block_q > j * block_k
    )
  per_pair = 2 * math.prod(batch) * channels
  return per_pair * needed, per_pair * computed
