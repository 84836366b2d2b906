"""Runs studies of a few rows on one device, since these may not fit a mesh."""

import contextlib
import functools

import jax

from mod_jax import parallel
from mod_jax.train.task import Study


@contextlib.contextmanager
def one_device(*trees):
  """Leaves the mesh, and yields the trees on this host's first device."""
  trees = jax.tree.map(parallel.whole, trees)
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
