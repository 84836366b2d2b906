"""Fingerprints of data: what they notice, and how they say it."""

import json

from batch_checks import write
import numpy as np
import pytest

from mod_jax.data import fingerprint


def of_files(root):
  return fingerprint.of_files(
    [(path.name, str(path)) for path in sorted(root.iterdir())]
  )


def said(before, now):
  # As it comes back from a checkpoint.
  before = json.loads(json.dumps(before))
  return fingerprint.differences({'train': before}, {'train': now})


@pytest.fixture
def root(tmp_path):
  write(tmp_path, {f'{i}.txt': bytes([65 + i]) * 100 for i in range(6)})
  return tmp_path


def test_the_same_files_have_the_same_anywhere(root, tmp_path_factory):
  other = tmp_path_factory.mktemp('elsewhere')
  write(other, {path.name: path.read_bytes() for path in root.iterdir()})
  assert of_files(root) == of_files(other)
  assert said(of_files(root), of_files(other)) == []


def gone(root, *names):
  for name in names:
    (root / f'{name}.txt').unlink()


@pytest.mark.parametrize(
  ('change', 'expected'),
  [
    (
      lambda root: write(root, {'1.txt': b'A' * 99 + b'B'}),
      ['the training file 1.txt is changed'],
    ),
    (
      lambda root: gone(root, 0, 1, 2, 3),
      ['4 training files are gone (0.txt, 1.txt, 2.txt, …)'],
    ),
    (
      lambda root: (root / '5.txt').rename(root / '9.txt'),
      [
        'the training file 5.txt is gone',
        'the training file 9.txt is new',
      ],
    ),
  ],
  ids=['content', 'gone', 'renamed'],
)
def test_what_changed_is_named(root, change, expected):
  before = of_files(root)
  change(root)
  assert said(before, of_files(root)) == expected


def test_what_changed_beside_the_files_is_named(root):
  before, now = ({**of_files(root), 'labels': x} for x in 'ab')
  assert said(before, now) == ['training labels: a -> b']
  gone(root, 0)
  assert said(before, of_files(root) | {'labels': 'b'}) == [
    'the training file 0.txt is gone',
    'training labels: a -> b',
  ]


def test_of_very_many_files_a_sample_is_listed(root, monkeypatch):
  monkeypatch.setattr(fingerprint, '_FILES', 3)
  before = of_files(root)
  assert len(before['files']) == 3
  name = next(iter(before['files']))
  write(root, {name: b'changed'})
  assert said(before, of_files(root)) == [
    f'the training file {name} is changed'
  ]
  gone(root, *(set('012345') - {name[0]}))
  changed = said(before, of_files(root))
  assert changed[0] == '6 training files are 1 now'
  # Files that moved up into the sample are not called new.
  assert not [line for line in changed if 'is new' in line]


def test_a_large_file_is_read_in_parts(tmp_path, monkeypatch):
  monkeypatch.setattr(fingerprint, '_BYTES', 4000)
  monkeypatch.setattr(fingerprint, '_BLOCK', 100)
  data = np.random.default_rng(0).bytes(100_000)
  write(tmp_path, {'a': data})
  before = of_files(tmp_path)
  unseen = 0
  for at in range(0, len(data), 4999):
    write(tmp_path, {'a': data[:at] + bytes(500) + data[at + 500 :]})
    unseen += not said(before, of_files(tmp_path))
  assert unseen < 20  # At both ends at least.
  for at in (0, len(data) - 1):
    write(tmp_path, {'a': data[:at] + b'\0' + data[at + 1 :]})
    assert said(before, of_files(tmp_path))


def test_names_may_repeat_and_be_no_text(tmp_path):
  write(tmp_path, {'a': b'1', 'b': b'2'})
  files = [('x\udcff', str(tmp_path / 'a')), ('x\udcff', str(tmp_path / 'b'))]
  told = fingerprint.of_files(files)
  assert list(told['files']) == [r'x\xff', r'x\xff, another']
  json.dumps(told).encode()


def test_records():
  records = [
    {'text': f'{i}', 'image': np.full((2, 2), i), 'more': [b'x', i]}
    for i in range(100)
  ]
  before = fingerprint.of_records(records)
  assert before == fingerprint.of_records(list(records))
  for key, value in (
    ('text', 'changed'),
    ('image', np.full((4, 1), 99)),
    ('image', np.full((2, 2), 99.0)),
    ('more', [b'x99']),
  ):
    other = [*records[:-1], {**records[-1], key: value}]
    (line,) = said(before, fingerprint.of_records(other))
    assert line.startswith('training sampled_records: ')
  (*_, line) = said(before, fingerprint.of_records(records[:-1]))
  assert fingerprint.of_records([])['count'] == 0
