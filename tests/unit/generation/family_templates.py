"""Small chat templates in the manner of well-known families, which differ in the order of turns that they can take."""

from __future__ import annotations

_CALLS = "{% for c in m.tool_calls or [] %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"

TOLERANT = (
    "{% if tools %}[tools]{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen 3: everything is printed where it stands."""

SYSTEM_FIRST = (
    "{% set ns = namespace(asked=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = true %}"
    "{% endif %}{% endfor %}{% if not ns.asked %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[call {{ c.function.name }}{% for k, v in c.function.arguments | "
    "items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen 3.5: one system message at the beginning, and a question of the user somewhere."""

_COUNT = (
    "{% set ns = namespace(index=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
)
_SPLIT = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)
ALTERNATING = (
    _SPLIT
    + "{% if system is defined %}[SYSTEM]{{ system }}[/SYSTEM]{% endif %}{% if tools %}[tools]{% endif %}"
    + _COUNT
    + "{% for m in rest %}{% if m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '[IMG]' }}{% endfor %}{% endif %}[/INST]"
    "{% elif m.role == 'assistant' %}{% if not m.content and not m.tool_calls %}"
    "{{ raise_exception('content or calls are needed') }}{% endif %}{{ m.content }}"
    + _CALLS
    + "<|im_end|>{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
)
"""Ministral 3: users and assistants alternate, but for calls and results, and the assistant says something."""

SYSTEM_LATE = (
    _SPLIT
    + _COUNT
    + "{% for m in rest %}{% if m.role == 'user' %}[INST]{% if loop.last and system is defined %}{{ system }}\n\n"
    "{% endif %}{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[RESULT {{ m.tool_call_id }}]{{ m.content }}[/RESULT]{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}[{{ c.id }}]"
    "{% endfor %}" + _CALLS + "<|im_end|>{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""Mistral's older templates: the system message moves to the last turn of the user. Ids have nine letters."""

_PARITY = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}"
)
_TURN = (
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first and first else '' }}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + _PARITY + _TURN
)
"""Gemma 2: no system messages, and no tools."""

SYSTEM_IN_USER = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}" + _PARITY + _TURN
)
"""Gemma 3: the system message begins the first turn of the user. There are no tools."""

ONE_CALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    + _CALLS
    + "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)
"""Llama 3: a message has one call."""

SILENT = (
    "{% set ns = namespace(called='') %}{% for m in messages %}{% if m.role == 'system' and loop.first %}"
    "<|im_start|>developer\n{{ m.content }}<|im_end|>{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
    "<|im_end|>{% elif m.role == 'assistant' and m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "[call {{ c.name }} {{ c.arguments | tojson }}]{% set ns.called = c.name %}{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ m.content }}<|im_end|>{% set ns.called = '' %}{% elif m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('there was no assistant message with a tool call!') }}{% endif %}"
    "[{{ ns.called }} said {{ m.content }}]{% endif %}{% endfor %}"
)
"""gpt-oss: later system messages and further calls are left out, and a result needs a call."""

GATHERING = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}{% endif %}{% endfor %}{{ ns.system }}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '(' + c.id + ')' }}{% endfor %}" + _CALLS + "{% endif %}{% endfor %}"
)
"""DeepSeek 3.1 and Solar: all system messages are printed at the beginning. Calls have ids."""
