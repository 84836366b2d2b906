"""What compilers say of the kernels, for devices that need not be there.

    PYTHONPATH=.venv/cuda JAX_PLATFORMS=cpu python benchmarks/compiled.py

Compiles `route_scores` and `acm_mlp` at the sizes of a ViT-B on 128 images in
bfloat16, forward and with all gradients, and beside them other programs for the
same: XLA's own, which makes the whole attention map, or is a static MLP;
`route_scores` in blocks, as longer rows take it; and, on a GPU, `acm_mlp` by
`grouped_dot` and by `jax.lax.ragged_dot`, with a row for each learner that a
token runs.

For a chip of each kind of TPU this takes libtpu, and tells cycles, those of
them outside of kernels (copies, gathers, sorts) by operation, and bytes. XLA
estimates the cycles of most of its own operations. For kernels and for the
others they are the instructions that they issue, counted in the assembled code
by the bounds of its loops, with all branches taken. Only of `acm_mlp` those
loops count that run: with all learners for all tokens, and, in `by_learners`,
with random numbers of them. Waits for memory are left out. Bytes are what XLA
counts for its own operations, and every array of a kernel once.

For an H200 it takes Triton and JAX's plugin for GPUs, which `make test-slow`
installs in `.venv/cuda`, and tells launches, bytes that they move (each array
once, which a kernel may read again), the products of XLA's own, over those of a
static program, and registers, spilled bytes and shared memory of each Triton
kernel, as ptxas assembles it.

Floors: every array moved once, and every product at the peak. The result is
written beside this file as JSON; what flags leave out stays as it is there.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from absl import app, flags
import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np

from mod_jax import parallel, peaks
from mod_jax.prove import hlo, slices
import mod_jax_kernels
from mod_jax_kernels import tiles
from mod_jax_kernels.acm_mlp import order as order_lib
from mod_jax_kernels.acm_mlp import pallas_tpu
from mod_jax_kernels.attention import choice
from mod_jax_kernels.pallas_parts import LANES
import results as results_lib

_DEVICES = flags.DEFINE_list('devices', ['v5e', 'v5p', 'H200'], 'Which.')
_OPS = flags.DEFINE_list('ops', ['route_scores', 'acm_mlp'], 'Which.')
_DIRECTIONS = flags.DEFINE_list('directions', ['forward', 'gradient'], 'Which.')
# Implementations of `grouped_dot`, beside `acm_mlp`.
GROUPED = {'grouped': 'triton', 'ragged_dot': 'xla'}
_PROGRAMS = flags.DEFINE_list(
  'programs', ['kernels', 'blocks', 'xla', *GROUPED], 'Which.'
)
_GPU = 'h200:1'


@dataclasses.dataclass(frozen=True)
class Chip:
  """A chip: slice to compile for, JAX's name, bytes/s of memory, and clock.

  Bandwidths are from the pages named in `mod_jax.prove.slices`. Clocks follow
  from the peak: four matrix units of 128 x 128 in a core, two cores in a v5p.
  """

  topology: str
  kind: str
  bandwidth: float
  units: int

  @property
  def clock(self) -> float:
    return peaks.BFLOAT16[self.kind] / (2 * self.units * 128**2)

  def floor(self, num_bytes: float, flops: float) -> dict[str, float]:
    """Returns lower bounds of the cycles."""
    return {
      'bytes': num_bytes / self.bandwidth * self.clock,
      'products': flops / peaks.BFLOAT16[self.kind] * self.clock,
    }


CHIPS = {
  'v5e': Chip('v5e:2x2', 'TPU v5 lite', 819e9, 4),
  'v5p': Chip('v5p:2x2x1', 'TPU v5p?', 2765e9, 8),
}


def shapes(op: str) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the arrays, those of heads as the projections write them."""
  args = jax.eval_shape(lambda: kernel_cases.arrays(op, 'bfloat16'))
  if op == 'route_scores':
    return tuple(
      jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * x.shape[3]), x.dtype)
      for x in args
    )
  return args


def program(op: str, direction: str, implementation: str | None):
  """Returns a function of `shapes`, and of the result's gradient after them.

  Args:
    op: the operation.
    direction: `forward` or `gradient`.
    implementation: a backend; `xla` of `acm_mlp` is a static MLP.
  """
  inputs = kernel_cases.INPUTS[op]

  def forward(*args):
    if op == 'route_scores':
      shape = jax.eval_shape(lambda: kernel_cases.arrays(op, 'bfloat16'))[0]
      heads = (x.reshape(shape.shape) for x in args)
      out_BLHC, score_BL = kernel_cases.call(op, implementation)(*heads)
      return out_BLHC.reshape(args[0].shape), score_BL
    if implementation == 'xla':
      x_TD, w1_NDF, b1_NF, w2_NFD, _ = args
      w1_DH = jnp.moveaxis(w1_NDF, 0, 1).reshape(x_TD.shape[1], -1)
      hidden_TH = jax.nn.gelu(x_TD @ w1_DH + b1_NF.reshape(-1), False)
      return hidden_TH @ w2_NFD.reshape(-1, w2_NFD.shape[-1]), ()
    if implementation in GROUPED:
      return by_groups(GROUPED[implementation], *args), ()
    return kernel_cases.call(op, implementation)(*args), ()

  def gradient(*args):
    *args, dout = args
    rest = args[inputs:]
    out, vjp, more = jax.vjp(
      lambda *x: forward(*x, *rest), *args[:inputs], has_aux=True
    )
    return out, more, vjp(dout)

  return forward if direction == 'forward' else gradient


def by_groups(implementation: str, x_TD, w1_NDF, b1_NF, w2_NFD, k_T):
  """Returns `acm_mlp` by products of groups of rows, a group each learner."""
  tokens, learners = len(x_TD), len(w1_NDF)
  order = order_lib.order(k_T, learners)
  # A row for each learner that a token runs, sorted by learner.
  end_N = jnp.cumsum(order.count_N)
  row_R = jnp.arange(tokens * learners)
  group_R = (end_N <= row_R[:, None]).sum(axis=1)
  start_N = end_N - order.count_N
  place_R = row_R - start_N.at[group_R].get(mode='clip')
  token_R = jnp.where(
    row_R < end_N[-1], order.token_T.at[place_R].get(mode='clip'), tokens
  )
  x_RD = x_TD.at[token_R].get(mode='fill', fill_value=0)
  product = functools.partial(
    mod_jax_kernels.grouped_dot,
    size_E=order.count_N,
    implementation=implementation,
  )
  hidden_RF = product(x_RD, w1_NDF) + b1_NF.at[group_R].get(mode='clip')
  y_RD = product(jax.nn.gelu(hidden_RF, False).astype(x_TD.dtype), w2_NFD)
  return jnp.zeros_like(x_TD).at[token_R].add(y_RD, mode='drop')


def minimum(op: str, direction: str) -> tuple[float, float]:
  """Returns bytes and FLOPs that no program can do without."""
  args = shapes(op)
  sizes = [x.size * x.dtype.itemsize for x in args]
  inputs = kernel_cases.INPUTS[op]
  x = sizes[0]  # Also the size of the result.
  if op == 'route_scores':
    batch, length, width = args[0].shape
    product = 2 * batch * length**2 * width
    products = 2 if direction == 'forward' else 2 + 5
  else:
    product = 2 * args[0].size * args[1].shape[0] * args[1].shape[2]
    products = 2 if direction == 'forward' else 2 + 4
  moved = sum(sizes) + x
  if direction == 'gradient':
    moved += x + sum(sizes[:inputs])
  return moved, products * product


def on_tpu(name: str, op: str, direction: str, which: str, folder) -> dict:
  """Returns what the TPU compiler tells; `folder` is where it writes."""
  args = shapes(op)
  if direction == 'gradient':
    args += args[:1]
  function = program(op, direction, 'xla' if which == 'xla' else None)
  with tiles.trying(**({'row': 0} if which == 'blocks' else {})):
    told, kernels = estimated(name, function, args, folder)
  if (op, which) == ('acm_mlp', 'kernels'):
    cycles = by_learners(*(name, direction, told['outside_kernels'], kernels))
    told |= {'cycles': [*cycles.values()][-1], 'by_learners': cycles}
  moved, flops = minimum(op, direction)
  return {
    **told,
    'floor_cycles': CHIPS[name].floor(moved, flops),
    'floor_bytes': moved,
  }


def by_learners(
  name: str, direction: str, outside: int, kernels: list[dict]
) -> dict[float, int]:
  """Returns cycles of `acm_mlp` by the mean number of learners.

  The longest loop of a kernel is over units of rows, of which those count that
  run. The others order the tokens of a tile and restore their order; they count
  once for each tile, and not for each of its steps.

  Args:
    name: of the chip, whose cores share the tiles.
    direction: `forward` or `gradient`.
    outside: cycles outside of kernels.
    kernels: the others, as of `operations`.
  """
  x_TD, *weights, _ = shapes('acm_mlp')
  learners, cores = weights[0].shape[0], CHIPS[name].units // 4
  arrays = x_TD, *(jnp.zeros(w.shape, w.dtype) for w in weights)
  plans = [functools.partial(pallas_tpu.forward_plan, *arrays)]
  if direction == 'gradient':  # Its kernel is the longest.
    plans += [functools.partial(pallas_tpu.backward_plan, *arrays, x_TD)]

  kernels = sorted(kernels, key=lambda kernel: kernel['cycles'])

  def cycles(plan, kernel):
    (grid,) = (loop for loop in kernel['loops'] if loop.depth == 1)
    inner = [loop for loop in kernel['loops'] if loop.depth == 2]
    *others, rows = sorted(inner, key=lambda loop: loop.bundles)
    once = sum(loop.times * loop.bundles for loop in others)
    rest = grid.bundles - once - rows.times * rows.bundles
    pieces_IN = np.asarray(plan.pieces_IN)
    units = -(-pieces_IN // (LANES // pallas_tpu.PIECE)).sum()
    units *= plan.steps // learners
    inside = plan.tiles * once + units * rows.bundles
    return grid.times * rest + inside / cores

  totals = {}
  for mean in np.linspace(0, learners, 9):
    k_T = np.random.default_rng(0).binomial(
      learners, mean / learners, x_TD.shape[0]
    )
    order = order_lib.order(jnp.asarray(k_T), learners)
    totals[float(mean)] = int(
      outside
      + sum(
        cycles(plan(order), kernel)
        for plan, kernel in zip(plans, kernels, strict=True)
      )
    )
  return totals


def estimated(
  name: str, function, args, folder: pathlib.Path
) -> tuple[dict, list[dict]]:
  """Compiles a function for a chip.

  Returns:
    What the compiler tells, and those of the `operations` that are kernels.
  """
  chip = CHIPS[name]
  (found,) = slices.parse(chip.topology)
  sharding = jax.sharding.SingleDeviceSharding(found.devices()[0])
  jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
  for path in folder.iterdir():
    path.unlink()
  with slices.compiler(quick=True):
    compiled = jitted.lower(*args).compile()
  found = operations(compiled.as_text(), folder)
  kernels = [x for x in found if x['kernel']]
  outside = collections.Counter()
  for x in found:
    if not x['kernel']:
      outside[x['opcode']] += x['cycles']
  memory = compiled.cost_analysis()['bytes accessed']
  memory += sum(x['bytes'] for x in kernels)
  told = {
    'cycles': sum(x['cycles'] for x in found),
    'outside_kernels': sum(outside.values()),
    'outside': {k: n for k, n in outside.most_common() if n},
    'bytes': memory,
    'spills': sum(x['spills'] for x in kernels),
    'memory_cycles': chip.floor(memory, 0)['bytes'],
  }
  return told, kernels


@contextlib.contextmanager
def dumped():
  """Gives a folder for `estimated`; for once in a process, before libtpu."""
  with tempfile.TemporaryDirectory() as folder:
    os.environ['LIBTPU_INIT_ARGS'] = f'--xla_jf_dump_to={folder}'
    yield pathlib.Path(folder)


def operations(text: str, folder: pathlib.Path) -> list[dict]:
  """Returns the operations of a compiled program.

  Args:
    text: of the program, with XLA's estimates.
    folder: has the assembled code of each operation.
  """
  code = {}
  for path in folder.glob('*-final_*.txt'):
    match = re.match(r'\d+-(.+)-\d+-final_(bundles|hlo-.*)', path.stem)
    if match:
      code[match[1], match[2] == 'bundles'] = path
  found = []
  issued_by = {}  # Equal operations share their code.
  for line in text[text.index('\nENTRY') :].splitlines():
    match = re.match(
      r'\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z-]+)\(%?[^)]*\)', line
    )
    if not match:
      continue
    name, result, opcode = match.groups()
    estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
    if estimate:
      cycles = int(estimate[1])
    elif (name, True) in code:
      *inner, whole = loops(code[name, True].read_text())
      cycles = issued_by[opcode, result] = whole.bundles
    else:
      cycles = issued_by.get((opcode, result), 0)
    kernel = 'tpu_custom_call' in line
    about = {'name': name, 'opcode': opcode, 'cycles': cycles, 'kernel': kernel}
    if kernel:
      operands = re.search(r'operand_layout_constraints=\{(.*?\})\}', line)
      about['bytes'] = num_bytes(f'{result} {operands[1]}')
      about['spills'] = spills(code[name, False].read_text())
      about['loops'] = inner
    found.append(about)
  return found


class Loop(NamedTuple):
  """A loop of assembled code.

  Attributes:
    depth: number of loops around it.
    times: how often it runs.
    bundles: that a run issues, with those of the loops within.
  """

  depth: int
  times: int
  bundles: int


def loops(code: str) -> list[Loop]:
  """Returns the loops of assembled code, and last the whole of it."""
  found = []
  opened = [[0, 1]]  # Bundles of the open loops, and how often they run.

  def close():
    bundles, times = opened.pop()
    found.append(Loop(len(opened), times, bundles))
    if opened:
      opened[-1][0] += bundles * times

  for line in code.splitlines():
    match = re.match(
      r'\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*) (.*)', line
    )
    if match:
      label, depth, bundle = match.groups()
      # A bundle without instructions does not tell its depth.
      depth = len(depth) if not bundle.startswith('{}') else len(opened) - 1
      while len(opened) - 1 > depth - (label == 'LB'):
        close()
      if label == 'LB':
        opened.append([0, 1])
      opened[-1][0] += 1
    bound = re.search(r'scmp\.ge\.s32\S* %\S+, (\d+) /\* loop exit', line)
    if bound:
      opened[-1][1] = int(bound[1])
  while opened:
    close()
  return found


def spills(utilization: str) -> int:
  """Returns how many instructions spill a vector register."""
  lines = utilization.splitlines()
  column = lines[1].split(', ').index('VSTORE:SPILL')
  return sum(int(line.split()[column]) for line in lines[4:] if line)


def num_bytes(types: str) -> int:
  """Returns the bytes of all arrays in a text such as `(bf16[8,128]{1,0})`."""
  return sum(
    math.prod(map(int, filter(None, shape.split(',')))) * int(bits) // 8
    for bits, shape in re.findall(r'[a-z](\d+)\[([\d,]*)\]', types)
  )


def for_gpu(function, args, **options):
  """Returns a function as compiled for an H200; options are of `jax.jit`."""
  (found,) = slices.parse(_GPU)
  mesh = parallel.make_mesh(parallel.MeshConfig(), found.devices())
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args
  )
  with (
    jax.set_mesh(mesh),
    choice.made_for(found.devices()[0]),
    slices.compiler(quick=False),
  ):
    return jax.jit(function, **options).lower(*args).compile()


def launched(compiled) -> dict:
  """Returns launches of a compiled program, bytes they move, and its room."""
  found = hlo.launches(compiled.as_text())
  return {
    'launches': sum(
      x.count for x in found if x.opcode not in ('while', 'conditional')
    ),
    'bytes': sum(x.count * x.bytes for x in found),
    'temporary_bytes': compiled.memory_analysis().temp_size_in_bytes,
  }


def on_hopper(op: str, direction: str, which: str) -> dict:
  """Returns what XLA tells of a program, and ptxas of its Triton kernels."""
  from jax_triton import triton_lib

  args = shapes(op)
  if direction == 'gradient':
    args += args[:1]
  made = []
  compile_kernel = triton_lib.compile_ttir_to_ptx_inplace

  def noting(*args, **kwargs):
    made.append(compile_kernel(*args, **kwargs))
    return made[-1]

  implementation = 'triton' if which == 'kernels' else which
  triton_lib.compile_ttir_to_ptx_inplace = noting
  try:
    compiled = for_gpu(program(op, direction, implementation), args)
  finally:
    triton_lib.compile_ttir_to_ptx_inplace = compile_kernel
  moved, flops = minimum(op, direction)
  products = hlo.cost(compiled.as_text()).flops
  return {
    **launched(compiled),
    # Those of kernels are not counted.
    'products': products / flops if which != 'kernels' else None,
    'floor_bytes': moved,
    'kernels': [assembled(kernel) for kernel in made],
  }


def assembled(kernel) -> dict:
  """Returns registers of a thread and spilled bytes of a compiled kernel."""
  from triton.backends.nvidia import compiler

  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/kernel.ptx'
    with open(path, 'w') as file:
      file.write(kernel.binary)
    told = subprocess.run(
      [
        *(compiler.get_ptxas(90).path, '-v', '--gpu-name=sm_90a'),
        *(path, '-o', f'{folder}/kernel.cubin'),
      ],
      capture_output=True,
      text=True,
      check=True,
    ).stderr
  registers = re.search(r'Used (\d+) registers', told)
  stored = re.search(r'(\d+) bytes spill stores', told)
  return {
    'name': kernel.name,
    'registers': int(registers[1]),
    'spilled_bytes': int(stored[1]),
    'shared_bytes': kernel.shared_mem_bytes,
  }


def main(_):
  cells = []
  asked = list(
    itertools.product(
      *(_DEVICES.value, _OPS.value, _DIRECTIONS.value, _PROGRAMS.value)
    )
  )
  with dumped() as folder:
    for device, op, direction, which in asked:
      if which == 'blocks' and (op != 'route_scores' or device not in CHIPS):
        continue
      if which in GROUPED and (op != 'acm_mlp' or device in CHIPS):
        continue
      cell = {'device': device, 'op': op, 'direction': direction}
      cell['program'] = which
      if device in CHIPS:
        cell |= on_tpu(device, op, direction, which, folder)
      else:
        cell |= on_hopper(op, direction, which)
      cells.append(cell)
      print(json.dumps(cell), file=sys.stderr, flush=True)
  path = pathlib.Path(__file__).with_suffix('.json')
  if flags.FLAGS.save and path.exists():  # What was not asked for stays.
    names = ('device', 'op', 'direction', 'program')
    before = json.loads(path.read_text())['cells']
    kept = [x for x in before if tuple(x[n] for n in names) not in asked]
    cells = kept + cells
  results_lib.save(__file__, {'cells': cells})


if __name__ == '__main__':
  app.run(main)
