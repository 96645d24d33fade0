"""The form of errors on Tinker's paths, which is OpenAI's object: the SDK shows the body as it is."""

from __future__ import annotations

from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.dialects.route import ErrorForm

PREFIX = "/api/v1"
"""Beginning of all paths of Tinker's API."""

ERRORS = ErrorForm(
    error_body,
    {
        "type": "object",
        "properties": {"error": {"type": "object"}},
        "required": ["error"],
        "additionalProperties": False,
    },
    PREFIX,
)
"""The form of errors at and below PREFIX, where errors would have Ollama's form otherwise."""
