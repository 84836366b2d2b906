"""Evaluates, studies and uses a run: predictions, samples, exports.

  python eval.py --workdir=runs/mod
  python eval.py --workdir=runs/amod --noevaluate --predict='photos/*.{jpg,png}'
  python eval.py --workdir=runs/amod --noevaluate --predict='photos/*.jpg' \\
    --predictions=photos.csv
  python eval.py --workdir=runs/mod --noevaluate --sample='Once upon' \\
    --rule=threshold --temperature=0
  python eval.py --workdir=runs/vit --noevaluate --export=out \\
    --export_format=huggingface

Where the package is installed, `mod-jax-eval` is the same command.

--study=NAME takes a longer look at the model; --study=list lists the studies
  of this run's kind of model.
--distributed joins the other hosts of a run whose model one host cannot hold.
  Start the same command on each of them; on TPU pods and under Slurm the hosts
  find each other, elsewhere set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
  JAX_PROCESS_ID.

The config is the one that the run was trained with.
"""

import itertools
import json
import os
import typing

from absl import flags
import jax
import numpy as np

from mod_jax import cli, paths, tables, tasks
from mod_jax.data import image_folder
from mod_jax.errors import UserError
from mod_jax.models.detr import DETRConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.pretrained import export as export_lib
from mod_jax.pretrained import load as load_lib
from mod_jax.runs import best
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation

_BATCH = 32  # Pictures that are predicted at a time.


def define_flags() -> None:
  flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
  flags.DEFINE_string(
    'step', None, 'Checkpoint, or best; by default the newest.'
  )
  flags.DEFINE_bool(
    'evaluate', True, 'Measure held-out losses and draw the pictures.'
  )
  flags.DEFINE_integer(
    'batches',
    None,
    "Held-out batches; 0 for all; by default the config's.",
    lower_bound=0,
  )
  flags.DEFINE_multi_string(
    'study',
    [],
    'Longer look at the model to take; `list` lists those that there are',
  )
  flags.DEFINE_multi_string(
    'predict',
    [],
    'Pictures to classify or to search for objects, or recordings to'
    ' transcribe: a file, or globs in quotes, separated by commas, as in'
    " 'photos/*.{jpg,png}'",
  )
  flags.DEFINE_string(
    'predictions',
    None,
    'File for the classes that --predict finds, ending in .csv or .json.',
  )
  flags.DEFINE_string(
    'export', None, 'Directory to write the model to, for use elsewhere.'
  )
  flags.DEFINE_enum(
    'export_format',
    'safetensors',
    typing.get_args(export_lib.Format),
    'Who reads it: mod_jax itself (safetensors), transformers, timm or PEFT.',
  )
  flags.DEFINE_bool(
    'export_dense',
    False,
    'Of a routed or pruned model, export the dense model that has its weights.',
  )
  flags.DEFINE_multi_string('sample', [], 'Text to continue')
  flags.DEFINE_integer(
    'max_new_tokens',
    None,
    'Tokens to add; by default up to the length of training.',
  )
  flags.DEFINE_integer(
    'max_length', None, 'Room for prompt and new tokens; by default both fit.'
  )
  flags.DEFINE_float('temperature', 0.7, '0 for the likeliest.')
  flags.DEFINE_integer('top_k', 0, 'Draw among so many; 0 for all.')
  flags.DEFINE_float('top_p', 0.95, 'Nucleus to draw from.')
  flags.DEFINE_integer(
    'seed',
    0,
    'Of the random numbers of --sample.',
    lower_bound=0,
    upper_bound=2**32 - 1,
  )
  flags.DEFINE_string(
    'rule',
    None,
    'Causal rule of --sample, of those that the model was trained for.',
  )
  flags.DEFINE_enum(
    *('overflow', 'exact', ['exact', 'drop']),
    'Caches of routed blocks in --sample: exact has room for all tokens, drop'
    ' for 1.25 times the capacity.',
  )


def _sample(task, trained):
  args, language = flags.FLAGS, task.modality
  if not hasattr(language, 'sample'):
    raise UserError('--sample continues text: this run is no language model.')
  kwargs = {}
  rules = language.rules[1:]
  if args.rule is not None and args.rule not in rules:
    raise UserError(
      f'--rule={args.rule}: this model was trained for'
      f' {", ".join(rules) or "no causal rule; leave --rule out"}.'
    )
  if rules:
    kwargs['mode'] = language.config.model.routing_mode(
      args.rule or rules[0], overflow=args.overflow
    )
  elif args.overflow != 'exact':
    raise UserError(
      f'--overflow={args.overflow}: this model was trained for no causal rule;'
      ' leave --overflow out.'
    )
  texts = language.sample(
    trained.params,
    trained.model_state,
    args.sample,
    max_new_tokens=args.max_new_tokens,
    max_length=args.max_length,
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    key=jax.random.key(args.seed),
    **kwargs,
  )
  for prompt, text in zip(args.sample, texts, strict=True):
    print(f'\nsample:\n{prompt}{text}')


def _predict(run) -> list[str]:
  """Prints the predictions of --predict; returns the files it cannot read.

  Also writes the predictions to the file of --predictions, if there is one.
  """
  path = flags.FLAGS.predictions
  if path is not None and not path.endswith(('.csv', '.json')):
    raise UserError(f'--predictions={path}: expected a .csv or .json file.')
  if isinstance(run.config, LMConfig | VLMConfig):
    raise UserError(
      '--predict reads pictures or recordings: this run is a language model;'
      ' take --sample or, to ask about pictures, run.predict.'
    )
  classifies = not isinstance(run.config, DETRConfig | Wav2Vec2Config)
  if path is not None and not classifies:
    raise UserError(
      f'--predictions={path} holds classes of pictures, and this model does not'
      ' classify: leave it out.'
    )
  files = [x for patterns in flags.FLAGS.predict for x in _files(patterns)]
  width = max(map(len, files))
  rows = []
  for row, answer in (_classes if classifies else _contents)(run, files):
    print(f'{row["file"]:{width}}  {answer}')
    rows.append(row)
  if path is not None:
    _write_predictions(path, rows)
  return [row['file'] for row in rows if 'error' in row]


def _files(patterns: str) -> list[str]:
  """Returns the files that a value of --predict names."""
  files = []
  for pattern in paths.split_globs(patterns) or [patterns]:
    matches = [pattern]
    # Names may hold the letters of patterns, such as `a[1].jpg`.
    if not paths.expand(pattern).is_file():
      matches = [x for x in sorted(paths.glob(pattern)) if os.path.isfile(x)]
    if not matches:
      raise UserError(
        f'--predict={pattern}: no such file. Quote patterns, and name'
        " what is in a folder, such as 'photos/*/*.jpg'."
      )
    files += matches
  return files


def _contents(run, files):
  """Yields (row, text) per file; a row has an `error` if it cannot be read."""
  for file in files:
    try:
      (content,) = run.predict(file)
    except UserError as error:
      yield {'file': file, 'error': str(error)}, str(error)
      continue
    if isinstance(run.config, Wav2Vec2Config):
      answer = content.text
    else:
      answer = ', '.join(f'{x.name} {x.score:.1%}' for x in content)
    yield {'file': file}, answer


def _classes(run, files):
  """Yields (row, text) per picture; a row has `probabilities` or `error`."""
  settings = {}
  if run.multi_label:  # Any number of labels may be true: leave none out.
    settings['top'] = run.config.dense_twin().num_classes
  for chunk in itertools.batched(files, _BATCH):
    images, rows = [], [{'file': file} for file in chunk]
    for row in rows:
      try:
        images.append(run.preprocess([row['file']]))
      except image_folder.UnreadableImageError as error:
        row['error'] = str(error)
    answers = iter(
      run.classify(np.concatenate(images), **settings) if images else ()
    )
    for row in rows:
      answer = row.get('error')
      if answer is None:
        row['probabilities'] = next(answers)
        answer = ', '.join(
          f'{name} {p:.1%}' for name, p in row['probabilities'].items()
        )
      yield row, answer


def _write_predictions(path, rows):
  """Writes JSON, or CSV with the classes side by side, the likeliest first."""
  if path.endswith('.json'):
    text = json.dumps(rows, indent=1, ensure_ascii=False) + '\n'
  else:
    num_ranks = max(len(row.get('probabilities', ())) for row in rows)
    ranks = [
      (f'class_{i}', f'probability_{i}') for i in range(1, num_ranks + 1)
    ]
    table = [['file', 'error', *itertools.chain(*ranks)]]
    for row in rows:
      pairs = row.get('probabilities', {}).items()
      pairs = [*pairs, *[('', '')] * (num_ranks - len(pairs))]
      error = row.get('error', '')
      table.append([row['file'], error, *itertools.chain(*pairs)])
    text = tables.csv_text(table)
  paths.write_bytes(path, text.encode('utf-8', 'backslashreplace'))


def _list_studies(workdir):
  config = workdir_lib.read_config(workdir, ExperimentConfig)
  names = tasks.make_task(config, workdir).studies()
  if not names:
    print('There are no studies of this kind of model.')
  for name in names:
    print(f'--study={name}')


def main(_) -> None:
  """Evaluates, studies, samples, predicts or exports, as the flags say."""
  args = flags.FLAGS
  if 'list' in args.study:
    _list_studies(args.workdir)
    return
  cli.start_backend()
  if args.predictions and not args.predict:
    raise UserError(
      f'--predictions={args.predictions} is written by --predict: say what to'
      ' predict, too.'
    )
  unreadable, step = [], best.parse(args.step)
  if args.predict or args.export:
    run = load_lib.load(args.workdir, step=step)
    if args.predict:
      unreadable = _predict(run)
    if args.export:
      export_lib.export(
        run, args.export, args.export_format, dense=args.export_dense
      )
      print(f'exported: {args.export}')
  in_training = args.evaluate or args.study or args.sample
  # Without anything to do, `_evaluate` still checks that the run can be loaded.
  if in_training or not (args.predict or args.export):
    _evaluate(args, step)
  if unreadable:
    more = ', …' if len(unreadable) > 3 else ''
    raise UserError(
      f'--predict: {len(unreadable)} of the files cannot be read'
      f' ({", ".join(unreadable[:3])}{more}): repair or remove them; the others'
      ' are answered.'
    )


def _evaluate(args, step):
  trained = tasks.load(args.workdir, step=step)
  evaluation.find_studies(trained.task, args.study)
  if args.sample:  # First, to refuse bad flags before the slow evaluation.
    _sample(trained.task, trained)
  if args.evaluate:
    evaluation.evaluate(trained, args.workdir, batches=args.batches)
  evaluation.study(trained, args.study, args.workdir)


def run() -> None:
  """Entry point of the console command."""
  define_flags()
  cli.run(main)
