"""Files of text: listing, holding out, copies, pieces."""

import os

from batch_checks import write
import pytest

from mod_jax.data import corpus


def names(files):
  return [f.name for f in files]


def test_links_in_a_circle(tmp_path):
  inner, outside = tmp_path / 'root/a/b', tmp_path / 'outside'
  for folder in (inner, outside):
    folder.mkdir(parents=True)
    (folder / f'{folder.name}.txt').write_text('x')
  for i in range(2):
    (inner / f'up{i}').symlink_to(tmp_path / 'root', target_is_directory=True)
  (inner / 'out').symlink_to(outside, target_is_directory=True)
  files = corpus.list_files(f'{tmp_path}/root/**/*.txt')
  assert [f.name for f in files] == ['a/b/b.txt', 'a/b/out/outside.txt']


def test_listing_is_sorted_relative_and_without_repeats(tmp_path):
  write(tmp_path, {'b.txt': 'b', 'a/z.txt': 'z', 'a/y.txt': 'y', 'e.txt': ''})
  (tmp_path / 'link.txt').symlink_to(tmp_path / 'b.txt')
  files = corpus.list_files(f'{tmp_path}/**/*.txt, {tmp_path}/a/*.txt')
  assert [os.path.realpath(f.path) for f in files] == [
    str(tmp_path / n) for n in ('a/y.txt', 'a/z.txt', 'b.txt')
  ]
  assert names(files)[:2] == ['a/y.txt', 'a/z.txt']


def test_of_two_names_the_first_counts_in_any_order(tmp_path, monkeypatch):
  write(tmp_path, {'b/file.txt': 'text'})
  (tmp_path / 'a').symlink_to(tmp_path / 'b', target_is_directory=True)
  found = [f'{tmp_path}/{name}/file.txt' for name in 'ab']
  for order in (found, found[::-1]):
    monkeypatch.setattr(corpus.paths, 'glob', lambda _, order=order: order)
    assert names(corpus.list_files(f'{tmp_path}/*/*.txt')) == ['a/file.txt']


def test_listing_takes_braces_and_commas_in_names(tmp_path):
  write(tmp_path, {n: n for n in ('a/x.txt', 'b/x.txt', 'b/y.md', 'c, d.txt')})

  def found(patterns):
    return names(corpus.list_files(patterns))

  # Names say which of the directories, as where a wildcard matched it.
  assert found(f'{tmp_path}/{{a,b}}/x.txt') == ['a/x.txt', 'b/x.txt']
  assert found(f'{tmp_path}/{{a,b}}/*.{{txt,md}}') == [
    *('a/x.txt', 'b/x.txt', 'b/y.md')
  ]
  assert found(f'{tmp_path}/c, d.txt') == ['c, d.txt']
  assert found(f'{tmp_path}/c[,]*, {tmp_path}/a/{{x,y{{1,2}}}}.txt') == [
    *('c, d.txt', 'x.txt')
  ]


def test_stdlib_is_source_of_the_library_only():
  files = corpus.list_stdlib()
  assert 'dataclasses.py' in names(files)
  assert all(n.endswith('.py') for n in names(files))
  assert not [n for n in names(files) if 'site-packages' in n]
  assert names(files) == sorted(names(files), key=os.fsencode)


def test_holding_out_is_stable_and_close_to_the_fraction():
  files = [
    corpus.TextFile(name=f'{i}.txt', path=f'/{i}', size=1, mtime_ns=0)
    for i in range(1000)
  ]
  train, held_out = corpus.hold_out(files, 0.1)
  assert 60 < len(held_out) < 140
  assert sorted(names(train + held_out)) == sorted(names(files))
  _, fewer = corpus.hold_out(files[:500], 0.1)
  assert set(names(fewer)) <= set(names(held_out))


@pytest.mark.parametrize('fraction', [1e-9, 1 - 1e-9])
def test_holding_out_leaves_neither_side_empty(fraction):
  files = [
    corpus.TextFile(name=f'{i}', path=f'/{i}', size=1, mtime_ns=0)
    for i in range(3)
  ]
  train, held_out = corpus.hold_out(files, fraction)
  assert {len(train), len(held_out)} == {1, 2}
  assert corpus.hold_out(files[:1], fraction) == (files[:1], [])


def test_copies_of_held_out_files_are_not_trained_on(tmp_path):
  long = bytes(2**16)
  write(
    tmp_path,
    {
      't/copy': 'same',
      't/size': 'sane',
      't/long': long + b'1',
      't/longcopy': long + b'2',
      'h/a': 'same',
      'h/b': long + b'2',
    },
  )
  train = corpus.list_files(f'{tmp_path}/t/*')
  held_out = corpus.list_files(f'{tmp_path}/h/*')
  assert names(corpus.without_copies(train, held_out)) == ['long', 'size']
  assert corpus.without_copies(held_out, held_out) == []
  every = corpus.without_copies([*train, *held_out])
  assert names(every) == ['copy', 'long', 'longcopy', 'size']


def test_long_files_are_read_in_pieces_that_end_with_a_line(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(corpus, '_CHUNK', 8)
  text = 'abcdé\n' * 5 + 'é' * 21 + '\nend'
  write(tmp_path, {'a': text.encode() + b'\xc3'})
  *chunks, last = corpus.chunks(str(tmp_path / 'a'))
  assert b''.join([*chunks, last]) == text.encode() + b'\xc3'
  assert len(chunks) > 3
  assert all(len(c) <= 19 and c.decode() for c in chunks)
  assert chunks[0].endswith(b'\n')
