"""The cost of a compiled program: its matrix products and communication.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs,
so a scanned model looks many times cheaper than it is. This module parses the
text of the compiled program, and multiplies products and communication by the
trip counts of the loops around them.
"""

import collections
from collections.abc import Iterator
import dataclasses
import math
import re

import numpy as np

# Part of the names of operations that a backward pass recomputes.
_AGAIN = 'rematted_computation'
_COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-broadcast',
  'collective-permute',
)
_KERNELS = (
  *('tpu_custom_call', 'triton_kernel_call_ffi', 'mosaic_gpu'),
  '__cudnn$fmha',
)
# Opcodes whose result has the values of their first operand.
_COPIES = ('bitcast', 'convert', 'copy', 'copy-start', 'copy-done')
# Opcodes for which a GPU launches nothing, as for those that end in `-done`.
_NOTHING = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
  *('after-all', 'partition-id', 'replica-id'),
)
_SLICES = ('dynamic-slice', 'gather', 'slice')
_UPDATES = ('dynamic-update-slice', 'scatter')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'  (ROOT )?%?([\w.-]+) = ')
_SHAPE = re.compile(r'([a-z]\w*)\[([\d,]*)\]')


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation.

  Attributes:
    kind: such as `all-gather`. An all-reduce of which each device keeps only
      its part, which TPUs run as one operation, counts as `reduce-scatter`.
    payload: bytes of the whole array, as each device has it after a gather or
      before a reduction.
    group: numbers of the devices of the first group; all groups are alike.
    source: JAX's name of the operation; may be empty.
    count: number of executions in a run of the program.
  """

  kind: str
  payload: int
  group: tuple[int, ...]
  source: str
  count: int = 1

  @property
  def sent(self) -> float:
    """Bytes that each device sends in all executions, around a ring."""
    size = len(self.group)
    factor = {
      'all-reduce': 2 * (size - 1) / size,
      'collective-permute': 1.0,
    }.get(self.kind, (size - 1) / size)
    return self.count * factor * self.payload


@dataclasses.dataclass(frozen=True)
class Product:
  """A matrix product or convolution outside of kernels."""

  shapes: tuple[tuple[int, ...], ...]  # Of both operands and the result.
  flops: int  # Of one execution; a multiply-add counts as 2.
  # JAX's name of the operation. If the compiler lost it, the name of an
  # operation that was fused with it, or ''.
  source: str
  own: bool  # Whether `source` is the operation's own name.
  count: int = 1  # Number of executions in a run of the program.


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A call of a custom kernel: one written in Pallas or Triton, or cuDNN's."""

  name: str
  operands: tuple[tuple[str, tuple[int, ...]], ...]  # Dtypes and shapes.
  count: int = 1  # Number of executions in a run of the program.
  causal: bool = False  # Whether an attribute sets a causal mask; cuDNN only.


@dataclasses.dataclass(frozen=True)
class Cost:
  """The work of one device in a run of a program."""

  products: tuple[Product, ...]
  collectives: tuple[Collective, ...]
  kernels: tuple[Kernel, ...]
  endless: tuple[str, ...]  # Loops with an unknown trip count, counted once.

  @property
  def flops(self) -> int:
    """FLOPs of all products, without those in custom kernels."""
    return _flops(self.products)

  @property
  def again(self) -> int:
    """The part of `flops` that a backward pass recomputes."""
    total, first, second = 0, collections.Counter(), collections.Counter()
    for part in self.products:
      repeated = _AGAIN in part.source
      if part.own:
        total += repeated * part.count * part.flops
      else:
        counts = second if repeated else first
        counts[part.shapes, part.flops] += part.count
    # A name of another operation in the same fusion is no proof: that operation
    # may be recomputed, and the product one of a gradient. Such products count
    # as recomputed only as often as others that lost their names, but are not
    # fused with recomputed operations, have the same shapes.
    both = first & second
    return total + sum(both[shapes, flops] * flops for shapes, flops in both)


def cost(text: str) -> Cost:
  """Returns the cost of a program, given as `jax.stages.Compiled.as_text`."""
  parts = list(_Program(text).parts())
  kinds = (Product, Collective, Kernel, str)
  return Cost(*(tuple(x for x in parts if isinstance(x, k)) for k in kinds))


@dataclasses.dataclass(frozen=True)
class Launch:
  """An operation that a GPU launches, or a decision that its host waits for.

  Attributes:
    name: of the operation.
    opcode: `fusion`, `custom-call` and so on.
    bytes: memory that an execution reads and writes, each array counted once.
      If only slices of an array are read or replaced, the slices are counted.
    flops: of the products of an execution, without those in custom kernels.
    count: executions in a run of the program. The body of a loop with an
      unknown trip count is executed once.
  """

  name: str
  opcode: str
  bytes: int
  flops: int
  count: int


def launches(text: str) -> list[Launch]:
  """Returns what a GPU's program launches, and what its host waits for.

  A loop with an unknown trip count adds a `while`, and a branch a
  `conditional`, both without bytes: there the host waits for the decision. A
  branch is assumed to go the way that launches most.
  """
  return list(_Program(text).launches())


def _flops(parts) -> int:
  return sum(x.count * x.flops for x in parts if isinstance(x, Product))


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str  # The result's type; tuples are in parentheses.
  opcode: str
  operands: tuple[str, ...]  # Their names; for a constant, its value.
  attributes: str  # The rest of the line.

  @property
  def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of the results."""
    matches = _SHAPE.findall(self.type)
    return [(dtype, _dimensions(dims)) for dtype, dims in matches]

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the only result."""
    ((_, shape),) = self.arrays
    return shape

  @property
  def bytes(self) -> int:
    return sum(
      _bits(dtype) * math.prod(shape) // 8 for dtype, shape in self.arrays
    )

  @property
  def source(self) -> str:
    match = re.search(r'op_name="([^"]*)"', self.attributes)
    return match[1] if match else ''

  def attribute(self, name: str) -> str:
    """Returns an attribute's first value, without braces; '' if missing."""
    match = re.search(rf'\b{name}=\{{?([^ ,}}]*)', self.attributes)
    return match[1] if match else ''

  def dimensions(self, name: str) -> tuple[int, ...]:
    """Returns an attribute that is a list of numbers; () if it is missing."""
    match = re.search(rf'\b{name}=\{{([\d,]*)\}}', self.attributes)
    return _dimensions(match[1]) if match else ()

  def computations(self, name: str) -> list[str]:
    """Returns the names of the computations that an attribute lists."""
    match = re.search(rf'\b{name}=(\{{[^}}]*\}}|%?[\w.-]+)', self.attributes)
    return re.findall(r'[\w.-]+', match[1]) if match else []


class _Computation(dict):
  """Instructions by name; the computation returns the value of `root`."""

  root: _Instruction

  def operands(self, instruction: _Instruction) -> list[_Instruction]:
    return [self[name] for name in instruction.operands]

  def uses(self, instruction: _Instruction) -> list[_Instruction]:
    """Returns the users of a value and of its copies, without the copies."""
    found = []
    for user in self.values():
      if instruction.name in user.operands:
        found += self.uses(user) if user.opcode in _COPIES else [user]
    return found

  def results(self) -> list[_Instruction]:
    root = self.root
    return self.operands(root) if root.opcode == 'tuple' else [root]

  def source(self, instruction: _Instruction) -> _Instruction:
    """Returns the instruction whose value an instruction copies, or itself."""
    while instruction.opcode in _COPIES:
      (instruction,) = self.operands(instruction)
    return instruction


# A str is the name of a loop with an unknown trip count.
_Part = Product | Collective | Kernel | str


class _Program:
  """The computations of a compiled program, parsed from the program's text."""

  def __init__(self, text: str):
    self._computations: dict[str, _Computation] = {}
    for entry, name, lines in _computations(text):
      computation = self._computations[name] = _Computation()
      for line in lines:
        is_root, instruction = _instruction(line)
        computation[instruction.name] = instruction
        if is_root:
          computation.root = instruction
      if entry:
        self._entry = name
    # A collective that lists no groups runs on all devices.
    match = re.search(r'num_partitions=(\d+)', text[: text.find('\n')])
    self._devices = int(match[1]) if match else 1

  def parts(self, name: str | None = None, count: int = 1) -> Iterator[_Part]:
    """Yields each `_Part` of a computation that is executed `count` times.

    `name` is the computation's name; None for the whole program.
    """
    computation = self._computations[name or self._entry]
    for instruction in computation.values():
      yield from self._of_instruction(computation, instruction, count)

  def _of_instruction(self, computation, instruction, count):
    opcode = instruction.opcode
    kind = opcode.removesuffix('-start')
    if opcode in ('dot', 'convolution'):
      lhs, rhs = (x.shape for x in computation.operands(instruction))
      shapes, source = (lhs, rhs, instruction.shape), instruction.source
      flops = (_dot if opcode == 'dot' else _convolution)(instruction, *shapes)
      yield Product(shapes, flops, source, own=bool(source), count=count)
    elif kind in _COLLECTIVES:
      payload = sum(x.bytes for x in computation.operands(instruction))
      group = _group(instruction.attributes, self._devices)
      if kind == 'all-gather':
        payload *= len(group)
      yield Collective(kind, payload, group, instruction.source, count)
    elif opcode == 'while':
      body, condition, trips = self._loop(computation, instruction)
      times = count * (1 if trips is None else trips)
      repeated = [*self.parts(body, times), *self.parts(condition, times)]
      yield from repeated
      if trips is None and repeated:
        yield instruction.name
    elif opcode == 'fusion':
      yield from self._fused(instruction, count)
    elif opcode in ('call', 'call-start', 'async-start'):
      for attribute in ('to_apply', 'calls'):
        for called in instruction.computations(attribute):
          yield from self.parts(called, count)
    elif opcode == 'conditional':
      ways = [list(self.parts(x, count)) for x in _ways(instruction)]
      # Which branch runs is unknown: assume the one with the most FLOPs.
      yield from max(ways, key=_flops)
    elif opcode == 'custom-call':
      called = re.search(
        r'custom_call_target="([^"]*)"', instruction.attributes
      )
      if called[1].startswith('__cudnn$conv'):
        yield self._by_cudnn(computation, instruction, called[1], count)
      elif called[1].startswith(_KERNELS):
        operands = computation.operands(instruction)
        yield Kernel(
          # The compiler adds a unique suffix to the kernel's name.
          re.sub(r'(\.\w+)*$', '', instruction.name),
          tuple(x.arrays[0] for x in operands),
          count,
          'CAUSAL' in instruction.attributes,
        )

  def _by_cudnn(self, computation, instruction, called: str, count: int):
    """Returns cuDNN's convolution, or a gradient of one, as a `Product`."""
    first, second, *_ = (x.shape for x in computation.operands(instruction))
    result = instruction.arrays[0][1]  # The second result is a workspace.
    lhs, rhs, out = {
      '__cudnn$convBackwardInput': (result, second, first),
      '__cudnn$convBackwardFilter': (first, result, second),
    }.get(called, (first, second, result))
    flops = _convolution(instruction, lhs, rhs, out)
    source, shapes = instruction.source, (first, second, result)
    return Product(shapes, flops, source, own=bool(source), count=count)

  def launches(self, name: str | None = None, count: int = 1):
    """Yields the launches of a computation; arguments as of `parts`."""
    computation = self._computations[name or self._entry]
    for instruction in computation.values():
      opcode = instruction.opcode
      if opcode in _NOTHING or opcode.endswith('-done'):
        continue
      if opcode == 'while':
        body, condition, trips = self._loop(computation, instruction)
        times = count * (1 if trips is None else trips)
        yield from self.launches(body, times)
        yield from self.launches(condition, times)
        if trips is None:
          yield Launch(instruction.name, opcode, 0, 0, count)
      elif opcode == 'conditional':
        ways = [list(self.launches(x, count)) for x in _ways(instruction)]
        yield from max(ways, key=len)
        yield Launch(instruction.name, opcode, 0, 0, count)
      elif opcode == 'call':
        (called,) = instruction.computations('to_apply')
        yield from self.launches(called, count)
      else:
        moved = self._moved(computation, instruction)
        products = _flops(self._of_instruction(computation, instruction, 1))
        yield Launch(instruction.name, opcode, moved, products, count)

  def _moved(self, computation, instruction) -> int:
    """Returns the `bytes` of an operation's `Launch`."""
    operands = computation.operands(instruction)
    if instruction.opcode.endswith('-start'):
      return instruction.bytes  # Its type has the operands, then the results.
    if instruction.opcode != 'fusion':
      return instruction.bytes + sum(x.bytes for x in operands)
    fused = self._computations[instruction.computations('calls')[0]]
    total = 0
    for parameter in fused.values():
      if parameter.opcode != 'parameter':
        continue
      uses = fused.uses(parameter)
      opcodes = {
        x.opcode if fused.source(fused[x.operands[0]]) is parameter else ''
        for x in uses
      }
      if opcodes <= {*_SLICES}:
        total += sum(x.bytes for x in uses)
      elif not opcodes <= {*_UPDATES}:
        total += parameter.bytes
    for result in fused.results():
      replaced = fused.source(result)
      if replaced.opcode in _UPDATES:
        update = replaced.operands[2 if replaced.opcode == 'scatter' else 1]
        total += fused[update].bytes
      else:
        total += result.bytes
    return total

  def _fused(self, instruction, count):
    """Yields each `_Part` of a fusion; fills in a missing `source`."""
    (called,) = instruction.computations('calls')
    scatters = called.startswith('all-reduce-scatter')
    for part in self.parts(called, count):
      if isinstance(part, Product) and not part.source:
        part = dataclasses.replace(part, source=self._source(called))
      if isinstance(part, Collective):
        kind, source = part.kind, part.source or instruction.source
        if scatters and kind == 'all-reduce':
          kind = 'reduce-scatter'
        part = dataclasses.replace(part, kind=kind, source=source)
      yield part

  def _source(self, name: str) -> str:
    """Returns a `source` in a fusion, preferably a recomputed operation's."""
    names = ['']
    for instruction in self._computations[name].values():
      names.append(instruction.source)
      if instruction.opcode == 'fusion':
        names += map(self._source, instruction.computations('calls'))
    return max(names, key=lambda name: (_AGAIN in name, name))

  def _loop(self, computation, instruction) -> tuple[str, str, int | None]:
    """Returns a loop's body, its condition, and its trip count if known."""
    (body,), (condition,) = map(instruction.computations, ('body', 'condition'))
    trips = self._trips(computation, instruction, body, condition)
    return body, condition, trips

  def _trips(self, computation, instruction, body, condition) -> int | None:
    """Returns the trip count of a loop, or None if it is unknown."""
    match = re.search(
      r'known_trip_count"?[=:]\{"n":"(\d+)"\}', instruction.attributes
    )
    if match:
      return int(match[1])
    # Without that annotation, only the count of one kind of loop is found: its
    # condition compares an integer of its state with a limit. The values in the
    # first two iterations give the start, the limit and the step.
    condition, body = self._computations[condition], self._computations[body]
    test, after = condition.root, body.root
    (state,) = computation.operands(instruction)
    opcodes = test.opcode, state.opcode, after.opcode
    if opcodes != ('compare', 'tuple', 'tuple'):
      return None
    first = [_integer(computation, name) for name in state.operands]
    second = [_integer(body, name, first) for name in after.operands]
    (start, end), (following, same) = (
      [_integer(condition, name, values) for name in test.operands]
      for values in (first, second)
    )
    direction = test.attribute('direction')
    if None in (start, end, following) or same != end or direction == 'EQ':
      return None
    if following == start:
      return None
    distance = end - start + (direction == 'LE') - (direction == 'GE')
    return max(0, math.ceil(distance / (following - start)))


def _ways(instruction: _Instruction) -> list[str]:
  """Returns the computations that a conditional chooses among."""
  names = 'branch_computations', 'true_computation', 'false_computation'
  return [x for name in names for x in instruction.computations(name)]


def _computations(text: str) -> Iterator[tuple[bool, str, list[str]]]:
  """Yields (whether the program begins here, name, lines) per computation."""
  header, lines = None, []
  for line in text.splitlines():
    if header is None:
      header, lines = _COMPUTATION.match(line), []
    elif line[:1] == '}' and line[:2] != '}}':
      yield bool(header[1]), header[2], lines
      header = None
    elif _INSTRUCTION.match(line):
      lines.append(line)
    else:  # Attributes of custom kernels may span several lines.
      lines[-1] += line


def _instruction(line: str) -> tuple[bool, _Instruction]:
  line = re.sub(r'/\*.*?\*/', '', line)
  head = _INSTRUCTION.match(line)
  start = head.end()
  end = _closing(line, start) if line[start] == '(' else line.index(' ', start)
  opening = line.index('(', end)
  closing = _closing(line, opening)
  # Operands are separated by commas, but shapes contain commas, too.
  operands = re.split(r', (?![^\[{]*[\]}])', line[opening + 1 : closing - 1])
  return bool(head[1]), _Instruction(
    head[2],
    line[start:end],
    line[end:opening].strip(),
    tuple(x.split()[-1].lstrip('%') for x in operands if x.strip()),
    line[closing:],
  )


def _closing(line: str, opening: int) -> int:
  """Returns the index after the parenthesis that matches `line[opening]`."""
  depth = 0
  for i in range(opening, len(line)):
    depth += (line[i] == '(') - (line[i] == ')')
    if not depth:
      return i + 1
  raise ValueError(f'unclosed parenthesis in {line[opening : opening + 80]!r}')


def _dimensions(text: str) -> tuple[int, ...]:
  return tuple(map(int, filter(None, text.split(','))))


def _bits(dtype: str) -> int:
  """Returns the bits of a dtype; 0 for types without data, such as `token`."""
  match = re.search(r'\d+', dtype)
  return 8 if dtype == 'pred' else int(match[0]) if match else 0


def _dot(instruction, lhs, _, out) -> int:
  contracted = instruction.dimensions('lhs_contracting_dims')
  return 2 * math.prod(out) * math.prod(lhs[i] for i in contracted)


def _convolution(instruction, lhs, rhs, out) -> int:
  """Returns the FLOPs of a convolution.

  The TPU compiler turns matrix products into convolutions, with the head axis
  as a window that is mostly padding. So products with padding are not counted.
  """
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.attributes)
  of_lhs, of_rhs, of_out = labels.groups()
  match = re.search(r'window=\{([^}]*)\}', instruction.attributes)
  window = dict(x.split('=') for x in match[1].split()) if match else {}
  pairs = 1
  for i, axis in enumerate(sorted(filter(str.isdigit, of_out))):

    def setting(name, default, i=i):
      text = window[name].split('x')[i] if name in window else default
      return int(text.split('_')[0])

    position = (
      np.arange(out[of_out.index(axis)])[:, None] * setting('stride', '1')
      - setting('pad', '0_0')
      + np.arange(rhs[of_rhs.index(axis)]) * setting('rhs_dilate', '1')
    )
    dilation, size = setting('lhs_dilate', '1'), lhs[of_lhs.index(axis)]
    inside = (position >= 0) & (position % dilation == 0)
    pairs *= int((inside & (position // dilation < size)).sum())
  groups = int(instruction.attribute('batch_group_count') or 1)
  rows = lhs[of_lhs.index('b')] // groups
  # The kernel has the input features of one group only.
  features = rhs[of_rhs.index('i')] * out[of_out.index('f')]
  return 2 * pairs * rows * features


def _group(attributes: str, devices: int) -> tuple[int, ...]:
  """Returns the first group of devices of a collective operation."""
  if pairs := re.search(r'source_target_pairs=\{\{([\d,]*)\}', attributes):
    return _dimensions(pairs[1])
  if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', attributes):
    return _dimensions(listed[1])
  if iota := re.search(
    r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes
  ):
    shape, sizes, order = map(_dimensions, (*iota.groups()[:2], iota[3] or ''))
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
      ids = ids.transpose(order)
    return tuple(ids.reshape(shape)[0].tolist())
  if mesh := re.search(
    r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes
  ):
    return _mesh_group(*mesh.groups())
  return tuple(range(devices))


def _mesh_group(mesh: str, text: str) -> tuple[int, ...]:
  """Returns the first group along some axes of a mesh, or parts of axes."""
  axes = {n: int(size) for n, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
  ids = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
  names = list(axes)
  indices = [np.zeros(1, int) for _ in axes]
  for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", text):
    places = np.arange(axes[name])
    if before:  # A part: the axis is split into (before, size, rest).
      places = places.reshape(int(before), int(size), -1)[0, :, 0]
    i = names.index(name)
    indices[i] = (indices[i][:, None] + places).ravel()
  return tuple(ids[np.ix_(*indices)].ravel().tolist())


def _integer(computation, name: str, state=()) -> int | None:
  """Returns the value of an instruction, given the loop's state.

  Returns None unless the value is a scalar integer that is computed from
  constants and the state by additions and subtractions.
  """
  instruction = computation[name]
  if not re.match(r'\(?[su]\d+\[\]', instruction.type):
    return None
  opcode, operands = instruction.opcode, instruction.operands
  if opcode == 'constant':
    return int(operands[0])
  if opcode in _COPIES:
    return _integer(computation, operands[0], state)
  if opcode == 'get-tuple-element':
    of_state = computation[operands[0]].opcode == 'parameter' and state
    return state[int(instruction.attribute('index'))] if of_state else None
  if opcode in ('add', 'subtract'):
    values = [_integer(computation, operand, state) for operand in operands]
    if None not in values:
      return values[0] + (1 if opcode == 'add' else -1) * values[1]
  return None
