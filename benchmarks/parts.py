"""Profiles a compiled program: time by parts, from names of its operations."""

from collections.abc import Callable
import pathlib
import re
import tempfile

import jax

# Operations that only move data.
_MOVES = {
  *('bitcast', 'broadcast', 'concatenate', 'constant', 'copy', 'iota'),
  *('pad', 'parameter', 'reshape', 'slice', 'transpose', 'tuple'),
}
# Skipped: their time is that of the operations inside, which are listed, too.
_OUTER = {'while', 'call', 'conditional'}
# Kernels of libraries and of Triton do not tell for which operation they run.
_LIBRARIES = {
  'products': 'nvjet|_gemm_',
  'attention core': 'sdpa|cudnn|^_(forward|score|dq|dkv)_kernel',
  'copies': '^[Mm]em(cpy|set)',
}
_OPERATION = re.compile(r'\s+(?:ROOT )?%?([\w.-]+) = .*?[\])}] ([a-z][\w-]*)\(')
_COMPUTATION = re.compile(r'(?:ENTRY )?%?([\w.-]+) \(.*\{$')


def seconds(program: str, run: Callable) -> dict[str, float]:
  """Returns the seconds of a training step's parts, by name, most first.

  Args:
    program: the compiled program's text.
    run: runs the program once; what it returns is waited for.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(run())
    return of_profile(folder, program)


def of_profile(folder: str, program: str, runs: int = 1) -> dict[str, float]:
  """Returns `seconds` from a directory with the profile of some runs."""
  names = names_of(program)
  (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
  profile = jax.profiler.ProfileData.from_file(str(path))
  part_seconds = {}
  for plane in profile.planes:
    for line in plane.lines:
      for event in line.events:
        if part := of_event(event.name, names):
          part_seconds[part] = (
            part_seconds.get(part, 0) + event.duration_ns / 1e9 / runs
          )
  return dict(sorted(part_seconds.items(), key=lambda item: -item[1]))


def of_event(event: str, names: dict[str, str]) -> str | None:
  """Returns the part of an event, None if it is not of the program.

  Args:
    event: an operation's name, with underscores in place of dots on GPUs, or
      that of a library's kernel.
    names: result of `names_of`.
  """
  libraries = (p for p, names in _LIBRARIES.items() if re.search(names, event))
  return names.get(event.replace('.', '_')) or next(libraries, None)


def part_of(name: str, is_product: bool) -> str:
  """Returns the part of the step that an operation belongs to.

  Args:
    name: of the operation, such as `jit(f)/transpose(jvp(ViT))/block_0/mul`.
    is_product: whether it multiplies matrices.
  """
  if 'jvp(' not in name:
    return 'optimiser'
  if 'block_' not in name:
    return 'embedding, head and loss'
  if '/process/' not in name:
    return 'routing and residual adds'
  if '/attend/' in name:
    return 'attention core'
  return 'products' if is_product else 'norms and elementwise'


def names_of(program: str) -> dict[str, str]:
  """Returns the parts of operations that are not inside a fusion, by name.

  Names have underscores in place of dots. Operations that only move data are in
  the part `copies`.
  """
  inside, lines, computation = {}, [], None
  for line in program.splitlines():
    if start := _COMPUTATION.match(line):
      computation = start[1]
    elif operation := _OPERATION.match(line):
      inside.setdefault(computation, set()).add(operation[2])
      lines.append((*operation.groups(), line))
  parts = {}
  for name, kind, line in lines:
    called = re.search(r'calls=%?([\w.-]+)', line)
    kinds = inside[called[1]] if called else {kind}
    if kind in _OUTER:
      continue
    meaning = re.search(r'op_name="([^"]*)"', line)
    name = name.replace('.', '_')
    parts[name] = part_of(meaning[1] if meaning else '', 'dot' in kinds)
    if kinds <= _MOVES:
      parts[name] = 'copies'
  return parts
