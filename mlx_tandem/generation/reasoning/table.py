"""The table of all forms of thoughts, and which of them a chat template's text asks for."""

from __future__ import annotations

from mlx_tandem.generation.reasoning.thoughts import Thoughts
from mlx_tandem.generation.tools import kimi

HARMONY = "openai_gptoss"
"""The name of the form of gpt-oss, whose messages one parser reads together with its calls."""

FORMS: dict[str, Thoughts] = {
    "deepseek_r1": Thoughts("<think>", "</think>", always_opened=True, closing="\n</think>\n\n"),
    "gemma4": Thoughts("<|channel>thought\n", "<channel|>", closing="\n<channel|>"),
    "granite": Thoughts(
        "Here is my thought process:",
        "Here is my response:",
        variants=(("Here's my thought process:", "Here's my response:"),),
    ),
    "granite_tags": Thoughts("<think>", "</think>", frame=("<response>", "</response>"), closing="</think>"),
    "kimi_k2": Thoughts("<think>", "</think>", enders=(kimi.OPEN,), closing="</think>"),
    "longcat": Thoughts("<longcat_think>", "</longcat_think>", closing="\n</longcat_think>\n"),
    "mistral": Thoughts("[THINK]", "[/THINK]", closing="[/THINK]"),
    HARMONY: Thoughts(
        "<|channel|>analysis<|message|>", "<|end|>", closing="<|end|><|start|>assistant<|channel|>final<|message|>"
    ),
    "seed_oss": Thoughts("<seed:think>", "</seed:think>", closing="\n</seed:think>\n"),
    "think": Thoughts("<think>", "</think>", closing="\n</think>\n\n"),
}
"""The forms by their names, which are vLLM's where it has the same. `think` is that of Qwen, GLM and many others."""

ALIASES = dict.fromkeys(("deepseek_v3", "deepseek_v31", "glm45", "minimax_m2", "qwen3"), "think")
"""vLLM's names of forms that are the same."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>", "analysis")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("seed_oss", ("</seed:think>",)),
    ("longcat", ("</longcat_think>",)),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("granite_tags", ("</think>", "<response>")),
    ("granite", ("Here is my thought process:",)),
    ("kimi_k2", ("</think>", kimi.OPEN)),
    ("think", ("</think>",)),
)
"""The first form all of whose signs are in the text of a chat template is the one for its model."""


def form_for(template: str) -> str:
    """Return the name of the form for a model with this chat template; none if it has no thoughts of a known form."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "none")
