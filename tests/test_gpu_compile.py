"""Real programs compile for GPUs that are not here: JAX's plugin does it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tiny

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not tiny.GPU_COMPILER.is_dir(),
    reason='make test-slow installs the compiler',
  ),
]

# A ViT has an odd number of tokens.
VIT = (
  'configs/vit/imagenet.py:deit_tiny',
  *('--config.model.num_layers=2', '--config.train.batch_size=4'),
)


def report(
  config: str, *options: str, gpus: int = 1, xla_flags: str = ''
) -> dict[str, str]:
  """Returns what `--compile_for` tells, by name of the line."""
  command = [
    *(sys.executable, 'train.py', f'--config={config}'),
    *(f'--compile_for=h100:{gpus}', *options),
  ]
  environment = {
    **{'PYTHONPATH': str(tiny.GPU_COMPILER), 'JAX_PLATFORMS': 'cpu'},
    'XLA_FLAGS': xla_flags,
  }
  done = subprocess.run(
    command,
    cwd=ROOT,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  lines = (
    re.split(r'\s{2,}', line, maxsplit=1) for line in done.stdout.splitlines()
  )
  found = dict(line for line in lines if len(line) == 2)
  assert found['memory'].endswith('fits')
  return found


def share(found: dict[str, str]) -> float:
  """Returns the products that were found, over the model's."""
  return float(re.search(r'step, ([\d.]+) of', found['products'])[1])


@pytest.mark.parametrize('options', [(), ('--config.model.routing=None',)])
def test_attention_of_odd_length_is_ours_with_scores_or_without(options):
  assert report(*VIT, *options)['not counted'] == 'triton_kernel_call'


def test_attention_of_even_length_is_cudnns():
  sizes = ('--config.model.image_size=240', '--config.data.image_size=240')
  found = report(*VIT, *sizes, '--config.model.routing=None')
  # The model's count has the gradient of the pixels, too.
  assert share(found) == pytest.approx(1, abs=0.04)
  assert 'not counted' not in found
  # None of the launches is faster than at its peak rate.
  predicted, products = re.findall(r'([\d.e-]+) ms', found['step'])[:2]
  assert float(predicted) >= float(products) > 0
  assert found['launches'].startswith(f'{predicted} ms')


def test_images_of_a_batch_are_not_next_to_each_other(tmp_path):
  report(
    *VIT[:2],
    *('--config.train.batch_size=128', '--config.model.routing=None'),
    xla_flags=f'--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*step.*',
  )
  (path,) = tmp_path.glob('*after_optimizations.txt')
  program = path.read_text()
  # A DeiT-Ti's features, as they lie in memory.
  assert '[128,197,192]{2,1,0}' in program
  assert '[197,192,128]' not in program


def test_products_of_experts_are_no_more_than_the_models():
  """XLA's grouped product would be eight times as many."""
  found = report(
    'configs/lm/experts.py:',
    '--config.model.experts.capacity_factor=None',
    *('--config.model.num_layers=1', '--config.train.batch_size=4'),
    gpus=2,
  )
  assert share(found) < 1
  assert found['not counted'] == 'triton_kernel_call'
  assert found['slice'].startswith('h100:2')
