"""train.py and eval.py: what they print, and how they take bad input."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import types
import unittest.mock

from absl import flags
import pytest

from mod_jax.data import corpus
from mod_jax.runs import metrics as metrics_lib

pytestmark = pytest.mark.usefixtures('compilation_cache')

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = f'--config={ROOT}/configs/lm/mod.py:tiny'
# On top of `tiny`: what a test can afford.
SMALL = {
  'model.num_layers': 1,
  'model.width': 16,
  'model.num_heads': 2,
  'model.mlp_dim': 16,
  'model.routing.period': 1,
  'model.routing.offset': 0,
  'model.routing.predictor_width': 0,
  'model.routing.threshold_decay': 0.0,
  'data.length': 16,
  'train.num_steps': 4,
  'evaluation.every': 0,
  'evaluation.batches': 1,
  'evaluation.final_batches': 1,
  'evaluation.sample_tokens': 4,
  'log.tensorboard': False,
  'checkpoint.every': 2,
}


@dataclasses.dataclass(frozen=True)
class Ended:
  status: int
  out: str
  err: str


@contextlib.contextmanager
def own_flags():
  """Takes away the flags that a script has defined."""
  try:
    yield
  finally:
    for module, found in flags.FLAGS.flags_by_module_dict().items():
      if module.startswith('mod_jax.scripts.'):
        for flag in list(found):
          delattr(flags.FLAGS, flag.name)
    flags.FLAGS.unparse_flags()


def run(script, *args):
  """Runs a script as a command line would, in this process."""
  out, err = io.StringIO(), io.StringIO()
  argv = [script, *map(str, args)]
  with (
    own_flags(),
    unittest.mock.patch.object(sys, 'argv', argv),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    pytest.raises(SystemExit) as info,
  ):
    runpy.run_path(str(ROOT / script), run_name='__main__')
  return Ended(info.value.code or 0, out.getvalue(), err.getvalue())


def start(script, *args):
  """Runs a script in a process of its own, with one device."""
  env = dict(os.environ) | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'}
  done = subprocess.run(
    [sys.executable, str(ROOT / script), *map(str, args)],
    capture_output=True,
    text=True,
    env=env,
    timeout=300,
  )
  return Ended(done.returncode, done.stdout, done.stderr)


def overrides(changes):
  return [f'--config.{name}={value}' for name, value in changes.items()]


def assert_refused(ended, pattern):
  assert ended.status not in (0, None)
  assert 'Traceback' not in ended.err
  lines = ended.err.splitlines()
  (line,) = [line for line in lines if line.startswith('error: ')]
  assert line == lines[-1]
  assert re.search(pattern, line), line


def snapshot(folder):
  return {
    str(p): (p.read_bytes(), p.stat().st_mtime_ns)
    for p in folder.rglob('*')
    if p.is_file()
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
    assert 'error' not in ended.err
    assert 'held-out, at step 4' in ended.out
    assert re.search(r'^router +\d+\.\d+', ended.out, re.MULTILINE)
    assert 'sample, also in' in ended.out
    for name in ('routing', 'router_weights', 'curves'):
      assert f'picture: {workdir}/pictures/{name}.png' in ended.out
      assert (workdir / 'pictures' / f'{name}.png').exists()
    *lines, last = metrics_lib.read(workdir)
    assert len(lines) == 4
    assert all(
      {'router/bce', 'router/accuracy'} < line.keys() for line in lines
    )
    assert {'top_k/loss', 'router/loss'} < last.keys()

  @pytest.mark.parametrize(
    ('script', 'words'),
    [
      ('train.py', ('--config.FIELD=VALUE', '--describe', '--compile_for:')),
      ('eval.py', ('--study=list', '--export_format:', '--predict:')),
    ],
  )
  def test_help(self, script, words):
    ended = run(script, '--help')
    assert (ended.status, ended.err) == (1, '')
    assert ended.out.count(f'\n  python {script} --') >= 2
    for word in (*words, '--distributed', '--[no]distributed:', '--workdir:'):
      assert word in ended.out, word

  def test_flops(self):
    ended = run('train.py', CONFIG, '--flops')
    assert ended.status == 0
    assert ended.err == ''
    for line in (
      r'^FLOPs of a forward pass over one sequence of 32 tokens',
      r'^block_0 ',
      r'^block_1 \(routed\) ',
      r'^head ',
      r'^total ',
      r'^ratio to dense +0\.\d+',
      r'MACs',
      r'^6ND ',
    ):
      assert re.search(line, ended.out, re.MULTILINE), line

  def test_describe(self):
    ended = run('train.py', CONFIG, '--config.seed=3', '--describe')
    assert (ended.status, ended.err) == (0, '')
    assert ended.out.startswith('A small Mixture-of-Depths language model')
    assert re.search('^variants: raw, .*, tiny$', ended.out, re.MULTILINE)
    assert '\n--config.seed=3\n    Seeds the initial parameters' in ended.out
    assert '\n--config.model.routing.capacity=0.125\n' in ended.out

  @pytest.mark.parametrize(
    ('config', 'unit'),
    [('lm/paper.py:60m', 'sequence'), ('vit/dynamic.py:static', 'image')],
  )
  def test_flops_need_no_data(self, config, unit):
    """Nor a tokenizer, nor a teacher, nor data that TFDS has prepared."""
    ended = run('train.py', f'--config={ROOT}/configs/{config}', '--flops')
    assert (ended.status, ended.err) == (0, '')
    assert f'FLOPs of a forward pass over one {unit}' in ended.out

  @pytest.mark.usefixtures('one_device')
  def test_sweep(self, tmp_path):
    args = (
      'train.py',
      CONFIG,
      f'--workdir={tmp_path}',
      '--sweep=optimizer.learning_rate=1e-3,1e38',
      *overrides(SMALL),
    )
    ended = run(*args)
    assert ended.status == 0, ended.err
    table = ended.out.splitlines()[-3:]
    assert table[0].split() == [
      'optimizer.learning_rate',
      'top_k/loss',
      'router/loss',
      'never/loss',
    ]
    assert re.match(r'0\.001( +\d\.\d{4}){3}$', table[1])
    assert re.match(r'1e\+38( +diverged){3}$', table[2])
    assert len(json.loads((tmp_path / 'sweep.json').read_text())['points']) == 2
    done = tmp_path / 'optimizer.learning_rate=0.001'
    before = snapshot(done)
    again = run(*args)
    assert again.out.splitlines()[-3:] == table
    assert 'learning_rate=0.001 continues' not in again.err
    assert snapshot(done) == before
    typo = '--sweep=optimizer.learning_rat=1'
    ended = run('train.py', CONFIG, f'--workdir={tmp_path}/new', typo)
    assert_refused(
      ended, "'learning_rat'.*Did you mean 'optimizer.learning_rate'"
    )
    assert not (tmp_path / 'new').exists()

  @pytest.mark.parametrize(
    ('args', 'pattern'),
    # What a config, a mesh, a model or data refuse for themselves is in the
    # tests of those.
    [
      (
        ['--config.train.num_steps =3'],
        r"no field 'num_steps '.*'train.num_steps'",
      ),
      (['--config.model.vocab_size=100'], "vocab_size=100 .*tokenizer's 256"),
      (['--config.evaluation.batch_size=3'], 'evaluation.batch_size=3'),
      (
        ['--config.mesh.data=2', '--config.mesh.tensor=4'],
        "Axis 'heads'.* size 2, which 4 devices",
      ),
      (['--config.optimizer.warmup_steps=20'], 'warmup_steps=20 .*20 steps'),
      (['--config.train.capacity_warmup_steps=20'], 'capacity_warmup_steps=20'),
      (["--config.optimizer.rules=(('x',1,0),)"], 'matches no parameter'),
      (['--config.init=/no/run'], 'init=/no/run: no such file.*hf download'),
      (
        [
          '--config.data.tokenizer=huggingface',
          '--config.data.tokenizer_path=/no/tokenizer.json',
        ],
        '/no/tokenizer.json',
      ),
      (
        ['--compile_for=v9:4x4'],
        "'v9:4x4' is unknown: expected one of v4, v5e",
      ),
    ],
    ids=lambda x: (
      x[-1].removeprefix('--config.')[:60] if isinstance(x, list) else ''
    ),
  )
  def test_bad_input(self, args, pattern, tmp_path):
    ended = run('train.py', CONFIG, f'--workdir={tmp_path}/run', *args)
    assert_refused(ended, pattern)
    assert ended.out == ''
    assert not list(tmp_path.iterdir())

  @pytest.mark.parametrize(
    ('args', 'pattern'),
    [
      ([], '--config is missing'),
      ([CONFIG], '--workdir is missing'),
    ],
  )
  def test_missing_flags(self, args, pattern):
    assert_refused(run('train.py', *args), pattern)

  def test_a_workdir_with_another_config(self, trained):
    workdir, _ = trained
    before = snapshot(workdir)
    for changes, pattern in (
      ({'model.width': 32}, 'model.width: 16 -> 32'),
      ({'seed': 1, 'name': 'x'}, 'seed: 0 -> 1'),
      # All of them may differ, but the last cannot be.
      ({'name': 'x', 'mesh.data': 5}, 'does not fit'),
    ):
      ended = run(
        'train.py',
        CONFIG,
        f'--workdir={workdir}',
        *overrides(SMALL | changes),
      )
      assert_refused(ended, pattern)
      assert snapshot(workdir) == before

  @pytest.mark.usefixtures('one_device')
  def test_divergence_is_one_line(self, tmp_path):
    changes = SMALL | {'optimizer.learning_rate': 1e38, 'log.every': 1}
    ended = run(
      'train.py', CONFIG, f'--workdir={tmp_path}', *overrides(changes)
    )
    assert_refused(
      ended,
      r'(loss|grad_norm) is (nan|inf) at step \d+; .*checkpoint.*Try a lower',
    )
    bad = int(re.search(r'at step (\d+);', ended.err)[1])
    steps = [p.name for p in (tmp_path / 'checkpoints').iterdir()]
    assert all(int(step) < bad for step in steps if step.isdigit())


class TestEval:
  def test_evaluates_and_samples(self, trained, tmp_path):
    workdir = tmp_path / 'run'
    shutil.copytree(trained[0], workdir)
    kept = snapshot(workdir / 'checkpoints')
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
    assert snapshot(workdir / 'checkpoints') == kept
    # The same seed writes the same; no evaluation was asked for.
    again = run('eval.py', f'--workdir={workdir}', '--noevaluate', *samples)
    assert 'held-out' not in again.out
    assert again.out
    assert ended.out.startswith(again.out)

  @pytest.mark.parametrize(
    ('args', 'pattern'),
    [
      (['--step=3'], r'no checkpoint at step 3 .*\[2, 4\]'),
      (['--step=new'], '--step=new: expected an integer'),
      (['--batches=-1'], 'num_batches=-1'),
      (
        ['--sample=0123456789', '--max_new_tokens=5', '--max_length=14'],
        'prompt=10, max_new_tokens=5, max_length=14',
      ),
      (['--sample=a', '--max_new_tokens=0'], 'max_new_tokens=0'),
      (['--sample='], 'a token in each'),
      (['--sample=a', '--rule=bogus'], '--rule=bogus: .*trained for router'),
      (['--sample=a', '--overflow=spill'], 'overflow'),
      (
        ['--study=importance'],
        "expected one of 'arank', 'copying', 'engagement'",
      ),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else '',
  )
  def test_bad_input(self, trained, args, pattern):
    workdir, _ = trained
    before = snapshot(workdir)
    # A wrong number of batches is only looked at by an evaluation.
    evaluate = [] if '--batches=-1' in args else ['--noevaluate']
    ended = run('eval.py', f'--workdir={workdir}', *evaluate, *args)
    assert_refused(ended, pattern)
    assert snapshot(workdir) == before

  def test_no_run_and_no_checkpoint(self, trained, tmp_path):
    assert_refused(run('eval.py'), '--workdir is missing')
    for workdir in (tmp_path, tmp_path / 'nowhere', trained[0] / 'eval.json'):
      ended = run('eval.py', f'--workdir={workdir}')
      assert_refused(ended, 'holds no run')
    assert not (tmp_path / 'nowhere').exists()
    shutil.copy(trained[0] / 'config.json', tmp_path)
    ended = run('eval.py', f'--workdir={tmp_path}')
    assert_refused(ended, 'holds no checkpoint yet')
    assert [p.name for p in tmp_path.iterdir()] == ['config.json']

  def edited(self, trained, tmp_path, edit):
    """Copies a run and changes its config.json."""
    workdir = tmp_path / 'run'
    shutil.copytree(trained[0], workdir)
    held = json.loads((workdir / 'config.json').read_text())
    edit(held)
    (workdir / 'config.json').write_text(json.dumps(held))
    return workdir

  def test_a_vocabulary_that_does_not_match(self, trained, tmp_path):
    def edit(held):
      held['model']['vocab_size'] = 512

    workdir = self.edited(trained, tmp_path, edit)
    before = snapshot(workdir)
    pattern = r'with a different config \(model.vocab_size: 256 -> 512\)'
    for args in (['eval.py'], ['eval.py', '--noevaluate', '--sample=a']):
      assert_refused(run(*args, f'--workdir={workdir}'), pattern)
    assert snapshot(workdir) == before

  def test_a_config_from_elsewhere(self, trained, tmp_path):
    def edit(held):
      held['model']['heads'] = held['model'].pop('num_heads')

    workdir = self.edited(trained, tmp_path, edit)
    ended = run('eval.py', f'--workdir={workdir}')
    assert_refused(ended, "model.heads: LMConfig has no field 'heads'")

  @pytest.mark.parametrize(
    ('data', 'pattern'),
    [
      (b'\xff\xfe', 'cannot be read .it is not UTF-8'),
      (b'[' * 100_000, 'not JSON'),
      (b'{"model": ' * 500 + b'1' + b'}' * 500, 'model.model'),
      (b'{"seed": ' + b'9' * 6000 + b'}', 'not JSON .Exceeds the limit'),
      (
        b'{"optimizer": {"learning_rate": 1' + b'0' * 400 + b'}}',
        'learning_rate=10',
      ),
      (b'', 'not JSON'),
      (b'null', 'the config is a NoneType'),
    ],
    ids=range(7),
  )
  def test_a_config_that_cannot_be_read(self, tmp_path, data, pattern):
    (tmp_path / 'config.json').write_bytes(data)
    for args in (('eval.py',), ('train.py', CONFIG)):
      ended = run(*args, f'--workdir={tmp_path}')
      assert_refused(ended, pattern)
      assert ended.status == 2
      assert f'{tmp_path}/config.json' in ended.err
    assert [p.name for p in tmp_path.iterdir()] == ['config.json']

  @pytest.mark.parametrize('link', [False, True])
  def test_checkpoints_that_are_no_directory(self, trained, tmp_path, link):
    shutil.copy(trained[0] / 'config.json', tmp_path)
    path = tmp_path / 'checkpoints'
    if link:
      path.symlink_to('checkpoints')  # Round and round.
    else:
      path.write_text('mine')
    for args in (('eval.py',), ('train.py', CONFIG, *overrides(SMALL))):
      ended = run(*args, f'--workdir={tmp_path}')
      assert_refused(ended, 'checkpoints')
      assert ended.status == 2
    assert {p.name for p in tmp_path.iterdir()} == {
      'config.json',
      'checkpoints',
    }

  def test_text_that_is_gone(self, trained, tmp_path, monkeypatch):
    gone = {'stdlib': str(tmp_path / 'gone')}
    monkeypatch.setattr(
      corpus, 'sysconfig', types.SimpleNamespace(get_paths=lambda: gone)
    )
    ended = run('eval.py', f'--workdir={trained[0]}')
    assert_refused(ended, "no .*py files under '.*gone'")

  def test_damaged_checkpoints(self, trained, tmp_path):
    workdir = tmp_path / 'run'
    shutil.copytree(trained[0], workdir)
    for step in ('4', '2'):
      for path in (workdir / 'checkpoints' / step / 'state').rglob('*'):
        if path.is_file():
          os.truncate(path, path.stat().st_size // 2)
      ended = run('eval.py', f'--workdir={workdir}', '--noevaluate')
      if step == '4':
        assert ended.status == 0
    assert_refused(ended, r'no checkpoint .* usable \(step 4: .*; step 2: ')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('args', 'pattern'),
  [
    (('train.py', CONFIG, '--config.mesh.data=2'), 'not fit 1 device'),
    (('eval.py',), 'holds no run'),
  ],
  ids=['train', 'eval'],
)
def test_in_a_process_of_its_own(tmp_path, args, pattern):
  ended = start(*args, f'--workdir={tmp_path}/new')
  assert_refused(ended, pattern)
  assert ended.err.count('\n') == 1
  assert ended.out == ''
  assert list(tmp_path.iterdir()) == []
