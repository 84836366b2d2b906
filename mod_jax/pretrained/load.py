"""`load` returns a `Run`: a model with its weights, ready for use.

Which formats can be read is decided in `source`, and in `convert.files` for
files of arrays.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import os
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import config as config_lib
from mod_jax import flops, optimizer
from mod_jax.data import images as images_lib
from mod_jax.data import prepared
from mod_jax.data.audio import AudioDataConfig
from mod_jax.data.detection import DetectionPreprocess
from mod_jax.data.text import TextDataConfig
from mod_jax.errors import UserError, require
from mod_jax.layers.mode import RoutingMode
from mod_jax.layers.quantized import Quantized
from mod_jax.models import lm, protocol
from mod_jax.models.detr import DETRConfig
from mod_jax.models.dynamic_vit import DynamicViTConfig
from mod_jax.models.lm import LMConfig
from mod_jax.models.vlm import VLMConfig
from mod_jax.models.wav2vec2 import Wav2Vec2Config
from mod_jax.pretrained.source import Source
from mod_jax.runs import best
from mod_jax.sampling import generation
from mod_jax.sampling.speculation import Draft
from mod_jax.serving import chat as chat_lib
from mod_jax.serving import pictures as pictures_lib
from mod_jax.serving.engine import FAILURES, Engine, Event
from mod_jax.tasks import MODALITIES, make_task, warm_start
from mod_jax.tasks import detection as detection_task
from mod_jax.tasks.experiment import ExperimentConfig
from mod_jax.train import evaluation
from mod_jax.train.task import Study

_BATCH = 32  # Number of pictures that are classified at a time.
_LENGTH = 2048  # Default for the longest text of a published model, in tokens.
INT8 = 'int8'  # The `dtype` that rounds matrices to int8.


@dataclasses.dataclass(frozen=True)
class Continuation:
  """A language model's continuation of a text.

  Attributes:
    text: the new text, without the prompt.
    tokens: the new tokens, without an end token.
    log_probs: log-probabilities of the new tokens, in nats, under the model's
      own distribution.
  """

  text: str
  tokens: np.ndarray
  log_probs: np.ndarray


class Detected(NamedTuple):
  """An object in a picture.

  Attributes:
    name: name of the object's class.
    score: probability of the class.
    box: (left, top, right, bottom) in pixels of the picture.
  """

  name: str
  score: float
  box: tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Run:
  """A model, its weights, and its preprocessing or tokenizer.

  Attributes:
    config: the model's config.
    variables: the model's variables: `params` and any other collections.
    experiment: config of the run that trained the model, or one that only says
      how a published model reads text or speech; None for published models of
      pictures alone, and for a LLaVA without a tokenizer.
    preprocess: turns pictures into the model's input, as in evaluation; None
      for a model that takes no pictures.
    classes: names of a vision model's classes; None if unknown.
    multi_label: whether a picture may have any number of classes. Then each
      class has its own probability.
    task: the task of `experiment`; None if `experiment` is None.
    origin: Hugging Face directory of a language or vision-language model, or of
      the model that PEFT's adapters belong to; else None. The directory may
      have been deleted.
    base: path of the weights that a model's adapters belong to, or that its run
      has frozen; None if there are no such weights.
    foreign: whether the weights are those of a published model of text or
      speech that mod_jax has not trained further. Prompts then begin with the
      special tokens of the model's tokenizer.
  """

  config: Any
  variables: Mapping[str, Any]
  experiment: ExperimentConfig | None = None
  preprocess: images_lib.Preprocess | DetectionPreprocess | None = None
  classes: tuple[str, ...] | None = None
  multi_label: bool = False
  task: Any = None
  origin: str | None = None
  base: str | None = None
  foreign: bool = False

  @functools.cached_property
  def model(self):
    """The linen module; `run.model.apply(run.variables, …)` is pure."""
    return self.config.build()

  @functools.cached_property
  def _jitted(self):
    return jax.jit(self.model.apply, static_argnames=('mode', 'mutable'))

  def __repr__(self) -> str:
    count = flops.num_params(self.config)
    kind, origin = type(self.config).__name__, self.origin or self.base
    whence = f', of {origin}' if origin else ''
    return f'<Run: {kind} with {count:,} parameters{whence}>'

  def apply(self, *args, **kwargs):
    """Returns the compiled model's output; arguments are those of the module.

    A model with random routing scores needs `rngs={'routing': key}`. Raises
    UserError if a positional argument is neither arrays nor numbers, or tokens
    are not in the vocabulary.
    """
    for x in jax.tree.leaves(args):
      if not isinstance(x, int | float) and not hasattr(x, 'dtype'):
        raise UserError(
          f'apply: expected arrays, and not a {type(x).__name__}: for pictures'
          ' take what run.preprocess makes of them, for texts what run.encode'
          ' and mod_jax.sampling.pad_prompts make, or call run.predict.'
        )
    if args and isinstance(self.config, LMConfig | VLMConfig):
      # The compiled model cannot see which ids it gets, and would clamp them.
      lm.check_tokens(self.config, args[0], kwargs.get('valid_BL'))
    return self._jitted(self.variables, *args, **kwargs)

  @property
  def tokenizer(self):
    """Tokenizer of a language or vision-language model, if known; else None."""
    reads = isinstance(self.config, LMConfig | VLMConfig)
    if reads and self.task is not None:
      return self.task.modality.tokenizer
    return None

  def encode(self, text: str) -> list[int]:
    """Returns a prompt's tokens; UserError if the model has no tokenizer."""
    tokenizer = self.tokenizer or self._asked.modality.tokenizer
    how = tokenizer.encode_prompt if self.foreign else tokenizer.encode
    return how(text)

  def predict(
    self,
    inputs,
    *,
    top: int | None = None,
    least: float | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    mode: RoutingMode | str | None = None,
    max_length: int | None = None,
    draft: Draft | None = None,
    key: jax.Array | None = None,
  ) -> list:
    """Classifies pictures, finds objects, continues texts, or transcribes.

    For each setting, None means the default. A setting that the kind of model
    does not have raises an error if it is not None.

    Args:
      inputs: one input or a list of them: paths of pictures, Pillow images or
        uint8 arrays [height, width, 3]; for language models, strings; for
        vision-language models, (picture, question) or (list of pictures,
        question); for models of speech, which have no settings, paths of
        recordings.
      top: classification: number of classes to return; 5 by default.
      least: detection: least score of an object; .5 by default.
      max_new_tokens: text: most tokens to add. By default, a text may grow to
        `Run.default_length` tokens or, if its prompt is longer than that, to
        `Run.max_length`; an answer about pictures may have 64 tokens.
      temperature: sampling: 0, the default, takes the likeliest token.
      top_k: sampling: takes one of the k likeliest tokens; 0, the default,
        means all tokens.
      top_p: sampling: takes one of the fewest likeliest tokens whose total
        probability reaches this; 1, the default, means all tokens.
      min_p: sampling: takes a token whose probability is at least this share of
        the likeliest token's; 0, the default, means all tokens.
      mode: name of the rule by which routed blocks choose tokens, such as
        `threshold`, or a `RoutingMode`; by default the first of the config's
        `causal_rules`.
      max_length: number of tokens, prompt included, that the caches hold.
      draft: speculative decoding: proposes tokens, which the model verifies.
      key: random key, for a temperature above 0.

    Returns:
      For each picture a dictionary from class names, the likeliest first, to
      probabilities; from a detector a list of `Detected`, the best first; for
      each text a `Continuation`; for each recording a `Transcript`; for each
      question the answer.

    Raises:
      UserError: an input is not of the model's modality, or a setting is out of
        range.
    """
    inputs = self._listed(inputs)
    if not inputs:
      return []
    of_texts = {
      **{'max_new_tokens': max_new_tokens, 'temperature': temperature},
      **{'top_k': top_k, 'top_p': top_p, 'min_p': min_p, 'key': key},
      **{'mode': mode, 'max_length': max_length, 'draft': draft},
    }
    if isinstance(self.config, Wav2Vec2Config):
      transcribe = self.task.modality.transcribe
      takes, predict = (), functools.partial(transcribe, self.apply)
    elif isinstance(self.config, DETRConfig):
      takes, predict = ('least',), self._detect
    elif isinstance(self.config, VLMConfig):
      takes = tuple(name for name in of_texts if name not in ('mode', 'draft'))
      predict = self._answer
    elif self.preprocess is None:
      takes, predict = tuple(of_texts), self._continue
    else:
      takes, predict = ('top',), self._classify
    settings = {'top': top, 'least': least} | of_texts
    given = {name: x for name, x in settings.items() if x is not None}
    for name in given:
      if name not in takes:
        raise UserError(
          f'{name}: this model takes {", ".join(takes) or "no settings"}: leave'
          ' it out.'
        )
    return predict(inputs, **given)

  def _listed(self, inputs) -> list:
    """Returns a list of the inputs, which may be a single input or several."""
    single = not isinstance(inputs, Sequence) or isinstance(inputs, str)
    single |= isinstance(self.config, VLMConfig) and isinstance(inputs, tuple)
    return [inputs] if single else list(inputs)

  @property
  def _asked(self):
    """The value of `task`; raises UserError if the model has no tokenizer."""
    if self.task is None:
      raise UserError(
        'there is no tokenizer.json beside the weights of this model: fetch it,'
        ' too, or use run.apply.'
      )
    return self.task

  def _answer(self, asked, **kwargs) -> list[str]:
    state = dict(self.variables)
    return self._asked.modality.answers(
      *(state.pop('params'), state), *self._prepared(asked), **kwargs
    )

  def _prepared(self, asked) -> tuple[list, list[str]]:
    """Returns the preprocessed pictures and the text of each question."""
    for question in asked:
      if not (
        isinstance(question, tuple)
        and len(question) == 2
        and isinstance(question[1], str)
      ):
        raise UserError(
          f'{question!r} is no question about a picture: give (picture,'
          ' question).'
        )
    shown = [
      pictures if isinstance(pictures, list) else [pictures]
      for pictures, _ in asked
    ]
    return (
      [self.preprocess(pictures) if pictures else [] for pictures in shown],
      [question for _, question in asked],
    )

  def _classify(self, pictures, **kwargs) -> list[dict[str, float]]:
    predictions = []
    for batch in itertools.batched(pictures, _BATCH):
      predictions += self.classify(self.preprocess(batch), **kwargs)
    return predictions

  def _detect(
    self, pictures, *, least: float = detection_task.LEAST_SCORE
  ) -> list[list[Detected]]:
    predictions = []
    for picture in map(images_lib.as_image, pictures):
      output, *_ = self._look(picture)
      found = detection_task.boxes_of(
        output.logits_BQV[0],
        output.boxes_BQ4[0],
        *(self.classes, (picture.height, picture.width), least),
      )
      predictions.append([Detected(*x) for x in found])
    return predictions

  def _look(self, picture):
    image_BHWC, size_B2 = self.preprocess([picture])
    rngs = {'routing': jax.random.key(0)}
    return self.apply(image_BHWC, size_B2, rngs=rngs), image_BHWC, size_B2

  def draw(self, inputs, *, least: float = detection_task.LEAST_SCORE):
    """Returns a figure of the model's output and of where it computes.

    * Detectors: the boxes in one picture, and the routed tokens.
    * Vision-language models: the image tokens that each routed block processes
      for each question, with the answer.
    * Models of speech with learners: the cost of each frame of each recording,
      and the letters that the model outputs.

    Args:
      inputs: as in `predict`; one picture for a detector, else up to eight.
      least: least score of an object that a detector finds.

    Raises:
      UserError: there is no figure for this kind of model.
    """
    if isinstance(self.config, DETRConfig):
      return self._draw_boxes(inputs, least)
    inputs = self._listed(inputs)
    if isinstance(self.config, VLMConfig):
      modality, asked = self._asked.modality, self._prepared(inputs)
      return modality.draw(self.apply, *asked, self._answer(inputs))
    if isinstance(self.config, Wav2Vec2Config):
      return self.task.modality.draw(self.task, self.apply, inputs)
    raise UserError(
      'draw: there is no figure of an input of this model: use run.predict.'
    )

  def _draw_boxes(self, picture, least):
    output, image_BHWC, size_B2 = self._look(picture)
    figures = detection_task.draw(
      self.config,
      jax.device_get(output),
      images_lib.denormalize(self.preprocess, image_BHWC),
      *(size_B2, self.classes, least),
    )
    return figures['boxes']

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    stream: bool = False,
    max_new_tokens: int | None = None,
    **settings,
  ) -> str | Iterator[str]:
    """Answers a chat, with the chat template beside the model's tokenizer.

        run.chat([{'role': 'user', 'content': 'Name three rivers.'}])

    A vision-language model gets the prompt of its training, not the template's.
    A content may be a list of parts, with pictures as `predict` takes them:

        parts = [{'type': 'image', 'image': 'photo.jpg'},
                 {'type': 'text', 'text': 'What is on the table?'}]
        run.chat([{'role': 'user', 'content': parts}])

    Args:
      messages: each with a `role`, such as `user`, and a `content`; the oldest
        first.
      stream: whether to return the answer as an iterator over its pieces, each
        as soon as it is known.
      max_new_tokens: most tokens of the answer; by default 256, or fewer if
        fewer fit.
      **settings: those of `serving.engine.Engine.submit`, such as temperature
        (0 by default), top_k, top_p, min_p, stop, seed and schema.

    Raises:
      UserError: the model has no chat template; the messages do not fit the
        template, or are longer than the model's longest input; a setting is out
        of range; or, possibly only from the iterator, the answer ends early
        because the tokenizer is broken or the schema too complex.
    """
    if not isinstance(self.config, LMConfig | VLMConfig):
      raise UserError('chat: this is no language model: use run.predict.')
    modality, pictures = self._asked.modality, []
    if isinstance(self.config, VLMConfig):
      pieces, pictures = pictures_lib.pieces(messages)
      tokens, settings['kinds'] = modality.encode(pieces)
      settings['images'] = self.preprocess(pictures) if pictures else []
    else:
      text = chat_lib.render(*modality.tokenizer_source, messages)
      tokens = self.tokenizer.encode_chat(text)
    length = len(tokens) - len(pictures)
    if max_new_tokens is None:
      max_new_tokens = max(1, min(256, self.max_length - length))
    room = min(generation.bucket(length + max_new_tokens), self.max_length)
    engine = Engine(self, slots=1, max_length=room, pictures=len(pictures))
    engine.submit(tokens, max_new_tokens=max_new_tokens, **settings)
    pieces = _whole_answer(engine.run())
    return pieces if stream else ''.join(pieces)

  def evaluate(
    self,
    data: images_lib.ImageDataConfig
    | TextDataConfig
    | AudioDataConfig
    | None = None,
    *,
    batches: int = 0,
  ) -> dict[str, float]:
    """Returns held-out metrics, such as `loss` and `accuracy`.

    A routed language model has each metric once for each routing rule, under
    names such as `top_k/loss`.

    Args:
      data: data to evaluate on, read with the model's own preprocessing,
        tokenizer or vocabulary; None for the data that the run was trained on.
      batches: number of batches; 0 for all held-out data.

    Raises:
      UserError: `data` is None and the model was not trained by mod_jax; or the
        data cannot be read or do not fit the model.
    """
    require(batches >= 0, '0, for all held-out data, or more', batches=batches)
    on = self._for_evaluation('evaluate', data)
    with jax.set_mesh(on.mesh):
      return evaluation.held_out(
        on.task, on.params, on.model_state, on.mesh, batches=batches
      )

  def study(self, name: str, data=None) -> Study:
    """Runs a study of the model, as `eval.py --study=NAME` does.

    For a dense language model, `study('influence', data).metrics['suggested']`
    are the blocks that change the direction of features least; route these.

    Args:
      name: name of the study.
      data: as for `evaluate`.

    Raises:
      UserError: as in `evaluate`; or there is no such study, and the message
        lists all studies.
    """
    on = self._for_evaluation('study', data)
    (run,) = evaluation.find_studies(on.task, [name]).values()
    with jax.set_mesh(on.mesh):
      return run(on.params, on.model_state, on.mesh)

  def _for_evaluation(self, what: str, data) -> evaluation.Trained:
    """Returns the weights, on a mesh, and a task that reads the data."""
    task, example = self.task, MODALITIES[type(self.config)].example
    if data is not None:
      if (wanted := example.partition('(')[0]) != type(data).__name__:
        raise UserError(
          f'{what}: data is a {type(data).__name__}, and this model needs a'
          f' {wanted}, as in data={example}.'
        )
      data = self.reading_as_trained(data)
      # The objective determines what is measured, and the budget.
      objective = self.experiment and self.experiment.objective
      task = make_task(
        ExperimentConfig(model=self.config, data=data, objective=objective)
      )
      if isinstance(self.config, Wav2Vec2Config):
        task.modality.vocabulary = self.task.modality.vocabulary
    elif task is None or self.foreign:
      raise UserError(
        f'{what}: this model is not from a run of ours, so it has no data: say'
        f' on which, as in data={example}.'
      )
    task.modality.check()
    if data is not None and self.classes is not None:
      self._check_classes(task.modality.classes)
    mesh = evaluation.mesh_of(task.config)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = dict(jax.device_put(dict(self.variables), everywhere))
    params = state.pop('params')
    return evaluation.Trained(
      task=task, step=0, params=params, model_state=state, mesh=mesh
    )

  @property
  def max_length(self) -> int:
    """Longest text of a language model in tokens, including new tokens.

    The number is in the published config, or it is the length in training.
    """
    return (self.experiment or self._asked.config).data.length

  @property
  def default_length(self) -> int:
    """Default for the longest text in tokens.

    It is `max_length`, but for a published model at most 2,048: some models
    take 100,000 tokens or more, for which few machines have enough memory.
    """
    return min(self.max_length, _LENGTH) if self.foreign else self.max_length

  def reading_as_trained(self, data):
    """Returns `data`, a config, with the model's preprocessing or tokenizer.

    Speech gets the model's sampling rate. Raises UserError if `data` is a
    corpus that was prepared with another tokenizer.
    """
    if isinstance(self.config, Wav2Vec2Config):
      return dataclasses.replace(data, rate=self.experiment.data.rate)
    if self.preprocess is not None:
      data = self.preprocess.apply_to(data)
      if not isinstance(self.config, VLMConfig):
        return data
    if self.task is None:
      return data
    if data.source == 'prepared':
      self._check_corpus(data.path)
      return data
    kind, path = self.task.modality.tokenizer_source
    return dataclasses.replace(data, tokenizer=kind, tokenizer_path=path)

  def _check_classes(self, theirs: Sequence[str]) -> None:
    """Compares `theirs`, the data's class names, with the model's.

    Raises UserError if only the order differs; warns if the names differ. What
    the model calls a number that no class of the data has does not matter.
    """
    pairs = enumerate(zip(theirs, self.classes, strict=False))
    different = [(i, a, b) for i, (a, b) in pairs if a not in ('', b)]
    if not different:
      return
    message = 'class %d is called %r in the data, and %r by the model'
    if {*theirs} - {''} <= {*self.classes}:
      raise UserError(
        f'evaluate: {message % different[0]}, which has all of these names in'
        ' another order: number the classes of the data as it does.'
      )
    logging.warning('%s.', message % different[0])

  def _check_corpus(self, path: str) -> None:
    """Raises UserError if a corpus was prepared with another tokenizer."""
    theirs = prepared.make_tokenizer(path).fingerprint
    ours = theirs  # The check is skipped if there is no tokenizer any more.
    with contextlib.suppress(UserError):
      ours = self.tokenizer.fingerprint
    if theirs != ours:
      raise UserError(
        f'data.path={path}: the corpus was prepared with another tokenizer than'
        ' that of the model: prepare one with the same, by --config.tokenizer'
        ' and --config.tokenizer_path.'
      )

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
    longest = max(map(len, prompts))
    if longest > self.max_length and 'max_length' not in kwargs:
      raise UserError(
        f'a prompt of {longest} tokens is longer than the texts of'
        f' {self.max_length} that the model has learnt from (run.max_length):'
        ' shorten it, or say by max_length how long a text may get.'
      )
    room = min(self.default_length, kwargs.get('max_length', self.max_length))
    if longest < room:
      kwargs.setdefault('max_new_tokens', room - longest)
    generated = language.continued(params, state, prompts, **kwargs)
    return [
      Continuation(text, *(np.asarray(x_N[:length]) for x_N in of_tokens))
      for text, *of_tokens, length in zip(
        language.decoded(prompts, generated),
        generated.tokens_BN,
        generated.log_prob_BN,
        generated.length_B,
        strict=True,
      )
    ]

  def classify(self, images_BHWC, *, top: int = 5) -> list[dict[str, float]]:
    """Like `predict`, for pictures that `preprocess` has already prepared."""
    if top < 1:
      raise UserError(f'top={top}: expected at least 1.')
    if not self.config.dense_twin().num_classes:
      raise UserError(
        'num_classes=0: this model has features of pictures and no classes: use'
        ' run.apply(run.preprocess(pictures)).features_BLD.'
      )
    names = self.classes or tuple(
      map(str, range(self.config.dense_twin().num_classes))
    )
    # Class names need not be unique: ImageNet has two classes named crane.
    shared = {name for name, n in collections.Counter(names).items() if n > 1}
    names = [f'{x} ({v})' if x in shared else x for v, x in enumerate(names)]
    rngs = {'routing': jax.random.key(0)}
    logits_BV = self.apply(images_BHWC, rngs=rngs).logits_BV
    probabilities = jax.nn.sigmoid if self.multi_label else jax.nn.softmax
    probability_BV = probabilities(logits_BV.astype(jnp.float32))
    predictions = []
    for probability_V in np.asarray(probability_BV):
      best = np.argsort(-probability_V, kind='stable')[:top]
      predictions.append({names[v]: float(probability_V[v]) for v in best})
    return predictions


def load(
  path: str | os.PathLike,
  *,
  step: best.Step = None,
  dtype: str | None = None,
  trust: Sequence[str] = (),
  base: str | None = None,
  **known,
) -> Run:
  """Loads a model with its weights.

  No code in the folder is run: a config may name classes of mod_jax and of
  modules that are already imported; all others are refused.

  Args:
    path: directory of a mod_jax run; a folder that `export` wrote; a Hugging
      Face folder with a language model of `convert.lm.FAMILIES`, a LLaVA, a
      CLIP, a DETR or a Wav2Vec2; a GGUF file of llama.cpp; a folder of PEFT
      with adapters of a language model or of a vision transformer; or a
      published vision transformer, either a folder from Hugging Face or timm or
      a file that `convert.vit.load` reads.
    step: step of a run's checkpoint, or 'best' for the checkpoint that
      `checkpoint.best` has kept; None for the newest.
    dtype: `float32` or `bfloat16`: the model computes and keeps its matrices in
      this type; routers, predictors, norms and biases stay float32. `int8` is
      for a language model that is not trained any further: the matrices listed
      by `models.lm.matrices` are kept in int8, see `layers.quantized`. None
      keeps all weights in float32. With `int8` and None, the model computes in
      its config's dtype.
    trust: modules to import first, such as `['package.module']`, whose classes
      the config may name.
    base: path of the weights that the adapters at `path` belong to, or that the
      run at `path` has frozen; None for the path that their config names.
    **known: fields of `ViTConfig` that cannot be derived from the file of a
      pretrained vision transformer; see `convert.vit.derive`.

  Raises:
    UserError: there is nothing at that path, or it holds no model.
  """
  config_lib.trust(trust)
  source = Source.open(path, base=base, **known).at(step)
  run = _about(source, None if dtype == INT8 else dtype)
  matrices = lm.matrices(run.config) if dtype == INT8 else {}
  if not source.ours:
    variables = source.read()
  else:
    shapes = protocol.shapes(run.config)
    params, model_state = warm_start.load_weights(
      *(os.fspath(path), None, shapes.pop('params'), shapes),
      step=step,
      base=base,
    )
    variables = {'params': params, **model_state}

  def on_device(path, array):
    # Reads one array at a time, if arrays are `Lazy`.
    array = jnp.asarray(array)
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    inputs = matrices.get('/'.join(names[1:]))
    if inputs is not None:
      return Quantized.of(array, inputs)
    casts = optimizer.is_matrix(names) and 'predictor' not in names
    if dtype not in (None, INT8) and casts:
      array = array.astype(dtype)
    return array

  variables = jax.tree_util.tree_map_with_path(on_device, variables)
  return dataclasses.replace(run, variables=variables)


def _whole_answer(events: Iterable[Event]) -> Iterator[str]:
  for event in events:
    if event.text:
      yield event.text
    if event.reason in FAILURES:
      raise UserError(FAILURES[event.reason])


def require_floats(run: Run) -> None:
  """Raises UserError if the weights have been rounded to int8."""
  leaves = jax.tree.leaves(
    run.variables, is_leaf=lambda x: isinstance(x, Quantized)
  )
  is_rounded = any(isinstance(x, Quantized) for x in leaves)
  require(
    not is_rounded,
    'weights as they were before they were rounded: load the model again'
    ' without it',
    dtype=INT8,
  )


def _computing_in(config, dtype: str):
  """Returns the config with another compute dtype, also for nested models."""
  if isinstance(config, DynamicViTConfig):
    backbone = _computing_in(config.backbone, dtype)
    return dataclasses.replace(config, backbone=backbone)
  if isinstance(config, VLMConfig):
    parts = {'tower': config.tower, 'language': config.language}
    parts = {name: _computing_in(part, dtype) for name, part in parts.items()}
    return dataclasses.replace(config, **parts)
  return dataclasses.replace(config, dtype=dtype)


def about(path: str | os.PathLike) -> Run:
  """Returns the `Run` that `load` would return, but with empty `variables`.

  Weights are read only if the config is derived from them.
  """
  return _about(Source.open(path))


def _about(source: Source, dtype: str | None = None) -> Run:
  config, experiment, task = source.config, source.experiment, None
  if dtype is not None:
    config = _computing_in(config, dtype)
  if experiment is not None:
    experiment = dataclasses.replace(experiment, model=config)
    # Only runs and exports contain vocabularies of characters.
    workdir = source.path if source.kind in ('run', 'export') else None
    task = make_task(experiment, workdir)
  if source.tokenizer is not None:
    task.modality.use_tokenizer(source.tokenizer, os.fspath(source.path))
  origins = {
    'language': source.path,
    'vlm': source.path,
    'peft': source.base,
  }
  origin = origins.get(source.kind)
  return Run(
    config=config,
    variables={},
    experiment=experiment,
    preprocess=source.preprocess,
    classes=source.classes,
    multi_label=source.multi_label,
    task=task,
    origin=origin and os.fspath(origin),
    base=source.base,
    foreign=source.foreign,
  )
