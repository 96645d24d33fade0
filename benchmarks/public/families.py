"""The table of our forms that the parsers of other projects read."""

from __future__ import annotations

from typing import Any

from mlx_tandem.generation.reasoning.table import ALIASES as THOUGHT_ALIASES
from mlx_tandem.generation.reasoning.table import FORMS, HARMONY
from mlx_tandem.generation.tools.table import ALIASES as CALL_ALIASES
from mlx_tandem.generation.tools.table import PARSERS
from public.parsers import Family

_CALLS = {
    "DeepSeekV31Detector": "deepseek_v31",
    "DeepSeekV31ToolParser": "deepseek_v31",
    "DeepSeekV32Detector": "deepseek_v32",
    "DeepSeekV32EngineToolParser": "deepseek_v32",
    "DeepSeekV32ParserToolAdapter": "deepseek_v32",
    "DeepSeekV3Detector": "deepseek_v3",
    "DeepSeekV3ToolParser": "deepseek_v3",
    "FunctionGemmaToolParser": "functiongemma",
    "Gemma4Detector": "gemma4",
    "Gemma4EngineToolParser": "gemma4",
    "Gemma4ParserToolAdapter": "gemma4",
    "Gemma4ToolParser": "gemma4",
    "Glm47MoeDetector": "glm45",
    "Glm47MoeModelToolParser": "glm45",
    "Glm47MoeParserToolAdapter": "glm45",
    "Glm4MoeDetector": "glm45",
    "GptOssDetector": "openai",
    "GptOssToolParser": "openai",
    "Granite4ToolParser": "hermes",
    "GraniteEngineToolParser": "granite",
    "GraniteParserToolAdapter": "granite",
    "Hermes2ProToolParser": "hermes",
    "HermesDetector": "hermes",
    "KimiK2Detector": "kimi_k2",
    "KimiK2FuncDetector": "kimi_k2",
    "KimiK2ParserToolAdapter": "kimi_k2",
    "KimiK2ToolParser": "kimi_k2",
    "Lfm2Detector": "lfm2",
    "Lfm2ToolParser": "lfm2",
    "Llama32Detector": "llama3_json",
    "Llama3JsonToolParser": "llama3_json",
    "Llama4PythonicToolParser": "pythonic",
    "MinimaxM2Detector": "minimax_m2",
    "MinimaxM2ParserToolAdapter": "minimax_m2",
    "MinimaxM2ToolParser": "minimax_m2",
    "MistralDetector": "mistral",
    "MistralParserToolAdapter": "mistral",
    "MistralToolParser": "mistral",
    "PythonicDetector": "pythonic",
    "PythonicToolParser": "pythonic",
    "Qwen25Detector": "hermes",
    "Qwen3CoderDetector": "qwen3_coder",
    "Qwen3EngineToolParser": "qwen3_coder",
    "Qwen3ParserToolAdapter": "qwen3_coder",
    "SeedOssEngineToolParser": "seed_oss",
    "SeedOssParserToolAdapter": "seed_oss",
}
"""Our parser of calls for each of their classes."""

_THOUGHTS = {
    "DeepSeekR1Detector": "deepseek_r1",
    "DeepSeekV3ReasoningParser": "think",
    "DeepSeekR1ReasoningParser": "deepseek_r1",
    "Gemma4Detector": "gemma4",
    "Gemma4ParserReasoningAdapter": "gemma4",
    "Glm45Detector": "think",
    "GptOssDetector": HARMONY,
    "GptOssReasoningParser": HARMONY,
    "GraniteReasoningParser": "granite",
    "KimiK2Detector": "kimi_k2",
    "KimiK2ReasoningDetector": "kimi_k2",
    "KimiK2ReasoningParser": "kimi_k2",
    "MistralDetector": "mistral",
    "MistralParserReasoningAdapter": "mistral",
    "Qwen3Detector": "think",
    "SeedOssParserReasoningAdapter": "seed_oss",
}
"""Our form of thoughts for each of their classes."""

_CALLS_OF = {
    "gemma4": "gemma4",
    "glm4": "glm45",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "qwen3": "qwen3_coder",
    "seed": "seed_oss",
}
"""Our parsers of calls by what is in the names of parsers of thoughts for the same models."""

_OPENED = {
    "DeepSeekV3ReasoningWithThinkingParser": Family(thoughts="think", opened=True),
    "Glm47MoeParserReasoningAdapter": Family("glm45", "think", opened=True, raw=True),
    "KimiK2ReasoningParser": Family("kimi_k2", "kimi_k2", opened=True, raw=True),
    "MiniMaxM2ReasoningParser": Family("minimax_m2", "think", opened=True, raw=True),
    "Qwen3ParserReasoningAdapter": Family("qwen3_coder", "think", opened=True, raw=True),
}
"""The classes that take it that the prompt has opened a thought."""

_BOTH = {
    "DeepSeekV32Parser": Family("deepseek_v32", "think"),
    "Gemma4Parser": Family("gemma4", "gemma4"),
    "Glm47MoeParser": Family("glm45", "think", opened=True),
    "GraniteParser": Family("granite", "granite"),
    "KimiK2Parser": Family("kimi_k2", "kimi_k2", opened=True),
    "MinimaxM2Parser": Family("minimax_m2", "think", opened=True),
    "MistralParser": Family("mistral", "mistral"),
    "Qwen3Parser": Family("qwen3_coder", "think", opened=True),
    "SeedOssParser": Family("seed_oss", "seed_oss", opened=True),
}
"""The classes that read thoughts and calls."""

_NAMES = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "think",
    "deepseek-v31": "think",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "gpt-oss": "openai",
    "llama3": "llama3_json",
    "holo2": "think",
    "minimax": "think",
    "minimax-m2": "minimax_m2",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3-thinking": "think",
    "qwen3_json": "hermes",
}
"""SGLang's names that are not ours."""

_OPENED_NAMES = ("glm45", "glm47", "minimax_m2", "qwen3", "holo2", "kimi_k2", "minimax", "qwen3-thinking")
"""The names under which vLLM takes it that the prompt has opened a thought."""


def family_of(project: str, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Family | None:
    """Return our forms for a parser that a test makes; None for one that is not served here."""
    name = path.rpartition(".")[2]
    thinking = "reasoning" in path.lower()
    if "combined_parser:" in path:
        calls, _, thoughts = path.rpartition(":")[2].partition("+")
        return joined(
            _named(calls, thinking=False, opened=False) if calls else None,
            _named(thoughts, thinking=True, opened=True) if thoughts else None,
        )
    if "_parser:" in path:
        return _named(path.rpartition(":")[2], thinking=thinking, opened=project == "vllm")
    if project == "sglang" and name == "FunctionCallParser":
        given = kwargs.get("tool_call_parser") or (args[1] if len(args) > 1 else "")
        return _named(str(given), thinking=False, opened=False)
    if project == "sglang" and name == "ReasoningParser":
        given = str(kwargs.get("model_type") or (args[0] if args else ""))
        return _named(given, thinking=True, opened="thinking" in given or given == "minimax")
    if name == "HarmonyParser":
        return Family("openai", HARMONY)
    if name == "BaseReasoningFormatDetector":
        return Family(thoughts="think")
    if name == "ParserEngine":
        config = str(kwargs.get("parser_engine_config", ""))
        return _engine(config)
    if name in _OPENED:
        return _OPENED[name]
    if name in _BOTH:
        return _BOTH[name]
    if thinking:
        return _thoughts(_THOUGHTS[name], name) if name in _THOUGHTS else None
    return Family(_CALLS[name]) if name in _CALLS else None


def _thoughts(form: str, name: str, *, opened: bool = False) -> Family:
    """Return a form of thoughts, with the calls of the models that it is of."""
    calls = next((calls for sign, calls in _CALLS_OF.items() if sign in name.lower()), "none")
    return Family(calls, form, opened, raw=calls != "none")


def joined(calls: Family | None, thoughts: Family | None) -> Family | None:
    """Return the forms of a parser that is made of two; None for one of which a part is not served here."""
    if calls is None and thoughts is None:
        return None
    return Family(
        calls.calls if calls is not None else "none",
        thoughts.thoughts if thoughts is not None else "none",
        thoughts is not None and thoughts.opened,
    )


def _engine(config: str) -> Family | None:
    """Return our forms for vLLM's engine with a configuration."""
    for sign, family in (("qwen3_config", Family("qwen3_coder", "think")), ("gemma4_config", _BOTH["Gemma4Parser"])):
        if sign in config:
            return family
    return None


def _named(name: str, *, thinking: bool, opened: bool) -> Family | None:
    """Return our form for one of their names."""
    name = name.lower()
    found = _NAMES.get(name, name)
    if thinking:
        if name in ("gpt-oss", HARMONY):
            return Family(thoughts=HARMONY)
        found = THOUGHT_ALIASES.get(found, found)
        return _thoughts(found, name, opened=opened and name in _OPENED_NAMES) if found in FORMS else None
    found = CALL_ALIASES.get(found, found)
    return Family(found) if found in PARSERS else None
