"""The probe on texts, tokenizers and models that aren't like the usual ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hfpar.attention import interface
from hfpar.audit.forward import Forward, prediction_scores
from hfpar.audit.generate import Generator
from hfpar.audit.model import ModelSettings, load_audited, open_model
from hfpar.audit.prefix import TailLimits, TextTokenizer, find_cut
from hfpar.audit.probe import PlannedItem, Probe, ProbeSettings
from hfpar.audit.results import ItemResult
from hfpar.data.benchmarks import BenchmarkItem
from hfpar.errors import ConfigError
from hfpar.models.tiny import build_tiny_model
from hfpar.train.loss import LogitTransform

TEXTS = [
    "First: pens cost 18 <|im_end|> and cups cost 20 </s> but keys cost 30 in all of the shops here?",
    "一个农夫有苹果和梨,他卖了三十七个苹果,又买了五个梨,现在他一共有多少个水果呢?请回答问题并说明理由。",
    "Cafe\u0301 two: re\u0301sume\u0301 and nai\u0308ve pens cost 17, but cafe\u0301 keys cost 25 of the cups?",
    "Third\t😀👍🏽 toys cost 11\r\n\r\nand 👩‍👩‍👧 boxes cost 77 \x00 in  two   shops 😀, but how many?",
]


def byte_level(normalizer: Any = None) -> Any:
    """As GPT-2's, with special tokens that also stand in texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_end|>", "<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def sentence_piece() -> Any:
    """As Llama 2's: a space before the text, bytes for what the vocabulary lacks, a token at both ends."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({letter for text in TEXTS for letter in text if letter.isascii()} - {" "} | {"▁"})
    vocabulary = {name: number for number, name in enumerate([*names, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(names[:3])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


TOKENIZERS = {
    "byte level": byte_level,
    "composed": lambda: byte_level(normalizers.NFC()),
    "pieces": sentence_piece,
}


@pytest.fixture(params=list(TOKENIZERS), scope="module")
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return TextTokenizer(TOKENIZERS[request.param]())


def plan(texts: Sequence[str], tokenizer: TextTokenizer) -> list[PlannedItem]:
    return [
        PlannedItem(
            "made_up",
            BenchmarkItem(str(number), f"line {number}", text, None, None),
            tokenized,
            [find_cut(tokenized, ratio, tokenizer, TailLimits(3, 8)) for ratio in (0.2, 0.4, 0.6)],
        )
        for number, (text, tokenized) in enumerate(zip(texts, tokenizer(texts), strict=True))
    ]


def memorised(planned: Sequence[PlannedItem], vocab_size: int) -> Any:
    """A model that has learnt all texts by heart."""
    torch.manual_seed(0)
    interface.register()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="hfpar")
    texts = [item.tokenized.input_ids for item in planned]
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(50):
        labels = ids.masked_fill(mask == 0, -100)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def verdicts(results: Sequence[ItemResult]) -> list[tuple[Any, ...]]:
    return [
        (item.item_id, cut.ratio, cut.skipped, cut.exact, cut.exact_normalized, cut.matched_tokens)
        for item in results
        for cut in item.cuts
    ]


def test_forward_decides_as_generation_does_whatever_the_tokenizer(tokenizer: TextTokenizer) -> None:
    planned = plan(TEXTS, tokenizer)
    model = memorised(planned, len(tokenizer.tokenizer))
    end = tokenizer.tokenizer.eos_token_id
    found = {
        method: Probe(
            Forward(model, packs=True),
            Generator(model, end, [end]),
            tokenizer,
            ProbeSettings(method=method),  # type: ignore[arg-type]
        )(planned)
        for method in ("forward", "generate")
    }
    assert verdicts(found["forward"]) == verdicts(found["generate"])
    exact = [cut.exact for item in found["generate"] for cut in item.cuts if cut.skipped is None]
    assert sum(exact) > 6


def test_special_tokens_in_texts_are_read_as_text(tokenizer: TextTokenizer) -> None:
    text = "one </s> and <s> two"
    (tokenized,) = tokenizer([text])
    first = tokenized.num_special
    assert not set(tokenized.input_ids[first:]) & set(tokenizer.tokenizer.all_special_ids)
    assert tokenizer.ids(text) == tokenized.input_ids
    assert tokenizer.plain_ids(text) == tokenized.input_ids[first:]
    assert "</s>" in tokenizer.continuation(
        tokenized.input_ids[: first + 1], tokenized.input_ids[first + 1 :]
    )


def test_a_continuation_is_whole_wherever_its_context_begins() -> None:
    tokenizer = TextTokenizer(sentence_piece())
    text = "苹果和梨三十七个苹果"
    ids = tokenizer.ids(text)  # three tokens a letter, behind a first token and a space
    assert tokenizer.continuation(ids[:14], ids[14:]) == text[4:]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mamba", {"state_size": 4}),  # no attention
        ("bloom", {"n_head": 2, "n_layer": 1}),  # no attention that Transformers could exchange
        ("bert", {"is_decoder": True}),  # layers between the decoder and the head
        ("falcon_h1", {"lm_head_multiplier": 0.2, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16}),
    ],
)
def test_families_that_cannot_be_packed_are_read_as_transformers_reads_them(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    build_tiny_model(tmp_path, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    sizes = {
        "vocab_size": 896,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **options)).eval()
    plain.save_pretrained(tmp_path)
    with open_model(ModelSettings(str(tmp_path))) as source:
        loaded = load_audited(source, torch.device("cpu"))
        texts = [source.tokenizer(text).input_ids for text in TEXTS[:2]]
    assert not loaded.packs
    for ids, found in zip(texts, Forward(loaded.model, packs=False)(texts), strict=True):
        with torch.inference_mode():
            logprobs = plain(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        true = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(found.logprob[1:], true.numpy(), atol=1e-4)
        assert found.best[1:].tolist() == logprobs.argmax(-1).tolist()


def test_nothing_is_asked_beyond_the_model_s_context() -> None:
    """GPT-2 has no places there, and Transformers ends with an IndexError."""
    tokenizer = TextTokenizer(byte_level())
    tokenizer.tokenizer.chat_template = "{{ messages[0]['content'] }} and that is what the user wants to know"
    planned = plan(TEXTS[1:], tokenizer)
    longest = max(len(item.tokenized.input_ids) for item in planned)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=300, n_embd=32, n_head=2, n_layer=1, n_positions=longest, bos_token_id=None
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="hfpar").eval()
    settings = ProbeSettings(method="generate", generate=True, chat_template=True, max_new_tokens=30)
    results = Probe(Forward(model, packs=True), Generator(model, 1, []), tokenizer, settings)(planned)
    chat = [cut for item in results for cut in item.cuts if cut.mode == "chat"]
    assert len(chat) == 3 * len(planned)
    assert "too_long" in {cut.skipped for cut in chat} != {"too_long"}
    assert all(cut.skipped is None for item in results for cut in item.cuts if cut.mode == "bare")


def test_generated_tokens_fill_the_context_and_no_more() -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=300, n_embd=32, n_head=2, n_layer=1, n_positions=20, bos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [[5] * 4, [6] * 18, [7] * 20, [8] * 30]
    written = Generator(model, 1, [])(prompts, [9, 9, 9, 9], lambda *_: False, tokens_per_batch=1000)
    assert [len(tokens) for tokens in written] == [9, 2, 0, 0]


def test_another_token_with_the_same_logit_is_no_hit() -> None:
    """With 16 bits this is common; greedy generation takes the first."""
    logits = torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]])
    scores = prediction_scores(logits, torch.tensor([1, 2]), LogitTransform())
    assert scores[:, 0].tolist() == [1, 1] and scores[0, 2] == 0 and 0 < scores[1, 2] < 1e-6


def test_weights_that_overflow_are_told_in_one_line() -> None:
    planned = plan(TEXTS[:2], tokenizer := TextTokenizer(byte_level()))
    config = AutoConfig.for_model(
        "gpt2", vocab_size=300, n_embd=32, n_head=2, n_layer=1, bos_token_id=None, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="hfpar").eval()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.fill_(float("nan"))
    probe = Probe(Forward(model, packs=True), Generator(model, 1, []), tokenizer, ProbeSettings())
    with pytest.raises(ConfigError, match=r"^dtype: float32; .* no finite numbers"):
        probe(planned)
