"""From GGUF's words to Hugging Face's: tensor names, config fields, and the order of rows.

    blk.7.attn_q.weight           ->  model.layers.7.self_attn.q_proj.weight
    blk.7.ffn_up_exps.weight      ->  model.layers.7.mlp.experts.0.up_proj.weight, 1, 2, …      slices of one tensor
    llama.embedding_length        ->  hidden_size
    rows of q and k (llama only): (head, pair, half) -> (head, half, pair)

    table.py        the architectures; llama_like.py, gemma.py, qwen.py, phi.py, others.py, deepseek.py: their entries
    architecture.py what an entry is, and what most of them share
    config.py       keys and tensors -> config.json's fields        rope.py, tokens.py, windows.py: parts of them
    names.py        tensors -> Hugging Face's names                 rules.py: how;  views.py: made of which bytes

GGUF's llama writers reorder the rows of q and k so that rotary pairs lie side by side; Hugging Face keeps the two
halves of a head apart, and so do Octavo's models. Other files are not reordered. Gemma files hold their norm weights
with the 1 already added.

Only `gguf.py` talks to this. No torch, so that keys and shapes can be shown without it. Source of the conventions: the
converters of the llama.cpp project, as its files show them.
"""
