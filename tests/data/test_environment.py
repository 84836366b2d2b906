"""The source text of the environment: whose files it is, and their versions."""

import json

import pytest

from mod_jax.data import environment, fingerprint, text


def install(root, name, version, files):
  """Puts a package in a folder as an installer does."""
  info = f'{name}-{version}.dist-info'
  files = {
    **files,
    f'{info}/METADATA': f'Name: {name}\nVersion: {version}\n',
    f'{info}/RECORD': '',
  }
  files[f'{info}/RECORD'] = ''.join(f'{path},,\n' for path in files)
  for path, content in files.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


@pytest.fixture
def packages(tmp_path, monkeypatch):
  """Two pinned packages and one that is not, in an environment of their own."""
  site = tmp_path / 'lib' / 'site-packages'
  sources = {
    'pinned/__init__.py': '',
    'pinned/a.py': 'a = 1\n',
    'pinned/table.csv': '1,2\n',
    '../../bin/script.py': '#!/here/python\n',
  }
  install(site, 'pinned', '1.2', sources)
  copies = {'also_pinned/a.py': 'a = 1\n', 'also_pinned/b.py': 'a = 2\n'}
  copies['also_pinned/stripped.py'] = 'a = 3\n'
  install(site, 'also_pinned', '3', copies)
  (site / 'also_pinned/stripped.py').unlink()
  install(site, 'other', '1', {'other/c.py': 'c = 3\n'})
  (tmp_path / 'lib/abc.py').write_text('abc = 4\n')
  (tmp_path / 'requirements.txt').write_text(
    '# What is pinned.\npinned==1.2\nnot-installed==0.1\n'
  )
  (tmp_path / 'requirements-no-deps.txt').write_text('also-pinned==4\n')
  monkeypatch.setattr(environment, '_ROOT', tmp_path)
  monkeypatch.setattr('sys.path', [str(site)])
  monkeypatch.setattr(
    'sysconfig.get_paths', lambda: {'stdlib': str(tmp_path / 'lib')}
  )
  environment.list_files.cache_clear()
  yield site
  environment.list_files.cache_clear()


def test_pinned_packages_only_and_each_content_once(packages):
  files = environment.list_files()
  assert [f.name for f in files] == [
    'also_pinned/a.py',
    'also_pinned/b.py',
    'python/abc.py',
  ]
  assert files[1].path == str(packages / 'also_pinned/b.py')


def test_versions_are_part_of_the_fingerprint(packages):
  config = text.TextDataConfig(source='environment', eval_fraction=0.5)
  before = json.loads(json.dumps(text.fingerprint(config)))
  assert set(before['versions']) == {'python', 'pinned', 'also-pinned'}
  assert before['train']['count'] + before['held_out']['count'] == 3
  install(packages, 'other', '2', {'other/c.py': 'c = 4\n'})
  environment.list_files.cache_clear()
  assert text.fingerprint(config) == before
  metadata = packages / 'pinned-1.2.dist-info/METADATA'
  metadata.write_text('Name: pinned\nVersion: 1.3\n')
  assert fingerprint.differences(before, text.fingerprint(config)) == [
    'versions pinned: 1.2 -> 1.3'
  ]


@pytest.mark.slow
def test_this_environment():
  files = environment.list_files()
  names = {f.name for f in files}
  assert {'python/dataclasses.py', 'jax/_src/core.py'} <= names
  assert not [n for n in names if n.startswith(('mod_jax', '__editable__'))]
  config = text.TextDataConfig(source='environment')
  train, held_out = text.split_files(config)
  assert 0.02 < len(held_out) / len(files) < 0.1
  assert {*train, *held_out} == set(files)
