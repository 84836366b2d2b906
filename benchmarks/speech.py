"""Adaptive width in a recogniser of real speech: telephone prompts.

    apt install asterisk-core-sounds-en asterisk-core-sounds-en-wav
    python benchmarks/speech.py --data=/usr/share --workdir=runs/speech

The prompts of Asterisk as Debian packages them: 25 minutes of one speaker at
8 kHz, and a list of what is said (CC BY-SA 3.0). Without the rights to install,
`apt download` both, unpack them by `dpkg -x FILE.deb ROOT`, and give
`--data=ROOT/usr/share`. Prompts of more than eight seconds are left out, and so
are tones, silences, and texts with numbers or remarks that nobody reads out. A
tenth is held out, whose texts are not trained on.

A Wav2Vec2 is trained from nothing and converted for each budget. Each run is a
line of `speech.jsonl` beside this file; see `study.py`.
"""

import gzip
import json
import pathlib
import re
import sys

from absl import app, flags
import machine
import numpy as np
import speech_runs
from study import Study
import study_tables

from mod_jax import config as config_lib
from mod_jax.errors import UserError

_DATA = flags.DEFINE_string(
  'data', '/usr/share', 'Directory in which the packages are installed.'
)
_SEEDS = flags.DEFINE_list('seeds', ['0'], 'A dense run for each.')
_STUDY = Study(__file__, 'runs/speech')

BUDGETS = (0.4, 0.6)
_LIST = 'doc/asterisk-core-sounds-en/core-sounds-en.txt.gz'
_SOUNDS = 'asterisk/sounds/en_US_f_Allison'


def prompts(data: str) -> dict[pathlib.Path, str]:
  """Returns the texts of the prompts, by path of the recording.

  Raises:
    UserError: the packages are not there.
  """
  listed, sounds = pathlib.Path(data, _LIST), pathlib.Path(data, _SOUNDS)
  for path in (listed, sounds):
    if not path.exists():
      raise UserError(
        f'{path} is missing: apt install asterisk-core-sounds-en'
        ' asterisk-core-sounds-en-wav, or say by --data where else its'
        ' /usr/share is.'
      )
  with gzip.open(listed, 'rt', encoding='utf-8') as file:
    lines = (line.partition(':') for line in file)
    text_of = {name: text.strip() for name, _, text in lines if text.strip()}
  # In sentences the list has digits, and it says elsewhere how they are read.
  read_as = {str(i): text_of[f'digits/{i}'] for i in range(10)}
  found = {}
  for name, text in text_of.items():
    text = re.sub(r'\b\d\b', lambda digit: read_as[digit[0]], text)
    text = text.replace('-', ' ')
    path = sounds / f'{name}.wav'
    if path.exists() and not re.search(r'[\d(\[]', text):
      found[path] = text
  return found


def write_lists(data: str, folder: pathlib.Path) -> None:
  """Writes the recordings to train on, and those held out, as manifests."""
  found = prompts(data)
  order = np.random.default_rng(0).permutation(len(found))
  paths = np.array(sorted(found))[order]
  held_out = paths[: len(paths) // 10]
  unseen = {found[path] for path in held_out}
  trained = [path for path in paths if found[path] not in unseen]
  folder.mkdir(parents=True, exist_ok=True)
  for split, listed in (('train', trained), ('eval', held_out)):
    lines = [
      json.dumps({'audio': str(path.absolute()), 'text': found[path]})
      for path in listed
    ]
    (folder / f'{split}.jsonl').write_text('\n'.join(lines) + '\n')


def planned(seed: int, folder: pathlib.Path):
  """Returns the runs of a seed, each after the one that it starts from."""
  words = machine.configs('speech/words.py')
  names = ('tiny', 'acm_tiny') if _STUDY.tiny else ('', 'acm')
  changes = {
    'data.source': 'folder',
    'data.path': str(folder.absolute()),
    'data.buckets': (1.0, 2.0, 4.0, 8.0),
    'data.mask_span': 5,
    'model.vocab_size': 40,
  }
  dense, acm = (
    config_lib.replace(words.get_config(name), changes) for name in names
  )
  if not _STUDY.tiny:
    dense = config_lib.replace(dense, {'train.num_steps': 1500})
  # The loss is a sum over a recording, and these are longer than `words`.
  acm = config_lib.replace(acm, {'objective.budget_weight': 20.0})
  return speech_runs.planned(_STUDY, dense, acm, seed, BUDGETS)


def main(_):
  if not _STUDY.only_table:
    folder = _STUDY.workdir('prompts')
    write_lists(_DATA.value, folder)
    for seed in map(int, _SEEDS.value):
      _STUDY.train(planned(seed, folder), speech_runs.tell(_STUDY))
  found = _STUDY.results()
  if not found:
    sys.exit('No run is finished yet.')
  print(study_tables.speech(found))


if __name__ == '__main__':
  app.run(main)
