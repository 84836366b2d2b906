"""Flips bits of files of text, and looks at what reads them.

    python tools/fuzz_data.py --flips=700 --seed=0

So many times a file of each kind is damaged: one bit or a few are flipped, or
it is cut. A process of its own reads it. It must not crash, and must not end in
a traceback: what it reads are texts, or it refuses the file in one sentence.
Where hashes stand, in shards of prepared corpora and in Parquet files with
checksums, the texts must be those that were written.
"""

import argparse
import collections
import functools
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading

import pyarrow as pa
from pyarrow import parquet

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 20  # In which a file is read.
WORDS = ['the', 'of', 'Ünïcode', 'mixture', 'depths', '\n']


def write_tables(folder: pathlib.Path) -> dict[str, bool]:
  """Writes a file of each kind; returns by name whether hashes stand there."""
  draw = random.Random(0)
  texts = [
    ' '.join(draw.choices(WORDS, k=draw.randint(0, 30))) for _ in range(400)
  ]
  table = pa.table({'text': texts, 'label': list(range(400))})
  large = table.set_column(0, 'text', table['text'].cast(pa.large_string()))
  zstd = pa.ipc.IpcWriteOptions(compression='zstd')
  for name, new, rows, options in (
    ('stream.arrow', pa.ipc.new_stream, table, None),
    ('file.arrow', pa.ipc.new_file, table, None),
    ('large.arrow', pa.ipc.new_stream, large, None),
    ('zstd.arrow', pa.ipc.new_stream, table, zstd),
  ):
    with new(folder / name, rows.schema, options=options) as writer:
      writer.write_table(rows, max_chunksize=100)
  parquet.write_table(table, folder / 'plain.parquet')
  parquet.write_table(
    table, folder / 'zstd.parquet', compression='zstd', use_dictionary=False
  )
  parquet.write_table(
    table, folder / 'checksums.parquet', write_page_checksum=True
  )
  return {p.name: p.stem == 'checksums' for p in sorted(folder.iterdir())}


def read_table(path) -> list[str]:
  from mod_jax.data import tables

  return list(tables.read_column(str(path), 'text'))


def prepare(folder: pathlib.Path):
  """Makes a small corpus, of whose shards a sample sees a small part."""
  from mod_jax.data import prepare as prepare_lib
  from mod_jax.data import text

  for group in ('train', 'eval'):
    (folder / group).mkdir()
    for i in range(4):
      (folder / group / f'{i}.txt').write_text(f'{group} {i} ' * 2000)
  source = text.TextDataConfig(
    source='files',
    files=f'{folder}/train/*.txt',
    eval_files=f'{folder}/eval/*.txt',
  )
  prepare_lib.prepare(source, str(folder / 'corpus'), shard_bytes=2**15)


def read_corpus(shard) -> list[int]:
  """Reads all of a corpus, until its shards are checked."""
  from mod_jax.data import prepared

  prepared._begin_check.cache_clear()  # The process before has checked them.
  stream = prepared.open_stream(str(shard.parent), 'train')
  for thread in threading.enumerate():
    if isinstance(thread, prepared._WholeCheck):
      thread.join()
  return stream.read(0, len(stream)).tolist()


def damaged(data: bytes, draw) -> bytes:
  """Returns bytes of which some bits are flipped, or the end is missing."""
  if draw.random() < 0.1:
    return data[: draw.randrange(len(data))]
  result = bytearray(data)
  for _ in range(draw.choice([1, 1, 1, 4])):
    result[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
  return bytes(result)


def outcome(read, expected) -> str:
  """Reads in a process of its own; returns what came of it."""
  from mod_jax.errors import UserError

  reader, writer = os.pipe()
  child = os.fork()
  if not child:
    signal.alarm(SECONDS)
    try:
      said = 'as written' if read() == expected else 'other texts'
    except UserError:
      said = 'refused'
    except BaseException as error:
      said = f'TRACEBACK {type(error).__name__}'
    os.write(writer, said.encode())
    os._exit(0)
  os.close(writer)
  with open(reader) as pipe:
    said = pipe.read()
  _, status = os.waitpid(child, 0)
  if os.WIFSIGNALED(status):
    return f'CRASH by {signal.Signals(os.WTERMSIG(status)).name}'
  return said


def fuzz(path, read, hashed: bool, flips: int, seed: int) -> int:
  """Damages a file so many times; prints what came, returns what is wrong."""
  data, expected = path.read_bytes(), read(path)
  found = collections.Counter()
  for i in range(flips):
    path.write_bytes(damaged(data, random.Random(f'{seed} {path.name} {i}')))
    found[outcome(functools.partial(read, path), expected)] += 1
  path.write_bytes(data)
  told = ', '.join(f'{n} {what}' for what, n in found.most_common())
  print(f'{path.name} ({len(data):,} bytes): {told}', flush=True)
  right = {'as written', 'refused'} | (set() if hashed else {'other texts'})
  return sum(n for what, n in found.items() if what not in right)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--flips', type=int, default=700, help='Of each file.')
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  sys.path[:0] = [str(ROOT), str(ROOT / 'kernels')]
  from mod_jax.data import fingerprint

  fingerprint._BYTES = 2**10
  wrong = 0
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    (folder / 'tables').mkdir()
    for file, hashed in write_tables(folder / 'tables').items():
      path = folder / 'tables' / file
      wrong += fuzz(path, read_table, hashed, args.flips, args.seed)
    prepare(folder)
    for path in sorted((folder / 'corpus').glob('train-*.tokens'))[:2]:
      wrong += fuzz(path, read_corpus, True, args.flips, args.seed)
  print(f'seed {args.seed}: {wrong} crashes, tracebacks and wrong texts')
  sys.exit(wrong > 0)


if __name__ == '__main__':
  main()
