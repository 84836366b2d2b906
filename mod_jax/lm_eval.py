"""Evaluates language models by EleutherAI's lm-evaluation-harness.

  python -m mod_jax.lm_eval --model=runs/mod --tasks=lambada_openai,hellaswag
  python -m mod_jax.lm_eval --model=FOLDER --tasks=my_task --include_path=tasks

--model is a run, an exported folder, or a folder of Hugging Face. A routed
model is scored under a causal rule, which --rule chooses: the choice by top-k
would depend on later tokens, and so on the answers. The harness is not
installed with mod_jax: pip install 'mod_jax[lm_eval]'.
"""

import itertools
import json
import pathlib

from absl import flags, logging
import jax
import lm_eval.api.model
import lm_eval.models.utils
import lm_eval.tasks
import lm_eval.utils
import numpy as np

from mod_jax import cli
from mod_jax.errors import UserError
from mod_jax.layers import vocabulary
from mod_jax.pretrained import load as load_lib
from mod_jax.sampling import generation
from mod_jax.serving.engine import Engine


class ModJax(lm_eval.api.model.TemplateLM):
  """A language model of mod_jax, with the interface of the harness.

  Args:
    run: the model, with its weights and tokenizer.
    rule: the causal rule of routing; None takes the default of generation.
    batch_size: number of texts that are scored, or continued, at a time.
    max_length: most tokens of a text; None takes the run's `default_length`.
  """

  def __init__(
    self,
    run: load_lib.Run,
    *,
    rule: str | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
  ):
    super().__init__()
    # The engine chooses and checks the rule.
    self._engine = Engine(
      run, slots=batch_size, max_length=max_length, mode=rule
    )
    self._run, self._batch_size = run, batch_size
    self.tokenizer = run.tokenizer
    self._score = jax.jit(self._scores)

  @property
  def eot_token_id(self) -> int:
    if self.tokenizer.eos_id is None:
      raise UserError(
        'this tokenizer has no token that ends a text, which the harness needs'
        ' in place of an empty context.'
      )
    return self.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """Id before a text without context: begin-of-text, or else end-of-text."""
    begin = self.tokenizer.bos_id
    return self.eot_token_id if begin is None else begin

  @property
  def max_length(self) -> int:
    return self._engine.max_length

  @property
  def tokenizer_name(self) -> str:
    return self.tokenizer.fingerprint

  def tok_encode(self, string, add_special_tokens=None, **kwargs) -> list[int]:
    """Returns the tokens of a text, by default with the model's begin token."""
    del kwargs
    if add_special_tokens is False:
      return self.tokenizer.encode(string)
    return self._run.encode(string)

  def _scores(self, variables, tokens_BL, valid_BL):
    """Returns (log_prob, is_argmax) [B, L - 1] of each token but the first."""
    output = self._run.config.build().apply(
      variables,
      tokens_BL[:, :-1],
      valid_BL=valid_BL[:, :-1],
      mode=self._engine.mode,
      rngs={'routing': jax.random.key(0)},
    )
    logits_BLV, target_BL = output.logits_BLV, tokens_BL[:, 1:]
    log_prob_BL = generation.log_prob(logits_BLV, target_BL)
    return log_prob_BL, vocabulary.argmax(logits_BLV) == target_BL

  def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
    del disable_tqdm, kwargs
    rows = []
    for _, context, continuation in requests:
      tokens = context + continuation
      self._warn_if_cut(len(tokens) - 1)
      tokens = tokens[-(self.max_length + 1) :]
      rows.append((tokens, min(len(continuation), len(tokens) - 1)))
    # Batch texts of similar lengths, since batches are padded to the longest.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    results = [None] * len(rows)
    for start in range(0, len(order), self._batch_size):
      batch = order[start : start + self._batch_size]
      # The last token is only a target.
      length = generation.bucket(max(len(rows[i][0]) for i in batch) - 1)
      # The number of rows is fixed, so that few shapes are compiled.
      tokens_BL = np.zeros((self._batch_size, length + 1), np.int32)
      valid_BL = np.zeros(tokens_BL.shape, bool)
      valid_BL[:, 0] = True
      for b, i in enumerate(batch):
        tokens, _ = rows[i]
        tokens_BL[b, : len(tokens)] = tokens
        valid_BL[b, : len(tokens)] = True
      log_prob_BL, likeliest_BL = map(
        np.asarray, self._score(self._run.variables, tokens_BL, valid_BL)
      )
      for b, i in enumerate(batch):
        tokens, count = rows[i]
        scored = slice(len(tokens) - 1 - count, len(tokens) - 1)
        results[i] = (
          float(log_prob_BL[b, scored].sum()),
          bool(likeliest_BL[b, scored].all()),
        )
    for (texts, _, _), result in zip(requests, results, strict=True):
      if texts is not None:
        self.cache_hook.add_partial('loglikelihood', texts, result)
    return results

  def _warn_if_cut(self, length):
    if length > self.max_length:
      logging.log_first_n(
        logging.WARNING,
        'A text of %d tokens does not fit max_length=%d: texts are cut.',
        *(1, length, self.max_length),
      )

  def loglikelihood_rolling(self, requests, disable_tqdm=False):
    """Returns each text's log-likelihood, summed over windows of the text."""
    del disable_tqdm
    pairs, ends = [], []
    for request in requests:
      (string,) = request.args
      windows = lm_eval.utils.get_rolling_token_windows(
        token_list=self.tok_encode(string),
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      pairs += [
        (None, *lm_eval.utils.make_disjoint_window(pair)) for pair in windows
      ]
      ends.append(len(pairs))
    scores = [score for score, _ in self._loglikelihood_tokens(pairs)]
    totals = [sum(scores[i:j]) for i, j in itertools.pairwise([0, *ends])]
    for request, total in zip(requests, totals, strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', request.args, total)
    return totals

  def generate_until(self, requests, disable_tqdm=False):
    """Returns the continuation of each text, up to its first stop string."""
    del disable_tqdm
    generated = {}
    for seed, request in enumerate(requests):
      context, gen_kwargs = request.args
      settings = lm_eval.models.utils.normalize_gen_kwargs(gen_kwargs)
      tokens = self.tok_encode(context) or [self.prefix_token_id]
      # New tokens may take half of the length, or more if the context is short.
      room = max(self.max_length - len(tokens), self.max_length // 2, 1)
      num_new = min(settings['max_gen_toks'], room)
      self._warn_if_cut(len(tokens) + settings['max_gen_toks'])
      tokens = tokens[-(self.max_length - num_new) :]
      id = self._engine.submit(
        tokens,
        max_new_tokens=num_new,
        temperature=settings.get('temperature') or 0.0,
        top_p=settings.get('top_p') or 1.0,
        top_k=settings.get('top_k') or 0,
        stop=[text for text in settings['until'] if text],
        seed=seed,  # Repeated requests must get different samples.
      )
      generated[id] = ''
    for event in self._engine.run():
      generated[event.id] += event.text
    texts = list(generated.values())
    for request, text in zip(requests, texts, strict=True):
      self.cache_hook.add_partial('generate_until', request.args, text)
    return texts


def define_flags() -> None:
  """Defines the flags of `main`."""
  flags.DEFINE_string('model', None, 'Directory of the model.', required=True)
  cli.define_dtype()
  flags.DEFINE_list('tasks', None, "The harness's tasks.", required=True)
  flags.DEFINE_string(
    'include_path', None, 'Directory of further tasks, in YAML.'
  )
  flags.DEFINE_integer('limit', None, 'Documents of each task; default all.')
  flags.DEFINE_integer('num_fewshot', None, "Examples; by default the task's.")
  flags.DEFINE_integer('batch_size', 8, 'Texts that are read at a time.')
  flags.DEFINE_integer(
    *('max_length', None),
    'Tokens that are read; by default as in training, and 2,048 at most of a'
    ' published model.',
  )
  flags.DEFINE_string(
    'rule', None, 'Causal rule of a routed model, of those trained for.'
  )
  flags.DEFINE_string('out', None, 'File for the results, in JSON.')


def main(_) -> None:
  """Runs the tasks, prints the harness's table, and writes the results."""
  values = flags.FLAGS
  if values.out and not pathlib.Path(values.out).parent.is_dir():
    raise UserError(
      f'--out={values.out}: there is no such directory; make it first.'
    )
  model = ModJax(
    load_lib.load(values.model, dtype=values.dtype),
    rule=values.rule,
    batch_size=values.batch_size,
    max_length=values.max_length,
  )
  manager = lm_eval.tasks.TaskManager(include_path=values.include_path)
  if unknown := sorted(set(values.tasks) - set(manager.all_tasks)):
    raise UserError(
      f'--tasks={unknown[0]}: the harness has no such task; `lm-eval ls tasks`'
      ' lists them, and --include_path adds a directory of your own.'
    )
  results = lm_eval.simple_evaluate(
    model=model,
    tasks=values.tasks,
    task_manager=manager,
    limit=values.limit,
    num_fewshot=values.num_fewshot,
  )
  print(lm_eval.utils.make_table(results))
  if values.out:
    text = json.dumps(results['results'], indent=2) + '\n'
    pathlib.Path(values.out).write_text(text, encoding='utf-8')


if __name__ == '__main__':
  define_flags()
  cli.run(main)
