"""Proves that runs compile and fit on slices of TPUs, before any is paid for.

The real training step, sharded as in the run, is compiled for a slice that need
not be here. The compiled program tells the memory, the arithmetic and the
communication of each chip.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import operator
import pathlib
import re

from absl import flags
import jax

from mod_jax import config as config_lib
from mod_jax import parallel, paths, peaks
from mod_jax.errors import UserError
from mod_jax.sweeps import hlo, manifest, slices, tables
from mod_jax.tasks import make_task
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.tasks.plain import Plain
from mod_jax.train import state as state_lib
from mod_jax.train.run_config import fitted
from mod_jax.train.step import jit_step
import mod_jax_kernels
from mod_jax_kernels.attention import choice

# What a slice's memory error says; the compiler keeps some memory to itself.
_TOO_LARGE = re.compile(r'Used ([\d.]+)([KMG]) of')
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
  """What one chip does in a training step of a run, and how long that takes.

  Where the step does not fit, all but the first lines is 0.

  Attributes:
    topology: the slice.
    chips: how many it has.
    data: size of the mesh's axis, and so are the next three.
    fsdp: see there.
    expert: see there.
    tensor: see there.
    parameters: of the model.
    memory: bytes that the step needs; at least these, where it is not known.
    available: bytes that the chip has.
    fits: whether the program could be made.
    model_flops: what `mod_jax.flops` counts for a step.
    products: the same as found in the program: what is computed a second time
      for the backward pass is left out, and attention is counted as there.
    again: FLOPs besides these: what rematerialisation computes once more, and
      what the attention kernel does with masked pairs or once more.
    collectives: by kind, how often in a step, and the bytes that are sent.
    sent: bytes sent in a step, of all kinds.
    compute_seconds: all products at the chip's peak rate.
    network_seconds: all communication, one after another, each at the full rate
      of its links.
    uncounted: kernels and loops that the other figures leave out.
  """

  topology: str
  chips: int
  data: int
  fsdp: int
  expert: int
  tensor: int
  parameters: int
  memory: int
  available: int
  fits: bool
  model_flops: float
  products: float = 0.0
  again: float = 0.0
  collectives: dict[str, tuple[int, float]] = dataclasses.field(
    default_factory=dict
  )
  sent: float = 0.0
  compute_seconds: float = 0.0
  network_seconds: float = 0.0
  uncounted: tuple[str, ...] = ()

  @property
  def step_seconds(self) -> float:
    """The larger of the two, as if they overlapped and nothing else took time.

    Less is possible where communications over different links overlap.
    """
    return max(self.compute_seconds, self.network_seconds)

  @property
  def bound(self) -> str:
    """What takes longer."""
    if not self.fits:
      return 'memory'
    network = self.network_seconds > self.compute_seconds
    return 'network' if network else 'compute'

  @property
  def bytes_per_flop(self) -> float:
    return self.sent / (self.products + self.again)


def check(config: ExperimentConfig, topology: slices.Slice) -> Proof:
  """Returns what is known of a run on a slice before anything is compiled.

  The memory is that of the state alone, so a run may not fit even if it seems
  to.

  Raises:
    UserError: the mesh does not divide the slice, the batch or the parameters;
      the run trains in a way that is not compiled ahead.
  """
  task = make_task(config)
  if type(task) is not Plain:
    raise UserError(
      f'{config.name}: pruned and adaptive models, which need a teacher or'
      ' several phases, are not compiled ahead; take a dense or routed one.'
    )
  *others, tensor = sizes = config.mesh.sizes(topology.num_chips)
  if config.train.rows % (parts := math.prod(others)):
    fitting = fitted(config, topology.num_chips).mesh
    way_out = f'use a multiple of {parts}'
    if fitting != config.mesh:
      way_out += (
        f', or config.mesh.tensor={fitting.tensor} and'
        f' config.mesh.fsdp={fitting.fsdp}'
      )
    raise UserError(
      f'train.batch_size / grad_accum_steps={config.train.rows} does not divide'
      f' by the {parts} chips of {topology.name} along data and fsdp with'
      f' config.mesh.tensor={tensor}: {way_out}.'
    )
  mesh = jax.sharding.AbstractMesh(sizes, parallel.MESH_AXES)
  parallel.check_batch(
    config.evaluation.batch_size, mesh, 'evaluation.batch_size'
  )
  _, abstract = state_lib.of_run(task, mesh)
  return Proof(
    topology=topology.name,
    chips=topology.num_chips,
    **mesh.shape,
    parameters=sum(x.size for x in jax.tree.leaves(abstract.params)),
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
  """Compiles a run's training step for a slice, and reads what it does.

  Args:
    config: the run; its mesh is taken as it is.
    topology: the slice.
    cache: a directory of what was found before; None keeps nothing.

  Raises:
    UserError: as of `check`, or libtpu is missing.
  """
  path = None
  if cache is not None:
    topology.check_compiler()  # Its version is part of the key.
    path = paths.expand(cache) / f'{_key(config, topology)}.json'
    if path.is_file():
      record = json.loads(path.read_text())
      return Proof(**record | {'uncounted': tuple(record['uncounted'])})
  found = check(config, topology)
  if found.memory <= found.available:
    found = _compiled(found, config, topology)
  if path is not None:
    paths.write_bytes(path, json.dumps(dataclasses.asdict(found)).encode())
  return found


def smallest(
  config: ExperimentConfig, topologies: Sequence[slices.Slice], cache=None
) -> Proof:
  """Returns the proof of the first of some slices that a run fits on.

  Where it fits on none, that is the last one that it can be divided over.

  Args:
    config: the run; its mesh is changed as `fitted` says.
    topologies: from the smallest.
    cache: as of `prove`.

  Raises:
    UserError: it cannot be divided over any.
  """
  found, refusal = None, None
  for topology in topologies:
    try:
      found = prove(fitted(config, topology.num_chips), topology, cache)
    except UserError as error:
      refusal = error
      continue
    if found.fits:
      break
  if found is None:
    raise refusal
  return found


def lower(config: ExperimentConfig, devices: Sequence[jax.Device]):
  """Returns the training step of a run as it is handed to the compiler.

  Args:
    config: the run.
    devices: all that it runs on.
  """
  task = make_task(config)
  mesh = parallel.make_mesh(config.mesh, devices)
  with jax.set_mesh(mesh), choice.made_for('tpu'):
    optimizer, abstract = state_lib.of_run(task, mesh)
    batch = parallel.abstract_batch(task.batch_shapes(), mesh)
    step = jit_step(
      abstract,
      task=task,
      optimizer=optimizer,
      static_args=_static_args(config, task),
      config=config.train,
    )
    return step.lower(abstract, batch, None)


def run(
  runs: Iterable[tuple[str, ExperimentConfig]],
  topologies: Sequence[str],
  workdir,
) -> list[dict]:
  """Proves runs on slices, each beside its dense twin; prints what it finds.

  `WORKDIR/prove.csv` has a line for each; it is written anew after every one.
  What was compiled before is not compiled again, so an interrupted call goes on
  where it stopped, and runs that differ in their seeds cost one compilation.

  Args:
    runs: names and configs. Their meshes are changed as `fitted` says.
    topologies: names of slices; that of a kind of chip stands for the smallest
      one that a run fits on.
    workdir: directory of the sweep.

  Returns:
    The lines, by column: all runs on the first slice, then on the next.

  Raises:
    UserError: an unknown slice; a run that does not divide over one, before
      anything is compiled; when all is written, some that do not fit.
  """
  runs = list(runs)
  chosen = [slices.parse(topology) for topology in topologies]
  for found, (_, config) in itertools.product(chosen, runs):
    if len(found) == 1:
      check(fitted(config, found[0].num_chips), found[0])
  workdir = paths.expand(workdir)
  prove_one = functools.partial(_prove_pair, cache=workdir / 'prove')
  rows = []
  for found, (name, config) in itertools.product(chosen, runs):
    rows.append({'id': name} | prove_one(config, found))
    print(_line(rows[-1], heading=len(rows) == 1), flush=True)
    paths.write_bytes(workdir / 'prove.csv', tables.csv_text(rows).encode())
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


def report(config: ExperimentConfig, topology: str, cache=None) -> str:
  """Returns what compiling a run for a slice tells, for people.

  Args:
    config: the run. Its mesh must fit the slice.
    topology: the slice; a kind of chip stands for the smallest one that the run
      fits on, with the mesh that `fitted` gives.
    cache: as of `prove`.

  Raises:
    UserError: as of `prove` and `smallest`.
  """
  found = slices.parse(topology)
  if len(found) == 1:
    proof = prove(config, found[0], cache)
  else:
    proof = smallest(config, found, cache)
  mesh = ', '.join(
    f'{name} {getattr(proof, name)}' for name in parallel.MESH_AXES
  )
  fits = 'fits' if proof.fits else 'DOES NOT FIT'
  lines = [
    ('slice', f'{proof.topology}: {proof.chips} chips, mesh {mesh}'),
    ('parameters', f'{proof.parameters:,}'),
    ('memory', f'{_memory(vars(proof))} GiB a chip: {fits}'),
  ]
  if proof.fits:
    lines += _report_step(proof)
  return '\n'.join(f'{name:<15} {text}' for name, text in lines)


def _report_step(proof: Proof) -> list[tuple[str, str]]:
  lines = [
    (
      'products',
      f'{proof.products:.4e} FLOPs a chip and step, {_ratio(proof):.4f} of the'
      f" model's {proof.model_flops / proof.chips:.4e};"
      f' {proof.again:.3e} more are computed again',
    )
  ]
  lines += [
    (kind, f'{count} in a step, {sent / 1e6:,.1f} MB sent by each chip')
    for kind, (count, sent) in proof.collectives.items()
  ]
  lines += [
    (
      'network',
      f'{proof.sent / 1e6:,.1f} MB, {proof.bytes_per_flop:.2e} bytes per FLOP',
    ),
    (
      'step',
      f'{1e3 * proof.step_seconds:.4g} ms as predicted, bound by {proof.bound}:'
      f' {1e3 * proof.compute_seconds:.4g} ms of products at the peak rate,'
      f' {1e3 * proof.network_seconds:.4g} ms of communication',
    ),
  ]
  if proof.uncounted:
    lines.append(('not counted', ', '.join(proof.uncounted)))
  return lines


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the sweep.')
  flags.DEFINE_list(
    'topology',
    [],
    'Slices of TPUs such as v5e:4x4,v5p:4x4x4; v5e alone stands for the'
    ' smallest of its slices that a run fits on.',
  )


def main(_) -> None:
  """`python -m mod_jax.sweeps prove`."""
  workdir, topologies = flags.FLAGS.workdir, flags.FLAGS.topology
  for name, value in (('workdir', workdir), ('topology', topologies)):
    if not value:
      raise UserError(
        f'--{name} is missing: give the directory of the sweep and slices, as'
        ' in --workdir=W --topology=v5e:4x4.'
      )
  entries = manifest.read(workdir)
  run([(entry.id, entry.config) for entry in entries], topologies, workdir)


def _prove_pair(config, found, cache) -> dict:
  """Returns a line of the table: a run on a slice, with its dense twin's."""
  if len(found) > 1:
    proof = smallest(config, found, cache)
    (found,) = (x for x in found if x.name == proof.topology)
  else:
    (found,) = found
    proof = prove(fitted(config, found.num_chips), found, cache)
  row = dataclasses.asdict(proof) | {
    'collectives': json.dumps(proof.collectives),
    'uncounted': ' '.join(proof.uncounted),
    'step_seconds': proof.step_seconds,
    'bound': proof.bound,
    'bytes_per_flop': proof.bytes_per_flop if proof.fits else 0.0,
    'products_ratio': _ratio(proof) if proof.fits else 0.0,
  }
  twin = _twin(config)
  beside = None
  if twin:
    beside = prove(fitted(twin, found.num_chips), found, cache)
  row['dense_fits'] = beside.fits if beside else ''
  for name in ('products', 'again', 'sent', 'step_seconds'):
    known = beside and beside.fits
    row[f'dense_{name}'] = getattr(beside, name) if known else ''
  return row


def _twin(config) -> ExperimentConfig | None:
  """Returns the dense twin of a routed run, or None of a dense one."""
  model = config.model.dense_twin()
  if model == config.model:
    return None
  return dataclasses.replace(config, model=model)


def _ratio(proof: Proof) -> float:
  return proof.products * proof.chips / proof.model_flops


def _key(config: ExperimentConfig, topology: slices.Slice) -> str:
  """Returns a name of all that a program's cost depends on."""
  irrelevant = (
    *('name', 'seed', 'init', 'evaluation', 'checkpoint', 'log'),
    # Constants of the program.
    *('optimizer.warmup_steps', 'optimizer.learning_rate'),
    # So is this, unless it says whether a warm-up of the capacity ends.
    *(() if config.train.capacity_warmup_steps else ('train.num_steps',)),
  )
  told = json.loads(config_lib.to_json(config))
  for path in irrelevant:
    *parents, name = path.split('.')
    functools.reduce(operator.getitem, parents, told).pop(name)
  versions = map(importlib.metadata.version, ('jax', 'libtpu'))
  text = json.dumps([told, topology.name, *versions, _code()])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
  """Returns a digest of the code that makes programs and reads them."""
  digest = hashlib.sha256()
  kernels = pathlib.Path(mod_jax_kernels.__file__).parent
  for folder in (pathlib.Path(__file__).parents[1], kernels):
    for path in sorted(folder.rglob('*.py')):
      digest.update(path.read_bytes())
  return digest.hexdigest()


def _static_args(config, task):
  """Returns those of the program that runs longest, the last one of a run."""
  return task.static_args(config.train.num_steps)


def _compiled(proof: Proof, config, topology) -> Proof:
  """Compiles the step, and adds to a proof what it does if it fits."""
  devices = topology.devices()
  try:
    with slices.quick_compiler():
      compiled = lower(config, devices).compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    found = _TOO_LARGE.search(str(error))
    if found is None:
      return proof
    used = float(found[1]) * 2 ** {'K': 10, 'M': 20, 'G': 30}[found[2]]
    return dataclasses.replace(proof, memory=int(used))
  memory = compiled.memory_analysis()
  used = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.generated_code_size_in_bytes
  )
  proof = dataclasses.replace(proof, memory=used, fits=True)
  mesh = parallel.make_mesh(config.mesh, devices)
  return _read(proof, hlo.cost(compiled.as_text()), topology, mesh)


def _read(proof: Proof, cost: hlo.Cost, topology, mesh) -> Proof:
  """Adds what a program does to a proof."""
  useful, again, uncounted = kernel_flops(cost.kernels)
  products = cost.flops - cost.again + useful
  again += cost.again
  collectives, network = {}, 0.0
  peak = peaks.of(mesh.devices.flat[0])
  positions = [device.coords for device in mesh.devices.flat]
  for part in cost.collectives:
    count, sent = collectives.get(part.kind, (0, 0.0))
    collectives[part.kind] = (count + part.count, sent + part.sent)
    group = [positions[i] for i in part.group]
    network += part.sent / topology.bandwidth(group)
  return dataclasses.replace(
    proof,
    products=products,
    again=again,
    collectives=dict(sorted(collectives.items())),
    sent=sum(sent for _, sent in collectives.values()),
    compute_seconds=(products + again) / peak,
    network_seconds=network,
    uncounted=(*uncounted, *cost.endless),
  )


# The parts of splash attention: how many of its matrix products a model's count
# has, and how many are computed. Both backward parts compute the weights once
# more, and the second one their gradient.
_SPLASH = {
  'splash_mha_fwd': (2, 2),
  'splash_mha_dq': (2, 3),
  'splash_mha_dkv': (2, 4),
}


_FLOATS = ('bf16', 'f32')


def kernel_flops(
  kernels: Iterable[hlo.Kernel],
) -> tuple[int, int, tuple[str, ...]]:
  """Returns the FLOPs of attention kernels, by formula.

  Returns:
    Those that a model's count has, exact causal pairs and each product once;
    what is computed besides; and the names of kernels that are not attention.
  """
  counts, others = collections.Counter(), {}
  for kernel in kernels:
    part = next((p for p in _SPLASH if kernel.name.startswith(p)), None)
    if part is None:
      others[kernel.name] = None
    else:
      counts[part, *_product_flops(kernel)] += kernel.count
  useful, total = 0, 0
  for (part, seen, visited), count in counts.items():
    once, computed = _SPLASH[part]
    total += count * computed * visited
    if part == 'splash_mha_fwd':
      # A rematerialised forward pass runs the same kernel again.
      count = min(count, counts['splash_mha_dq', seen, visited] or count)
    useful += count * once * seen
  return useful, total - useful, tuple(others)


def _product_flops(kernel: hlo.Kernel) -> tuple[int, int]:
  """Returns the FLOPs of one product of attention: needed, and computed."""
  # Integers say which blocks a causal mask leaves; then come q, k and the rest.
  mask = [shape for dtype, shape in kernel.operands if dtype == 's8']
  q, k, *_ = (shape for dtype, shape in kernel.operands if dtype in _FLOATS)
  *batch, queries, channels = q
  keys = k[-2]
  seen = visited = queries * keys
  if mask:
    _, rows, columns = mask[0]
    block_q, block_k = queries // rows, keys // columns
    seen = queries * (queries + 1) // 2
    visited = (
      block_q
      * block_k
      * sum(
        (i + 1) * block_q > j * block_k
        for i, j in itertools.product(range(rows), range(columns))
      )
    )
  one = 2 * math.prod(batch) * channels
  return one * seen, one * visited


_COLUMNS = {
  'id': lambda row: row['id'],
  'slice': lambda row: row['topology'],
  'mesh': lambda row: 'x'.join(str(row[name]) for name in parallel.MESH_AXES),
  'GiB': lambda row: _memory(row),
  'products': lambda row: f'{row["products"]:.3e}',
  '/model': lambda row: f'{row["products_ratio"]:.3f}',
  'again': lambda row: f'{row["again"] / max(1, row["products"]):.2f}',
  'sent MB': lambda row: f'{row["sent"] / 1e6:.0f}',
  'B/FLOP': lambda row: f'{row["bytes_per_flop"]:.1e}',
  'compute ms': lambda row: f'{1e3 * row["compute_seconds"]:.1f}',
  'network ms': lambda row: f'{1e3 * row["network_seconds"]:.1f}',
  'bound by': lambda row: row['bound'],
  'dense ms': lambda row: _milliseconds(row['dense_step_seconds']),
}
_WIDTHS = {'id': 24, 'slice': 14}


def _memory(row: Mapping) -> str:
  return f'{row["memory"] / _GIB:.2f} of {row["available"] // _GIB}'


def _milliseconds(seconds) -> str:
  return '-' if seconds == '' else f'{1e3 * seconds:.1f}'


def _line(row: Mapping, *, heading: bool) -> str:
  """Returns a row for people, under the names of the columns if it is first."""
  cells = {name: cell(row) for name, cell in _COLUMNS.items()}
  lines = [dict(zip(cells, cells, strict=True)), cells][not heading :]
  return '\n'.join(
    ''.join(
      cell.ljust(_WIDTHS[name]) if name in _WIDTHS else cell.rjust(12)
      for name, cell in line.items()
    )
    for line in lines
  )
