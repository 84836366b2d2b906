r"""Evaluates and studies a run, and continues texts.

  python eval.py --workdir=runs/mod
  python eval.py --workdir=runs/amod --noevaluate --predict='photos/*.jpg'
  python eval.py --workdir=runs/mod --noevaluate --sample='def main(' \
    --rule=threshold --temperature=0

--study=NAME takes a longer look at the model; a name that is none lists those
that this run's kind of model has.
"""

import glob

from absl import flags
import jax

import mod_jax
from mod_jax import cli
from mod_jax import tasks
from mod_jax.errors import UserError
from mod_jax.train import evaluation

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint; by default the newest.')
_EVALUATE = flags.DEFINE_bool(
  'evaluate', True, 'Measure held-out losses and draw the pictures.'
)
_BATCHES = flags.DEFINE_integer(
  'batches', None, "Held-out batches; 0 for all; by default the config's."
)
_STUDY = flags.DEFINE_multi_string(
  'study', [], 'Longer look at the model to take; may be given several times.'
)
_PREDICT = flags.DEFINE_multi_string(
  'predict',
  [],
  'Pictures to classify: files, or a glob in quotes; may be given several'
  ' times.',
)
_SAMPLE = flags.DEFINE_multi_string(
  'sample', [], 'Text to continue; may be given several times.'
)
_SAMPLE_TOKENS = flags.DEFINE_integer(
  'sample_tokens', None, 'Tokens to add; by default up to the trained length.'
)
_MAX_LENGTH = flags.DEFINE_integer(
  'max_length', None, 'Room for prompt and new tokens; by default both fit.'
)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.7, '0 for the likeliest.')
_TOP_K = flags.DEFINE_integer('top_k', 0, 'Draw among so many; 0 for all.')
_TOP_P = flags.DEFINE_float('top_p', 0.95, 'Nucleus to draw from.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the samples.')
_RULE = flags.DEFINE_string(
  'rule', None, 'Causal rule to sample under; by default the first trained.'
)
_OVERFLOW = flags.DEFINE_enum(
  'overflow', 'exact', ['exact', 'drop'], 'Room in the routed caches.'
)

flags.adopt_module_key_flags(cli)


def _sample(task, trained):
  language = task.modality
  if not hasattr(language, 'sample'):
    raise UserError('--sample continues text: this run is no language model.')
  kwargs = {}
  rules = language.rules[1:]
  if _RULE.value is not None and _RULE.value not in rules:
    raise UserError(
      f'--rule={_RULE.value}: this model was trained for'
      f' {", ".join(rules) or "no causal rule; leave --rule out"}.'
    )
  if rules:
    kwargs['mode'] = language.config.model.routing.mode(
      _RULE.value or rules[0], overflow=_OVERFLOW.value
    )
  texts = language.sample(
    trained.params,
    trained.model_state,
    _SAMPLE.value,
    num_tokens=_SAMPLE_TOKENS.value,
    max_length=_MAX_LENGTH.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    key=jax.random.key(_SEED.value),
    **kwargs,
  )
  for prompt, text in zip(_SAMPLE.value, texts, strict=True):
    print(f'\nsample:\n{prompt}{text}')


def _predict(workdir):
  if _STEP.value is not None:
    raise UserError(
      '--predict and --step: the newest checkpoint predicts; leave one out.'
    )
  run = mod_jax.load(workdir)
  if run.preprocess is None:
    raise UserError(
      '--predict classifies pictures: this run is a language model; take'
      ' --sample.'
    )
  files = []
  for pattern in _PREDICT.value:
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
      raise UserError(f'--predict={pattern}: there is no such file.')
    files += found
  width = max(map(len, files))
  for file, classes in zip(files, run.predict(files), strict=True):
    told = ', '.join(f'{name} {p:.1%}' for name, p in classes.items())
    print(f'{file:{width}}  {told}')


def main(_):
  if not _WORKDIR.value:
    raise UserError('--workdir is missing: give the directory of a run.')
  cli.start_distributed()
  if _PREDICT.value:
    _predict(_WORKDIR.value)
    if not _EVALUATE.value and not _STUDY.value:
      return
  trained = tasks.load(_WORKDIR.value, step=_STEP.value)
  evaluation.find_studies(trained.task, _STUDY.value)
  if _SAMPLE.value:  # First: what is refused is refused at once.
    _sample(trained.task, trained)
  if _EVALUATE.value:
    evaluation.evaluate(trained, _WORKDIR.value, batches=_BATCHES.value)
  evaluation.study(trained, _STUDY.value, _WORKDIR.value)


if __name__ == '__main__':
  cli.run(main)
