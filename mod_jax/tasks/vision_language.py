"""Questions about pictures, answered by a vision-language model."""

from collections.abc import Callable, Iterable, Sequence
import functools

import jax.numpy as jnp
import numpy as np

from mod_jax import errors, flops, losses, viz
from mod_jax.data import batches, tokenizers
from mod_jax.data import conversations as data_lib
from mod_jax.data import images as images_lib
from mod_jax.layers import lora
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.layers.token_info import IMAGE, KINDS
from mod_jax.losses import sums
from mod_jax.models import vlm
from mod_jax.sampling import generate
from mod_jax.studies.language import arank
from mod_jax.studies.vision_language import image_tokens
from mod_jax.tasks.experiment import PruningObjective
from mod_jax.tasks.modality import Modality, table

_QUESTION, _ANSWER = map(KINDS.index, ('question', 'answer'))
_PICTURED = 4  # Held-out pictures that are drawn.
_SHOWN = 6  # Held-out questions that are answered at the end of a run.
_ADDED = 16  # Maximum number of tokens of such an answer.
# Loss weight of what makes a DynamicViT keep the chosen number of patches.
_RATIO = PruningObjective().ratio


class VisionLanguage(Modality):
  """Answers to questions about pictures.

  The loss is on answers and, with `data.marks`, on the digits in the pictures.
  """

  example = 'ConversationDataConfig(source="table", path="questions.tsv")'
  unit, loss_unit = 'tokens', 'token'
  row = 'conversations'
  columns = ('accuracy', 'loss')
  main = ('loss', 'accuracy')
  rising = ('accuracy', 'accuracy/.*')
  # A dense checkpoint fits a routed model, and vice versa.
  optional = (
    *(r'(.*/)?(router|predictor)/.*', r'moving/.*'),
    *(r'tower/prediction_\d+/.*', r'tower/pattern_\d+', lora.PARAMETERS),
  )

  def __init__(self, config, workdir=None):
    super().__init__(config, workdir)
    data = config.data
    places = data.pictures * config.model.num_patches
    self.length = ((places + data.length, data.pictures),)
    errors.require(
      config.model.has_grid or not data.marks,
      'False for a tower that leaves fewer patches, which have no places',
      **{'data.marks': data.marks},
    )

  @functools.cached_property
  def tokenizer_source(self) -> tuple[str, str]:
    """Kind and path of the tokenizer, for `tokenizers.make`."""
    return self.config.data.tokenizer, self.config.data.tokenizer_path

  @functools.cached_property
  def tokenizer(self):
    """The tokenizer of the data, read on first use."""
    return tokenizers.make(*self.tokenizer_source)

  def use_tokenizer(self, kind: str, path: str) -> None:
    """Replaces the tokenizer; the arguments are those of `tokenizers.make`."""
    self.tokenizer_source = (kind, '' if kind == 'bytes' else path)
    self.tokenizer = tokenizers.make(kind, path)

  @property
  def end(self) -> int:
    """The token that ends an answer: `eos_id`, or a line break without one."""
    if self.tokenizer.eos_id is not None:
      return self.tokenizer.eos_id
    return self.tokenizer.encode('\n')[-1]

  @property
  def _adds_space(self) -> bool:
    """Whether the tokenizer puts a space before each text, as Llama 2's do."""
    first = self.tokenizer.encode_after('a')[:1]
    return any(self.tokenizer.surfaces[i].startswith(b' ') for i in first)

  @property
  def end_tokens(self) -> tuple[int, ...]:
    """The tokens after which the generation of an answer stops."""
    return self.tokenizer.end_ids or (self.end,)

  def check(self):
    model, tokenizer = self.config.model, self.tokenizer
    if model.vocab_size < tokenizer.vocab_size:
      raise errors.UserError(
        f'model.language.vocab_size={model.vocab_size} is smaller than the'
        f" tokenizer's {tokenizer.vocab_size}: set it to at least that."
      )
    image = model.image_token
    if image < tokenizer.vocab_size and tokenizer.surfaces[image]:
      raise errors.UserError(
        f'model.image_token={image} is {tokenizer.spelled(image)!r} in the'
        f' tokenizer: take an id of no text, such as {tokenizer.vocab_size},'
        ' and enlarge the vocabulary.'
      )

  # Rows.

  def encode(
    self,
    pieces: Sequence[tuple[data_lib.Kind, str]],
    encode_all: Callable[[list[str]], Iterable[list[int]]] | None = None,
  ) -> tuple[list[int], list[int]]:
    """Returns the tokens of a text, and each token's kind, an index in `KINDS`.

    Each picture becomes the single token `image_token`, and each answer ends
    with the token `end`. The pieces are encoded one by one, so that the kind of
    each token (see `layers/token_info.py`) is known, but their tokens are those
    of the whole text between pictures and the ends of answers.

    Args:
      pieces: (kind, text) of each piece.
      encode_all: maps texts to their tokens; None for `tokenizer.encode_parts`.
    """
    tokens = self.tokenizer.beginning()
    kinds = [KINDS.index('text')] * len(tokens)
    parts = [text.split(data_lib.IMAGE) for _, text in pieces]
    texts, follows, adds_space = [], False, self._adds_space
    for (kind, _), of_piece in zip(pieces, parts, strict=True):
      for i, text in enumerate(of_piece):
        follows &= not i  # Not the first after a picture.
        if text and follows:
          # A space between texts belongs to the word after it.
          if texts[-1].endswith(' '):
            texts[-1], text = texts[-1][:-1], f' {text}'
          if adds_space:  # Then the tokenizer itself puts it there.
            text = text.removeprefix(' ')
        texts.append(text)
        follows |= bool(text)
      follows &= kind != 'answer'
    if encode_all is None:
      encode_all = self.tokenizer.encode_parts
    encoded = iter(encode_all(texts))
    for (kind, _), of_piece in zip(pieces, parts, strict=True):
      for i in range(len(of_piece)):
        if i:
          tokens.append(self.config.model.image_token)
          kinds.append(IMAGE)
        ids = next(encoded)
        tokens += ids
        kinds += [KINDS.index(kind)] * len(ids)
      if kind == 'answer':
        tokens.append(self.end)
        kinds.append(_ANSWER)
    return tokens, kinds

  def _row(self, conversation: data_lib.Conversation) -> dict:
    """Returns a row's arrays; cuts off text beyond `data.length` tokens."""
    data, model = self.config.data, self.config.model
    tokens, kinds = self.encode(conversation.pieces())
    is_text = np.asarray(kinds) != IMAGE
    cut = int((np.cumsum(is_text) <= data.length).sum())
    tokens, kinds = tokens[:cut], kinds[:cut]
    shown = conversation.pictures[: kinds.count(IMAGE)]
    pictures = data.preprocess(shown) if shown else []
    placed = vlm.place_images(
      *(model, [tokens], [pictures], [kinds]),
      text=data.length,
      count=data.pictures,
    )
    is_answer_L = placed.valid_BL[0] & (placed.kind_BL[0] == _ANSWER)
    return {
      'tokens': placed.tokens_BL[0],
      'images': placed.images_BIHWC[0],
      'kind': placed.kind_BL[0],
      'valid': placed.valid_BL[0],
      'targets': np.append(placed.tokens_BL[0, 1:], np.int32(0)),
      'weights': np.append(is_answer_L[1:], False).astype(np.float32),
      'topic': np.int32(conversation.topic),
    }

  def _train_row(self, source, index, rng) -> dict:
    del rng  # Rows are not augmented.
    conversation = source.load(int(index))
    row = self._row(conversation)
    if self.config.data.marks:  # The target of an image token is its digit.
      digit_L = self._digits_shown(row, conversation)
      row['targets'] = np.where(digit_L >= 0, digit_L, row['targets'])
      row['weights'] = np.where(digit_L >= 0, np.float32(1), row['weights'])
    return row

  def _digits_shown(self, row, conversation: data_lib.Conversation):
    """Returns digit_L: the text token of the digit that each image token shows.

    The value is -1 for image tokens of the background, -2 for all other tokens.
    """
    grid = self.config.model.grid
    place_G = (np.arange(grid) + 0.5) / grid
    digit_GG = np.full((grid, grid), -1, np.int32)
    for (x, y, width, height), digit in conversation.objects:
      is_row_G = np.abs(place_G - y) < height / 2
      is_column_G = np.abs(place_G - x) < width / 2
      # Some tokenizers put a token for the beginning of a word before a digit.
      *_, token = self.tokenizer.encode(digit)
      digit_GG[is_row_G[:, None] & is_column_G] = token
    digit_L = np.full(len(row['tokens']), -2, np.int32)
    digit_L[row['valid'] & (row['kind'] == IMAGE)] = digit_GG.flatten()
    return digit_L

  def _eval_row(self, source, index) -> dict:
    real = index != batches.PADDING
    conversation = source.load(int(index) if real else 0)
    row = self._row(conversation)
    if self.config.data.source == 'scenes' and self.config.model.has_grid:
      shown_L = self._digits_shown(row, conversation)
      row['shown'] = shown_L if real else np.full_like(shown_L, -2)
    return row | {
      'weights': row['weights'] * real,
      'weight': np.float32(real),
    }

  def split(self, name):
    return data_lib.open_split(self.config.data, name)

  def endless(self, **kwargs):
    source = self.split('train')
    make_row = functools.partial(self._train_row, source)
    workers = self.config.data.workers
    return batches.endless(
      make_row, len(source), workers, what='conversations', **kwargs
    )

  def eval_batches(self, **kwargs):
    source = self.split('eval')
    make_row = functools.partial(self._eval_row, source)
    workers = self.config.data.workers
    return batches.held_out(make_row, len(source), workers, **kwargs)

  def row_shapes(self):
    ((length, pictures),) = self.length
    size = self.config.data.image_size
    return {
      **dict.fromkeys(('tokens', 'kind', 'targets'), ((length,), 'int32')),
      'images': ((pictures, size, size, 3), 'float32'),
      'valid': ((length,), 'bool'),
      'weights': ((length,), 'float32'),
      'topic': ((), 'int32'),
    }

  def data_fingerprint(self):
    fingerprint = self.tokenizer.fingerprint
    return super().data_fingerprint() | {'tokenizer': fingerprint}

  @property
  def tokens_per_step(self):
    ((length, _),) = self.length
    return self.config.train.batch_size * length

  def inputs(self, batch, *, train):
    del train
    return (batch['tokens'], batch['images']), {
      'kind_BL': batch['kind'],
      'valid_BL': batch['valid'],
      # Without targets the model returns logits, and no loss.
      'targets_BL': batch.get('targets'),
      'weights_BL': batch['weights'],
    }

  def loss(self, output, batch):
    return output.loss

  def losses(self, output, batch):
    pairs, metric_sums = super().losses(output, batch)
    if output.keep_STN is not None:
      model = self.config.model
      is_image_BL = batch['valid'] & (batch['kind'] == IMAGE)
      pictures_B1 = is_image_BL.sum(-1, keepdims=True) // model.num_patches
      is_shown_BI = jnp.arange(self.config.data.pictures) < pictures_B1
      ratio = metric_sums['ratio'] = losses.ratio_loss(
        *(output.keep_STN, model.tower.targets, is_shown_BI.reshape(-1))
      )
      pairs.append((_RATIO * ratio[0], ratio[1]))
    return pairs, metric_sums

  def eval_sums(self, output, batch, mode):
    """Returns metric sums; an answer is right if greedy decoding gives it."""
    del mode
    asked_BL = batch['weights'] > 0
    asked_B = asked_BL.any(axis=-1)
    right_B = asked_B & (output.right_BL | ~asked_BL).all(axis=-1)

    def accuracy(among_B):
      return (right_B & among_B).sum(dtype=jnp.float32), among_B.sum(
        dtype=jnp.float32
      )

    found = {'loss': self.loss(output, batch), 'accuracy': accuracy(asked_B)}
    if self.config.data.source == 'scenes':
      for name in self.config.data.topics:
        among_B = batch['topic'] == data_lib.TOPICS.index(name)
        found[f'accuracy/{name}'] = accuracy(asked_B & among_B)
    for routed in output.routing:
      if routed.candidate_BL is not None:
        among_BL = routed.candidate_BL & asked_B[:, None]
        share = (
          (routed.chosen_BL & among_BL).sum(dtype=jnp.float32),
          among_BL.sum(dtype=jnp.float32),
        )
        found = sums.add(found, {'routed': share})
    return found

  def token_weights(self, batch):
    return batch['valid'] * batch['weight'][:, None]

  def modes(self, *, more=False):
    model = self.config.model
    routing = model.decoding_mode if len(model.rules) > 1 else RoutingMode()
    return {} if more else {'': Mode(routing=routing)}

  # Reports.

  def summary(self, task, metrics):
    model = self.config.model
    cells = [
      f'{flops.forward(model, *self.length) / 1e9:.4f}',
      f'{flops.num_params(model):,}',
    ]
    columns = self.columns + ('routed',) * bool(model.num_routed)
    lines = table(
      *(metrics, columns, [('model', '', *cells)]),
      more=('GFLOPs', 'parameters'),
    )
    by_topic = [
      f'{name.partition("/")[2]} {value:.4f}'
      for name, value in metrics.items()
      if name.startswith('accuracy/')
    ]
    if by_topic:
      lines.append(f'accuracy by question: {", ".join(by_topic)}')
    if model.num_routed:
      lines.append(
        'routed: of the tokens among which blocks choose, those that enter'
      )
    return '\n'.join(lines)

  @property
  def _chooses_image_tokens(self) -> bool:
    routing = self.config.model.routing
    kinds = () if routing is None else routing.kinds or ()
    return self.config.model.has_grid and 'image' in kinds

  def pictures(self, task, params, model_state):
    """Draws which image tokens each routed block processes, and the answers."""
    if not self._chooses_image_tokens:
      return {}
    batch = next(iter(self.eval_batches(batch_size=_PICTURED, num_batches=1)))
    del batch['targets']  # Without them the model returns logits, for answers.
    output = task.on_examples(
      *(params, model_state, batch), *self.modes().values()
    )
    is_image_BL = batch['valid'] & (batch['kind'] == IMAGE)
    shown_B = is_image_BL.any(axis=-1) & (batch['weight'] > 0)
    if not shown_B.any():
      return {}
    written_BL = np.argmax(output.logits_BLV, axis=-1)
    is_question_BL = batch['valid'] & (batch['kind'] == _QUESTION)

    def said(tokens_L, is_said_L):
      return self.tokenizer.decode(tokens_L[is_said_L]).strip()

    labels = [
      f'{said(batch["tokens"][row], is_question_BL[row])}'
      f' {said(written_BL[row], batch["weights"][row] > 0)}'
      for row in np.flatnonzero(shown_B)
    ]
    figure = self._draw(
      *(output, batch['images'], is_image_BL, labels),
      'Held-out pictures: the image tokens that each block processes',
      shown_B,
    )
    return {'image_tokens': figure}

  def _draw(
    self, output, images_BIHWC, is_image_BL, labels, title, shown_B=np.s_[:]
  ):
    """Draws which patches of each row's first picture the blocks process."""
    model = self.config.model
    place_BN = np.argsort(~is_image_BL, axis=-1, kind='stable')
    place_BN = place_BN[:, : model.num_patches]
    processed_RBN = [
      np.take_along_axis(np.asarray(routed.chosen_BL), place_BN, axis=-1)
      for routed in output.routing
    ]
    return viz.patch_maps(
      images_lib.denormalize(self.config.data, images_BIHWC[shown_B, 0]),
      np.stack(processed_RBN)[:, shown_B],
      layers=model.routed_blocks,
      grid=(model.grid,) * 2,
      num_layers=model.num_layers,
      labels=labels,
      title=title,
    )

  def studies(self):
    by_name = {'arank': arank}
    if self._chooses_image_tokens and self.config.data.source == 'scenes':
      by_name['image_tokens'] = image_tokens
    return by_name

  def answers(
    self,
    params,
    model_state,
    pictures: Sequence[Sequence[np.ndarray]],
    questions: Sequence[str],
    *,
    max_new_tokens: int = 64,
    **kwargs,
  ) -> list[str]:
    """Returns answers to questions, decoded greedily by default.

    `pictures` has, for each question, arrays from `data.preprocess`. If a
    question has no placeholders for its pictures, they come before the
    question. `kwargs` are those of `sampling.generate`.
    """
    model = self.config.model
    placed = self._asked(pictures, questions)
    kwargs.setdefault('temperature', 0.0)
    if 'mode' not in kwargs:
      kwargs['mode'] = model.decoding_mode
    generated = generate(
      model.build(),
      {'params': params, **model_state},
      placed.tokens_BL,
      placed.valid_BL,
      images_BIHWC=placed.images_BIHWC,
      kind_BP=placed.kind_BL,
      max_new_tokens=max_new_tokens,
      end_token=self.end_tokens,
      **kwargs,
    )
    arrays = map(np.asarray, (generated.tokens_BN, generated.length_B))
    return [
      self.tokenizer.decode(tokens_N[:length].tolist()).strip()
      for tokens_N, length in zip(*arrays, strict=True)
    ]

  def _asked(self, pictures, questions) -> vlm.Placed:
    """Returns prompts, padded at the left: a question and its pictures each."""
    rows, kinds = [], []
    for shown, question in zip(pictures, questions, strict=True):
      question = data_lib.with_pictures(question, len(shown))
      tokens, kinds_of_row = self.encode(data_lib.prompt(question))
      rows.append(tokens)
      kinds.append(kinds_of_row)
    model = self.config.model
    return vlm.place_images(model, rows, pictures, kinds, side='left')

  def draw(self, apply, pictures, questions, answers):
    """Returns a figure of the image tokens that each block processes.

    `apply` is the compiled model with its parameters. `answers` are the results
    of the method `answers` for `pictures` and `questions`. Only the first
    picture of a question is drawn. Raises UserError for a question without a
    picture, and if no block chooses among image tokens.
    """
    if not self._chooses_image_tokens:
      raise errors.UserError(
        'draw: no block of this model chooses among image tokens: use'
        ' run.predict.'
      )
    if not all(map(len, pictures)):
      raise errors.UserError('draw: give a picture with each question.')
    placed = self._asked(pictures, questions)
    (mode,) = self.modes().values()
    output = apply(
      placed.tokens_BL,
      placed.images_BIHWC,
      kind_BL=placed.kind_BL,
      valid_BL=placed.valid_BL,
      mode=mode.routing,
    )
    is_image_BL = placed.valid_BL & (placed.kind_BL == IMAGE)
    labels = [' '.join(x) for x in zip(questions, answers, strict=True)]
    return self._draw(
      *(output, placed.images_BIHWC, is_image_BL, labels),
      'The image tokens that each block processes',
    )

  def texts(self, task, params, model_state):
    added = min(_ADDED, self.config.evaluation.sample_tokens)
    # With top-k as its only rule, a model cannot generate.
    if not added or len(self.config.model.rules) == 1:
      return
    source = self.split('eval')
    asked = [source.load(i) for i in range(min(_SHOWN, len(source)))]
    # Ask the first question of each conversation, and show only the pictures
    # that this question refers to.
    questions = [x.turns[0][0] for x in asked]
    pictures = [
      x.pictures[: question.count(data_lib.IMAGE)]
      for x, question in zip(asked, questions, strict=True)
    ]
    preprocess = self.config.data.preprocess
    found = self.answers(
      *(params, model_state),
      [preprocess(shown) if shown else [] for shown in pictures],
      questions,
      max_new_tokens=added,
    )
    for conversation, answer in zip(asked, found, strict=True):
      question, true = conversation.turns[0]
      question = question.replace(data_lib.IMAGE, '').strip()
      yield f'{question} {answer} (it is {true})'
