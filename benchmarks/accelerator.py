"""All that is to be measured on a GPU, with one command.

    python benchmarks/accelerator.py --workdir=runs/h100

1. `kernels`: each kernel against plain XLA, forward and backward.
2. `kernel_times`: their times beside XLA's and cuDNN's, and block sizes tuned.
3. `training`: steps of language models and ViTs and the share of the device's
   peak that they reach (MFU); inference of ViTs.
4. `decoding`: by batch and context.
5. `isoflop`: Mixture-of-Depths at equal FLOPs (`configs/sweeps/gpu.py:hour`).

A stage is a list of parts, and a part is a process that leaves a file in the
work directory. What has left its file is not run again, and a sweep goes on
where it stopped: so the same command, killed and given again, continues. No
part begins after `--minutes`, for machines that are lent for a short time. At
the end of each stage its results, with device and versions, are gathered in
`STAGE.json`: these files are what to send back. A part that fails is named at
the end, and tried again by the next call. Kernels that are too far from the
reference are named too, and their results stay. `--parts` runs those whose
STAGE/PART matches a regular expression. `--python` compares with PyTorch, if
that is another Python with torch, transformers and timm. `--tiny` runs
everything at sizes that measure nothing, also on a CPU.

XLA's autotuning takes most of the time of the stages with models. Without it
(`XLA_FLAGS='--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false'`)
the kernels of a language model's training step took as long in all on an H100;
a result says with which flags it was made.
"""

import csv
import json
import pathlib
import re
import subprocess
import sys
import time

from absl import app, flags
import kernel_cases

_HERE = pathlib.Path(__file__).resolve().parent
_WORKDIR = flags.DEFINE_string('workdir', None, 'Of results.', required=True)
_MINUTES = flags.DEFINE_float('minutes', None, 'After which no part begins.')
_PARTS = flags.DEFINE_string('parts', '', 'A pattern of STAGE/PART.')
_TINY = flags.DEFINE_bool('tiny', False, 'Sizes that measure nothing.')
_PYTHON = flags.DEFINE_string('python', None, 'With torch, for comparison.')


def part(script: str, sizes: str, tiny: str) -> list[str]:
  """Returns the command of a part, without its output."""
  options = (tiny if _TINY.value else sizes).split()
  return [sys.executable, str(_HERE / f'{script}.py'), *options]


def beside_torch(script: str, sizes: str, tiny: str) -> list[str]:
  torch = [f'--torch={_PYTHON.value}'] if _PYTHON.value else []
  return part(script, sizes, tiny) + torch


def stages() -> dict[str, dict[str, list[str]]]:
  """Returns the commands of each stage by name."""
  tiny_lm = '--rounds=2 --width=64 --layers=2 --length=32 --batch=2'
  tiny_vit = '--rounds=1 --image_size=112 --layers=4'
  # Heads of 128 channels, as in `configs/lm/paper.py`.
  lm = '--dtype=bfloat16 --length=2048 --vocab=32768 --head_dim=128 --rounds=7'
  vit = '--dtype=bfloat16 --batch=128'
  infer = '--dtype=bfloat16 --batches=1,32,256'
  training = {
    'lm_60m': beside_torch(
      'train_step', f'{lm} --width=512 --layers=8 --batch=32', tiny_lm
    ),
    'lm_220m': beside_torch(
      'train_step', f'{lm} --width=1024 --layers=12 --batch=16', tiny_lm
    ),
  }
  backbones = ('deit_tiny',) if _TINY.value else ('deit_small', 'vit_base')
  for backbone in backbones:
    chosen = f'--backbone={backbone}'
    training[f'{backbone}_step'] = beside_torch(
      'vit_train_step', f'{vit} {chosen}', f'{tiny_vit} {chosen} --batch=2'
    )
    training[f'{backbone}_inference'] = beside_torch(
      'vit_throughput', f'{infer} {chosen}', f'{tiny_vit} {chosen} --batches=2'
    )
  scores = '--dtype=bfloat16 --channels=64'
  tiny_scores = '--rounds=2 --lengths=20 --batch=1 --heads=2 --channels=32'
  tiny_acm = (
    '--rounds=2 --width=16 --hidden=32 --images=2 --tokens=9 --points=2'
  )
  times = {
    'route_scores_vit': part(
      'route_scores',
      f'{scores} --lengths=197,577 --batch=64 --heads=12',
      tiny_scores,
    ),
    'route_scores_lm': part(
      'route_scores', f'{scores} --lengths=1024,2048,4096 --causal', tiny_scores
    ),
    'acm_layer': part('acm_layer', '--dtype=bfloat16 --grouped', tiny_acm),
    'acm_layer_gradient': part(
      'acm_layer', '--dtype=bfloat16 --gradient', f'{tiny_acm} --gradient'
    ),
    'head_loss': part(
      'head_loss',
      '--dtype=bfloat16 --tokens=32768 --width=1024 --vocabularies=32768'
      ' --chunks=1024,2048,4096,8192',
      '--rounds=1 --tokens=32 --width=16 --vocabularies=32 --chunks=8',
    ),
    'token_select': part(
      'token_select', '', '--rounds=2 --batch=1 --length=64 --width=64'
    ),
    **{
      f'tune_{op}': part(
        'tune',
        f'--op={op}',
        f'--op={op} --interpret=pallas --rounds=1 --passes=1 --names={size}',
      )
      for op, size in (('acm_mlp', 'rows'), ('route_scores', 'block'))
    },
  }
  return {
    'kernels': {
      op: part('kernel_errors', f'--ops={op}', f'--ops={op} --interpret=pallas')
      for op in kernel_cases.INPUTS
    },
    'kernel_times': times,
    'training': training,
    'decoding': {
      'decode': beside_torch(
        'decode',
        '--width=1024 --dtype=bfloat16 --batches=1,8,64 --tokens=131072',
        '--rounds=2 --width=64 --layers=2 --batches=1 --contexts=32',
      )
    },
  }


def run(command: list[str], output: pathlib.Path) -> bool:
  """Runs a part unless its file is there; returns whether it is now."""
  if not output.exists():
    print(f'{output.stem}: {" ".join(command)}', flush=True)
    log = output.with_suffix('.log')
    with log.open('w') as file:
      subprocess.run(
        [*command, f'--output={output}'],
        stdout=file,
        stderr=subprocess.STDOUT,
        check=False,
      )
  return output.exists()


def runs(folder: pathlib.Path) -> list[dict[str, str]] | None:
  """Returns the runs of a sweep; None if it is not finished."""
  table = folder / 'isoflop.csv'
  if not table.exists():
    return None
  with table.open() as file:
    rows = list(csv.DictReader(file))
  # Where some run has failed, the table has the others.
  planned = (folder / 'manifest.jsonl').read_text().splitlines()
  return rows if len(rows) == len(planned) else None


def sweep(variant: str, folder: pathlib.Path) -> None:
  """Plans, trains and fits a sweep."""
  config = _HERE.parent / 'configs' / 'sweeps' / f'gpu.py:{variant}'
  commands = [['plan', f'--config={config}'], ['run'], ['fit']]
  if (folder / 'manifest.jsonl').exists():
    del commands[0]
  folder.mkdir(parents=True, exist_ok=True)
  for command in commands:
    with (folder / f'{command[0]}.log').open('a') as log:
      module = [sys.executable, '-m', 'mod_jax.sweeps', *command]
      print(f'{folder.name}: {" ".join(module)}', flush=True)
      subprocess.run(
        [*module, f'--workdir={folder}'],
        stdout=log,
        stderr=subprocess.STDOUT,
        check=False,
      )


def main(_):
  folder = pathlib.Path(_WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  begun = time.monotonic()
  missing, wrong, environment = [], [], {}

  def late():
    minutes = (time.monotonic() - begun) / 60
    return _MINUTES.value is not None and minutes >= _MINUTES.value

  def gather(stage, found):
    text = json.dumps(found, indent=2)
    (folder / f'{stage}.json').write_text(text + '\n')

  for stage, parts in stages().items():
    found = {}
    for name, command in parts.items():
      output = folder / stage / f'{name}.json'
      output.parent.mkdir(exist_ok=True)
      wanted = re.search(_PARTS.value, f'{stage}/{name}') and not late()
      if output.exists() or wanted and run(command, output):
        found[name] = json.loads(output.read_text())
        environment = found[name]['environment']
        wrong += found[name].get('wrong', [])
      else:
        missing.append(f'{stage}/{name}')
    if found:
      gather(stage, found)
  # A tiny sweep stands for the search of the rate as well.
  for variant in ('hour_tiny',) if _TINY.value else ('hour_tune', 'hour'):
    wanted = re.search(_PARTS.value, f'isoflop/{variant}') and not late()
    place = folder / 'isoflop' / variant
    rows = runs(place)
    if rows is None and wanted:
      sweep(variant, place)
      rows = runs(place)
    if rows is None:
      missing.append(f'isoflop/{variant}')
    else:
      gather(f'isoflop_{variant}', {'environment': environment, 'runs': rows})
  problems = []
  if wrong:
    problems.append(f'too far from the reference: {", ".join(wrong)}.')
  if missing:
    problems.append(
      f'not finished: {", ".join(missing)}. Their logs are in {folder}; the'
      ' same command goes on.'
    )
  if problems:
    raise SystemExit(' '.join(problems))


if __name__ == '__main__':
  app.run(main)
