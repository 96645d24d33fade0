"""The chat template for models that have none, such as base models. It writes the role before each message."""

from __future__ import annotations

STOPS = ("\nUser:", "\nSystem:")
"""Texts that end an answer. A base model that is not stopped at them would write the next messages itself."""

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
"""The template. It ends each answer with the token that ends a text, so that training teaches to draw it."""
