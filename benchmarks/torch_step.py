"""Runs training steps of PyTorch's eager `LlamaForCausalLM`, on request.

`train_step.py --torch` runs this script under an interpreter that has torch and
transformers. Each input line requests a step; an output line says that it is
done. Arguments: batch, length, vocabulary, width, blocks, heads, hidden units.
"""

import sys

import torch
import transformers


def main():
  batch, length, vocab, width, layers, heads, hidden = map(int, sys.argv[1:])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=vocab,
    hidden_size=width,
    intermediate_size=hidden,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    max_position_embeddings=length,
    tie_word_embeddings=True,
    use_cache=False,
  )
  model = transformers.LlamaForCausalLM(config).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
  # The model shifts the targets by itself.
  tokens_BL = torch.randint(0, vocab, (batch, length))
  about = [f'torch {torch.__version__}']
  about.append(f'transformers {transformers.__version__}')
  about.append(f'{torch.get_num_threads()} threads')
  print(', '.join([*about, model.config._attn_implementation]), flush=True)
  for _ in sys.stdin:
    optimizer.zero_grad()
    loss = model(input_ids=tokens_BL, labels=tokens_BL).loss
    loss.backward()
    optimizer.step()
    print(loss.item(), flush=True)


if __name__ == '__main__':
  main()
