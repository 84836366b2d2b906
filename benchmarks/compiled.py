"""What compilers say of the kernels, for devices that need not be there.

    python benchmarks/compiled.py

Compiles `route_scores` and `acm_mlp` at the sizes of a ViT-B on 128 images in
bfloat16, forward and with all gradients, and beside them XLA's own program for
the same: the whole attention map, and a static MLP.

For a chip of each kind of TPU this takes libtpu, and tells the cycles that the
compiler estimates, those of them outside of kernels (copies, gathers, sorts),
and the bytes that operations read and write. The estimates of kernels are in
what the compiler writes when it is asked to; a tile of `acm_mlp` counts with
all of its learners. For an H200 it takes Triton, and tells registers, spilled
bytes and shared memory of each kernel, as ptxas assembles it. Floors: every
array moved once, and every product at the peak. The result is written beside
this file as JSON.
"""

import collections
import dataclasses
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

from absl import app, flags
import jax
import jax.numpy as jnp
import kernel_cases

from mod_jax import peaks
import results as results_lib

_DEVICES = flags.DEFINE_list('devices', ['v5e', 'v5p', 'H200'], 'Which.')
_OPS = flags.DEFINE_list('ops', ['route_scores', 'acm_mlp'], 'Which.')
_DIRECTIONS = flags.DEFINE_list('directions', ['forward', 'gradient'], 'Which.')
_PROGRAMS = flags.DEFINE_list('programs', ['kernels', 'xla'], 'Which.')


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
    return kernel_cases.call(op, implementation)(*args), ()

  def gradient(*args):
    *args, dout = args
    rest = args[inputs:]
    out, vjp, more = jax.vjp(
      lambda *x: forward(*x, *rest), *args[:inputs], has_aux=True
    )
    return out, more, vjp(dout)

  return forward if direction == 'forward' else gradient


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


def on_tpu(name: str, op: str, direction: str, implementation, folder) -> dict:
  """Returns what the TPU compiler tells; `folder` is where it writes."""
  from mod_jax.prove import slices

  chip = CHIPS[name]
  (found,) = slices.parse(chip.topology)
  args = shapes(op)
  if direction == 'gradient':
    args += args[:1]
  sharding = jax.sharding.SingleDeviceSharding(found.devices()[0])
  jitted = jax.jit(
    program(op, direction, implementation),
    in_shardings=sharding,
    out_shardings=sharding,
  )
  for path in glob.glob(f'{folder}/**/*.t*xt*', recursive=True):
    os.remove(path)
  with slices.quick_compiler():
    compiled = jitted.lower(*args).compile()
  cycles, kernels = estimates(compiled.as_text(), profiles(folder))
  memory = compiled.cost_analysis()['bytes accessed']
  moved, flops = minimum(op, direction)
  return {
    'cycles': cycles,
    'outside_kernels': cycles - kernels,
    'bytes': memory,
    'spills': spills(folder),
    'floor_cycles': chip.floor(moved, flops),
    'floor_bytes': moved,
  }


def profiles(folder: str) -> dict[str, int]:
  """Returns cycles by operation, as the compiler has written them."""
  found = {}
  for path in glob.glob(f'{folder}/profile/*.textproto'):
    with open(path) as file:
      text = file.read()
    name = re.search(r'hlo_op_name: "([^"]+)"', text)
    cycles = re.search(r'estimated_cycles: (\d+)', text)
    if name and cycles:
      found[name[1]] = int(cycles[1])
  return found


def estimates(text: str, profile: dict[str, int]) -> tuple[int, int]:
  """Returns the estimated cycles of a program, and those in kernels.

  Args:
    text: of the compiled program, with estimates of XLA's own operations.
    profile: of `profiles`, which also has the others.
  """
  total = kernels = 0
  like = collections.Counter()
  for line in text[text.index('\nENTRY') :].splitlines():
    match = re.match(r'\s+(?:ROOT )?%?([\w.-]+) = ', line)
    if not match:
      continue
    name = match[1]
    own = re.search(r'"estimated_cycles":"(\d+)"', line)
    cycles = int(own[1]) if own else profile.get(name, 0)
    like[name] += 1
    total += cycles
    kernels += cycles * ('tpu_custom_call' in line)
  return total, kernels


def spills(folder: str) -> int | None:
  """Returns how many instructions of kernels spill a vector register."""
  total, found = 0, False
  for path in glob.glob(f'{folder}/*final_hlo-static-per-bundle-util*.txt'):
    with open(path) as file:
      lines = file.read().splitlines()
    column = lines[1].split(', ').index('VSTORE:SPILL')
    found = True
    total += sum(int(line.split()[column]) for line in lines[4:] if line)
  return total if found else None


def on_hopper(op: str, direction: str) -> list[dict]:
  """Returns what ptxas tells of each Triton kernel of a program."""
  from jax.sharding import AbstractDevice, AbstractMesh
  from jax_triton import triton_lib

  device = AbstractDevice(
    device_kind='NVIDIA H200', num_cores=132, platform='cuda'
  )
  mesh = AbstractMesh((1,), ('x',), abstract_device=device)
  args = shapes(op)
  if direction == 'gradient':
    args += args[:1]
  made = []
  compile_kernel = triton_lib.compile_ttir_to_ptx_inplace

  def noting(*args, **kwargs):
    made.append(compile_kernel(*args, **kwargs))
    return made[-1]

  triton_lib.compile_ttir_to_ptx_inplace = noting
  try:
    with jax.sharding.use_abstract_mesh(mesh):
      traced = jax.jit(program(op, direction, 'triton')).trace(*args)
      traced.lower(lowering_platforms=('cuda',))
  finally:
    triton_lib.compile_ttir_to_ptx_inplace = compile_kernel
  return [assembled(kernel) for kernel in made]


def assembled(kernel) -> dict:
  """Returns registers of a thread and spilled bytes of a compiled kernel."""
  triton = importlib.util.find_spec('triton').submodule_search_locations[0]
  with tempfile.TemporaryDirectory() as folder:
    path = f'{folder}/kernel.ptx'
    with open(path, 'w') as file:
      file.write(kernel.binary)
    told = subprocess.run(
      [
        *(f'{triton}/backends/nvidia/bin/ptxas', '-v', '--gpu-name=sm_90a'),
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
  with tempfile.TemporaryDirectory() as folder:
    os.mkdir(f'{folder}/profile')
    # Read once, as libtpu is loaded.
    os.environ['LIBTPU_INIT_ARGS'] = (
      f'--xla_jf_dump_to={folder}'
      f' --xla_jf_dump_static_llo_profile_to={folder}/profile'
    )
    for device in _DEVICES.value:
      for op in _OPS.value:
        for direction in _DIRECTIONS.value:
          for which in _PROGRAMS.value:
            cell = {
              **{'device': device, 'op': op, 'direction': direction},
              'program': which,
            }
            if device in CHIPS:
              implementation = {'kernels': None, 'xla': 'xla'}[which]
              cell |= on_tpu(device, op, direction, implementation, folder)
            elif which == 'kernels':
              cell['kernels'] = on_hopper(op, direction)
            else:
              continue  # XLA compiles for GPUs only where one is.
            cells.append(cell)
            print(json.dumps(cell), file=sys.stderr, flush=True)
  results_lib.save(__file__, {'cells': cells})


if __name__ == '__main__':
  app.run(main)
