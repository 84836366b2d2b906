"""Compilers for accelerators that are not here."""

import importlib.util
import os

import jax
import pytest


def lower_for_hopper(function, *args) -> str:
  """Returns what JAX hands to an H200: Triton kernels are compiled in it."""
  from jax.sharding import AbstractDevice
  from jax.sharding import AbstractMesh

  device = AbstractDevice(
    device_kind='NVIDIA H200', num_cores=132, platform='cuda'
  )
  mesh = AbstractMesh((1,), ('x',), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=('cuda',)).as_text()


def compile_for_tpu(topology: str, function, *args):
  """Returns the program for one chip of `v5e:2x2`, `v5p:2x2x1`, …, compiled."""
  # Set here and not globally: they only matter to libtpu.
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  from jax.experimental import topologies

  devices = topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  ).devices
  sharding = jax.sharding.SingleDeviceSharding(devices[0])
  return (
    jax.jit(function, in_shardings=sharding, out_shardings=sharding)
    .lower(*args)
    .compile()
  )


@pytest.fixture(scope='session')
def for_hopper():
  """`lower_for_hopper`, where Triton and JAX's plugin for GPUs are."""
  for module in ('triton', 'jax_triton', 'jax_cuda13_plugin'):
    if importlib.util.find_spec(module) is None:
      pytest.skip(f'{module} is not installed, so nothing compiles for a GPU')
  return lower_for_hopper


@pytest.fixture(scope='session', params=['v5e:2x2', 'v5p:2x2x1'])
def for_tpu(request):
  """`compile_for_tpu` for one of two kinds, where libtpu is."""
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('libtpu, the TPU compiler, is not installed')
  return lambda *args: compile_for_tpu(request.param, *args)
