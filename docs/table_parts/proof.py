"""What compiled programs tell, as kept in `results/prove_*`, `benchmarks`."""

import math

from machine import markdown
import numpy as np

from table_parts.common import measured, read_csv, table


def proofs(name: str) -> list[dict[str, str]]:
  """Returns the rows of one of its files."""
  return read_csv(f'prove_paper/{name}.csv')


def paired() -> dict[str, list[tuple[dict, dict]]]:
  """Returns (routed, dense) proofs of each size, by slice."""
  found = {}
  for routed, dense in zip(
    proofs('prove')[::2], proofs('prove')[1::2], strict=True
  ):
    assert dense['id'] == f'{routed["id"]}_dense'
    assert dense['topology'] == routed['topology']
    kind, _ = routed['topology'].split(':')
    found.setdefault(f'{routed["chips"]} {kind}', []).append((routed, dense))
  return found


def number(row: dict, *names: str) -> float:
  """Returns the sum of some columns."""
  return math.fsum(float(row[name]) for name in names)


def mesh(row: dict) -> str:
  return '·'.join(row[axis] for axis in ('data', 'fsdp', 'tensor'))


PROVED = {
  'GiB a chip': lambda row: f'{number(row, "memory") / 2**30:.1f}',
  'products, found / counted': lambda row: (
    f'{number(row, "products_ratio"):.4f}'
  ),
  'computed again': lambda row: (
    f'{number(row, "again") / number(row, "products"):.2f}'
  ),
  'sent, GB': lambda row: f'{number(row, "sent") / 1e9:.2f}',
  'bytes per kFLOP': lambda row: f'{1e3 * number(row, "bytes_per_flop"):.2f}',
  'products, ms': lambda row: f'{1e3 * number(row, "compute_seconds"):.1f}',
  'network, ms': lambda row: f'{1e3 * number(row, "network_seconds"):.1f}',
  'step predicted, ms': lambda row: f'{1e3 * number(row, "step_seconds"):.1f}',
}


@table
def prove():
  """The paper's models on slices of TPUs: MoD / dense twin."""
  rows = [
    [
      routed['id'].upper(),
      where,
      mesh(routed),
      *(f'{show(routed)} / {show(dense)}' for show in PROVED.values()),
    ]
    for where, pairs in paired().items()
    for routed, dense in pairs
  ]
  return markdown(['model', 'slice', 'mesh', *PROVED], rows)


def ratios(pairs: list[tuple[dict, dict]], *columns: str) -> str:
  """Returns the range of what MoD takes over what its dense twins take."""
  found = [
    number(mod, *columns) / number(dense, *columns) for mod, dense in pairs
  ]
  return f'{min(found):.2f} to {max(found):.2f}'


def steps(bound: str, text: str) -> str:
  """Returns a sentence about the steps on all slices with one bound."""
  slices = {
    where: pairs
    for where, pairs in paired().items()
    if all(row['bound'] == bound for pair in pairs for row in pair)
  }
  pairs = [pair for pairs in slices.values() for pair in pairs]
  return (
    f'On {" and ".join(slices)}, {text}, for MoD as for the dense models. The'
    f' step of MoD can take {ratios(pairs, "step_seconds")} of the dense time'
    ' if the two overlap in full, and'
    f' {ratios(pairs, "compute_seconds", "network_seconds")} if they do not'
    ' overlap at all.'
  )


@table
def prove_words():
  """What the table `prove` says."""
  off = max(abs(number(row, 'products_ratio') - 1) for row in proofs('prove'))
  more = {
    f'{mod["id"].upper()} on {where}': number(mod, 'sent')
    - number(dense, 'sent')
    for where, pairs in paired().items()
    for mod, dense in pairs
    if mod['tensor'] == '1'
  }
  usual = [extra for extra in more.values() if extra > 0]
  exceptions = [
    f' The exception is {where}, where it sends {-extra / 1e6:.0f} MB less.'
    for where, extra in more.items()
    if extra <= 0
  ]
  lines = [
    'The matrix products that are found in the compiled programs are those'
    f' that `mod_jax.flops` counts, within {off:.3%}. What is computed again'
    ' comes on top of them: rematerialisation, and what the attention kernel'
    ' does with masked pairs of tokens or in its backward pass.',
    'Where heads and hidden units are not split (`tensor` is 1), MoD sends what'
    " its dense twin sends, and the routers' gradients besides:"
    f' {min(usual) / 1e6:.2f} to {max(usual) / 1e6:.2f} MB.'
    f'{"".join(exceptions)}',
    steps('compute', 'the matrix products take longer than the communication'),
    steps('network', 'the communication takes longer than the matrix products'),
  ]
  return '\n'.join(f'* {line}' for line in lines)


@table
def prove_remedies():
  """The largest model on the slice where the network is the bound."""
  first, *_ = proofs('remedies')
  usual = [
    row
    for row in proofs('prove')
    if row['id'] == '3b' and row['topology'] == first['topology']
  ]
  names = {
    'fsdp_4': 'parameters split over fewer chips',
    'fsdp_8': 'parameters split over fewer chips',
    'no_remat': 'no rematerialisation',
    '3b': 'as in the table above',
  }
  rows = [
    [
      names[row['id']],
      mesh(row),
      *(
        PROVED[column](row)
        for column in (
          *('GiB a chip', 'sent, GB', 'products, ms', 'network, ms'),
          'step predicted, ms',
        )
      ),
    ]
    for row in usual + proofs('remedies')
  ]
  header = [
    *('3B, MoD', 'mesh', 'GiB a chip', 'sent, GB', 'products, ms'),
    *('network, ms', 'step predicted, ms'),
  ]
  return markdown(header, rows)


@table
def prove_vision():
  """Recipes for pictures on a GPU and on a slice of TPUs."""
  rows = [
    [
      f'`{row["id"]}`',
      {'h100:1': 'one H100', 'v5e:2x4': '8 v5e'}[row['topology']],
      f'{number(row, "parameters") / 1e6:.0f}',
      *(f'{number(row, key) / 2**30:.1f}' for key in ('memory', 'available')),
      *(
        f'{1e3 * number(row, "compute_seconds") * share:.1f}'
        for share in (
          1,
          number(row, 'dense_products', 'dense_again')
          / number(row, 'products', 'again'),
        )
      ),
      *(
        f'{1e3 * number(row, key):.1f}'
        for key in ('step_seconds', 'dense_step_seconds')
      ),
    ]
    for row in read_csv('prove_vision/prove.csv')
  ]
  header = [
    *('recipe', 'on', 'million parameters', 'GiB a chip', 'of'),
    *('products of a step, ms', "the dense twin's, ms"),
    *('the step, ms', "the dense twin's, ms"),
  ]
  return markdown(header, rows)


@table
def prove_vlm():
  """LLaVA-7B's second stage on slices of TPUs."""
  rows = [
    [
      {'dense': 'dense', 'pmod': 'p-MoD'}[row['id']],
      f'16 {chip}',
      '·'.join(row[axis] for axis in ('data', 'fsdp', 'tensor')),
      *(f'{number(row, key) / 2**30:.1f}' for key in ('memory', 'available')),
      f'{number(row, "products_ratio"):.3f}',
      f'{number(row, "sent") / 1e9:.0f}',
      *(
        f'{1e3 * number(row, key):,.0f}'
        for key in ('compute_seconds', 'network_seconds')
      ),
    ]
    for chip in ('v5p', 'v5e')
    for row in read_csv(f'prove_vlm/{chip}.csv')
  ]
  header = [
    *('model', 'slice', 'mesh', 'GiB a chip', 'of'),
    *('products, found / counted', 'sent, GB', 'products, ms', 'network, ms'),
  ]
  return markdown(header, rows)


PROGRAMS = {
  'kernels': 'kernels',
  'blocks': 'kernels, rows in blocks',
  'xla': 'XLA alone',
  'grouped': '`grouped_dot` by Triton',
  'ragged_dot': '`jax.lax.ragged_dot`',
}


@table
def compiled():
  """What the TPU compiler tells of the kernels and of XLA's programs."""
  rows = []
  for cell in measured('compiled')['cells']:
    if 'cycles' not in cell:
      continue
    thousands = (
      cell['cycles'],
      cell['outside_kernels'],
      cell['memory_cycles'],
      max(cell['floor_cycles'].values()),
    )
    rows.append(
      [
        cell['device'],
        f'`{cell["op"]}`, {cell["direction"]}',
        PROGRAMS[cell['program']],
        *(f'{cycles / 1e3:,.0f}' for cycles in thousands),
        f'{cell["bytes"] / 1e6:,.0f}',
        f'{cell["bytes"] / cell["floor_bytes"]:.2f}',
        '' if cell['program'] == 'xla' else f'{cell["spills"]:,}',
      ]
    )
  return markdown(
    [
      *('chip', 'operation', 'program', 'thousand cycles', 'outside kernels'),
      *('to move its bytes', 'at least', 'MB', 'over the minimum', 'spills'),
    ],
    rows,
  )


@table
def compiled_learners():
  """Estimated cycles of `acm_mlp` by the mean number of learners."""
  cells = [
    cell for cell in measured('compiled')['cells'] if 'by_learners' in cell
  ]
  rows = []
  for cell in cells:
    cycles = list(cell['by_learners'].values())
    means = [float(mean) for mean in cell['by_learners']]
    off_line = cycles - np.polyval(np.polyfit(means, cycles, 1), means)
    rows.append(
      [
        *(cell['device'], cell['direction']),
        *(f'{n / 1e3:,.0f}' for n in cycles[::2]),
        f'{cycles[0] / cycles[-1]:.1%}',
        f'{np.abs(off_line).max() / cycles[-1]:.1%}',
      ]
    )
  header = ['chip', 'direction', *(f'{mean:g}' for mean in means[::2])]
  return markdown([*header, 'first over last', 'off a line'], rows)


@table
def compiled_moves():
  """What the TPU compiler tells of ways to move tokens."""
  rows = [
    [
      cell['what'],
      cell['how'],
      *(f'{cell[key] / 1e3:,.0f}' for key in ('cycles', 'memory_cycles')),
      f'{cell["bytes"] / 1e6:,.0f}',
    ]
    for cell in measured('compiled_moves')['cells']
  ]
  return markdown(
    ['v5e', 'how', 'thousand cycles', 'to move its bytes', 'MB'], rows
  )


@table
def compiled_gpu():
  """What ptxas tells of the Triton kernels."""
  rows = [
    [
      f'`{cell["op"]}`, {cell["direction"]}',
      f'`{kernel["name"]}`',
      str(kernel['registers']),
      str(kernel['spilled_bytes']),
      f'{kernel["shared_bytes"] / 1024:.0f}',
    ]
    for cell in measured('compiled')['cells']
    for kernel in cell.get('kernels', ())
  ]
  return markdown(
    ['operation', 'kernel', 'registers', 'bytes spilled', 'shared KiB'], rows
  )


@table
def compiled_programs():
  """What XLA tells of programs for a GPU."""
  rows = [
    [
      f'`{cell["op"]}`, {cell["direction"]}',
      PROGRAMS[cell['program']],
      str(cell['launches']),
      f'{cell["bytes"] / 1e6:,.0f}',
      f'{cell["bytes"] / cell["floor_bytes"]:.1f}',
      f'{cell["temporary_bytes"] / 1e6:,.0f}',
      # Those of kernels are not told.
      f'{cell["products"]:.2f}' if cell['products'] else '',
    ]
    for cell in measured('compiled')['cells']
    if 'launches' in cell
  ]
  header = [
    *('operation', 'program', 'launches', 'MB moved', 'over the minimum'),
    *('MB of room', "products over a static program's"),
  ]
  return markdown(header, rows)


@table
def compiled_decode():
  """Launches and bytes of steps of decoding, for a GPU."""
  rows = [
    [
      cell['size'].upper(),
      str(cell['batch']),
      cell['model'],
      str(cell['launches']),
      str(cell['waits']),
      f'{cell["bytes"] / 1e6:,.0f}',
      f'{cell["bytes"] / cell["floor_bytes"]:.2f}',
    ]
    for cell in measured('compiled_decode')['cells']
  ]
  header = [
    *('model', 'sequences', 'program', 'launches', 'waits', 'MB moved'),
    'over the minimum',
  ]
  return markdown(header, rows)
