"""A run whose directory is in an object store, `gs://…`.

The store is emulated: objects in a dictionary, behind fsspec for all that goes
through etils.epath, and behind HTTP for TensorStore, which Orbax writes arrays
with. As in the true one, there are no directories, nothing can be appended, and
an object appears when its writer closes it.
"""

import http.server
import io
import json
import os
import pathlib
import re
import threading
import urllib.parse

import chex
from etils.epath import backend as epath_backend
import fsspec
from fsspec.implementations import memory
import jax
from orbax.checkpoint._src.path import gcs_utils
import pytest
from tiny_runs import make_config

from mod_jax import config as config_lib
from mod_jax import paths, tasks
from mod_jax.data import corpus, image_folder
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.pretrained.source import Source
from mod_jax.runs import lock
from mod_jax.runs import metrics as metrics_lib
from mod_jax.runs import workdir as workdir_lib
from mod_jax.sweeps import grid
from mod_jax.tasks import phases
from mod_jax.train import evaluation, loop

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures('one_device'),
]

OBJECTS = {}  # '/bucket/name' -> MemoryFile


class Bucket(memory.MemoryFileSystem):
  """What gcsfs would be: only names with '/' in them, and whole objects."""

  protocol = ('gs', 'gcs')
  store = OBJECTS
  pseudo_dirs = property(lambda self: [])  # None, and none can be added.
  cachable = False

  @classmethod
  def _strip_protocol(cls, path):
    if isinstance(path, list):
      return [cls._strip_protocol(p) for p in path]
    path = re.sub('^gc?s://', '', os.fspath(path)).strip('/')
    return f'/{path}' if path else ''

  def mkdir(self, path, create_parents=True, **kwargs):
    pass

  def makedirs(self, path, exist_ok=False):
    pass

  def rmdir(self, path):
    pass

  def _open(self, path, mode='rb', **kwargs):
    path = self._strip_protocol(path)
    if mode == 'rb':
      if path not in OBJECTS:
        raise FileNotFoundError(path)
      return io.BytesIO(OBJECTS[path].getvalue())
    assert mode == 'wb', f'no object can be opened for {mode}'
    return Upload(path)


class Upload(io.BytesIO):
  """An object on its way."""

  def __init__(self, path):
    super().__init__()
    self.path = path

  def close(self):
    if not self.closed:
      put(self.path, self.getvalue())
    super().close()


def put(path, data):
  OBJECTS[path] = memory.MemoryFile(None, path, data)


class Handler(http.server.BaseHTTPRequestHandler):
  """As much of the JSON API of Google Cloud Storage as TensorStore calls."""

  protocol_version = 'HTTP/1.1'

  def log_message(self, *args):
    pass

  def answer(self, status, body=b'', **headers):
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def parse(self):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    match = re.search('/b/([^/]+)/o(?:/(.*))?$', url.path)
    name = urllib.parse.unquote(match[2] or query.get('name', ''))
    path = f'/{match[1]}/{name}'
    found = OBJECTS.get(path)
    # A generation is a time; equal only for the same object.
    generation = 0 if found is None else id(found)
    wanted = query.get('ifGenerationMatch')
    if wanted is not None and int(wanted) != generation:
      self.read_body()
      self.answer(412)
      return None
    return path, found, generation, query

  def read_body(self):
    return self.rfile.read(int(self.headers.get('Content-Length', 0)))

  def do_GET(self):  # noqa: N802
    if (parsed := self.parse()) is None:
      return
    path, found, generation, query = parsed
    if path.endswith('/') and 'alt' not in query:
      names = sorted(name.removeprefix(path) for name in OBJECTS)
      names = [
        name
        for name in names
        if not name.startswith('/')
        and name.startswith(query.get('prefix', ''))
        and name >= query.get('startOffset', '')
        and (not query.get('endOffset') or name < query['endOffset'])
      ]
      items = [{'name': n, 'size': str(OBJECTS[path + n].size)} for n in names]
      self.answer(200, json.dumps({'items': items}).encode())
    elif found is None:
      self.answer(404)
    elif query.get('ifGenerationNotMatch') == str(generation):
      self.answer(304)
    else:
      data, status, headers = found.getvalue(), 200, {}
      wanted = re.match(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
      if wanted:
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        headers['Content_Range'] = f'bytes {first}-{last}/{len(data)}'
        data, status = data[first : last + 1], 206
      self.answer(status, data, x_goog_generation=str(generation), **headers)

  def do_POST(self):  # noqa: N802
    if (parsed := self.parse()) is None:
      return
    path, *_ = parsed
    put(path, self.read_body())
    told = {'name': path, 'generation': str(id(OBJECTS[path]))}
    self.answer(200, json.dumps(told).encode())

  def do_DELETE(self):  # noqa: N802
    if (parsed := self.parse()) is None:
      return
    path, found, *_ = parsed
    OBJECTS.pop(path, None)
    self.answer(404 if found is None else 204)


@pytest.fixture(scope='module', autouse=True)
def store():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  with pytest.MonkeyPatch.context() as patch:
    url = f'http://127.0.0.1:{server.server_port}'
    patch.setenv('TENSORSTORE_GCS_HTTP_URL', url)
    patch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'none')
    # It would ask a library that is not needed here.
    patch.setattr(
      gcs_utils, 'is_hierarchical_namespace_enabled', lambda path: False
    )
    for name in Bucket.protocol:
      fsspec.register_implementation(name, Bucket, clobber=True)
    epath_backend.fsspec_backend._get_filesystem.cache_clear()
    yield
  epath_backend.fsspec_backend._get_filesystem.cache_clear()
  server.shutdown()
  server.server_close()


@pytest.fixture(autouse=True)
def _nothing_here(tmp_path, monkeypatch):
  """Whatever takes a URL for a local path would write below this directory."""
  here = tmp_path / 'here'
  here.mkdir()
  monkeypatch.chdir(here)
  yield
  assert list(here.iterdir()) == []


def test_a_run_in_a_store(texts, tmp_path, caplog, monkeypatch):
  saving = {'checkpoint.every': 1, 'checkpoint.keep': 2}
  config = make_config(texts, **saving, **{'log.tensorboard': True})
  with monkeypatch.context() as patch:
    patch.setattr(evaluation, 'report', lambda *args: None)
    here = phases.train(
      config_lib.replace(config, {'log.tensorboard': False}), tmp_path / 'run'
    )
  workdir = 'gs://bucket/runs/a'
  assert not phases.train(config, workdir, max_steps=2).finished
  assert 'no TensorBoard events' in caplog.text
  # As a kill leaves it: the next save begun but not finished.
  put('/bucket/runs/a/checkpoints/3/state/d/half', b'x')
  result = phases.train(config, workdir)
  assert result.finished
  assert result.metrics == here.metrics

  stored = {name.removeprefix('/bucket/runs/a/') for name in OBJECTS}
  kept = {name.split('/')[1] for name in stored if name.startswith('check')}
  assert kept == {'3', '4'}
  assert {
    'config.json',
    'eval.json',
    'metrics.jsonl',
    'pictures/curves.png',
    'checkpoints/4/manifest.json',
  } <= stored
  assert not [name for name in stored if 'tmp' in name]
  assert metrics_lib.read(workdir) == metrics_lib.read(tmp_path / 'run')
  events = [event['event'] for event in metrics_lib.read_events(workdir)]
  assert events == ['start', 'first_step', 'end'] * 2

  trained = tasks.load(workdir)
  assert trained.step == 4
  assert evaluation.evaluate(trained, workdir) == here.metrics
  params = Source.open(workdir).read()['params']
  chex.assert_trees_all_equal(params, jax.device_get(result.state.params))

  # Damage is found there as it is here.
  name = max(
    (n for n in OBJECTS if '/checkpoints/4/state/' in n),
    key=lambda n: OBJECTS[n].size,
  )
  put(name, OBJECTS[name].getvalue()[:-1])
  caplog.clear()
  assert phases.train(config, workdir, max_steps=0).step == 3
  assert 'using the one at step 3 instead' in caplog.text


def test_metrics_are_written_anew_now_and_then(monkeypatch):
  workdir = 'gs://bucket/metrics'
  with metrics_lib.MetricWriter(workdir, tensorboard=False) as writer:
    writer.write(1, 'train', {'loss': 1.0})
    assert metrics_lib.read(workdir) == []
    writer.flush()
    assert len(metrics_lib.read(workdir)) == 1
    writer.write(2, 'train', {'loss': 1.0})
    assert len(metrics_lib.read(workdir)) == 1
    writer.write(2, 'eval', {'loss': 1.0})
    assert len(metrics_lib.read(workdir)) == 3
    monkeypatch.setattr(metrics_lib, '_REWRITE_SECS', -1.0)
    writer.write(3, 'train', {'loss': 1.0})
    assert len(metrics_lib.read(workdir)) == 4
  with metrics_lib.MetricWriter(workdir, tensorboard=False, resume_step=2):
    pass
  assert [line['step'] for line in metrics_lib.read(workdir)] == [1, 2, 2]


def test_a_sweep_in_a_store(texts, monkeypatch):
  config = make_config(texts)
  points = []

  def train(task, config, workdir, **kwargs):
    points.append(str(workdir))
    raise loop.TrainingDiverged('as if')

  monkeypatch.setattr(loop, 'train', train)
  grid.run(config, {'seed': [0, 1]}, 'gs://bucket/sweep')
  assert points == [f'gs://bucket/sweep/seed={i}' for i in (0, 1)]
  told = json.loads(OBJECTS['/bucket/sweep/sweep.json'].getvalue())
  assert len(told['points']) == 2


def test_what_must_be_elsewhere(texts, monkeypatch):
  def missing(protocol):
    raise ImportError('Please install gcsfs')

  put('/bucket/weights/vit.safetensors', b'x')
  url = 'gs://bucket/texts'
  config = make_config(texts)
  for message, call in (
    ('memory://x: runs live in', lambda: phases.train(config, 'memory://x')),
    ('s3://b/x: runs live in', lambda: phases.train(config, 's3://b/x')),
    (f"files='{url}.* is a URL", lambda: corpus.list_files(f'{url}/*.txt')),
    (f"dir='{url}.* is a URL", lambda: TextDataConfig(cache_dir=url)),
    (f"path='{url}.* is a URL", lambda: image_folder._layout(url)),
    (
      'copy it here first',
      lambda: workdir_lib.find('gs://bucket/weights/vit.safetensors'),
    ),
  ):
    with pytest.raises(UserError, match=message):
      call()
  monkeypatch.setattr(fsspec, 'get_filesystem_class', missing)
  with pytest.raises(UserError, match='gs://bucket/x .*pip install gcsfs'):
    paths.expand('gs://bucket/x')


def test_a_lock_in_a_store(monkeypatch):
  workdir, path = 'gs://bucket/locked', '/bucket/locked/lock.json'
  monkeypatch.setattr(lock, '_POLL', 0.02)
  monkeypatch.setattr(lock, '_BEAT', 0.05)
  monkeypatch.setattr(lock, '_DEAD', 0.4)
  with lock.held(workdir) as held:
    text = OBJECTS[path].getvalue()
    assert json.loads(text)['pid'] == os.getpid()
    with pytest.raises(lock.InUse, match='in use by process'):
      lock.Lock(held.path).acquire()  # Its heart beats.
    assert OBJECTS[path].getvalue() == text
  assert path not in OBJECTS
  put(path, text)
  put('/bucket/locked/lock.beat', b'the last one')
  with lock.held(workdir):
    assert OBJECTS[path].getvalue() != text
  assert not [name for name in OBJECTS if name.startswith('/bucket/locked')]


def test_expanding(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert paths.expand('~/a') == pathlib.Path(tmp_path, 'a')
  assert str(paths.expand('gs://bucket/a') / 'b') == 'gs://bucket/a/b'
  assert str(paths.expand(paths.expand('gs://b/~'))) == 'gs://b/~'
