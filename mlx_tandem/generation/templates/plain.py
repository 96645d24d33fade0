"""The chat template of models that have none, such as base models: a line with its role before each message."""

from __future__ import annotations

STOPS = ("\nUser:", "\nSystem:")
"""Texts that end an answer, behind which the model would write the next messages itself."""

BEGINNING = "{{- bos_token -}}"
"""The first part of the template for a tokenizer that begins texts with a special token."""

SOURCE = r"""
{%- for message in messages -%}
    {{- message.role | capitalize + ': ' + (message.content or '') -}}
    {%- if message.role == 'assistant' -%}{{- eos_token or '' -}}{%- endif -%}
    {{- '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
"""The template. The token that ends a text ends each answer, so that training teaches it."""
