"""The mesh, and the one table from logical axis names to mesh axes.

Modules name the axes of their arrays; only this file knows which mesh axes
these names stand for. Meshes are made with automatic axes and entered by
`jax.set_mesh`: the older `with mesh:` would drop the constraints silently.
"""

import dataclasses
import math
from typing import Annotated

from flax import linen as nn
import jax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from mod_jax import config as config_lib
from mod_jax.errors import UserError

MESH_AXES = ('data', 'fsdp', 'expert', 'tensor')

# Logical name -> mesh axes. A name that is not here is a mistake.
RULES = {
  # Activations.
  'batch': ('data', 'fsdp', 'expert'),
  # Where experts lie on devices of their own, the rows that they share.
  'expert_batch': ('data', 'fsdp'),
  'length': (),
  'act_embed': (),
  'act_heads': ('tensor',),
  'act_mlp': ('tensor',),
  'act_vocab': ('tensor',),
  # Parameters.
  'embed': ('fsdp',),
  'experts': ('expert',),
  'heads': ('tensor',),
  'head_dim': (),
  'mlp': ('tensor',),
  'vocab': ('tensor',),
  'layers': (),
  # Norms, routers and predictors: so small that every device keeps a copy,
  # and routing needs no communication.
  'replicated': (),
}

# Names of axes over rows: an initialisation has but one.
_BATCHES = ('batch', 'expert_batch')

_Devices = Annotated[int, config_lib.Range(ge=-1, le=2**20)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """How many devices each mesh axis spans; one of them may be -1: the rest."""

  # Copies of the parameters, each with a part of the batch.
  data: _Devices = -1
  # Parameters split, gathered when used; also splits the batch.
  fsdp: _Devices = 1
  expert: _Devices = 1  # Experts split; also splits the batch.
  tensor: _Devices = 1  # Heads, hidden units and vocabulary split.

  def __post_init__(self):
    config_lib.validate(self)
    sizes = self._sizes
    if 0 in sizes or sizes.count(-1) > 1:
      raise UserError(
        f'mesh={dict(zip(MESH_AXES, sizes, strict=True))}: expected positive'
        ' sizes, at most one of them -1 for the remaining devices.'
      )

  @property
  def _sizes(self) -> tuple[int, ...]:
    return tuple(getattr(self, axis) for axis in MESH_AXES)

  def sizes(self, num_devices: int) -> tuple[int, ...]:
    """Returns the sizes of MESH_AXES for so many devices, -1 resolved.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    sizes = list(self._sizes)
    known = math.prod(n for n in sizes if n > 0)
    if -1 in sizes and num_devices % known == 0:
      sizes[sizes.index(-1)] = num_devices // known
    if math.prod(sizes) != num_devices:
      raise UserError(
        f'mesh={dict(zip(MESH_AXES, sizes, strict=True))} does not fit'
        f' {num_devices} device(s): the product of the sizes must be'
        f' {num_devices}; set config.mesh accordingly.'
      )
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices=None) -> jax.sharding.Mesh:
  """Returns a mesh with the axes MESH_AXES over the devices.

  Where the devices are of several slices, which only the slower network of the
  data centre joins, the axis `data` goes over the slices, so that nothing but
  the sum of gradients crosses that network.

  Raises:
    UserError: the mesh does not fit the devices, or their hosts.
  """
  devices = jax.devices() if devices is None else list(devices)
  axis_types = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
  data, *others = config.sizes(len(devices))
  slices = len({getattr(d, 'slice_index', 0) for d in devices})
  if slices == 1:
    grid = mesh_utils.create_device_mesh(
      (data, *others),
      devices,
      # An axis of 8 in a cube of 4 x 4 x 4 chips, say.
      allow_split_physical_axes=True,
    )
  elif data % slices:
    raise UserError(
      f'mesh.data={data} does not divide over the {slices} slices that the'
      f' {len(devices)} devices are of: make it a multiple of {slices}, by less'
      ' fsdp, expert or tensor.'
    )
  else:
    grid = mesh_utils.create_hybrid_device_mesh(
      (data // slices, *others),
      (slices, *(1 for _ in others)),
      devices,
      allow_split_physical_axes=True,
    )
  mesh = jax.sharding.Mesh(grid, MESH_AXES, axis_types=axis_types)
  parts = set(_rows_of_hosts(mesh).values())
  sizes = {len(part) for part in parts}
  if len(sizes) > 1 or len(set().union(*parts)) != sum(map(len, parts)):
    raise UserError(
      f'mesh={dict(mesh.shape)} gives hosts some rows in common and others not,'
      ' so that no part of a batch is theirs alone to read: let mesh.tensor'
      ' divide the devices of a host, or be a multiple of them.'
    )
  return mesh


def fit_mesh(config: MeshConfig, num_devices: int, rows: int) -> MeshConfig:
  """Returns the mesh of a config, changed as little as a slice needs.

  Where `data` is left open, `tensor` is doubled until the other axes divide the
  rows, and `fsdp` is at most what is left. Nothing says that the result
  fits: `make_mesh`, `check_batch` and `shardings` do.

  Args:
    config: the mesh of the run.
    num_devices: of the slice.
    rows: of a batch, or microbatch.
  """
  if config.data != -1 or min(config._sizes[1:]) < 1:
    return config
  tensor = config.tensor
  while rows * tensor % num_devices and 2 * tensor <= num_devices:
    tensor *= 2
  if rows * tensor % num_devices:
    tensor = config.tensor
  fsdp = math.gcd(config.fsdp, num_devices // (tensor * config.expert))
  return dataclasses.replace(config, fsdp=fsdp, tensor=tensor)


def spec(names: tuple[str | None, ...]) -> PartitionSpec:
  """Returns the partition spec of an array with these logical axes.

  Raises:
    ValueError: an unknown name, or one mesh axis used for two array axes.
  """
  axes = []
  for name in names:
    if name is not None and name not in RULES:
      raise ValueError(f'Logical axis {name!r} is not in parallel.RULES.')
    axes.append(RULES[name] if name is not None else ())
  used = [axis for group in axes for axis in group]
  if len(used) != len(set(used)):
    raise ValueError(f'Logical axes {names} put one mesh axis on two axes.')
  return PartitionSpec(
    *(g if len(g) > 1 else (g[0] if g else None) for g in axes)
  )


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains an activation's sharding; without a mesh, does nothing."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, spec(names))


def per_device(function, inputs, outputs):
  """Returns a function that runs on each device's part of its arrays.

  For kernels, which XLA cannot split: it would gather everything first. Without
  a mesh, or on one device, it is the function itself. A batch that the devices
  do not divide, such as the one of an initialisation, runs whole on each; if
  they do not divide another axis, which `shardings` refuses of parameters, the
  function is left to the compiler.

  Args:
    function: of arrays, or None where there is none; returns a tuple. What it
      sums over a sharded axis is a part: see `mean_over`.
    inputs: for each argument the logical names of its axes.
    outputs: the same for each result.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function

  def run(*args):
    given = [x is not None for x in args]
    sizes = [
      (name, size)
      for x, names in zip(args, inputs, strict=True)
      if x is not None
      for name, size in zip(names, x.shape, strict=True)
    ]

    def divides(name, size):
      devices = [mesh.shape[axis] for axis in RULES.get(name, ())]
      return size % math.prod(devices) == 0

    split = all(divides(*of) for of in sizes if of[0] in _BATCHES)
    if not all(divides(*of) for of in sizes if of[0] not in _BATCHES):
      return function(*args)

    def part(names):
      return spec(
        tuple(n if split or n not in _BATCHES else None for n in names)
      )

    def call(*arrays):
      arrays = iter(arrays)
      return function(*(next(arrays) if here else None for here in given))

    return jax.shard_map(
      call,
      in_specs=tuple(
        part(names)
        for names, x in zip(inputs, args, strict=True)
        if x is not None
      ),
      out_specs=tuple(map(part, outputs)),
      # Kernels do not say over which axes their results vary.
      check_vma=False,
    )(*(x for x in args if x is not None))

  return run


def mean_over(x: jax.Array, name: str) -> jax.Array:
  """Returns the mean over the devices that share an axis, in `per_device`."""
  return _over(jax.lax.pmean, x, name)


def sum_over(x: jax.Array, name: str) -> jax.Array:
  """Returns the sum over the devices that share an axis, in `per_device`."""
  return _over(jax.lax.psum, x, name)


def max_over(x: jax.Array, name: str) -> jax.Array:
  """Returns the maximum over the devices that share an axis, likewise."""
  return _over(jax.lax.pmax, x, name)


def index_of(name: str) -> jax.Array:
  """Returns which part of an axis this device has, counted from 0, likewise."""
  return _over(lambda x, axes: x + jax.lax.axis_index(axes), 0, name)


def _over(reduce, x, name):
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return x  # Every device sees the whole.
  return reduce(x, RULES[name])


def shardings(boxed, mesh: jax.sharding.Mesh):
  """Returns NamedShardings for a tree of logically partitioned parameters.

  Args:
    boxed: a tree from `jax.eval_shape(model.init, …)`, still boxed by
      `nn.with_logical_partitioning`. Leaves without a box are replicated.
    mesh: the device mesh.

  Returns:
    The tree without boxes, a NamedSharding in place of each array.

  Raises:
    UserError: an axis of a parameter does not divide by its mesh axes.
  """

  def one(path, leaf):
    if not isinstance(leaf, nn.LogicallyPartitioned):
      return NamedSharding(mesh, PartitionSpec())
    names = leaf.names
    for size, name in zip(leaf.value.shape, names, strict=True):
      parts = math.prod(mesh.shape[axis] for axis in RULES.get(name, ()))
      if size % parts:
        raise UserError(
          f'Axis {name!r} of parameter {jax.tree_util.keystr(path)} has size'
          f' {size}, which {parts} devices along {RULES[name]} do not divide:'
          ' change the mesh or the model.'
        )
    return NamedSharding(mesh, spec(names))

  return jax.tree_util.tree_map_with_path(
    one, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of a batch: its first axis over all but tensor."""
  return NamedSharding(mesh, spec(('batch',)))


def abstract_batch(shapes, mesh: jax.sharding.Mesh):
  """Returns the shapes of a batch as `put_batch` places it."""
  sharding = batch_sharding(mesh)
  return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)


def check_batch(batch_size: int, mesh: jax.sharding.Mesh, what: str) -> None:
  """Raises UserError where a batch does not divide over the mesh."""
  parts = math.prod(mesh.shape[axis] for axis in RULES['batch'])
  if batch_size % parts:
    raise UserError(
      f'{what}={batch_size} does not divide by the {parts} devices along the'
      f" mesh's data, fsdp and expert axes: use a multiple of {parts}."
    )


def place(x, sharding: NamedSharding, dtype=None) -> jax.Array:
  """Returns an array, of which every host has the whole, spread over a mesh.

  Each host places its own part only: it cannot write to the others' devices.
  """
  x = np.asarray(x, dtype)
  return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def first_says(answer: bool) -> bool:
  """Returns the first host's answer on all hosts, which must all ask."""
  if jax.process_count() == 1:
    return answer
  return bool(multihost_utils.broadcast_one_to_all(np.array(answer)))


def row_shard(mesh: jax.sharding.Mesh) -> tuple[int, int]:
  """Returns which part of each batch's rows this host reads, and of how many.

  There are as many parts as hosts, unless `tensor` spans hosts: these have the
  same rows on their devices, so they read the same part.
  """
  by_host = _rows_of_hosts(mesh)
  parts = sorted(set(by_host.values()))
  return parts.index(by_host[jax.process_index()]), len(parts)


def _rows_of_hosts(mesh):
  """Returns by host which places along a batch its devices have."""
  found = {}
  # Rows are split along all axes but `tensor`, the last one.
  for place, devices in enumerate(
    mesh.devices.reshape(-1, mesh.devices.shape[-1])
  ):
    for device in devices:
      found.setdefault(device.process_index, set()).add(place)
  return {host: tuple(sorted(places)) for host, places in found.items()}


def put_batch(batch, mesh: jax.sharding.Mesh):
  """Places this host's part of a batch, as `row_shard` says, by rows."""
  sharding = batch_sharding(mesh)
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
    batch,
  )
