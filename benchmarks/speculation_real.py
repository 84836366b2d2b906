"""Speed of drafts on a real model, on code, prose and chat.

    python benchmarks/speculation_real.py --texts='texts/**/*.txt' \\
      --model=SmolLM2-135M-Instruct.Q4_1.gguf --converted=RUN

Continues the middles of files of the standard library, paragraphs of held-out
`texts`, and answers questions that are headings of `texts`, as in FAQs,
through the model's chat template. It does so without a draft and with each
kind, in turn, on the same prompts, until the model ends its text. `RUN` made
the model routed, as `convert_smollm2.py` does, and can so be drafted without
its routed blocks. A verification adds `tokens_of_a_pass` on average. The result
is written beside this file as JSON.
"""

import itertools
import pathlib

from absl import app, flags
import jax
import machine
import numpy as np
import passages

import mod_jax
from mod_jax import timing
from mod_jax.data import corpus
from mod_jax.data.text import TextDataConfig
from mod_jax.sampling import Draft, generate, pad_prompts
from mod_jax.serving import chat
import results as results_lib

_MODEL = flags.DEFINE_string(
  'model', None, 'File or folder of the model.', required=True
)
_TEXTS = flags.DEFINE_string('texts', None, 'Glob of the texts.', required=True)
_CONVERTED = flags.DEFINE_string('converted', None, 'A run that is routed.')
_TEMPERATURES = flags.DEFINE_list('temperatures', [0.0, 1.0], 'Of sampling.')
_PROMPT = flags.DEFINE_integer('prompt', 64, 'Tokens of each prompt, at most.')
_NEW = flags.DEFINE_integer('new', 128, 'Tokens that are added, at most.')
_ROUNDS = flags.DEFINE_integer('rounds', 6, 'Prompts of each kind.')


def drafts(config) -> dict[str, Draft | None]:
  """Returns the drafts to measure, by name."""
  if config.num_routed:
    return {'none': None, 'never, 2': Draft(kind='never', tokens=2)}
  third = config.num_layers // 3
  return {
    'none': None,
    **{f'lookup, {n}': Draft(kind='lookup', tokens=n) for n in (2, 4)},
    # No loss has trained the head at this depth.
    f'first {third} blocks, 2': Draft(kind='early', layers=third, tokens=2),
  }


def prompts(run) -> dict[str, list[list[int]]]:
  """Returns tokens to continue, by kind of text, in a random order."""
  code = passages.held_out(TextDataConfig(source='stdlib'))
  # Half a file, so that the rest goes on with what is defined there.
  code = [x[len(x) // 2 :].partition('\n')[2] for x in code]
  texts = TextDataConfig(source='files', files=_TEXTS.value)
  prose = itertools.chain(*map(passages.paragraphs, passages.held_out(texts)))
  # Few of the files that are held out have questions.
  documents = passages.contents(corpus.list_files(texts.files))
  questions = itertools.chain(*map(passages.questions, documents))
  source = run.task.modality.tokenizer_source
  asked = [
    run.tokenizer.encode_chat(
      chat.render(*source, [{'role': 'user', 'content': question}])
    )
    for question in questions
  ]
  length, rng = _PROMPT.value, np.random.default_rng(0)
  found = {
    'code': [x for x in map(run.encode, code) if len(x) >= length],
    'prose': [x for x in map(run.encode, prose) if len(x) >= length],
    'chat': [x for x in asked if len(x) <= length],
  }
  return {
    kind: [rows[i][:length] for i in rng.permutation(len(rows))]
    for kind, rows in found.items()
  }


class Decoder:
  """Continues prompts one by one, and counts tokens and passes of each."""

  def __init__(self, run, rows, temperature, draft):
    self._run, self._rows = run, itertools.cycle(rows)
    self._temperature, self._draft = temperature, draft
    self.tokens, self.passes = [], []

  def __call__(self):
    row = next(self._rows)
    # All of one length, for which one program is compiled.
    tokens_2P, valid_2P = pad_prompts([row, [0] * _PROMPT.value])
    generated = generate(
      self._run.model,
      self._run.variables,
      tokens_2P[:1],
      valid_2P[:1],
      max_new_tokens=_NEW.value,
      mode=self._run.config.decoding_mode,
      temperature=self._temperature,
      end_token=self._run.tokenizer.eos_id,
      key=jax.random.key(len(self.tokens)),
      draft=self._draft,
    )
    # The end token is generated, too.
    self.tokens.append(min(int(generated.length_B[0]) + 1, _NEW.value))
    self.passes.append(int(generated.passes))


def measure(run, rows, temperature: float) -> dict[str, dict]:
  """Returns tokens per second and tokens of a pass, by draft."""
  cases = {
    name: Decoder(run, rows, temperature, draft)
    for name, draft in drafts(run.config).items()
  }
  rounds = _ROUNDS.value
  seconds = timing.interleaved(cases, rounds=rounds)
  rates = {
    name: np.divide(case.tokens[-rounds:], seconds[name])
    for name, case in cases.items()
  }
  found = {}
  for name, case in cases.items():
    tokens, passes = sum(case.tokens[-rounds:]), sum(case.passes[-rounds:])
    low, middle, high = np.quantile(
      rates[name] / rates['none'], (0.25, 0.5, 0.75)
    )
    found[name] = {
      'tokens_per_second': tokens / sum(seconds[name]),
      'speedup': float(middle),
      'quartiles': [float(low), float(high)],
      # The pass over the prompt yields the first token.
      'tokens_of_a_pass': (tokens - rounds) / (passes - rounds),
      'tokens': tokens,
    }
  return found


def main(_):
  models = {'dense': mod_jax.load(_MODEL.value)}
  if _CONVERTED.value:
    models['converted'] = mod_jax.load(_CONVERTED.value)
  rows = prompts(models['dense'])
  cells = []
  for name, run in models.items():
    for kind, temperature in itertools.product(
      rows, map(float, _TEMPERATURES.value)
    ):
      by_draft = measure(run, rows[kind], temperature)
      about = {'model': name, 'text': kind, 'temperature': temperature}
      cells.append({**about, 'drafts': by_draft})
      print(cells[-1], flush=True)
  results = {
    **results_lib.settings('prompt', 'new', 'rounds'),
    'model': pathlib.Path(_MODEL.value).name,
    'prompts': {kind: len(x) for kind, x in rows.items()},
    'cells': cells,
  }
  results_lib.save(__file__, results)


if __name__ == '__main__':
  machine.with_malloc(machine.KEPT)
  app.run(main)
