"""Runs decoding steps of `transformers`' Llama on PyTorch, on request.

`decode.py --torch` runs this script under an interpreter that has torch and
transformers. Each input line requests a step that decodes one token of every
sequence; an output line says that it is done. Arguments: batch, context,
vocabulary, width, blocks, heads, hidden units.
"""

import sys

import torch
import transformers


def main():
  batch, context, vocab, width, layers, heads, hidden = map(int, sys.argv[1:])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=vocab,
    hidden_size=width,
    intermediate_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    max_position_embeddings=2 * context,
    tie_word_embeddings=True,
  )
  model = transformers.LlamaForCausalLM(config).eval()
  with torch.inference_mode():
    prompt_BL = torch.randint(0, vocab, (batch, context))
    cache = model(input_ids=prompt_BL, use_cache=True).past_key_values
    token_B1 = prompt_BL[:, -1:]
    about = [f'torch {torch.__version__}']
    about.append(f'transformers {transformers.__version__}')
    about.append(f'{torch.get_num_threads()} threads')
    print(', '.join([*about, model.config._attn_implementation]), flush=True)
    for _ in sys.stdin:
      output = model(input_ids=token_B1, past_key_values=cache, use_cache=True)
      token_B1 = output.logits[:, -1:].argmax(dim=-1)
      print(token_B1[0].item(), flush=True)


if __name__ == '__main__':
  main()
