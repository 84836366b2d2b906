"""What every test needs before jax is imported."""

import contextlib
import gc
import importlib.util
import os
import pathlib
import signal

# A GPU machine may ask for its own platform; everything here runs on CPUs.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['MPLBACKEND'] = 'agg'
# Triton 3.9 warns wherever nobody says.
os.environ.setdefault('TRITON_DEFAULT_FP_FUSION', '1')
# Eight simulated devices, for the tests of sharding. Processes that tests start
# inherit all of this environment; some of them ask for a single device.
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')
# Most of the suite's time is compilation, and tiny programs need none of LLVM's
# finer passes. XLA's own passes still run.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
# Both workers, the processes that tests start, and the next run share what was
# compiled.
_CACHE = pathlib.Path(__file__).parents[1] / '.pytest_cache' / 'xla'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.1')
# XLA for CPUs has two code generators for its fused loops. The newer one, which
# makes faster programs, takes several times as long to compile them; and tiny
# programs gain nothing from being compiled in parts. Where the machine is busy,
# eight devices may wait for each other for longer than the 40 seconds after
# which XLA ends the process by default.
os.environ['XLA_FLAGS'] = ' '.join(
  (
    '--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters',
    '--xla_cpu_parallel_codegen_split_count=1',
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    os.environ.get('XLA_FLAGS', ''),
  )
)

# After the environment above, which JAX reads once, as it is imported.
from absl import app  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Compilation makes the first example slow, and a suite that draws new examples
# each time would fail on somebody else's change.
hypothesis.settings.register_profile(
  'mod_jax',
  deadline=None,
  derandomize=True,
  max_examples=20,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('mod_jax')

# absl defines --help once in a process. Tests that call a command line take
# away the flags that they find new, and this is not to be one of them.
app.define_help_flags()

# Tracing makes many small objects, and looking through all that are alive each
# time that there are some hundred more took 6% of the suite's time.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
  """Spares the collector what stays to the end: modules, and the tests."""
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def load_config_file():
  """Returns a function (path, variant='') -> ExperimentConfig."""
  from mod_jax import config as config_lib

  def load(path, variant=''):
    module = config_lib.load(pathlib.Path(__file__).parents[1] / path)
    return module.get_config(variant) if variant else module.get_config()

  return load


@pytest.fixture(scope='session')
def texts(tmp_path_factory):
  """A glob of four files of random bytes."""
  folder = tmp_path_factory.mktemp('texts')
  rng = np.random.default_rng(0)
  for i in range(4):
    (folder / f'{i}.txt').write_bytes(rng.bytes(2000))
  return f'{folder}/*.txt'


@pytest.fixture(scope='session')
def on_one_device():
  """A context in which a run takes the first device and not all eight."""
  from mod_jax import parallel

  make_mesh = parallel.make_mesh

  @contextlib.contextmanager
  def context():
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(
        parallel,
        'make_mesh',
        lambda config, *_: make_mesh(config, jax.devices()[:1]),
      )
      yield

  return context


@pytest.fixture
def one_device(on_one_device):
  with on_one_device():
    yield


@pytest.fixture(scope='module')
def no_report():
  """Leaves out the table and the pictures of a run's end, which take longer."""
  from mod_jax.train import evaluation

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluation, 'report', lambda *args: None)
    yield


@pytest.fixture
def deaths():
  """Returns the signals that nobody caught: their default would end the tests.

  Ctrl-C is ignored where a shell runs the tests in the background; it is not
  here.
  """
  caught = []
  numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
  before = {
    number: signal.signal(number, lambda number, _: caught.append(number))
    for number in numbers
  }
  yield caught
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.fixture(scope='session')
def equations():
  """Returns a function: the operations of a jaxpr, those inside others too."""
  from jax.extend import core

  def equations(jaxpr):
    for equation in jaxpr.eqns:
      yield equation
      for inner in core.jaxprs_in_params(equation.params):
        yield from equations(inner)

  return equations


@pytest.fixture
def command():
  """Returns `mod_jax.sweeps` as a function: status, output and errors."""
  import command_line

  from mod_jax.sweeps import __main__ as sweeps

  def call(*arguments):
    argv = ['mod_jax.sweeps', *map(str, arguments)]
    ended = command_line.call(sweeps.main, argv)
    return ended.status, ended.out, ended.err

  return call


# Compilers for accelerators that are not here.


def lower_for_hopper(function, *args) -> str:
  """Returns what JAX hands to an H200: Triton kernels are compiled in it."""
  from jax.sharding import AbstractDevice, AbstractMesh

  device = AbstractDevice(
    device_kind='NVIDIA H200', num_cores=132, platform='cuda'
  )
  from mod_jax import parallel

  names = parallel.MESH_AXES
  mesh = AbstractMesh(
    (1,) * len(names),
    names,
    axis_types=(jax.sharding.AxisType.Auto,) * len(names),
    abstract_device=device,
  )
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=('cuda',)).as_text()


@pytest.fixture(scope='module')
def quick_tpu():
  from mod_jax.prove import slices

  with slices.compiler(quick=True):
    yield


def compile_for_tpu(topology: str, function, *args):
  """Returns the program for one chip of `v5e:2x2`, `v5p:2x2x1`, …, compiled."""
  from mod_jax.prove import slices

  (found,) = slices.parse(topology)
  sharding = jax.sharding.SingleDeviceSharding(found.devices()[0])
  jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
  with slices.compiler(quick=True):
    return jitted.lower(*args).compile()


@pytest.fixture(scope='session')
def for_hopper():
  """`lower_for_hopper`, where Triton and JAX's plugin for GPUs are."""
  for module in ('triton', 'jax_triton', 'jax_cuda13_plugin'):
    if importlib.util.find_spec(module) is None:
      pytest.skip(f'{module} is not installed, so nothing compiles for a GPU')
  return lower_for_hopper


@pytest.fixture(scope='session')
def for_tpu():
  """`compile_for_tpu`, where libtpu is."""
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('libtpu, the TPU compiler, is not installed')
  return compile_for_tpu
