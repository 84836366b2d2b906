"""Makes tasks for lm-evaluation-harness from held-out texts, without a network.

    python benchmarks/text_tasks.py --texts='texts/**/*.txt' --out=tasks
    python -m mod_jax.lm_eval --model=RUN --include_path=tasks \\
      --tasks=next_sentence,last_word

Only files are used that a run on the same texts holds out, and only paragraphs
of prose with two sentences or more. `next_sentence` asks which of four
sentences ends a paragraph; the others end paragraphs of other files.
`last_word` asks for the last word of a paragraph, as LAMBADA does (Paperno et
al. 2016). Documents and tasks are written to `out`.
"""

import json
import pathlib
import random

from absl import flags
from passages import held_out, paragraphs, sentences

from mod_jax import cli
from mod_jax.data import text
from mod_jax.errors import UserError

_TEXTS = flags.DEFINE_string('texts', None, 'Glob of the texts.', required=True)
_OUT = flags.DEFINE_string('out', None, 'Directory.', required=True)
_DOCUMENTS = flags.DEFINE_integer('documents', 500, 'Of each task, at most.')
_CHOICES = 4

# A harness task in YAML, which JSON is a part of.
_TASKS = {
  'next_sentence': {
    'output_type': 'multiple_choice',
    'doc_to_text': '{{context}}',
    'doc_to_choice': '{{choices}}',
    'doc_to_target': '{{label}}',
    'metric_list': [{'metric': 'acc'}, {'metric': 'acc_norm'}],
  },
  'last_word': {
    'output_type': 'loglikelihood',
    'doc_to_text': '{{before}}',
    'doc_to_target': ' {{word}}',
    'metric_list': [{'metric': 'acc'}, {'metric': 'perplexity'}],
  },
}


def documents(files: list[list[str]], most: int) -> list[dict]:
  """Returns what the tasks ask, in a random order that is always the same.

  Args:
    files: paragraphs of each file.
    most: documents to return.
  """
  rng = random.Random(0)
  ends = [[sentences(line)[-1] for line in lines] for lines in files]
  found = []
  for i, lines in enumerate(files):
    others = {x for of in ends[:i] + ends[i + 1 :] for x in of} - {*ends[i]}
    for line, end in zip(lines, ends[i], strict=True):
      context = line.removesuffix(end).rstrip()
      before, _, word = line.removesuffix('.').rpartition(' ')
      choices = [end, *rng.sample(sorted(others), _CHOICES - 1)]
      rng.shuffle(choices)
      found.append(
        {
          'context': context,
          'choices': choices,
          'label': choices.index(end),
          'before': before,
          'word': word,
        }
      )
  rng.shuffle(found)
  return found[:most]


def main(_):
  config = text.TextDataConfig(source='files', files=_TEXTS.value)
  texts = held_out(config)
  files = list(map(paragraphs, texts))
  files = [lines for lines in files if lines]
  if len(files) < _CHOICES:
    raise UserError(
      f'--texts={_TEXTS.value}: only {len(files)} of {len(texts)} held-out'
      f' files have paragraphs of two sentences; {_CHOICES} are needed.'
    )
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  path = out.resolve() / 'documents.jsonl'
  asked = documents(files, _DOCUMENTS.value)
  path.write_text(''.join(json.dumps(x) + '\n' for x in asked))
  shared = {
    'dataset_path': 'json',
    'dataset_kwargs': {'data_files': {'test': str(path)}},
    'test_split': 'test',
  }
  for name, task in _TASKS.items():
    fields = {'task': name, **shared, **task}
    (out / f'{name}.yaml').write_text(json.dumps(fields, indent=2) + '\n')
  print(f'{len(asked)} documents of {len(files)} files in {out}')


if __name__ == '__main__':
  cli.run(main)
