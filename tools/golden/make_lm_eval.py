"""Writes what lm-evaluation-harness finds by its Hugging Face backend.

A tiny Llama with a tokenizer in `lm_eval/model`, and in `lm_eval/expected.json`
each document's answers, for the tasks of `lm_eval_tasks.py`. Run it again only
to change these, in the environment of `make_vit.py`, with lm_eval and
accelerate:

  golden/bin/python tools/golden/make_lm_eval.py
"""

import json
import os
import pathlib
import shutil

os.environ |= {'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1'}

import lm_eval  # noqa: E402
import lm_eval_tasks  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

HERE = pathlib.Path(__file__).parents[2] / 'tests' / 'golden' / 'lm_eval'


def main():
  shutil.rmtree(HERE, ignore_errors=True)
  folder = HERE / 'model'
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=['<s>', '</s>'],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  texts = [
    text for doc in lm_eval_tasks.DOCUMENTS for text in map(str, doc.values())
  ]
  tokenizer.train_from_iterator(texts, trainer)
  # As Llama's: a text begins with <s>, and is not ended.
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 0)]
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>'
  ).save_pretrained(folder)
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=tokenizer.get_vocab_size(),
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=1,
  )
  model = transformers.LlamaForCausalLM(config)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
  model.save_pretrained(folder)
  results = lm_eval.simple_evaluate(
    model='hf',
    model_args=f'pretrained={folder},dtype=float32,max_length=32',
    tasks=lm_eval_tasks.tasks(HERE / 'documents.jsonl'),
    batch_size=1,
    device='cpu',
  )
  expected = lm_eval_tasks.answers(results)
  text = json.dumps(expected, indent=1) + '\n'
  (HERE / 'expected.json').write_text(text)
  (HERE / 'documents.jsonl').unlink()


if __name__ == '__main__':
  main()
