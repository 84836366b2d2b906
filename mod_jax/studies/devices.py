"""Runs studies of a few rows on one device, since these may not fit a mesh."""

import contextlib
import functools

import jax
from jax.experimental import multihost_utils
import numpy as np

from mod_jax import parallel
from mod_jax.train.task import Study


@contextlib.contextmanager
def one_device(*trees):
  """Leaves the mesh temporarily: a few rows may not divide over it.

  Yields:
    The trees of arrays, on the first device of this host.
  """

  def whole(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return multihost_utils.process_allgather(x, tiled=True)
    # Reads the arrays of a teacher, which may be `convert.entry.Lazy`.
    return x if isinstance(x, jax.Array) else np.asarray(x)

  trees = jax.tree.map(whole, trees)
  mesh = parallel.make_mesh(parallel.MeshConfig(), jax.local_devices()[:1])
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh):
    yield jax.device_put(trees, everywhere)


def on_one_device(study):
  """Decorates a function without a mesh as a study, in `one_device`."""

  @functools.wraps(study)
  def run(task, params, model_state, mesh) -> Study:
    del mesh
    with one_device(params, model_state) as variables:
      return study(task, *variables)

  return run
