# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the manner of six families of models, on a tokenizer of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

# Turns in ChatML; a system turn of its own where the chat has none.
_SMOLLM2 = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}\
<|im_start|>system
You are a helpful AI assistant named SmolLM.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Tools in the system turn; thoughts are dropped from answers before the last question.
_QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}\
{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set thought, answer = '', message.content %}
{%- if '</think>' in answer %}
{%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set answer = answer.split('</think>')[-1].lstrip() %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- answer + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# A system turn with dates, always; contents are trimmed; tools in the first user turn.
_LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + (date_string if date_string is defined else '26 Jul 2024') + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- if tools %}
{%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions:\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# The system text goes into the last user turn; nothing begins an answer.
_MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') }}
{{- message['content'] + '[/INST]' }}
{%- else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}
{%- endfor %}"""

# The system text goes into the first user turn; the assistant is called model.
_GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set prefix = messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}
{%- else %}{% set prefix = '' %}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- (prefix if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# A system turn of the template's own; the system text is the developer's; answers end otherwise
# when they are generated than in history, and begin with a channel.
_GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT.\\nCurrent date: 2025-08-05\\n\\n' }}
{{- 'Reasoning: low<|end|>' }}
{%- if messages[0]['role'] == 'system' %}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0]['content'] + '<|end|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """How the models of a family write a chat.

    Attributes:
        template: in Jinja.
        tokens: that are special.
        bos, eos: of the tokenizer.
        end: what ends an answer when it is generated.
        alternates: users and assistants must take turns.
        keeps: an answer is rendered in the next request as it was generated.
    """

    template: str
    tokens: tuple[str, ...]
    bos: str
    eos: str
    end: str
    alternates: bool = False
    keeps: bool = True


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "smollm2": Family(_SMOLLM2, _CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "qwen3": Family(_QWEN3, _CHATML, "<|endoftext|>", "<|im_end|>", "<|im_end|>"),
    "llama3": Family(
        _LLAMA3, ("<|begin_of_text|>", *_HEADERS), "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"
    ),
    "mistral": Family(
        _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", "</s>", alternates=True
    ),
    "gemma": Family(
        _GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        "<end_of_turn>",
        alternates=True,
    ),
    "gpt_oss": Family(
        _GPT_OSS,
        ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|startoftext|>",
        "<|return|>",
        "<|return|>",
        keeps=False,
    ),
}


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer of bytes with the special tokens and the template of a family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        extra_special_tokens=[t for t in family.tokens if t not in (family.bos, family.eos)],
    )
    made.chat_template = family.template
    return made
