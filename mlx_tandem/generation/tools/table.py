"""The table of all parsers of tool calls, and which of them a chat template's text asks for."""

from __future__ import annotations

import re

from mlx_tandem.generation.tools.calls import CallParser
from mlx_tandem.generation.tools.coder import DeepSeek32Parser, MiniMaxParser, QwenCoderParser, SeedParser
from mlx_tandem.generation.tools.deepseek import DeepSeek31Parser, DeepSeekParser
from mlx_tandem.generation.tools.gemma import FunctionGemmaParser, Gemma4Parser
from mlx_tandem.generation.tools.glm import GlmParser
from mlx_tandem.generation.tools.granite import GraniteParser
from mlx_tandem.generation.tools.harmony import HarmonyParser
from mlx_tandem.generation.tools.hermes import HermesParser
from mlx_tandem.generation.tools.kimi import KimiParser
from mlx_tandem.generation.tools.llama import LlamaJsonParser
from mlx_tandem.generation.tools.mistral import MistralHeaderParser, MistralParser
from mlx_tandem.generation.tools.pythonic import LfmParser, PythonicParser

PARSERS: dict[str, type[CallParser]] = {
    "deepseek_v3": DeepSeekParser,
    "deepseek_v31": DeepSeek31Parser,
    "deepseek_v32": DeepSeek32Parser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "glm45": GlmParser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "kimi_k2": KimiParser,
    "lfm2": LfmParser,
    "llama3_json": LlamaJsonParser,
    "minimax_m2": MiniMaxParser,
    "mistral": MistralParser,
    "mistral_args": MistralHeaderParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3_coder": QwenCoderParser,
    "seed_oss": SeedParser,
}
"""The parsers by their names, which are vLLM's where it has the same."""

ALIASES = {
    "glm47": "glm45",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
"""vLLM's other names of these parsers."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("functiongemma", ("<start_function_call>",)),
    ("glm45", ("<arg_key>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v32", ("function_calls>", "DSML")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("openai", ("<|channel|>", "<|message|>")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
"""The first parser all of whose signs are in the text of a chat template is the one for its model."""

COMMENT = re.compile(r"{#.*?#}", re.DOTALL)
"""Pattern of a comment in a chat template."""

_TOOLS = re.compile(r"\btools\b")


def parser_for(template: str) -> str:
    """Return the name of the parser for a model with this chat template; none if its calls have no known form."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")


def knows_tools(template: str) -> bool:
    """Return whether a chat template reads the variable `tools`."""
    return _TOOLS.search(COMMENT.sub("", template)) is not None
