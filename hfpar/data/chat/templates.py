"""Chat templates by name or file, and hfpar's own one for base models that have none."""

from __future__ import annotations

from pathlib import Path

from hfpar.errors import ConfigError

_CHATML = """\
{%- set ns = namespace(system='') -%}
{%- if tools -%}
    {%- set ns.system = 'Tools that you can call, as JSON:\\n' -%}
    {%- for tool in tools -%}
        {%- set ns.system = ns.system + (tool | tojson) + '\\n' -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + 'To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>' -%}
    {%- if messages[0]['role'] != 'system' -%}
        {{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
        {%- if message['reasoning_content'] -%}
            {{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- message['content'] -}}
        {%- for call in message['tool_calls'] -%}
            {%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' -}}
            {%- set arguments = call['function']['arguments'] -%}
            {{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' -}}
        {%- endfor -%}
        {{- END_OF_ANSWER -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- else -%}
        {{- message['content'] -}}
        {%- if loop.first and message['role'] == 'system' and ns.system -%}
            {{- '\\n\\n' + ns.system -}}
        {%- endif -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def resolve_chat_template(value: str, *, close_with_eos: bool = False) -> str:
    """The Jinja text that `chat_template` names.

    Args:
        value: `chatml` for hfpar's own template, which marks the assistant's turns with `{% generation %}` and
            renders tools, tool calls and reasoning; or the path of a Jinja file.
        close_with_eos: let hfpar's own template write the eos token after `<|im_end|>` in the assistant's turns:
            where `<|im_end|>` isn't a token, generation would have nothing to stop at.

    Raises:
        ConfigError: no such file, an empty one, or one that isn't a template.
    """
    if value == "chatml":
        return _CHATML.replace("END_OF_ANSWER", "'<|im_end|>'" + " + eos_token" * close_with_eos)
    try:
        text = Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: {value} is neither chatml nor a Jinja file that can be read: {_one_line(error)}"
        ) from error
    if not text.strip():
        raise ConfigError(f"chat_template: {value} is empty")
    _check_syntax(value, text)
    return text


def _check_syntax(value: str, text: str) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=text)  # compiles it, renders nothing
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template: {value} is no chat template: line {error.lineno}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
