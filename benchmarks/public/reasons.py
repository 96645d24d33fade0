"""The accepted differences between our parsers and the tests of other projects, with their reasons."""

from __future__ import annotations

GUESSED = "The request does not describe the parameter: ours guesses JSON as GLM's parser does, theirs keeps a text."
DROPPED = "Theirs drops text behind or between calls in silence; ours keeps it as content."
EMPTY = "Theirs drops the tags of a section without a call; ours keeps them, since what is no call is text."
NAMELESS = "Theirs makes a call without a name, or of a name with spaces, which nobody can carry out; ours is text."
UNKNOWN = "Theirs drops a call of a function that was not offered; ours passes it on, and the client can answer it."
WHOLE = "The same number: theirs makes 5 of 5.0 where the type is number."
OPEN = "Theirs leaves arguments open that the model has ended; ours completes them, unless a limit cuts them."
TWO = "Theirs reads the first of several calls; ours reads them all."
WRAPPED = "Theirs unwraps a parameter `arguments` or `input` that the function does not have; ours passes it on."
INLINE = "Theirs finds calls without a marker inside of text; ours only at the beginning, since text may quote them."
PIECES = "The same call: the test counts the pieces in which its arguments come."
LATER = "Theirs drops a closing tag of a thought in later text; ours keeps it as content."
UNOFFERED = "No tools were offered: without them ours reads no call that could end a thought."
STATE = "The test looks into its parser's own state, or at a part of the prompt that the comparison does not give."
QUOTES = "Theirs takes the quotes off a text whose form has none; ours keeps what the model wrote."
LENIENT = "Theirs makes no call of text that ours reads as one: a missing bracket, or an object where a list should be."
HEADERS = "Theirs drops messages to others, or of unknown channels; ours keeps them as content."

_VLLM, _SGLANG = "vllm:tests/", "sglang:test/registered/"
_DEEPSEEK32 = f"{_VLLM}tool_parsers/test_deepseekv32_tool_parser.py::TestExtractToolCalls::"
_GEMMA = f"{_VLLM}tool_parsers/test_gemma4_tool_parser.py::TestBareAndMalformedOpeners::"
_GEMMA_ENGINE = f"{_VLLM}parser/engine/test_gemma4_streaming_reasoning.py::"
_TRACES = f"{_VLLM}parser/engine/trace_builder.py::"
_KIMI = f"{_VLLM}tool_parsers/test_kimi_k2_tool_parser.py::"
_MISTRAL = f"{_VLLM}parser/mistral/test_tool_calls.py::"
_HARMONY = f"{_VLLM}parser/test_harmony.py::"
_QWEN = f"{_VLLM}parser/engine/test_qwen3.py::"
_THOUGHTS = f"{_VLLM}parser/engine/test_qwen3_reasoning.py::"
_MINIMAX = f"{_VLLM}parser/engine/test_minimax_m2.py::"
_CALLS = f"{_SGLANG}unit/function_call/test_function_call_parser.py::"
_KIMI_SGLANG = f"{_SGLANG}function_call/test_kimik2_detector.py::"
_HARMONY_SGLANG = f"{_SGLANG}unit/parser/test_harmony_parser.py::"
_REASONING = f"{_SGLANG}unit/parser/test_reasoning_parser.py::"

REASONS: dict[str, str] = {
    f"{_VLLM}tool_parsers/test_deepseekv31_tool_parser.py::test_extract_tool_calls_with_multiple_tools": DROPPED,
    f"{_DEEPSEEK32}test_arguments_wrapper": WRAPPED,
    f"{_DEEPSEEK32}test_input_wrapper": WRAPPED,
    f"{_DEEPSEEK32}test_number_param": WHOLE,
    f"{_VLLM}parser/engine/test_deepseek_v32.py::TestNonStreaming::test_wrapper": WRAPPED,
    f"{_CALLS}TestGemma4Detector::test_detect_and_parse_multiple_calls": DROPPED,
    _GEMMA: NAMELESS,
    f"{_GEMMA_ENGINE}TestBareThoughtWithoutChannelOpener": "Theirs reads a word `thought` without its marker as one.",
    f"{_GEMMA_ENGINE}TestGemma4ArgValueExtender::test_string_value": PIECES,
    f"{_GEMMA_ENGINE}TestGemma4SchemaCoercionBoolNumberNull::test_number_whole": WHOLE,
    _GEMMA_ENGINE: GUESSED,
    _TRACES: EMPTY,
    f"{_CALLS}TestGlm47MoeDetector::test_quoted": QUOTES,
    f"{_CALLS}TestGlm4MoeDetector::test_quoted": QUOTES,
    f"{_CALLS}TestGlm4MoeDetector::test_array_argument": "Theirs undoes the escapes of a whole call; ours is text.",
    f"{_CALLS}TestGlm": UNKNOWN,
    f"{_VLLM}tool_parsers/test_glm4_moe_tool_parser.py::test_streaming": STATE,
    f"{_VLLM}parser/engine/test_glm47_moe.py::TestStreamedToolArguments": GUESSED,
    f"{_VLLM}parser/engine/test_granite.py::TestNonStreaming": LENIENT,
    f"{_VLLM}parser/test_parse.py::": STATE,
    f"{_VLLM}parser/test_streaming.py::": STATE,
    f"{_VLLM}tool_parsers/test_hermes_tool_parser.py::test_hermes_parser_non_streaming_tool_call_invalid": LENIENT,
    f"{_KIMI_SGLANG}TestKimiK2BareCounter": "Theirs guesses a function from its arguments where the model names none.",
    f"{_KIMI_SGLANG}TestKimiK2EndToEnd::test_e2e_malformed": "Theirs passes on what is no JSON; ours mends it.",
    f"{_KIMI_SGLANG}TestKimiK2DetectorSpecialTokenLeakage": EMPTY,
    f"{_CALLS}TestKimiK2Detector::test_partial": OPEN,
    f"{_KIMI}TestExtractToolCalls::test_invalid_funcall_id": UNKNOWN,
    _KIMI: DROPPED,
    f"{_CALLS}TestLfm2Detector::test_detect_and_parse_unknown": UNKNOWN,
    f"{_VLLM}tool_parsers/test_lfm2_tool_parser.py::test_echoed": DROPPED,
    f"{_VLLM}tool_parsers/test_llama3_json_tool_parser.py::test_extract_tool_calls_simple": STATE,
    f"{_VLLM}tool_parsers/test_minimax_m2_tool_parser.py::": GUESSED,
    f"{_MINIMAX}TestArgValueExtender": GUESSED,
    f"{_MINIMAX}TestNonStreaming": UNKNOWN,
    f"{_SGLANG}unit/function_call/test_mistral_detector.py::TestMistralDetector::test_json_array": DROPPED,
    f"{_MISTRAL}test_extract_tool_calls[7]": OPEN,
    f"{_MISTRAL}test_extract_tool_calls[": DROPPED,
    f"{_MISTRAL}test_extract_tool_calls_pre_v11_multiple": TWO,
    f"{_MISTRAL}test_extract_tool_calls_pre_v11_no_tool_call": EMPTY,
    f"{_MISTRAL}test_extract_tool_calls_pre_v11_regex": DROPPED,
    f"{_MISTRAL}test_extract_tool_calls_pre_v11_tokenizer": DROPPED,
    f"{_MISTRAL}test_extract_tool_calls_pre_v11_unusual_calls[bare": TWO,
    f"{_MISTRAL}test_extract_tool_calls_streaming_pre_v11_unusual_calls[bare": TWO,
    f"{_MISTRAL}test_extract_tool_calls_pre_v11_unusual_calls[entry": DROPPED,
    f"{_MISTRAL}test_extract_tool_calls_streaming_pre_v11_unusual_calls[entry": DROPPED,
    f"{_MISTRAL}test_extract_tool_calls_v11_without_args": "Theirs makes a call of a mere name; ours is text.",
    _MISTRAL: NAMELESS,
    f"{_HARMONY}TestParseDelta::test_multi_tool": PIECES,
    f"{_HARMONY}TestParseDelta::test_tool_call_split": PIECES,
    _HARMONY: HEADERS,
    _HARMONY_SGLANG: HEADERS,
    f"{_CALLS}TestPythonicDetector": INLINE,
    f"{_VLLM}parser/engine/test_parser_engine.py::TestTruncatedToolOpener": EMPTY,
    f"{_VLLM}tool_parsers/test_qwen3coder_tool_parser.py::test_extract_tool_calls_type": GUESSED,
    f"{_QWEN}TestSchemaCoercionBoolNumberNull": WHOLE,
    f"{_QWEN}TestStreaming::test_streaming_split": PIECES,
    f"{_QWEN}TestStreaming::test_streaming_args": PIECES,
    _QWEN: GUESSED,
    f"{_THOUGHTS}TestDelegatingPromptDetection": STATE,
    _THOUGHTS: LATER,
    f"{_REASONING}TestGlm45Detector": UNOFFERED,
    f"{_REASONING}TestReasoningParser::test_glm45": UNOFFERED,
    f"{_REASONING}TestContinueFinalMessage": STATE,
    _REASONING: "Theirs drops the beginning of a closing tag at the end of a cut thought.",
    f"{_SGLANG}unit/function_call/test_function_call_parser.py::TestLlama32Detector": LENIENT,
}
"""The reason of each accepted difference, by the beginning of the ids of tests. The first one counts."""
