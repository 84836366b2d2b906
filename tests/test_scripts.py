"""train.py and eval.py: what they print, and how they take bad input."""

import json
import re
import shutil
import subprocess
import sys
import types

from command_line import ROOT, assert_refused, overrides, run
import pytest
import tiny

from mod_jax.errors import UserError
from mod_jax.runs import metrics as metrics_lib
from mod_jax.scripts import eval as eval_script
from mod_jax.tasks import make_task

pytestmark = pytest.mark.slow

CONFIG = f'--config={ROOT}/configs/lm/mod.py:tiny'
# On top of `tiny`: what a test can afford.
SMALL = tiny.SMALL | {
  'model.mlp_dim': 16,
  'model.routing.predictor_width': 0,
  'model.routing.threshold_decay': 0.0,
  'train.num_steps': 4,
  'evaluation.every': 0,
  'evaluation.batches': 1,
  'evaluation.final_batches': 1,
  'evaluation.sample_tokens': 4,
  'log.tensorboard': False,
  'checkpoint.every': 2,
}


@pytest.fixture(scope='module')
def trained(on_one_device, tmp_path_factory):
  """The directory of a run, trained by the script; copy it to change it."""
  workdir = tmp_path_factory.mktemp('runs') / 'run'
  with on_one_device():
    ended = run('train.py', CONFIG, f'--workdir={workdir}', *overrides(SMALL))
  assert ended.status == 0, ended.err
  return workdir, ended


class TestTrain:
  def test_says_what_it_did(self, trained):
    workdir, ended = trained
    assert re.search(r'^mod_tiny starts: [\d,]+ parameters', ended.err)
    assert 'step 4/4' in ended.err
    assert 'held-out, at step 4' in ended.out
    assert re.search(r'^router +\d+\.\d+', ended.out, re.MULTILINE)
    for name in ('routing', 'router_weights', 'curves'):
      assert f'picture: {workdir}/pictures/{name}.png' in ended.out
      assert (workdir / 'pictures' / f'{name}.png').exists()
    *lines, last = metrics_lib.read(workdir)
    assert len(lines) == 4
    assert {'top_k/loss', 'router/loss'} < last.keys()

  @pytest.mark.parametrize('script', ['train.py', 'eval.py'])
  def test_help(self, script):
    ended = run(script, '--help')
    assert (ended.status, ended.err) == (1, '')
    assert ended.out.count(f'\n  python {script} --') >= 2
    assert '--[no]distributed:' in ended.out

  @pytest.mark.parametrize(
    ('config', 'unit'),
    [
      ('lm/mod.py:tiny', 'sequence of 32 tokens'),
      # Their data, tokenizer and teacher are not looked for.
      ('lm/paper.py:60m', 'sequence'),
      ('vit/dynamic.py:static', 'image'),
    ],
  )
  def test_flops(self, config, unit):
    ended = run('train.py', f'--config={ROOT}/configs/{config}', '--flops')
    assert (ended.status, ended.err) == (0, '')
    assert f'FLOPs of a forward pass over one {unit}' in ended.out
    assert re.search(r'^ratio to dense +0\.\d+', ended.out, re.MULTILINE)

  def test_describe(self):
    ended = run('train.py', CONFIG, '--config.seed=3', '--describe')
    assert (ended.status, ended.err) == (0, '')
    assert re.search('^variants: raw, .*, tiny$', ended.out, re.MULTILINE)
    assert '\n--config.seed=3\n    Seeds the initial parameters' in ended.out

  @pytest.mark.usefixtures('one_device')
  def test_sweep(self, tmp_path):
    file = tmp_path / 'config.py'
    file.write_text(
      'from mod_jax import config as config_lib\n'
      f"mod = config_lib.load('{ROOT}/configs/lm/mod.py')\n"
      "get_config = lambda: mod.get_config('tiny')\n"
      'def complete(config):\n'
      '  seed = 7 if config.optimizer.learning_rate < 1 else 8\n'
      "  return config_lib.replace(config, {'seed': seed})\n"
    )
    ended = run(
      *('train.py', f'--config={file}', f'--workdir={tmp_path}'),
      '--sweep=optimizer.learning_rate=1e-3,1e38',
      *overrides(SMALL),
    )
    assert ended.status == 0, ended.err
    table = ended.out.splitlines()[-3:]
    assert table[0].startswith('optimizer.learning_rate  top_k/loss')
    assert re.match(r'0\.001( +\d\.\d{4}){3}$', table[1])
    assert re.match(r'1e\+38( +diverged){3}$', table[2])
    assert len(json.loads((tmp_path / 'sweep.json').read_text())['points']) == 2
    # Each point's config is completed by its own values.
    configs = sorted(tmp_path.glob('*/config.json'))
    assert [json.loads(x.read_text())['seed'] for x in configs] == [7, 8]

  @pytest.mark.parametrize('flag', ['flops', 'profile=2:3'])
  def test_what_a_sweep_does_not_support(self, flag):
    ended = run('train.py', CONFIG, '--sweep=seed=0,1', f'--{flag}')
    assert_refused(ended, f'--{flag[:5]}.* and --sweep')

  @pytest.mark.parametrize(
    ('arg', 'pattern'),
    # What a config, a mesh, a model or data refuse for themselves is in the
    # tests of those.
    [
      ('--config.model.vocab_size=100', "vocab_size=100 .*tokenizer's 256"),
      ('--config.evaluation.batch_size=3', 'evaluation.batch_size=3'),
      ('--config.init=/no/run', 'init=/no/run: no such file.*hf download'),
      ('--compile_for=v9:4x4', "'v9:4x4' is unknown: expected one of v4, v5e"),
    ],
  )
  def test_bad_input_leaves_nothing(self, arg, pattern, tmp_path):
    ended = run('train.py', CONFIG, f'--workdir={tmp_path}/run', arg)
    assert_refused(ended, pattern)
    assert ended.out == ''
    assert not list(tmp_path.iterdir())


class TestEval:
  def test_evaluates_and_samples(self, trained, tmp_path):
    workdir = tmp_path / 'run'
    shutil.copytree(trained[0], workdir)
    kept = tiny.snapshot(workdir / 'checkpoints')
    samples = (
      *('--sample=def ', '--sample=a longer prompt', '--max_new_tokens=3'),
      *('--rule=router', '--overflow=drop'),
    )
    ended = run('eval.py', f'--workdir={workdir}', '--batches=2', *samples)
    assert ended.status == 0, ended.err
    assert 'held-out, at step 4' in ended.out
    assert '\nsample:\ndef ' in ended.out
    assert '\nsample:\na longer prompt' in ended.out
    told = json.loads((workdir / 'eval.json').read_text())
    assert told['step'] == 4
    assert {'top_k/loss', 'router/loss'} < told.keys()
    assert tiny.snapshot(workdir / 'checkpoints') == kept
    # The same seed writes the same; no evaluation was asked for.
    again = run('eval.py', f'--workdir={workdir}', '--noevaluate', *samples)
    assert 'held-out' not in again.out
    assert again.out
    assert ended.out.startswith(again.out)

  @pytest.mark.parametrize(
    ('args', 'pattern'),
    [
      (['--step=3'], r'no checkpoint at step 3 .*\[2, 4\]'),
      (['--step=best'], 'names no best checkpoint'),
      (['--batches=-1'], '--batches=-1: .*non-negative'),
      (['--seed=4294967296'], r'--seed=4294967296: .*\[0, 4294967295\]'),
      (
        ['--sample=0123456789', '--max_new_tokens=5', '--max_length=14'],
        'prompt=10, max_new_tokens=5, max_length=14',
      ),
      (['--predictions=out.csv'], 'out.csv is written by --predict'),
      (['--sample=a', '--rule=bogus'], '--rule=bogus: .*trained for router'),
      (
        ['--study=importance'],
        "expected one of 'arank', 'copying', 'influence'",
      ),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else '',
  )
  def test_bad_input_changes_nothing(self, trained, args, pattern):
    workdir, _ = trained
    before = tiny.snapshot(workdir)
    ended = run('eval.py', f'--workdir={workdir}', '--noevaluate', *args)
    assert_refused(ended, pattern)
    assert tiny.snapshot(workdir) == before


def test_room_in_caches_needs_a_causal_rule(monkeypatch):
  args = types.SimpleNamespace(rule=None, overflow='drop')
  monkeypatch.setattr(eval_script.flags, 'FLAGS', args)
  with pytest.raises(UserError, match='no causal rule; leave --overflow out'):
    eval_script._sample(make_task(tiny.experiment()), None)


def test_in_a_process_of_its_own(tmp_path):
  done = subprocess.run(
    [sys.executable, ROOT / 'eval.py', f'--workdir={tmp_path}/new'],
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr.startswith('error: ')
  assert done.stderr.count('\n') == 1
  assert 'holds no run' in done.stderr
  assert list(tmp_path.iterdir()) == []
