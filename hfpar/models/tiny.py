"""A tiny model that is built on the spot: a real Hugging Face checkpoint, its tokenizer included.

The demo and the tests need a model without any download. This one is a Qwen3 of about 1.5 M parameters with
tied embeddings and grouped-query attention, small enough that a few minutes on a CPU teach it to solve the
demo's word problems.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hfpar.data.word_problems import generate_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_END_OF_TURN = "<|im_end|>"
_SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", _END_OF_TURN]


def build_tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 192,
    intermediate_size: int = 512,
    num_hidden_layers: int = 3,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    vocab_size: int = 896,
    max_position_embeddings: int = 2048,
    initializer_range: float = 0.06,
) -> None:
    """Write an untrained model with tokenizer, chat template and generation config into `folder`.

    The same arguments give the same bytes. `AutoModelForCausalLM` and `AutoTokenizer` load the folder.

    Args:
        folder: Where to; made if need be.
        seed: Of the weights.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layers.
        num_hidden_layers: Blocks.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; a divisor of the query heads.
        vocab_size: Tokens that the byte-level BPE may learn, the 256 bytes and 3 special tokens included.
        max_position_embeddings: Longest document, in tokens.
        initializer_range: Standard deviation of the first weights. The usual 0.02 suits wide models; at this
            width it slows learning down a lot.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = _build_tokenizer(vocab_size)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=hidden_size // num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=64
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on demo conversations.

    Digits are cut into groups of two, as larger models cut them into groups of three: with a token for each
    number of the demo's size, this small a model learns its sums several times faster than digit by digit.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    messages = [m for row in generate_conversations(2000, 0, "train") for m in row["messages"]]
    corpus = [f"{message['role']}\n{message['content']}" for message in messages]
    corpus += [f"{number} {number}" for number in range(100)] * 100  # or rare numbers would stay in pieces
    core.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=_END_OF_TURN,
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=int(1e30),
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
