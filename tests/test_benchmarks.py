"""Benchmarks run, at sizes that measure nothing."""

import ast
import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import parts
from PIL import Image
import pytest
import study_tables
import tiny

import mod_jax
from mod_jax import config as config_lib
from mod_jax.data import audio_files

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parent.parent
files = config_lib.load(ROOT / 'configs/lm/files.py')


CASES = {
  'acm_layer': (
    *('width=16', 'hidden=32', 'images=2', 'tokens=9', 'points=2', 'grouped'),
    *('peak_tflops=1', 'bandwidth_tb=1'),
  ),
  'route_scores': (
    *('lengths=20', 'batch=1', 'heads=2', 'channels=32', 'peak_tflops=1'),
    'bandwidth=1',
  ),
  'token_select': ('batch=1', 'length=64', 'width=64'),
  'one_row': ('inputs=16', 'outputs=32'),
  'choose_token': ('vocab=300', 'batches=2'),
  'serve_step': ('width=192', 'layers=2', 'vocab=300', 'slots=2', 'length=64'),
  'wav2vec2': ('width=48', 'layers=1', 'seconds=0.1', 'batches=2'),
  'vlm': ('width=64', 'layers=8', 'text=4', 'batches=1', 'prompts=1'),
  'image_input': ('pictures=16', 'pixels=9000', 'batch=4', 'steps=2'),
}

# Studies of few steps: the runs to train, and models of the table.
STUDIES = {
  'routing_recipe': ('gate/raw/0$', ['raw']),
  'detection_scenes': ('A-MoD', ['A-MoD 50%']),
  'speech_words': (
    '(dense|learners|gates|.*0.4)/',
    ['dense', 'adaptive, β = 0.4'],
  ),
  'vit_scenes': (
    '(dense|dense, trained on|A-MoD 50%|A-ViT, depth 3)/',
    ['dense', 'dense, trained on', 'A-MoD 50%', 'A-ViT, depth 3'],
  ),
  'vlm_scenes': (
    '(captions|dense)/',
    ['dense', 'FastV, not trained with', 'one answer always'],
  ),
}

# Bytes over the minimum, and the share of the estimated cycles that is not in
# kernels, of each operation on a TPU.
MOVED = {'route_scores': (1.05, 0.05), 'acm_mlp': (1.2, 0.05)}
# Bytes that kernels for GPUs spill to memory: what is not here, none.
SPILLED = {'_up': 52}
# Bytes that launches of a GPU's program move, over those of its arrays.
LAUNCHED = {'route_scores': 2.2, 'acm_mlp': 5.0}


def command(script, *args):
  return [sys.executable, f'benchmarks/{script}.py', *(f'--{a}' for a in args)]


def run(script, *args, path=''):
  here = {'JAX_NUM_CPU_DEVICES': '1', 'PYTHONPATH': str(path)}
  result = subprocess.run(
    command(script, *args),
    **{'cwd': ROOT, 'env': os.environ | here},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr[-2000:]
  return result.stdout


@pytest.mark.parametrize('script', CASES)
def test_runs_on_a_cpu(script):
  assert run(script, 'nosave', 'rounds=2', *CASES[script]).strip()


def test_both_losses_of_the_head_multiply_in_one_dtype():
  code = """
import head_loss, jax.numpy as jnp
from mod_jax import losses
args = jnp.ones((1, 4, 8), 'bfloat16'), jnp.ones((8, 6))
args += jnp.zeros((1, 4), int), jnp.ones((1, 4))
for loss in head_loss.plain, losses.head_loss:
  step = head_loss.compiled(loss, *args)
  print(step.func.lower(*step.args).as_text())
"""
  told = subprocess.run(
    [sys.executable, '-c', code],
    **{'cwd': ROOT / 'benchmarks', 'capture_output': True, 'text': True},
    check=True,
  )
  factors = re.findall(r'dot_general .* : \((.*)\) ->', told.stdout)
  assert len(factors) == 2 * 3
  assert all(len(re.findall('xbf16>', pair)) == 2 for pair in factors)


def rows(out):
  """Returns the cells of the tables that a study prints."""
  return [x[2:].split(' | ') for x in out.splitlines() if x.startswith('| ')]


@pytest.mark.parametrize('script', STUDIES)
def test_a_study_is_trained(script, tmp_path):
  runs, models = STUDIES[script]
  seeds = [] if script == 'routing_recipe' else ['seeds=0']
  args = ('tiny', *seeds, f'workdir={tmp_path}')
  out = run(script, *args, f'runs=^{runs}')
  names = [row[0] for row in rows(out)]
  assert [x for x in dict.fromkeys(names) if x in models] == models
  if script != 'detection_scenes':
    assert (tmp_path / f'{script}.png').stat().st_size > 1000
  text = (tmp_path / f'{script}.jsonl').read_text()
  found = [json.loads(line) for line in text.splitlines()]
  costs = [x['forward_flops'] for x in found if 'forward_flops' in x]
  assert sorted(costs, reverse=True)[:1] == costs[:1]
  for x in found:
    scores = [v for k, v in x.items() if re.match('accuracy|mAP', k)]
    assert all(0 <= v <= 1 for v in scores)
  if script == 'vlm_scenes':
    run(script, *args, 'time')
    timed = json.loads((tmp_path / 'vlm_scenes.json').read_text())
    assert list(timed['seconds_to_first_token']) == ['dense']


def test_prompts_are_trained_on_by_their_list(tmp_path):
  sounds = tmp_path / 'share/asterisk/sounds/en_US_f_Allison'
  listed = tmp_path / 'share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz'
  said = {f'digits/{i}': f'd{"abcdefghij"[i]}' for i in range(10)}
  said |= {f'vm-{i}': f'Press {i % 10} for call-back {i}.' for i in range(30)}
  said |= {'beep': '[a tone]', 'silence/1': '(1 second)', 'missing': 'ab'}
  for name in said:
    path = sounds / f'{name}.wav'
    path.parent.mkdir(parents=True, exist_ok=True)
    if name != 'missing':
      samples_T = np.random.default_rng(0).normal(size=6000)
      audio_files.write(path, samples_T / 9, 8000)
  listed.parent.mkdir(parents=True)
  lines = [f'{name}: {text}' for name, text in said.items()]
  listed.write_bytes(gzip.compress('\n'.join(lines).encode()))
  args = (f'data={tmp_path / "share"}', f'workdir={tmp_path / "runs"}')
  out = run('speech', 'tiny', *args, 'runs=^dense')
  assert '| dense | 1 | ' in out
  splits = {}
  for split in ('train', 'eval'):
    text = (tmp_path / f'runs/prompts/{split}.jsonl').read_text()
    splits[split] = [json.loads(x)['text'] for x in text.splitlines()]
  # Two digits, which the list does not say how to read, are left out.
  assert sum(map(len, splits.values())) == 20
  assert not set(splits['train']) & set(splits['eval'])
  assert 'Press dd for call back dd.' in splits['train'] + splits['eval']


def test_clip_art_of_unequal_classes(tmp_path):
  rng = np.random.default_rng(0)

  def write(name, pixels):
    path = tmp_path / 'clipart' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)

  for folder, count in (('cat/black', 60), ('dog', 70), ('few', 59)):
    for i in range(count):
      pixels = rng.integers(0, 256, (24, 24, 4), np.uint8)
      write(f'{folder}/{i}.png', pixels)
      if folder == 'dog' and i < 5:  # Nearly the same, in the same class.
        write(f'{folder}/again_{i}.png', pixels // 2 * 2)
      if folder == 'few' and i == 0:  # In two classes: in none.
        write('dog/few.png', pixels)
  args = ('tiny', 'seeds=0', f'workdir={tmp_path / "runs"}')
  out = run('openclipart', f'data={tmp_path / "clipart"}', *args)
  counts = json.loads((tmp_path / 'runs/pictures/counts.json').read_text())
  assert {name: sum(split) for name, split in counts.items()} == {
    'cat': 60,
    'dog': 70,
  }
  names = ['plain', 'class weights', 'balanced sampling']
  assert [row[0] for row in rows(out)[2:]] == names
  path = tmp_path / 'runs' / 'openclipart.jsonl'
  before = path.read_text()
  assert len(before.splitlines()) == 3
  again = run('openclipart', f'data={tmp_path / "clipart"}', *args)
  assert again.splitlines()[-5:] == out.splitlines()[-5:]
  assert path.read_text() == before
  args = *args[:-1], f'workdir={tmp_path / "methods"}', 'runs=^(dense|EViT .7)/'
  out = run('vit_clipart', f'data={tmp_path / "clipart"}', *args)
  assert [row[0] for row in rows(out)[2:]] == ['dense', 'EViT .7']
  shutil.rmtree(tmp_path / 'methods/pictures')  # The table needs none.
  again = run('vit_clipart', 'table', *args[:-1])
  assert rows(again) == rows(out)


def test_what_routed_blocks_recover(tmp_path):
  """A tenth of the cost for three tenths of the gain, or two by thresholds."""
  lines = []
  for name, loss, by_threshold, cost in (
    ('dense, 4 blocks', 3.0, None, 100),
    ('MoD, 4 full and 4 routed blocks', 2.97, 2.98, 110),
    ('dense, 8 blocks', 2.9, None, 200),
  ):
    for seed, more in enumerate((0, 0.2)):
      told = {'loss': loss + more, 'forward_flops': cost}
      told['threshold_rule'] = by_threshold and by_threshold + more
      told['run'] = f'width 64, rows of 32, {name}/{seed}'
      lines.append(told)
  (tmp_path / 'recovery.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  out = run('recovery', 'tiny', 'table', f'workdir={tmp_path}')
  (row,) = (x for x in out.splitlines() if x.startswith('| 64 | 32 | 2 | '))
  assert row.endswith('| 0.100 ± 0.000 | 10% | 30% ± 0% | 20% ± 0% |')
  # If others gain a tenth of a nat with e times as many FLOPs: e / 2 and so on.
  told = study_tables.recovery_multipliers({x['run']: x for x in lines}, 0.1)
  assert '| 1.36 ± 0.00 | 1.23 ± 0.00 | 1.11 ± 0.00 |' in told


def test_conversion_is_compared_with_deletion_by_seed():
  """At half of the saving, straight lines tell half of what deletion loses."""
  lines = {study_tables.PARENT: [2.5]}
  lines |= {'dense, 1k tokens': [2.0], 'MoD, 1k tokens': [2.2, 2.25]}
  lines['least influence, deleted, 1k tokens'] = [2.3, 2.46]
  costs = [100, 100, 90, 80]
  found = {
    f'{name}/{seed}': {
      'loss': loss,
      'without_routed_blocks': loss,
      'forward_flops': cost,
    }
    for (name, losses), cost in zip(lines.items(), costs, strict=True)
    for seed, loss in enumerate(losses)
  }
  table = {row[0]: row for row in rows(study_tables.converted(found))}
  assert table['MoD'][2:5] == ['2', '2.225 (2.200–2.250)', '0.200']
  # By seed 2.2 - 2.15 and 2.25 - 2.23; dense, the second seed is missing.
  assert table['MoD'][9] == '0.035 (0.020–0.050)'


def test_ways_to_convert_a_model_are_compared(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))  # For the tokens of the texts.
  texts = f'{tiny.texts(tmp_path, **{f"t{i}": 500 for i in range(40)})}/*.txt'
  for path in tmp_path.glob('t*.txt'):
    with path.open('a') as file:
      file.write(
        '\n\nWhy is it?\n----------\n\nIt is. So it is said, again and again.\n'
      )
  sizes = {'model.num_layers': 8, 'model.width': 12, 'model.num_heads': 2}
  sizes |= {'data.files': texts, 'data.tokenizer_vocab_size': 262}
  config = config_lib.replace(files.get_config('dense'), sizes)
  whole = tiny.run(files.complete(config))
  mod_jax.export(whole, tmp_path / 'model', 'huggingface')
  out = run(
    *('convert_smollm2', 'tiny', f'workdir={tmp_path / "runs"}'),
    *(f'model={tmp_path / "model"}', f'texts={texts}'),
    'runs=^(dense|least influence, (deleted|feed-forward alone 50%)), 172k.*/0',
  )
  found = {row[0]: row for row in rows(out)[2:]}
  assert found['dense, at first'][1] == 'not'
  assert found['dense'][1] == '172k tokens'
  assert (found['dense'][4], found['dense'][8]) == ('0.000', '1.000')
  deleted = found['least influence, deleted']
  routed = found['least influence, feed-forward alone 50%']
  assert float(deleted[8]) < float(routed[8]) < 1
  # By the causal rules, too.
  assert all(float(x) > 0 for x in routed[5:7])
  speed = run('convert_speed', 'nosave', 'rounds=2', f'model={tmp_path}/model')
  *_, last = speed.strip().splitlines()
  cells = ast.literal_eval(last)['cells']
  assert list(cells)[:2] == ['loss of held-out rows', 'training step']
  assert all(0 < cell['flop_ratio'] < 1 for cell in cells.values())
  template = '{{ messages[0].content }}'
  (tmp_path / 'model' / 'chat_template.jinja').write_text(template)
  (converted,) = tmp_path.glob('runs/*feed_forward*/0')
  drafted = run(
    *('speculation_real', 'nosave', 'rounds=2', 'temperatures=0'),
    *(f'model={tmp_path}/model', f'converted={converted}', f'texts={texts}'),
    *('prompt=16', 'new=8'),
  )
  *_, last = drafted.strip().splitlines()
  found = ast.literal_eval(last)
  assert found['prompts']['chat'] == 40
  cells = {(x['model'], x['text']): x['drafts'] for x in found['cells']}
  assert [*cells['converted', 'prose']] == ['none', 'never, 2']
  for drafts in cells.values():
    assert drafts.pop('none')['tokens_of_a_pass'] == 1
    assert all(1 <= x['tokens_of_a_pass'] <= 9 for x in drafts.values())


def test_all_that_an_accelerator_is_asked(tmp_path):
  args = 'accelerator', 'tiny', f'workdir={tmp_path}'
  first = tmp_path / 'kernels' / 'route_scores.json'
  # Killed in its second part, the command goes on.
  process = subprocess.Popen(command(*args), cwd=ROOT, start_new_session=True)
  while not first.exists() and process.poll() is None:
    time.sleep(0.1)
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  assert first.exists()
  before = first.stat().st_mtime_ns
  run(*args)
  assert first.stat().st_mtime_ns == before
  found = {
    name: json.loads((tmp_path / f'{name}.json').read_text())
    for name in ('kernels', 'kernel_times', 'training', 'decoding')
  }
  for parts_of_stage in found.values():
    assert all(part['environment']['jax'] for part in parts_of_stage.values())
  errors = {}
  for part in found['kernels'].values():
    assert not part['wrong']
    errors |= part['errors']
  kernels = {'acm_mlp', 'route_scores', 'token_select'}
  assert {name.split()[0] for name in errors} >= kernels
  assert {'mod', 'dense'} <= set(found['training']['lm_220m']['median_seconds'])
  told = json.loads((tmp_path / 'isoflop_hour_tiny.json').read_text())
  assert {'dense', 'mod'} <= {row['group'] for row in told['runs']}
  # Given again, the command only does what is missing.
  times = {p: p.stat().st_mtime_ns for p in tmp_path.glob('*/*.json')}
  again = tmp_path / 'kernel_times' / 'token_select.json'
  again.unlink()
  out = run(*args)
  assert len(out.splitlines()) == 1
  for path, before in times.items():
    assert (path.stat().st_mtime_ns > before) == (path == again), path


def test_an_accelerators_wrong_kernels_are_named(tmp_path):
  path = tmp_path / 'kernels' / 'acm_mlp.json'
  path.parent.mkdir()
  told = {'environment': {}, 'wrong': ['acm_mlp triton float32']}
  path.write_text(json.dumps(told))
  args = 'accelerator', f'workdir={tmp_path}', 'parts=none'
  done = subprocess.run(
    command(*args), cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 1
  assert 'reference: acm_mlp triton float32. not finished' in done.stderr


@pytest.mark.parametrize('stage', ['training', 'decoding'])
def test_an_accelerators_commands_are_accepted(stage):
  """Those of real sizes, of which nothing runs here."""
  code = (
    'import json, accelerator\n'
    'from absl import flags\n'
    "flags.FLAGS(['accelerator', '--workdir=W'])\n"
    'print(json.dumps(accelerator.stages()))'
  )
  told = subprocess.run(
    [sys.executable, '-c', code],
    **{'cwd': ROOT / 'benchmarks', 'capture_output': True, 'text': True},
    check=True,
  )
  for name, part in json.loads(told.stdout)[stage].items():
    done = subprocess.run(
      [*part, '--only_check_args'], cwd=ROOT, capture_output=True, text=True
    )
    assert not done.returncode, (name, done.stderr)


def test_kernels_move_and_spill_no_more_than_they_did():
  for module in ('libtpu', 'jax_triton'):
    pytest.importorskip(module)
  if not tiny.GPU_COMPILER.is_dir():
    pytest.skip('make test-slow installs the compiler for GPUs')
  out = run(
    *('compiled', 'nosave', 'devices=v5e,H200'),
    *('directions=forward', 'programs=kernels'),
    path=tiny.GPU_COMPILER,
  )
  cells = ast.literal_eval(out.splitlines()[-1])['cells']
  for cell in cells:
    if cell['device'] == 'H200':
      for kernel in cell['kernels']:
        assert kernel['spilled_bytes'] <= SPILLED.get(kernel['name'], 0), kernel
      assert cell['bytes'] <= LAUNCHED[cell['op']] * cell['floor_bytes']
      continue
    over, outside = MOVED[cell['op']]
    assert cell['floor_bytes'] <= cell['bytes'] <= over * cell['floor_bytes']
    assert cell['outside_kernels'] <= outside * cell['cycles']
    if cell['op'] == 'acm_mlp':
      # Tokens that run no learner cost little.
      cycles = [*cell['by_learners'].values()]
      assert cycles[0] <= 0.1 * cycles[-1]
      means = [*cell['by_learners']]
      line = np.polyval(np.polyfit(means, cycles, 1), means)
      assert np.abs(cycles - line).max() <= 0.05 * cycles[-1]
  assert {(cell['device'], cell['op']) for cell in cells} == {
    (device, op) for device in ('v5e', 'H200') for op in MOVED
  }


@pytest.mark.skipif(
  not tiny.GPU_COMPILER.is_dir(), reason='make test-slow installs the compiler'
)
def test_a_gpu_decodes_without_waiting():
  out = run(
    *('compiled_decode', 'nosave', 'sizes=tiny', 'batches=1'),
    path=tiny.GPU_COMPILER,
  )
  cells = ast.literal_eval(out.splitlines()[-1])['cells']
  waits = {cell['model']: cell['waits'] for cell in cells}
  # As a loop over a few rows does.
  assert waits.pop('MoD, rows') > 0
  assert not any(waits.values())


def test_loss_by_smaller_weights_on_an_odd_number_of_texts(tmp_path):
  config = tiny.experiment(**{'model.width': 32, 'model.mlp_dim': 32})
  params = tiny.variables(config.model)['params']
  tiny.save_run(tmp_path / 'model', config, params)
  tiny.texts(tmp_path, a=20, b=20, c=20, d=20, e=20)
  out = run(
    *('dtype_loss', 'nosave', f'model={tmp_path / "model"}', 'length=8'),
    f'texts={tmp_path}/*.txt',
  )
  found = ast.literal_eval(out.splitlines()[-1])
  assert found['tokens'] == 4 * 8
  sizes = [found[x]['bytes_over_float32'] for x in ('int8', 'bfloat16')]
  assert 0 < sizes[0] < sizes[1] < 1


def test_parts_of_a_step_by_the_names_of_kernels_and_operations():
  program = (
    'fused_add.3 (a: f32[2]) -> f32[2] {\n'
    '  ROOT %add.1 = f32[2] add(%a, %a)\n'
    '}\n'
    'ENTRY main.1 (p: f32[2]) -> f32[2] {\n'
    '  ROOT %loop_add_fusion.12 = f32[2]{0} fusion(%p), kind=kLoop,'
    ' calls=%fused_add.3, metadata={op_name="jit(f)/jvp(ViT)/embed/add"}\n'
    '}\n'
  )
  names = parts.names_of(program)
  kernels = {
    'loop_add_fusion_12': 'embedding, head and loss',
    'loop_add_fusion.12': 'embedding, head and loss',
    'nvjet_sm90_tst_64x5': 'products',
    '_dkv_kernel': 'attention core',
    'Memset 0': 'copies',
    'ThunkExecutor': None,
  }
  assert {k: parts.of_event(k, names) for k in kernels} == kernels
  operations = {
    'jit(update)/add': 'optimiser',
    'jit(update)/transpose(jvp(ViT))/norm/mul': 'embedding, head and loss',
    'jvp(M)/block_1/add': 'routing and residual adds',
    'jvp(M)/block_1/process/attention/attend/dot': 'attention core',
    'jvp(M)/block_1/process/mlp/dot': 'products',
    'jvp(M)/block_1/process/mlp/mul': 'norms and elementwise',
  }
  assert {k: parts.part_of(k, 'dot' in k) for k in operations} == operations


def test_a_run_of_a_study_waits_for_the_run_it_begins_with(tmp_path):
  """Another process may be training that one, and it has checkpoints."""
  code = """
import fcntl, pathlib, types
from absl import flags
import study
from mod_jax.data.text import TextDataConfig
from mod_jax.models.lm import LMConfig
from mod_jax.tasks.experiment import ExperimentConfig

runs = study.Study('study.py', 'runs')
flags.FLAGS(['study'])
config = dict(model=LMConfig(), data=TextDataConfig())
planned = {
  'first/0': ExperimentConfig(**config),
  'second/0': ExperimentConfig(**config, init='runs/first/0'),
  'third/0': ExperimentConfig(**config, init='elsewhere'),
}
def train(config, directory):
  print('trains', config.name)
  return types.SimpleNamespace(finished=True, metrics={})
directory = runs.workdir('first/0')
directory.mkdir(parents=True)
with (directory / 'busy').open('w') as lock:
  fcntl.flock(lock, fcntl.LOCK_EX)
  runs.train(planned, lambda *_: {}, train)
runs.train(planned, lambda *_: {}, train)
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    cwd=tmp_path,
    env=os.environ | {'PYTHONPATH': str(ROOT / 'benchmarks')},
    capture_output=True,
    text=True,
    check=True,
  )
  skipped = 'second/0 begins with first/0, which is not finished: skipped'
  trained = [f'trains {name}/0' for name in ('third', 'first', 'second')]
  assert done.stdout.splitlines() == [skipped, *trained]
