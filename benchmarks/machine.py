"""Helpers of benchmarks: training steps, memory, environment, spreads."""

from collections.abc import Callable, Mapping
import concurrent.futures
import datetime
import os
import pathlib
import platform
import statistics
import sys
import time

import jax
import jaxlib
import optax

from mod_jax import config as config_lib


def configs(path: str):
  """Returns the module of a file below `configs/`."""
  return config_lib.load(pathlib.Path(__file__).parents[1] / 'configs' / path)


def result_path(
  script: str, suffix: str, trial: str | None = None
) -> pathlib.Path:
  """Returns the path of a result: beside its script, or in a trial's folder.

  Args:
    script: path of the script.
    suffix: replaces `.py`.
    trial: directory of a trial, whose results are not kept; None for real runs.
  """
  path = pathlib.Path(script)
  return pathlib.Path(trial or path.parent, path.stem + suffix)


def train_step(loss, params, optimizer: optax.GradientTransformation, batch):
  """Returns a function that takes one training step and returns the loss.

  Args:
    loss: function of parameters and a batch.
    params: initial parameters.
    optimizer: the optimiser.
    batch: the batch of every step.

  Returns:
    The function; its attribute `program` is the compiled program's text.
  """

  def update(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  carry = [params, optimizer.init(params)]
  compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*carry, batch)
  compiled = compiled.compile()

  def step():
    *carry[:], value = compiled(*carry, batch)
    return value

  step.program = compiled.as_text()
  return step


def built(makers: Mapping[str, Callable]) -> dict:
  """Returns what functions return, by name; programs compile side by side.

  Prints when each is ready, since on a GPU that can take longer than all else.
  """
  begun = time.perf_counter()

  def build(name):
    result = makers[name]()
    print(f'{name}: built in {time.perf_counter() - begun:.0f} s', flush=True)
    return result

  with concurrent.futures.ThreadPoolExecutor() as pool:
    return dict(zip(makers, pool.map(build, makers), strict=True))


def spread(values: list[float]) -> dict:
  """Returns mean, range and values of a number that differs between seeds."""
  return {
    'mean': statistics.mean(values),
    'low': min(values),
    'high': max(values),
    'values': values,
  }


def cell(found: dict | None, scale: float = 1.0, digits: int = 3) -> str:
  """Returns mean (lowest–highest) of a `spread`, times the scale."""
  if found is None:
    return ''
  mean, low, high = (scale * found[x] for x in ('mean', 'low', 'high'))
  if low == high:
    return f'{mean:.{digits}f}'
  return f'{mean:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})'


def markdown(header: list[str], rows: list[list[str]]) -> str:
  """Returns a table of texts."""
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def point(name: str, group: str, mega: float, accuracy: dict) -> dict:
  """Returns a point of `viz.accuracy_flops` for a `spread` of accuracies.

  Args:
    name: name of the model.
    group: group of the model, whose points are joined by a line.
    mega: millions of FLOPs, or of multiply-accumulates.
    accuracy: result of `spread`; the bar is from the lowest to the highest.
  """
  return {
    'name': name,
    'group': group,
    'flops': mega,
    'accuracy': accuracy['mean'],
    'spread': (
      accuracy['mean'] - accuracy['low'],
      accuracy['high'] - accuracy['mean'],
    ),
  }


# HUGE_PAGES: memory in huge pages. KEPT: also, freed memory is not returned to
# the system, as with `mod_jax.cli.keep_freed_memory`. An environment variable
# sets them, so that they hold for PyTorch's process as well, and an empty
# GLIBC_TUNABLES turns them off.
HUGE_PAGES = 'glibc.malloc.hugetlb=1'
KEPT = ':'.join(
  (
    HUGE_PAGES,
    'glibc.malloc.arena_max=1',
    'glibc.malloc.mmap_max=0',
    f'glibc.malloc.trim_threshold={2**36}',
  )
)


def with_malloc(tunables: str) -> None:
  """Restarts the script with these settings of glibc's malloc, on Linux.

  XLA allocates the memory of every result anew, and page faults of small pages,
  .4 ms for each MB, can take longer than a layer's computation. Memory that one
  step returns to the system has to be faulted in again by the next one, which
  is slower the more memory other processes use.

  Args:
    tunables: the settings, such as `HUGE_PAGES` or `KEPT`.
  """
  name = 'GLIBC_TUNABLES'
  if sys.platform == 'linux' and name not in os.environ:
    os.environ[name] = tunables
    os.execv(sys.executable, [sys.executable, *sys.argv])


def environment() -> dict[str, str]:
  """Returns device and versions, to be recorded with every result."""
  device = jax.devices()[0]
  return {
    'date': datetime.date.today().isoformat(),
    'device': device.device_kind,
    'platform': device.platform,
    'processor': _processor(),
    'devices': str(jax.device_count()),
    'python': platform.python_version(),
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'glibc_tunables': os.environ.get('GLIBC_TUNABLES', ''),
    'xla_flags': os.environ.get('XLA_FLAGS', ''),
  }


# Of the matrix products of XLA and oneDNN, from the best, as Linux names them.
_INSTRUCTIONS = ('amx_bf16', 'avx512_bf16', 'avx512f', 'avx2')


def _processor() -> str:
  """Returns name, cores and instructions, which bfloat16's speed depends on."""
  path = pathlib.Path('/proc/cpuinfo')
  if path.exists():
    text = path.read_text()
    lines = text.splitlines()
    names = [x.split(':')[1].strip() for x in lines if 'model name' in x]
    if names:
      flags = set(text.split())
      best = [x for x in _INSTRUCTIONS if x in flags][:1]
      return ', '.join([names[0], f'{len(names)} cores', *best])
  return platform.processor()
