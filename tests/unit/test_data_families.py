"""Eight families of chat templates: token ids and labels equal to those of parts tokenized by hand.

The templates are short, in the manner of well-known ones. What is expected is written out as text, with « and »
around what is trained; each part of it is tokenized by itself with the bare tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hfpar.data.chat.encode import EncodeOptions, encode
from hfpar.data.reading.rows import Conversation, Place

CORPUS = [
    "How many apples are left? There are seven. And now? Only three of them remain. Be short, please. 😀"
] * 3


@dataclass(frozen=True)
class Family:
    template: str
    special_tokens: list[str]
    eos_token: str
    bos_token: str | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=350,
            special_tokens=self.special_tokens,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        core.train_from_iterator(CORPUS, trainer)
        if self.bos_token:  # as with add_bos_token
            core.post_processor = processors.TemplateProcessing(
                single=f"{self.bos_token} $A",
                special_tokens=[(self.bos_token, core.token_to_id(self.bos_token))],
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            eos_token=self.eos_token,
            bos_token=self.bos_token,
            pad_token=self.eos_token,
            chat_template=self.template,
        )


CHATML = Family(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ["<|im_start|>", "<|im_end|>"],
    "<|im_end|>",
)
LLAMA_3 = Family(
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% for call in m.tool_calls %}"
    "{{ '{\"name\": \"' + call.function.name + '\", \"parameters\": ' + (call.function.arguments | tojson) + '}' }}"
    "{% else %}{{ m.content | trim }}{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "<|eot_id|>",
    "<|begin_of_text|>",
)
QWEN_3 = Family(
    "{% set ns = namespace(query=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.query and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    "<|im_end|>",
)
MISTRAL = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == (messages | selectattr('role', 'equalto', 'user') | list | length - 1) * 2 %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}{% endfor %}",
    [
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
    ]
    + ["[/TOOL_RESULTS]"],
    "</s>",
    "<s>",
)
GEMMA = Family(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "<eos>",
    "<bos>",
)
PHI = Family(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"],
    "<|endoftext|>",
)
GPT_OSS = Family(
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set after = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
    "{% if m.thinking and not after %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ (call.arguments | tojson) + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
    "<|return|>",
)
DEEPSEEK_R1 = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜output｜>' + m.content }}"
    "{% elif m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{{ '<｜Assistant｜><｜call｜>' + call.name + '\n```json\n' + call.arguments + '\n```<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜output｜>",
        "<｜call｜>",
    ],
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
)


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "id": "abc", "function": {"name": name, "arguments": arguments}}]


SYSTEM = message("system", "Be short, please.")
U1, A1 = message("user", "How many apples are left?"), message("assistant", "There are seven.")
U2, A2 = message("user", "And now?"), message("assistant", "Only three 😀")
TURNS = [U1, A1, U2, A2]
COUNT = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
TOOL = '{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}'
C1 = {"role": "assistant", "content": "", "tool_calls": call("count", what="apples")}
T1 = message("tool", "7", name="count")
THOUGHT_1 = message("assistant", "There are seven.", reasoning_content="Let me count.")
THOUGHT_2 = message("assistant", "Only three 😀", reasoning_content="Four are gone.")


@dataclass(frozen=True)
class Case:
    family: Family
    messages: list[dict[str, Any]]
    expected: list[str]
    """One text a sample."""
    options: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    num_prompt: int = 0


_U1 = "<|im_start|>user\nHow many apples are left?<|im_end|>\n"
_U2 = "<|im_start|>user\nAnd now?<|im_end|>\n"
_BOT = "<|im_start|>assistant\n"
_H_SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\n"
_H_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
_H_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_H_IPYTHON = "<|start_header_id|>ipython<|end_header_id|>\n\n"
_L1 = f"<|begin_of_text|>{_H_USER}How many apples are left?<|eot_id|>{_H_ASSISTANT}"
_M1, _M2 = "[INST] How many apples are left?[/INST]", "[INST] And now?[/INST]"
_MT = f"[AVAILABLE_TOOLS] [{TOOL}][/AVAILABLE_TOOLS]"
_G1 = "<bos><start_of_turn>user\nHow many apples are left?<end_of_turn>\n<start_of_turn>model\n"
_P1 = "<|user|>\nHow many apples are left?<|end|>\n<|assistant|>\n"
_P2 = "<|user|>\nAnd now?<|end|>\n<|assistant|>\n"
_O1 = "<|start|>user<|message|>How many apples are left?<|end|><|start|>assistant"
_O2 = "<|start|>user<|message|>And now?<|end|><|start|>assistant"
_FINAL, _THINK = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
_D1 = "<｜begin▁of▁sentence｜><｜User｜>How many apples are left?<｜Assistant｜>"
_QT = f"<|im_start|>system\n{TOOL}\n<|im_end|>\n"

CASES = {
    # ChatML
    "chatml single": Case(CHATML, [U1, A1], [f"{_U1}{_BOT}«There are seven.<|im_end|>»\n"]),
    "chatml turns": Case(
        CHATML,
        [SYSTEM, *TURNS],
        [
            f"<|im_start|>system\nBe short, please.<|im_end|>\n{_U1}{_BOT}«There are seven.<|im_end|>»\n"
            f"{_U2}{_BOT}«Only three 😀<|im_end|>»\n"
        ],
    ),
    "chatml last_assistant": Case(
        CHATML,
        TURNS,
        [f"{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}«Only three 😀<|im_end|>»\n"],
        {"train_on": "last_assistant"},
    ),
    "chatml completion": Case(
        CHATML,
        [U1, A1, U2, A1, A2],
        [
            f"{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}«There are seven.<|im_end|>»\n{_BOT}"
            "«Only three 😀<|im_end|>»\n"
        ],
        {"train_on": "completion"},
    ),
    "chatml prompt and completion": Case(
        CHATML,
        TURNS,
        [f"{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}«Only three 😀<|im_end|>»\n"],
        num_prompt=3,
    ),
    "chatml all": Case(
        CHATML,
        [U1, A1],
        [f"«{_U1}{_BOT}There are seven.<|im_end|>\n»"],
        {"train_on": "all"},
    ),
    "chatml all but one": Case(
        CHATML,
        [U1, {**A1, "train": False}, U2, A2],
        [
            f"«{_U1}{_BOT}»There are seven.<|im_end|>«\n{_U2}{_BOT}Only three 😀<|im_end|>\n»",
        ],
        {"train_on": "all"},
    ),
    "chatml overrides": Case(
        CHATML,
        [
            {**SYSTEM, "train": False},
            {**U1, "train": True},
            {**A1, "train": False},
            U2,
            {**A2, "train": True},
        ],
        [
            "<|im_start|>system\nBe short, please.<|im_end|>\n<|im_start|>user\n"
            f"«How many apples are left?<|im_end|>»\n{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}"
            "«Only three 😀<|im_end|>»\n"
        ],
    ),
    # Llama 3: one bos, from the template; contents trimmed
    "llama 3 turns": Case(
        LLAMA_3,
        [U1, message("assistant", "  There are seven.\n\n"), U2, A2],
        [
            f"{_L1}«There are seven.<|eot_id|>»{_H_USER}And now?<|eot_id|>{_H_ASSISTANT}"
            "«Only three 😀<|eot_id|>»"
        ],
    ),
    "llama 3 system": Case(
        LLAMA_3,
        [SYSTEM, U1, A1],
        [
            f"<|begin_of_text|>{_H_SYSTEM}Be short, please.<|eot_id|>{_H_USER}"
            f"How many apples are left?<|eot_id|>{_H_ASSISTANT}«There are seven.<|eot_id|>»"
        ],
    ),
    "llama 3 tools": Case(
        LLAMA_3,
        [U1, C1, T1, A1],
        [
            f'{_L1}«{{"name": "count", "parameters": {{"what": "apples"}}}}<|eot_id|>»{_H_IPYTHON}7<|eot_id|>'
            f"{_H_ASSISTANT}«There are seven.<|eot_id|>»"
        ],
        tools=COUNT,
    ),
    # Qwen 3: thinking is shown after the last user's message only, and an empty block in the last turn
    "qwen 3 single": Case(
        QWEN_3, [U1, A1], [f"{_U1}{_BOT}«<think>\n\n</think>\n\nThere are seven.<|im_end|>»\n"]
    ),
    "qwen 3 thinking": Case(
        QWEN_3,
        [U1, THOUGHT_1],
        [f"{_U1}{_BOT}«<think>\nLet me count.\n</think>\n\nThere are seven.<|im_end|>»\n"],
        counts={"thinking kept": 1},
    ),
    "qwen 3 turns": Case(
        QWEN_3,
        [U1, THOUGHT_1, U2, THOUGHT_2],
        [
            f"{_U1}{_BOT}«<think>\nLet me count.\n</think>\n\nThere are seven.<|im_end|>»\n",
            f"{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}«<think>\nFour are gone.\n</think>\n\n"
            "Only three 😀<|im_end|>»\n",
        ],
        counts={"turns split off": 1, "thinking kept": 2},
    ),
    "qwen 3 masked": Case(
        QWEN_3,
        [U1, THOUGHT_1, U2, THOUGHT_2],
        [
            f"{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}«<think>\nFour are gone.\n</think>\n\n"
            "Only three 😀<|im_end|>»\n",
        ],
        {"earlier_turns": "mask"},
        counts={"turns masked": 1, "thinking kept": 1, "thinking left out": 1},
    ),
    "qwen 3 all": Case(
        QWEN_3,
        [U1, THOUGHT_1, U2, A2],
        [
            f"«{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}<think>\n\n</think>\n\n"
            "Only three 😀<|im_end|>\n»",
        ],
        {"train_on": "all"},
        counts={"thinking left out": 1},
    ),
    "qwen 3 without thinking": Case(
        QWEN_3,
        TURNS,
        [
            f"{_U1}{_BOT}<think>\n\n</think>\n\n«There are seven.<|im_end|>»\n",
            f"{_U1}{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}<think>\n\n</think>\n\n"
            "«Only three 😀<|im_end|>»\n",
        ],
        {"chat_template_kwargs": {"enable_thinking": False}},
        counts={"turns split off": 1},
    ),
    "qwen 3 tools": Case(
        QWEN_3,
        [U1, {**C1, "content": "Wait.", "reasoning_content": "Ask."}, T1, THOUGHT_1, U2, A2],
        [
            # A call and its answer belong together: both are shown as written until the next question.
            f"{_QT}{_U1}{_BOT}«<think>\nAsk.\n</think>\n\nWait.\n<tool_call>\n"
            '{"name": "count", "arguments": {"what": "apples"}}\n</tool_call><|im_end|>»\n'
            f"<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n{_BOT}«<think>\n"
            "Let me count.\n</think>\n\nThere are seven.<|im_end|>»\n",
            f'{_QT}{_U1}{_BOT}Wait.\n<tool_call>\n{{"name": "count", "arguments": {{"what": "apples"}}}}\n'
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            f"{_BOT}There are seven.<|im_end|>\n{_U2}{_BOT}«<think>\n\n</think>\n\n"
            "Only three 😀<|im_end|>»\n",
        ],
        tools=COUNT,
        counts={"turns split off": 1, "thinking kept": 2},
    ),
    # Mistral: no generation prompt; tools stand before the last question, wherever that is
    "mistral turns": Case(MISTRAL, TURNS, [f"<s>{_M1}« There are seven.</s>»{_M2}« Only three 😀</s>»"]),
    "mistral last_assistant": Case(
        MISTRAL,
        TURNS,
        [f"<s>{_M1} There are seven.</s>{_M2}« Only three 😀</s>»"],
        {"train_on": "last_assistant"},
    ),
    "mistral tools": Case(
        MISTRAL,
        [U1, C1, T1, A1],
        [
            f"<s>{_MT}{_M1}"
            '«[TOOL_CALLS] [{"name": "count", "arguments": {"what": "apples"}, "id": "abc"}]</s>»'
            "[TOOL_RESULTS] 7[/TOOL_RESULTS]« There are seven.</s>»"
        ],
        tools=COUNT,
    ),
    "mistral tools move": Case(
        MISTRAL,
        TURNS,
        [
            f"<s>{_MT}{_M1}« There are seven.</s>»",
            f"<s>{_M1} There are seven.</s>{_MT}{_M2}« Only three 😀</s>»",
        ],
        tools=COUNT,
        counts={"turns split off": 1},
    ),
    # Gemma: the turn ends with a token that isn't eos; white space after it isn't trained
    "gemma turns": Case(
        GEMMA,
        [U1, message("assistant", " There are seven. "), U2, A2],
        [
            f"{_G1}«There are seven.<end_of_turn>»\n<start_of_turn>user\nAnd now?<end_of_turn>\n"
            "<start_of_turn>model\n«Only three 😀<end_of_turn>»\n"
        ],
    ),
    "gemma overrides": Case(
        GEMMA,
        [U1, {**A1, "train": False}, {**U2, "train": True}, A2],
        [
            f"{_G1}There are seven.<end_of_turn>\n<start_of_turn>user\n«And now?<end_of_turn>»\n"
            "<start_of_turn>model\n«Only three 😀<end_of_turn>»\n"
        ],
    ),
    # Phi: eos closes the conversation, after the last turn's own end
    "phi turns": Case(
        PHI,
        TURNS,
        [f"{_P1}«There are seven.<|end|>»\n{_P2}«Only three 😀<|end|>\n<|endoftext|>»"],
    ),
    "phi system": Case(
        PHI,
        [SYSTEM, U1, A1],
        [f"<|system|>\nBe short, please.<|end|>\n{_P1}«There are seven.<|end|>\n<|endoftext|>»"],
    ),
    "phi all but one": Case(
        PHI,
        [U1, {**A1, "train": False}, U2, A2],
        [f"«{_P1}»There are seven.<|end|>«\n{_P2}Only three 😀<|end|>\n<|endoftext|>»"],
        {"train_on": "all"},
    ),
    # GPT-OSS: the last turn ends with another token, and only it shows its thinking
    "gpt-oss single": Case(
        GPT_OSS,
        [message("developer", "Be short, please."), U1, A1],
        [f"<|start|>developer<|message|>Be short, please.<|end|>{_O1}«{_FINAL}There are seven.<|return|>»"],
    ),
    "gpt-oss turns": Case(
        GPT_OSS,
        [U1, THOUGHT_1, U2, THOUGHT_2],
        [
            f"{_O1}«{_THINK}Let me count.<|end|><|start|>assistant{_FINAL}There are seven.<|return|>»",
            f"{_O1}{_FINAL}There are seven.<|end|>{_O2}«{_THINK}Four are gone.<|end|><|start|>assistant"
            f"{_FINAL}Only three 😀<|return|>»",
        ],
        counts={"turns split off": 1, "thinking kept": 2},
    ),
    "gpt-oss tools": Case(
        GPT_OSS,
        [U1, C1, T1, A1],
        [
            f'{_O1}« to=functions.count<|channel|>commentary json<|message|>{{"what": "apples"}}<|call|>»'
            "<|start|>functions.count to=assistant<|channel|>commentary<|message|>7<|end|>"
            f"<|start|>assistant«{_FINAL}There are seven.<|return|>»",
        ],
        tools=COUNT,
    ),
    # DeepSeek-R1: the generation prompt opens thinking that no finished turn shows
    "deepseek-r1 turns": Case(
        DEEPSEEK_R1,
        [
            message("assistant", "<think>\nLet me count.\n</think>There are seven.") if m is A1 else m
            for m in TURNS
        ],
        [
            f"{_D1}«There are seven.<｜end▁of▁sentence｜>»<｜User｜>And now?<｜Assistant｜>"
            "«Only three 😀<｜end▁of▁sentence｜>»"
        ],
        counts={"generation prompt not in the rendering": 2, "thinking left out": 1},
    ),
    "deepseek-r1 same beginning": Case(
        DEEPSEEK_R1,
        [U1, message("assistant", "<three>")],  # shares "<th" with "<think>"
        [f"{_D1}«<three><｜end▁of▁sentence｜>»"],
        counts={"generation prompt not in the rendering": 1},
    ),
    "deepseek-r1 tools": Case(
        DEEPSEEK_R1,
        [SYSTEM, U1, C1, T1, A1],
        [
            "<｜begin▁of▁sentence｜>Be short, please.<｜User｜>How many apples are left?<｜Assistant｜>"
            '«<｜call｜>count\n```json\n{"what": "apples"}\n```<｜end▁of▁sentence｜>»<｜output｜>7<｜Assistant｜>'
            "«There are seven.<｜end▁of▁sentence｜>»"
        ],
        tools=COUNT,
        counts={"generation prompt not in the rendering": 2},
    ),
}


def by_hand(expected: str, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Tokenize what lies between the marks, part by part."""
    input_ids: list[int] = []
    trained: list[bool] = []
    for number, part in enumerate(expected.replace("»", "«").split("«")):
        ids = tokenizer.backend_tokenizer.encode(part, add_special_tokens=False).ids
        input_ids += ids
        trained += [number % 2 == 1] * len(ids)
    return input_ids, trained


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_labels_equal_those_by_hand(name: str) -> None:
    case = CASES[name]
    tokenizer = case.family.tokenizer()
    row = Conversation(case.messages, case.num_prompt, case.tools)
    (found,) = encode([(Place("a.jsonl", "line", 1), row)], tokenizer, EncodeOptions(1000, **case.options))
    assert found.problem is None
    assert [tuple(sample) for sample in found.samples] == [by_hand(text, tokenizer) for text in case.expected]
    assert found.counts == case.counts


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        (GEMMA, [SYSTEM, U1, A1], "System role not supported"),
        (MISTRAL, [SYSTEM, U1, A1], "Only user, assistant and tool roles are supported!"),
    ],
)
def test_role_that_a_template_refuses(family: Family, messages: list[dict[str, Any]], reason: str) -> None:
    place = Place("a.jsonl", "line", 7)
    (found,) = encode([(place, Conversation(messages))], family.tokenizer(), EncodeOptions(1000))
    assert found == (
        [],
        {},
        ("chat template refuses", place, f"the chat template can't render it: {reason}"),
    )


def test_a_turn_that_is_rewritten_can_be_an_error() -> None:
    place = Place("a.jsonl", "line", 7)
    options = EncodeOptions(1000, earlier_turns="error")
    (found,) = encode([(place, Conversation(TURNS))], QWEN_3.tokenizer(), options)
    assert found.problem == (
        "earlier turn rewritten",
        place,
        "the chat template renders message 2 (assistant) otherwise once more messages follow; "
        "set earlier_turns to split or mask",
    )
