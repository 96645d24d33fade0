"""The table of all parameters that OpenAI, vLLM, mlx-lm, llama.cpp and LM Studio have for chats and text completions.

A supported parameter is a field of a body in `bodies.py`. For every other parameter, null and the values without effect
are accepted, and all other values are refused by name. docs/http-api.md shows this table together with the fields that
only this project has.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from mlx_tandem.dialects.openai.bodies import ChatBody, Common, CompletionBody

Route = Literal["chat", "completions"]
BOTH: tuple[Route, ...] = ("chat", "completions")
BODIES: dict[Route, type[Common]] = {"chat": ChatBody, "completions": CompletionBody}
CHAT: tuple[Route, ...] = ("chat",)
COMPLETIONS: tuple[Route, ...] = ("completions",)

SCHEMAS = {"O": "OpenAI", "V": "vLLM", "M": "mlx-lm", "L": "llama.cpp", "S": "LM Studio"}
"""The API that each letter of `Parameter.schemas` stands for."""


class Parameter(NamedTuple):
    """One parameter. `schemas` has the letters of SCHEMAS for the APIs that have it.

    `no_effect` has the values besides null that have no effect on the routes `only`. A type there stands for all of its
    values, and float for all numbers. No value has an effect while all parameters in `idle_without` are absent, null or
    0. `instead` is the parameter with which this server does the same.
    """

    name: str
    schemas: str
    no_effect: tuple[Any, ...] = ()
    only: tuple[Route, ...] = BOTH
    idle_without: tuple[str, ...] = ()
    instead: str = ""

    @property
    def served(self) -> tuple[Route, ...]:
        """The routes that support the parameter."""
        return tuple(route for route in BOTH if self.name in BODIES[route].__struct_fields__)


PARAMETERS: tuple[Parameter, ...] = (
    # The request
    Parameter("model", "OVML"),
    Parameter("messages", "OVML"),
    Parameter("prompt", "OVML"),
    Parameter("user", "OV"),
    Parameter("metadata", "O"),
    # Length and end of the answer
    Parameter("max_tokens", "OVML"),
    Parameter("max_completion_tokens", "OVML", instead="max_tokens"),
    Parameter("n_predict", "L", instead="max_tokens"),
    Parameter("min_tokens", "V"),
    Parameter("n", "OVL"),
    Parameter("n_cmpl", "L", no_effect=(1,), instead="n"),
    Parameter("best_of", "OV", no_effect=(1,)),
    Parameter("stop", "OVML"),
    Parameter("stop_token_ids", "V"),
    Parameter("ignore_eos", "VL"),
    Parameter("include_stop_str_in_output", "V"),
    Parameter("n_indent", "L", no_effect=(0,)),
    Parameter("t_max_predict_ms", "L", no_effect=(0, -1)),
    Parameter("max_repetition_pattern_size", "V", no_effect=(0,)),
    Parameter("min_repetition_pattern_size", "V", no_effect=(0,)),
    Parameter("repetition_min_count", "V", no_effect=(0,)),
    Parameter("repetition_detection", "V"),
    # Sampling
    Parameter("temperature", "OVML"),
    Parameter("top_p", "OVML"),
    Parameter("top_k", "VML"),
    Parameter("min_p", "VML"),
    Parameter("repetition_penalty", "VM"),
    Parameter("repetition_context_size", "M"),
    Parameter("repeat_penalty", "L", no_effect=(1,), instead="repetition_penalty"),
    Parameter("repeat_last_n", "L", idle_without=("presence_penalty", "frequency_penalty")),
    Parameter("presence_penalty", "OVML"),
    Parameter("presence_context_size", "M", idle_without=("presence_penalty",)),
    Parameter("frequency_penalty", "OVML"),
    Parameter("frequency_context_size", "M", idle_without=("frequency_penalty",)),
    Parameter("xtc_probability", "ML"),
    Parameter("xtc_threshold", "ML"),
    Parameter("logit_bias", "OVML", no_effect=([],)),
    Parameter("allowed_token_ids", "V"),
    Parameter("bad_words", "V", no_effect=([],)),
    Parameter("seed", "OVML"),
    Parameter("typical_p", "L", no_effect=(1,)),
    Parameter("tfs_z", "L", no_effect=(1,)),
    Parameter("top_n_sigma", "L", no_effect=(-1,)),
    Parameter("dynatemp_range", "L", no_effect=(0,)),
    Parameter("dynatemp_exponent", "L", no_effect=(float,)),
    Parameter("dry_multiplier", "L", no_effect=(0,)),
    Parameter("dry_base", "L", no_effect=(float,)),
    Parameter("dry_allowed_length", "L", no_effect=(float,)),
    Parameter("dry_penalty_last_n", "L", no_effect=(float,)),
    Parameter("dry_sequence_breakers", "L", no_effect=(list,)),
    Parameter("mirostat", "L", no_effect=(0,)),
    Parameter("mirostat_tau", "L", no_effect=(float,)),
    Parameter("mirostat_eta", "L", no_effect=(float,)),
    Parameter("adaptive_target", "L", no_effect=(-1,)),
    Parameter("adaptive_decay", "L", no_effect=(float,)),
    Parameter("min_keep", "L", no_effect=(0,)),
    Parameter("penalize_nl", "L", no_effect=(False,)),
    Parameter("samplers", "L"),
    Parameter("backend_sampling", "L", no_effect=(bool,)),
    Parameter("logits_processors", "V", no_effect=([],)),
    Parameter("use_beam_search", "V", no_effect=(False,)),
    Parameter("length_penalty", "V", no_effect=(float,)),
    Parameter("early_stopping", "V", no_effect=(bool,)),
    # Form of the answer
    Parameter("response_format", "OV", no_effect=({"type": "text"},)),
    Parameter("structured_outputs", "V"),
    Parameter("guided_json", "V"),
    Parameter("guided_regex", "V"),
    Parameter("guided_choice", "V"),
    Parameter("guided_grammar", "V"),
    Parameter("guided_decoding_backend", "V", no_effect=(str,)),
    Parameter("guided_whitespace_pattern", "V", idle_without=("guided_json",)),
    Parameter("structural_tag", "V"),
    Parameter("json_schema", "L", instead="response_format"),
    Parameter("grammar", "L", no_effect=("",), instead="guided_grammar"),
    Parameter("grammar_type", "L", no_effect=(str,)),
    Parameter("grammar_lazy", "L", no_effect=(False,)),
    Parameter("grammar_triggers", "L", no_effect=([],)),
    Parameter("preserved_tokens", "L", no_effect=([],)),
    Parameter("verbosity", "O", no_effect=("low", "medium", "high")),
    Parameter("modalities", "O", no_effect=(["text"],)),
    Parameter("audio", "O"),
    # Tools, reasoning and search
    Parameter("tools", "OVML", no_effect=([],)),
    Parameter("tool_choice", "OVL", no_effect=("none", "auto"), only=COMPLETIONS),
    Parameter("parallel_tool_calls", "OVL", no_effect=(bool,), only=COMPLETIONS),
    Parameter("parse_tool_calls", "L", no_effect=(True,)),
    Parameter("functions", "O", no_effect=([],)),
    Parameter("function_call", "O", no_effect=("none", "auto"), only=COMPLETIONS),
    Parameter("web_search_options", "O"),
    Parameter("moderation", "O"),
    Parameter("reasoning_effort", "OVL"),
    Parameter("include_reasoning", "V", no_effect=(bool,), only=COMPLETIONS),
    Parameter("thinking_token_budget", "V"),
    Parameter("thinking_forced_open", "L", no_effect=(False,)),
    Parameter("reasoning_format", "L", no_effect=("auto", "deepseek")),
    Parameter("reasoning_control", "L", no_effect=(False,)),
    Parameter("reasoning_budget_tokens", "L", no_effect=(-1,), instead="thinking_token_budget"),
    Parameter("reasoning_budget_start_tag", "L", no_effect=(str,)),
    Parameter("reasoning_budget_end_tag", "L", no_effect=(str,)),
    Parameter("reasoning_budget_end_tags", "L", no_effect=(list,)),
    Parameter("reasoning_budget_message", "L", no_effect=(str,)),
    # Making the prompt
    Parameter("echo", "OVL"),
    Parameter("suffix", "OV", no_effect=("",)),
    Parameter("add_generation_prompt", "VL", no_effect=(bool,), only=COMPLETIONS),
    Parameter("continue_final_message", "VL", no_effect=(False,), only=COMPLETIONS),
    Parameter("chat_template_kwargs", "VML", no_effect=(dict,), only=COMPLETIONS),
    Parameter("chat_template", "V"),
    Parameter("chat_format", "L"),
    Parameter("chat_parser", "L", no_effect=("",)),
    Parameter("generation_prompt", "L", no_effect=("",)),
    Parameter("role_mapping", "M"),
    Parameter("documents", "V", no_effect=([],)),
    Parameter("add_special_tokens", "V", no_effect=(False,), only=CHAT),
    Parameter("add_special_tokens", "V", no_effect=(True,), only=COMPLETIONS),
    Parameter("truncate_prompt_tokens", "V"),
    Parameter("prompt_embeds", "V", no_effect=([],)),
    Parameter("image_data", "L", no_effect=([],)),
    Parameter("mm_processor_kwargs", "V", no_effect=({},)),
    Parameter("media_io_kwargs", "V", no_effect=({},)),
    # Details of the answer
    Parameter("logprobs", "OVML", no_effect=(False,), only=COMPLETIONS),
    Parameter("top_logprobs", "OVM", no_effect=(0, -1), only=COMPLETIONS),
    Parameter("n_probs", "L", no_effect=(0,), instead="logprobs"),
    Parameter("post_sampling_probs", "L", no_effect=(False,)),
    Parameter("prompt_logprobs", "V"),
    Parameter("logprob_token_ids", "V", no_effect=([],)),
    Parameter("return_token_ids", "V"),
    Parameter("return_tokens", "L", no_effect=(False,), instead="return_token_ids"),
    Parameter("return_tokens_as_token_ids", "V"),
    Parameter("skip_special_tokens", "V"),
    Parameter("spaces_between_special_tokens", "V", no_effect=(bool,)),
    Parameter("response_fields", "L", no_effect=([],)),
    Parameter("timings_per_token", "L", no_effect=(False,)),
    Parameter("verbose", "L", no_effect=(False,)),
    Parameter("request_id", "V", no_effect=(str,)),
    # Streaming and scheduling
    Parameter("stream", "OVML"),
    Parameter("stream_options", "OVML"),
    Parameter("return_progress", "L", no_effect=(False,)),
    Parameter("sse_ping_interval", "L", no_effect=(float,)),
    Parameter("priority", "V"),
    Parameter("ttl", "S"),
    Parameter("service_tier", "O", no_effect=(str,)),
    Parameter("store", "O", no_effect=(bool,)),
    Parameter("safety_identifier", "O", no_effect=(str,)),
    # Caches, speculation and other models
    Parameter("prediction", "O"),
    Parameter("prompt_cache_key", "O", no_effect=(str,)),
    Parameter("prompt_cache_retention", "O", no_effect=(str,)),
    Parameter("prompt_cache_options", "O", no_effect=(dict,)),
    Parameter("cache_salt", "V"),
    Parameter("cache_prompt", "L", no_effect=(True,)),
    Parameter("n_cache_reuse", "L", no_effect=(float,)),
    Parameter("n_keep", "L", no_effect=(float,)),
    Parameter("n_discard", "L", no_effect=(float,)),
    Parameter("id_slot", "L", no_effect=(float,)),
    Parameter("adapters", "M", instead="lora_adapter"),
    Parameter("lora", "L", instead="lora_adapter"),
    Parameter("draft_model", "M", no_effect=("default_model",)),
    Parameter("num_draft_tokens", "M", no_effect=(float,)),
    Parameter("speculative.n_max", "L", no_effect=(float,)),
    Parameter("speculative.n_min", "L", no_effect=(float,)),
    Parameter("speculative.p_min", "L", no_effect=(float,)),
    Parameter("kv_transfer_params", "V", no_effect=({},)),
    Parameter("vllm_xargs", "V", no_effect=({},)),
)
