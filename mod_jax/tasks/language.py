"""Language modelling: batches, metrics, samples, and pictures of routing."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from mod_jax import errors, losses, viz
from mod_jax.data import text, tokenizers
from mod_jax.layers import lora
from mod_jax.layers import stack as stack_lib
from mod_jax.layers.mode import Mode, RoutingMode
from mod_jax.losses import sums
from mod_jax.sampling import Generated, generate, pad_prompts
from mod_jax.studies import language as studies
from mod_jax.studies.conversion import conversion
from mod_jax.tasks import expert_pictures
from mod_jax.tasks.modality import Modality, table

# The file of a learned tokenizer in the directory of its run.
_TOKENIZER = 'tokenizer.json'
# The prefix of metrics measured with `overflow='drop'`.
_DROP = 'drop_'


class Language(Modality):
  """Next-token prediction; routed models are judged under each routing rule."""

  example = 'TextDataConfig(source="files", files="texts/*.txt")'
  unit, loss_unit = 'tokens', 'token'
  row = 'sequences'
  columns = ('loss', 'perplexity', 'bits_per_byte')
  main = ('loss',)
  falling = ('loss', 'perplexity', 'bits_per_byte')
  # A dense checkpoint fits a routed model, and vice versa.
  optional = (r'(.*/)?(router|predictor)/.*', r'moving/.*', lora.PARAMETERS)

  def __init__(self, config, workdir=None):
    """Keeps the config; reads no data.

    On first use, a learned tokenizer is read from `workdir`, or else from the
    run at `config.init`, since the text that it learned from may have changed.
    If both lack the tokenizer, it is learned from the training text.
    """
    super().__init__(config, workdir)
    self.length = (config.data.length,)
    # `accuracy` is how often a causal routing rule agrees with top-k.
    self.rising = () if config.model.routing is None else ('accuracy',)

  @functools.cached_property
  def _data(self) -> text.TextDataConfig:
    """The config of the data, with the path of a learned tokenizer."""
    data = self.config.data
    if not data.learns_tokenizer:
      return data
    # `kept` looks in this run first, then in the run at `init`, whose weights
    # need the tokenizer that they were trained with.
    path = self.kept(_TOKENIZER) or text.learn_tokenizer(data)
    return dataclasses.replace(
      data, tokenizer='huggingface', tokenizer_path=str(path)
    )

  @functools.cached_property
  def tokenizer_source(self) -> tuple[str, str]:
    """Kind and path of the tokenizer, for `tokenizers.make`."""
    return text.tokenizer_source(self._data)

  @functools.cached_property
  def tokenizer(self):
    """The tokenizer of the data, read or learned on first use."""
    return text.make_tokenizer(self._data)

  def use_tokenizer(self, kind: str, path: str) -> None:
    """Replaces the tokenizer; the arguments are those of `tokenizers.make`."""
    # The data config only accepts an empty path with the tokenizer 'bytes'.
    self.tokenizer_source = (kind, '' if kind == 'bytes' else path)
    self.tokenizer = tokenizers.make(kind, path)

  def check(self):
    size = self.config.model.vocab_size
    if size < self.tokenizer.vocab_size:
      raise errors.UserError(
        f"model.vocab_size={size} is smaller than the tokenizer's"
        f' {self.tokenizer.vocab_size}: set it to at least that.'
      )

  def files(self):
    if not self.config.data.learns_tokenizer:
      return {}
    contents = tokenizers.files(*self.tokenizer_source)
    return {name: data.decode() for name, data in contents.items()}

  def endless(self, **kwargs):
    steps = self.config.train.num_steps
    return text.train_iterator(self._data, num_batches=steps, **kwargs)

  def rows_per_epoch(self):
    return text.num_train_tokens(self._data) // self.config.data.length

  def data_summary(self):
    return ''  # The base class counts rows, and text is counted in tokens.

  def row_shapes(self):
    dtypes = {'tokens': 'int32', 'targets': 'int32', 'weights': 'float32'}
    if self.config.data.segments:
      dtypes['segments'] = 'int32'
    return {name: (self.length, dtype) for name, dtype in dtypes.items()}

  def eval_batches(self, **kwargs):
    return text.eval_batches(self._data, **kwargs)

  def data_fingerprint(self):
    return text.fingerprint(self._data)

  @property
  def tokens_per_step(self):
    return self.config.train.batch_size * self.config.data.length

  def inputs(self, batch, *, train):
    del train
    # Padding has segment 0; training rows without segments have no padding.
    # Weights do not mark the padding: tokens of prompts may have weight 0, too.
    segment_BL, valid_BL = batch.get('segments'), batch.get('valid')
    if segment_BL is not None:
      valid_BL = segment_BL > 0
    return (batch['tokens'],), {
      'valid_BL': valid_BL,
      'segment_BL': segment_BL,
      # Without targets the model returns logits, and no loss.
      'targets_BL': batch.get('targets'),
      'weights_BL': batch.get('weights'),
    }

  def loss(self, output, batch):
    if output.loss is None:  # The model was called without targets.
      return losses.next_token_loss(
        output.logits_BLV, batch['targets'], batch['weights']
      )
    return output.loss

  def losses(self, output, batch):
    pairs, metric_sums = super().losses(output, batch)
    if output.early_loss is not None:
      total, weight = metric_sums['early_loss'] = output.early_loss
      pairs.append((self.config.model.early_loss * total, weight))
    return pairs, metric_sums

  def eval_sums(self, output, batch, mode):
    total, weight = self.loss(output, batch)
    metric_sums = {'loss': (total, weight)}
    if mode.routing.overflow == 'drop':
      return metric_sums
    token_bytes_V = jnp.asarray(self.tokenizer.token_bytes)
    num_bytes = jnp.sum(token_bytes_V[batch['targets']] * batch['weights'])
    metric_sums['bits_per_byte'] = (total, num_bytes)
    _, kwargs = self.inputs(batch, train=False)
    for routed in output.routing if mode.routing.rule != 'never' else ():
      agreement = losses.choice_agreement(
        routed.chosen_BL, routed.top_k_BL, kwargs['valid_BL']
      )
      metric_sums = sums.add(metric_sums, agreement)
    return metric_sums

  def token_weights(self, batch):
    _, kwargs = self.inputs(batch, train=False)
    if kwargs['valid_BL'] is None:
      return jnp.ones(batch['tokens'].shape, jnp.float32)
    return kwargs['valid_BL'].astype(jnp.float32)

  # Evaluation.

  @property
  def rules(self) -> tuple[str, ...]:
    """The routing rules to evaluate, as `LMConfig.rules`."""
    return self.config.model.rules

  @property
  def _shown(self) -> tuple[str, ...]:
    """The rules of `modes` and `summary`: `rules` and, if possible, `never`."""
    model = self.config.model
    skips = model.num_routed and (model.experts is None or model.experts.causal)
    return (*self.rules, 'never') if skips else self.rules

  def modes(self, *, more=False):
    """Returns a mode for each routing rule, by the prefix of its metrics.

    The rules are top-k, the causal rules, and the baseline `never`. A dense
    model has one mode, without a prefix. With `more`, the modes are the causal
    rules with `overflow='drop'`, whose losses are named `<rule>/drop_loss`.
    """
    model = self.config.model
    if more:
      # Only routed blocks have caches that can overflow.
      rules = self.rules[1:] if model.num_routed else ()
      named = {
        f'{rule}/{_DROP}': model.routing_mode(rule, overflow='drop')
        for rule in rules
      }
    elif self.rules:
      named = {f'{rule}/': model.routing_mode(rule) for rule in self._shown}
    else:
      named = {'': RoutingMode()}
    return {prefix: Mode(routing=mode) for prefix, mode in named.items()}

  def finish_metrics(self, metrics):
    """Adds `perplexity`, and converts `bits_per_byte` from nats to bits."""
    finished = dict(metrics)
    for name, value in metrics.items():
      prefix, is_bits, _ = name.rpartition('bits_per_byte')
      if is_bits:
        nats = min(metrics[f'{prefix}loss'], 700.0)
        finished[f'{prefix}perplexity'] = math.exp(nats)
        finished[name] = value / math.log(2)
    return finished

  # Reports.

  def summary(self, task, metrics):
    columns, rows, notes = self.columns, [('model', '')], []
    if self.rules:
      rows = [(rule, f'{rule}/') for rule in self._shown]
    if self.config.model.num_routed:
      columns += ('routed', 'accuracy', 'precision', 'recall', 'count_error')
    if 'never' in self._shown:
      notes.append(
        'never: routed blocks left out, the trivial baseline, whose accuracy is'
        f' {metrics["top_k/never_route"]:.4f}'
      )
    if any(name.endswith(f'/{_DROP}loss') for name in metrics):
      columns += (f'{_DROP}loss',)
      notes.append(
        f'{_DROP}loss: with caches of {RoutingMode().slack} times the capacity,'
        ' which pass by the tokens that find no room'
      )
    if (experts := self.config.model.experts) is not None:
      if experts.num_nulls and experts.choice == 'token':
        columns += ('experts/null',)
        notes.append(
          'experts/null: of all choices, those that do nothing, which should be'
          f' {1 - experts.share:.4f}'
        )
      columns += ('experts/busiest',)
      notes.append(
        'experts/busiest: tokens of the most wanted expert of a batch over the'
        ' mean of all; 1 where they are wanted alike, and at most'
        f' {experts.num_experts}'
      )
    title = 'rule' if self.rules else ''
    return '\n'.join([*table(metrics, columns, rows, title=title), *notes])

  def sample(
    self, params, model_state, prompts: list[str], **kwargs
  ) -> list[str]:
    """Returns continuations of texts; keywords as for `continued`."""
    prompts = [self.tokenizer.encode(prompt) for prompt in prompts]
    generated = self.continued(params, model_state, prompts, **kwargs)
    return self.decoded(prompts, generated)

  def decoded(
    self, prompts: list[list[int]], generated: Generated
  ) -> list[str]:
    """Returns the texts generated after prompts, up to an end token."""
    arrays = map(np.asarray, (generated.tokens_BN, generated.length_B))
    return [
      self.tokenizer.decode_after(prompt, tokens_N[:length].tolist())
      for prompt, tokens_N, length in zip(prompts, *arrays, strict=True)
    ]

  def continued(
    self,
    params,
    model_state,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | None = None,
    **kwargs,
  ) -> Generated:
    """Continues tokenized prompts; `kwargs` are those of `sampling.generate`.

    `mode` is the model's `decoding_mode` by default. If `max_new_tokens` is
    None, texts grow up to the length that the model was trained with, and a
    prompt that leaves no room raises UserError.
    """
    if 'mode' not in kwargs:
      kwargs['mode'] = self.config.model.decoding_mode
    tokens_BP, valid_BP = pad_prompts(prompts)
    if max_new_tokens is None:
      max_new_tokens = self.config.data.length - tokens_BP.shape[1]
      if max_new_tokens < 1:
        raise errors.UserError(
          f'A prompt of {tokens_BP.shape[1]} tokens leaves no room in the'
          f' {self.config.data.length} that the model was trained at: shorten'
          ' it, or say how many tokens to add all the same.'
        )
    return generate(
      self.config.model.build(),
      {'params': params, **model_state},
      tokens_BP,
      valid_BP,
      max_new_tokens=max_new_tokens,
      end_token=self.tokenizer.end_ids,
      **kwargs,
    )

  def texts(self, task, params, model_state):
    settings = self.config.evaluation
    # A routed model without a causal rule cannot generate.
    if settings.sample_tokens and len(self.rules) != 1:
      prompt = settings.prompt or self._held_out_words()
      room = self.config.data.length - len(self.tokenizer.encode(prompt))
      (continuation,) = self.sample(
        *(params, model_state, [prompt]),
        max_new_tokens=max(1, min(settings.sample_tokens, room)),
        temperature=0.7,
        top_p=0.95,
        key=jax.random.key(self.config.seed),
      )
      yield prompt + continuation

  def _held_out_words(self) -> str:
    """Returns up to three first words of a held-out row, as a prompt."""
    (batch,) = self.eval_batches(batch_size=1, num_batches=1)
    length = int(self.token_weights(batch)[0].sum())
    words = self.tokenizer.decode(batch['tokens'][0, :length].tolist()).split()
    # Leave most of the length to the continuation.
    room = max(1, self.config.data.length // 4)
    return ' '.join(words[:3])[:room] or '.'

  def _look(self, task, params, model_state):
    """Returns (output, pieces, real_BL) of a held-out batch.

    `output` is the model's output, `pieces` are the texts of the tokens of the
    first row, without padding, and real_BL is False for padding.
    """
    ((batch, output),) = task.over_held_out(
      lambda output, _: output, params, model_state, 1
    )
    real_BL = np.asarray(self.token_weights(batch)) > 0
    length = int(real_BL[0].sum())
    pieces = self.tokenizer.pieces(batch['tokens'][0, :length].tolist())
    return output, pieces, real_BL

  def pictures(self, task, params, model_state):
    config = self.config.model
    if not config.num_routed and config.experts is None:
      return {}
    output, pieces, real_BL = self._look(task, params, model_state)
    figures = {}
    if config.num_routed:
      figures |= self._routing_pictures(output, pieces, real_BL)
    if config.experts is not None:
      figures |= self._expert_pictures(
        task, params, model_state, output, pieces
      )
    return figures

  def _routing_pictures(self, output, pieces, real_BL):
    config, length = self.config.model, len(pieces)
    layers = config.routed_blocks
    thresholds = None
    if config.routing.threshold_decay:
      thresholds = [routed.threshold_B[0] for routed in output.routing]
    return {
      'routing': viz.routing_map(
        np.stack([r.chosen_BL[0, :length] for r in output.routing]),
        pieces,
        layers=layers,
        num_layers=config.num_layers,
        weights_RL=np.stack([r.weight_BL[0, :length] for r in output.routing]),
        title='Held-out text: which blocks process which token',
      ),
      'router_weights': viz.score_histogram(
        np.stack(
          [np.where(real_BL, r.score_BL, np.nan) for r in output.routing]
        ),
        np.stack([r.chosen_BL for r in output.routing]),
        layers=layers,
        title='Router scores on held-out text',
        thresholds=thresholds,
      ),
    }

  def _expert_pictures(self, task, params, model_state, output, pieces):
    config = self.config.model
    expert_RBL, more_RBL, dropped_RBL = expert_pictures.takers(
      output.experts, self.config.data.length
    )
    row = np.s_[:, 0, : len(pieces)]
    mode, suffix = Mode(), ''
    if len(self.rules) > 1:
      # Use the rule of generation. Under top-k, experts that choose their
      # tokens all have the same load.
      mode = Mode(routing=config.routing_mode(self.rules[1]))
      suffix = f", by the rule '{self.rules[1]}'"
    return {
      'expert_map': viz.expert_map(
        expert_RBL[row],
        pieces,
        layers=expert_pictures.blocks(config),
        num_layers=config.num_layers,
        num_experts=config.experts.num_experts,
        more_RL=more_RBL[row],
        dropped_RL=dropped_RBL[row],
        title='Held-out text: which expert takes which token',
      ),
      'expert_load': expert_pictures.load_picture(
        *(task, params, model_state, mode),
        f'Held-out text: how many tokens each expert takes{suffix}',
      ),
    }

  def studies(self):
    by_name = {
      'arank': studies.arank,
      'copying': studies.copying,
      'influence': studies.influence,
    }
    model = self.config.model
    if model.num_routed:
      by_name['engagement'] = studies.engagement
      # This study compares with the dense model at `init`, which has neither
      # experts nor learners.
      if self.config.init and model.experts is None and model.adaptive is None:
        by_name['conversion'] = conversion
    return by_name

  def load_pictures(self, task, params, model_state):
    """Draws the learners that each token runs, and the load of each row."""
    output, pieces, real_BL = self._look(task, params, model_state)
    choices = stack_lib.collect(output.aux, 'adaptive')
    layers = sorted({int(name.split('/')[0][6:]) for name in choices})
    share_RL = np.stack(
      [
        task.share_per_token(
          {n: c for n, c in choices.items() if n.startswith(f'block_{i}/')}
        )[0, : len(pieces)]
        for i in layers
      ]
    )
    return {
      'load': viz.token_load(
        share_RL,
        pieces,
        layers=layers,
        unit='share of the learners',
        title='Held-out text: where the compute goes',
      ),
      'compute': viz.compute_histogram(
        np.asarray(task.load_per_row(choices))[real_BL.any(axis=-1)],
        budget=task.objective.budget,
        title='Compute per held-out sequence',
      ),
    }
