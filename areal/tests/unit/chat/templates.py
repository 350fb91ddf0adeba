"""Small chat templates, each with a form of turns, reasoning and calls that published templates have."""

from __future__ import annotations

_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_JSON_CALLS = (
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
)
_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.content and m.tool_calls %}\n{% endif %}" + _JSON_CALLS + "<|im_end|>\n{% endfor %}" + _HEADER
)
"""Turns end with a token and a newline. A call is a JSON object in tags."""

THINKING = (
    _TOOLS + "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.user %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% if m.content and m.tool_calls %}\n{% endif %}"
    + _JSON_CALLS
    + "<|im_end|>\n{% endfor %}"
    + _HEADER
)
"""As ``CHATML``, with reasoning, which is dropped once a user has written again."""

OPENED = THINKING.replace(_HEADER, "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
"""As ``THINKING``, where the prompt opens the reasoning."""

ALONE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""A call is a JSON object and the whole answer, and an answer has one."""

PAIRS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|assistant|>\n{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}\n"
    "{% for k, v in call.function.arguments.items() %}<key>{{ k }}</key>\n"
    "<value>{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}</value>\n"
    "{% endfor %}</call>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The header of the next turn ends an answer. A call has pairs of keys and values."""

TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n"
    "{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As ``PAIRS``, where each value has lines of its own."""

LISTED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>{{ m.content }}{% if m.tool_calls %}<|calls|>{% for call in m.tool_calls %}"
    "<|call|>function<|sep|>{{ call.function.name }}\n```json\n{{ call.function.arguments + '' }}\n```<|end_call|>"
    "{% endfor %}<|end_calls|>{% endif %}"
    "{{ eos_token }}{% else %}<|{{ 'u' if m.role == 'user' else 'o' }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
"""ParsedCalls are in a list, with a name and arguments that the template wants as JSON."""

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
"""Without calls, and without the role of a system."""

CLOSED = CHATML.replace(
    _HEADER, "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
"""The end of a conversation has another token behind it."""

CALLING = {
    "CHATML": CHATML,
    "THINKING": THINKING,
    "OPENED": OPENED,
    "ALONE": ALONE,
    "PAIRS": PAIRS,
    "TAGGED": TAGGED,
    "LISTED": LISTED,
    "CLOSED": CLOSED,
}
"""Templates with calls, by name."""
