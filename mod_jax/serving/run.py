"""A model with its weights, ready for use; loads runs and pretrained models."""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
from typing import Any

from absl import logging
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import parallel
from mod_jax.convert import beside, files
from mod_jax.convert import lm as convert_lm
from mod_jax.convert import vit as convert_vit
from mod_jax.data import images as images_lib
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError
from mod_jax.models.lm import LMConfig
from mod_jax.runs import workdir as workdir_lib
from mod_jax.tasks import make_task, warm_start
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.tasks.images import CLASSES
from mod_jax.train import evaluation

_LENGTH = 2048  # Longest texts of pretrained language models, in tokens.
_BATCH = 32  # Pictures that are predicted at a time.
# Preprocessing of most published models, for weights without such metadata.
_IMAGENET = {
  'mean': (0.485, 0.456, 0.406),
  'std': (0.229, 0.224, 0.225),
  'crop_fraction': 0.875,
}


@dataclasses.dataclass(frozen=True)
class Continuation:
  """A language model's continuation of a text.

  Attributes:
    text: the new part alone.
    log_probs: log-probabilities of its tokens, in nats, under the model's own
      distribution.
  """

  text: str
  log_probs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A model, its weights, and its preprocessing or tokenizer.

  Attributes:
    config: the model's config.
    variables: the model's variables: `params`, and perhaps other collections.
    experiment: config of the run that trained it, or one made up to describe a
      pretrained language model; None for pretrained vision models.
    preprocess: turns pictures into a vision model's input, as in evaluation;
      None for a language model.
    classes: names of a vision model's classes; None if unknown.
    task: the task of a mod_jax run or of a language model; None otherwise.
    origin: Hugging Face directory that a language model was loaded from, or
      None; it need not exist any more.
    foreign: whether the weights are those of a pretrained language model, not
      trained further by mod_jax: prompts then begin with the special tokens of
      its tokenizer.
  """

  config: Any
  variables: Mapping[str, Any]
  experiment: ExperimentConfig | None = None
  preprocess: images_lib.Preprocess | None = None
  classes: tuple[str, ...] | None = None
  task: Any = None
  origin: str | None = None
  foreign: bool = False

  @functools.cached_property
  def model(self):
    """The linen module; `run.model.apply(run.variables, …)` is pure."""
    return self.config.build()

  @functools.cached_property
  def _jitted(self):
    return jax.jit(self.model.apply, static_argnames=('mode', 'mutable'))

  def apply(self, *args, **kwargs):
    """Returns the compiled model's output; arguments are those of the module.

    Random routing scores need `rngs={'routing': key}`.
    """
    return self._jitted(self.variables, *args, **kwargs)

  @property
  def tokenizer(self):
    """The language model's tokenizer; None if it has none."""
    if isinstance(self.config, LMConfig) and self.task is not None:
      return self.task.modality.tokenizer
    return None

  def encode(self, text: str) -> list[int]:
    """Returns the tokens of a text that the language model is to continue."""
    if self.foreign:
      return self.tokenizer.encode_prompt(text)
    return self.tokenizer.encode(text)

  def predict(self, inputs, **kwargs) -> list:
    """Classifies pictures, or continues texts.

    Args:
      inputs: one input or a list of them: paths of pictures, Pillow images or
        uint8 arrays [height, width, 3]; for language models, strings.
      **kwargs: for pictures `top`, the number of classes to return (5); for
        texts the keywords of `Language.continued`, such as num_tokens and
        temperature (0 by default).

    Returns:
      For each picture a dictionary from class names, the likeliest first, to
      probabilities; for each text a `Continuation`.

    Raises:
      UserError: an input is not of the model's modality, or a setting is out of
        range.
    """
    single = not isinstance(inputs, Sequence) or isinstance(inputs, str)
    inputs = [inputs] if single else list(inputs)
    if not inputs:
      return []
    if self.preprocess is None:
      return self._continue(inputs, **kwargs)
    return self._classify(inputs, **kwargs)

  def evaluate(
    self,
    data: images_lib.ImageDataConfig | TextDataConfig | None = None,
    *,
    batches: int = 0,
  ) -> dict[str, float]:
    """Returns held-out metrics, such as `loss` and `accuracy`.

    For a routed language model there is one set per routing rule, such as
    `top_k/loss`.

    Args:
      data: data to evaluate on, read with the model's own preprocessing or
        tokenizer; None for the data that the run was trained on.
      batches: number of batches; 0 for all held-out data.

    Raises:
      UserError: the model has no data and none are given, or the data cannot be
        read or do not fit the model.
    """
    task = self.task
    if data is not None:
      task = self._task_on(data)
    elif task is None or self.foreign:
      example = 'ImageDataConfig(source="folder", path="photos")'
      if isinstance(self.config, LMConfig):
        example = 'TextDataConfig(source="files", files="texts/*.txt")'
      raise UserError(
        'evaluate: this model is not from a run of ours, so it has no data: say'
        f' on which, as in data={example}.'
      )
    task.check()
    mesh = parallel.make_mesh(parallel.MeshConfig())
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = dict(jax.device_put(dict(self.variables), everywhere))
    params = state.pop('params')
    with jax.set_mesh(mesh):
      return evaluation.held_out(task, params, state, mesh, batches=batches)

  def _task_on(self, data):
    """Returns a task on other data, with the model's own preprocessing."""
    if self.preprocess is not None:
      data = self.preprocess.apply_to(data)
    elif self.task is not None and data.source != 'prepared':
      kind, path = self.task.modality.tokenizer_source
      data = dataclasses.replace(data, tokenizer=kind, tokenizer_path=path)
    return make_task(ExperimentConfig(model=self.config, data=data))

  def _continue(self, texts, **kwargs):
    if wrong := [text for text in texts if not isinstance(text, str)]:
      raise UserError(
        f'{wrong[0]!r} is a {type(wrong[0]).__name__}, and a language model'
        ' continues texts: give strings.'
      )
    state = dict(self.variables)
    params = state.pop('params')
    kwargs.setdefault('temperature', 0.0)
    language = self.task.modality
    prompts = [self.encode(text) for text in texts]
    generated = language.continued(params, state, prompts, **kwargs)
    return [
      Continuation(text, np.asarray(log_prob_N[:length]))
      for text, log_prob_N, length in zip(
        language.decoded(prompts, generated),
        generated.log_prob_BN,
        generated.length_B,
        strict=True,
      )
    ]

  def _classify(self, pictures, **kwargs):
    predictions = []
    for batch in itertools.batched(pictures, _BATCH):
      predictions += self.classify(self.preprocess(batch), **kwargs)
    return predictions

  def classify(self, images_BHWC, *, top: int = 5) -> list[dict[str, float]]:
    """Classifies pictures that `preprocess` has prepared; see `predict`."""
    if top < 1:
      raise UserError(f'top={top}: expected at least 1.')
    names = self.classes or tuple(map(str, range(self._num_classes)))
    # Class names need not be unique: ImageNet has two classes named crane.
    shared = {name for name, n in collections.Counter(names).items() if n > 1}
    names = [f'{x} ({v})' if x in shared else x for v, x in enumerate(names)]
    rngs = {'routing': jax.random.key(0)}
    logits_BV = self.apply(images_BHWC, rngs=rngs).logits_BV
    probability_BV = jax.nn.softmax(logits_BV.astype(jnp.float32))
    predictions = []
    for probability_V in np.asarray(probability_BV):
      best = np.argsort(-probability_V, kind='stable')[:top]
      predictions.append({names[v]: float(probability_V[v]) for v in best})
    return predictions

  @property
  def _num_classes(self) -> int:
    return self.config.dense_twin().num_classes


def load(path: str | os.PathLike, *, trust: Sequence[str] = (), **known) -> Run:
  """Loads a model with its weights.

  No code in the folder is run: a config may name classes of mod_jax and of
  modules that are already imported; all others are refused.

  Args:
    path: directory of a mod_jax run, of which the newest checkpoint is read; a
      folder that `export` wrote; a Hugging Face folder with a language model of
      `convert.lm.FAMILIES`; or a pretrained vision transformer, either a folder
      from Hugging Face or timm or a file that `convert.vit.load` reads.
    trust: modules to import first, such as `['package.module']`, whose classes
      the config may name.
    **known: fields of `ViTConfig` that cannot be derived from the file of a
      pretrained vision transformer; see `convert.vit.derive`.

  Raises:
    UserError: there is nothing at that path, or it holds no model.
  """
  config_lib.trust(trust)
  fields = about(path, **known)
  config = fields['config']
  if not warm_start.is_ours(path) and isinstance(config, LMConfig):
    return Run(variables={'params': convert_lm.load(path, config)}, **fields)
  if not warm_start.is_ours(path):
    variables = convert_vit.load_variables(files.find(path), config)
    return Run(variables=variables, **fields)
  shapes = _shapes(config)
  params, model_state = warm_start.from_ours(
    shapes.pop('params'), shapes, os.fspath(path)
  )
  variables = jax.tree.map(jnp.asarray, {'params': params, **model_state})
  return Run(variables=variables, **fields)


def about(path: str | os.PathLike, **known) -> dict[str, Any]:
  """Returns the fields of `load`'s `Run`, without reading any weights.

  Args:
    path: as for `load`.
    **known: as for `load`.

  Raises:
    UserError: there is nothing at that path, or it holds no model.
  """
  ours, language = warm_start.is_ours(path), convert_lm.holds_model(path)
  if not ours and not language:
    return _of_file(files.find(path), known)
  if known:
    raise UserError(
      f'{next(iter(known))}: {path} is a model whose config is known; leave it'
      ' out.'
    )
  if not ours:
    return _of_language(path)
  read_fields = _of_workdir if warm_start.is_workdir(path) else _of_folder
  return {'config': warm_start.model_config(path), **read_fields(path)}


def _of_folder(path) -> dict[str, Any]:
  """Returns the `Run` fields of a folder that `export` wrote."""
  exported, pictures = warm_start.read_folder(path)
  task = preprocess = None
  if exported.experiment is not None:
    task = make_task(exported.experiment)
  if exported.tokenizer is not None:
    task.modality.use_tokenizer(exported.tokenizer, os.fspath(path))
  else:
    preprocess = _preprocess(pictures, f'{path}/{warm_start.FOLDER}')
  return {
    'experiment': exported.experiment,
    'preprocess': preprocess,
    'classes': exported.classes,
    'task': task,
    'foreign': exported.foreign,
  }


def _preprocess(fields, where) -> images_lib.Preprocess:
  """Builds the preprocessing from the fields of an exported folder."""
  try:
    resample = Image.Resampling(fields.get('resample'))
  except ValueError as error:
    raise UserError(f'{where}: preprocess.resample: {error}.') from error
  fields = {k: fields[k] for k in fields if k != 'resample'}
  # `ImageDataConfig` has the remaining fields, and so checks their types.
  data = config_lib.from_known(
    images_lib.ImageDataConfig, fields, f'{where}: preprocess'
  )
  return dataclasses.replace(data.preprocess, resample=resample)


def _shapes(config) -> dict[str, Any]:
  """Returns the shapes of a model's variables, by collection."""
  key = jax.random.key(0)
  rngs = {'params': key, 'routing': key}
  init = config.build().init
  return dict(nn.unbox(jax.eval_shape(lambda: init(rngs, config.example()))))


def _of_workdir(path) -> dict[str, Any]:
  """Returns the `Run` fields of a mod_jax run."""
  experiment = workdir_lib.read_config(path, ExperimentConfig)
  fields = {'experiment': experiment, 'task': make_task(experiment, path)}
  if isinstance(experiment.model, LMConfig):
    return fields
  classes_file = workdir_lib.expand(path) / CLASSES
  if classes_file.is_file():
    names = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
      names = json.loads(classes_file.read_text(encoding='utf-8'))
    if not isinstance(names, list) or any(type(n) is not str for n in names):
      raise UserError(
        f'{classes_file} is no list of names: delete or restore it.'
      )
    fields['classes'] = tuple(names)
  return fields | {'preprocess': experiment.data.preprocess}


def _of_language(path) -> dict[str, Any]:
  """Returns the `Run` fields of a Hugging Face language model."""
  config = convert_lm.derive(path)
  # Its training data are unknown: the config only names the tokenizer.
  data = TextDataConfig(
    tokenizer='huggingface',
    tokenizer_path=os.fspath(path),
    length=min(convert_lm.max_length(path), _LENGTH),
  )
  experiment = ExperimentConfig(model=config, data=data, init=os.fspath(path))
  return {
    'config': config,
    'experiment': experiment,
    'task': make_task(experiment),
    'origin': os.fspath(path),
    'foreign': True,
  }


def _of_file(file, known) -> dict[str, Any]:
  """Returns the `Run` fields of a pretrained vision transformer."""
  config = convert_vit.derive(file, **known)
  info = beside.read(file)
  classes = info.classes
  if classes is not None and len(classes) != config.dense_twin().num_classes:
    classes = None
  assumed = {k: v for k, v in _IMAGENET.items() if k not in info.pictures}
  if assumed:
    logging.warning(
      'Assumed for pictures, as is usual with ImageNet, since nothing beside %s'
      ' tells: %s; if the model was trained with others, see `run.preprocess`.',
      *(file, ', '.join(f'{name}={value}' for name, value in assumed.items())),
    )
  size, unfollowed = config.dense_twin().image_size, [*info.unfollowed]
  if info.image_size not in (None, size):
    unfollowed.append(
      f'pictures of {info.image_size} pixels a side, where the model has {size}'
    )
  preprocess = images_lib.Preprocess(image_size=size, **info.pictures | assumed)
  try:
    # Its fields have the ranges.
    preprocess.apply_to(images_lib.ImageDataConfig())
  except UserError as error:
    raise UserError(f'the preprocessing beside {file}: {error}') from error
  if unfollowed:
    logging.warning(
      'Of the preprocessing that is told beside %s, this is not followed: %s;'
      ' pictures are read by %s.',
      *(file, '; '.join(unfollowed), preprocess),
    )
  return {
    'config': config,
    'preprocess': preprocess,
    'classes': classes,
  }
