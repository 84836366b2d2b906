"""Tables of generating text: decoding, smaller weights and drafts."""

from machine import markdown

from table_parts.common import between, measured, table


@table
def decode():
  """A decoding step by the number of sequences and what came before."""
  rows = []
  for cell in measured('decode')['cells']:
    seconds = cell['mean_seconds']
    kept = cell['cache_bytes']
    torch = cell.get('dense_over_torch')
    rows.append(
      [
        f'{cell["context"]}',
        f'{cell["batch"]}',
        *(f'{1e3 * seconds[n]:.1f}' for n in ('dense', 'mod', 'mod_masked')),
        f'{cell["speedup"]:.2f}',
        f'{cell["ideal_speedup"]:.2f}',
        f'{kept["mod"] / kept["dense"]:.2f}',
        f'{cell["no_row_routed_probability"]:.2f}',
        '' if torch is None else f'{torch:.2f}',
      ]
    )
  header = [
    *('context', 'sequences', 'dense, ms', 'MoD, ms', 'MoD masked, ms'),
    *('speed-up', 'speed-up by bytes', 'cache / dense'),
    *('chance that no row is routed', 'dense / PyTorch'),
  ]
  return markdown(header, rows)


def decode_words() -> str:
  """How fast decoding is, of which shapes and where."""
  found = measured('decode')
  cells = [x for x in found['cells'] if x['context'] == 512]
  speedups = [x['speedup'] for x in cells]
  over_torch = [1 / x['dense_over_torch'] for x in cells]
  batches = [x['batch'] for x in cells]
  return (
    f'Generating a token for {min(batches)} to {max(batches)} sequences after'
    ' 512 tokens, Mixture-of-Depths (12.5% of the tokens in every other block)'
    f' is {min(speedups):.2f} to {max(speedups):.2f} times as fast as the dense'
    f' twin, which is {min(over_torch):.1f} to {max(over_torch):.1f} times as'
    f" fast as the same model by PyTorch's `transformers`: {found['layers']}"
    f' blocks of width {found["width"]}, a vocabulary of'
    f' {found["vocab_size"]}, {found["torch"].split(", ")[2]} on'
    f' {found["environment"]["processor"]} (`benchmarks/decode.py`).'
    f'{_real_words()}'
  )


def _real_words() -> str:
  """The same of a real model."""
  results = measured('decode_real')
  speedups = [cell['speedup'] for cell in results['cells']]
  batches = [cell['batch'] for cell in results['cells']]
  llama_cpp = [
    f'{cell["llama.cpp_F32"]["speedup"]:.2f} for {cell["batch"]}'
    for cell in results['cells']
    if cell['batch'] in (min(batches), max(batches))
  ]
  return (
    f' A dense model from elsewhere, {results["model"]}, generates'
    f' {min(speedups):.2f} to {max(speedups):.2f} times as fast as by'
    f' `transformers`, for {min(batches)} to {max(batches)} sequences.'
    ' The speed of llama.cpp, in float32 too, divided by that of mod_jax, is'
    f' {" and ".join(llama_cpp)} (`benchmarks/decode_real.py`).'
  )


@table
def smaller_weights():
  """What smaller weights of a real model cost, and the speed they bring."""
  losses, cells = measured('dtype_loss'), measured('decode_real')['cells']
  rows = []
  for dtype in ('bfloat16', 'int8'):
    one = losses[dtype]
    rows.append(
      [
        *(f'`{dtype}`', f'{one["bytes_over_float32"]:.2f}'),
        f'{one["more"]:+.4f} ± {one["standard_error"]:.4f}',
        *(f'{cell[dtype]["speedup"]:.2f}' for cell in cells),
      ]
    )
  header = ['`dtype`', 'memory', f'loss on {losses["tokens"]:,} tokens']
  header += [f'speed, {cell["batch"]}' for cell in cells]
  return markdown(header, rows)


@table
def converted_speed():
  """Time of SmolLM2-135M with routed blocks, over the dense model's."""
  rows = []
  for name, cell in measured('convert_speed')['cells'].items():
    low, high = cell['quartiles']
    sizes = cell.get('cache_bytes')
    rows.append(
      [
        *(name, f'{cell["flop_ratio"]:.3f}'),
        f'{cell["time_ratio"]:.3f} ({low:.3f}–{high:.3f})',
        f'{sizes["mod"] / sizes["dense"]:.2f}' if sizes else '',
      ]
    )
  header = ['', 'FLOPs over dense', 'time over dense (quartiles)', 'cache']
  return markdown(header, rows)


@table
def choose_token():
  """Time of choosing tokens, of plain code and of ours."""
  rows = []
  for cell in measured('choose_token')['cells']:
    seconds = cell['median_seconds']
    middle, low, high = cell['over_plain']
    rows.append(
      [
        *(f'{cell["batch"]}', cell['choice']),
        *(f'{1e3 * seconds[name]:.2f}' for name in ('plain', 'mod_jax')),
        f'{middle:.2f} ({low:.2f}–{high:.2f})',
      ]
    )
  header = ['rows', 'choice', 'plain, ms', 'mod_jax, ms', 'ratio (quartiles)']
  return markdown(header, rows)


@table
def decode_real():
  """A real model's text, its first calls and its memory, by library."""
  rows = []
  names = {
    'mod_jax': 'mod_jax',
    'bfloat16': 'mod_jax, bfloat16',
    'int8': 'mod_jax, int8',
    'torch': 'PyTorch',
    'torch_bfloat16': 'PyTorch, bfloat16',
    'llama.cpp_F32': 'llama.cpp',
    'llama.cpp_Q8_0': 'llama.cpp, Q8_0',
    'llama.cpp_Q4_1': 'llama.cpp, Q4_1',
  }
  for cell in measured('decode_real')['cells']:
    for library, name in names.items():
      if (one := cell.get(library)) is None:
        continue
      rows.append(
        [
          *(str(cell['batch']), name, f'{one["steps_per_second"]:.1f}'),
          *(f'{one["first_call_seconds"]:.1f}', f'{one["peak_mib"]:,}'),
        ]
      )
  header = ['sequences', 'library', 'steps/s', 'first call, s']
  return markdown([*header, 'peak memory, MiB'], rows)


@table
def speculation():
  """Tokens per second with a draft, over the dense twin's."""
  cells = measured('speculation')['cells']
  batches = sorted({cell['batch'] for cell in cells})
  found = {(c['temperature'], c['batch']): c['kinds'] for c in cells}
  rows = []
  for temperature in sorted({cell['temperature'] for cell in cells}):
    for kind in found[temperature, batches[0]]:
      if kind == 'dense':
        continue
      by_batch = [found[temperature, batch][kind] for batch in batches]
      rows.append(
        [
          f'{temperature:g}',
          'none' if kind == 'plain' else kind,
          f'{by_batch[0]["tokens_of_a_pass"]:.2f}',
          *(f'{found["over_dense"]:.2f}' for found in by_batch),
        ]
      )
  header = ['temperature', 'draft', 'tokens of a pass']
  header += [f'{n} sequence{"s" * (n > 1)}' for n in batches]
  return markdown(header, rows)


@table
def speculation_real():
  """What drafts add to a pass of a real model, and the speed they bring."""
  cells = measured('speculation_real')['cells']
  texts = list(dict.fromkeys(cell['text'] for cell in cells))
  found = {
    (c['model'], c['temperature'], c['text']): c['drafts'] for c in cells
  }
  rows = []
  for model, temperature in dict.fromkeys(key[:2] for key in found):
    by_text = [found[model, temperature, text] for text in texts]
    for draft in by_text[0]:
      if draft != 'none':
        of_draft = [drafts[draft] for drafts in by_text]
        rows.append(
          [
            *(model, f'{temperature:g}', draft),
            *(f'{x["tokens_of_a_pass"]:.2f}' for x in of_draft),
            *(
              f'{x["speedup"]:.2f} ({between(*x["quartiles"])})'
              for x in of_draft
            ),
          ]
        )
  header = ['model', 'temperature', 'draft']
  header += [f'tokens of a pass: {text}' for text in texts]
  header += [f'speed: {text}' for text in texts]
  return markdown(header, rows)
