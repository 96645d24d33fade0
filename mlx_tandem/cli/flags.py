"""Translates command lines written for other servers: their flags that have no setting here, and their spellings of
ours.

`FLAGS` has a row for each flag that is accepted without a setting behind it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


class Refused(Exception):
    """A flag whose meaning cannot be kept here, or whose value makes no sense."""

    def __init__(self, flag: str, reason: str):
        super().__init__(reason)
        self.flag = flag


@dataclass(frozen=True)
class Flag:
    """The treatment of another server's flag."""

    text: str  # what does the job here, or why nothing can
    value: bool = False  # whether a value follows
    refuse: bool = False  # whether the flag is an error
    harmless: tuple[str, ...] = ()  # values that describe what happens here anyway, which need no warning
    quiet: bool = False  # whether the switch is always on here: no warning, and turning it off is an error


_ONE_BATCH = "rows of all adapters and of the base are always decoded in one batch"
_ADMISSION = "requests join the running batch at the next step; --max-num-seqs bounds it"
_IN_THE_POOL = "what prompts have in common is kept in the KV pool, which --num-blocks sizes"
_CHUNKS = "prompts are always read in chunks, so that streams go on beside them"
_NO_REQUEST_LOG = "requests are logged with `tandem -v` only, without what they say"
_NO_CODE = "code that comes with a model is never run"


FLAGS: dict[str, Flag] = {
    # MOLA
    "--enable-routed-decode-reference": Flag(_ONE_BATCH),
    "--strict-routed-decode-reference": Flag(f"{_ONE_BATCH}, and there is no second path to fall back to"),
    "--routed-decode-backend": Flag(f"{_ONE_BATCH}; --lora-backend chooses how their share is computed", value=True),
    "--enable-mixed-decode-migration": Flag(_ONE_BATCH),
    "--prestep-mixed-decode-migration": Flag(_ONE_BATCH),
    "--cache-routed-decode-sessions": Flag(f"{_ONE_BATCH}; adapters that --max-loras has room for stay on the device"),
    "--detached-shared-decode-owner": Flag("the engine is always a process of its own, with one decode loop"),
    # mlx-lm-server
    "--completion-batch-size": Flag("--max-num-seqs is the size of the one batch there is", value=True),
    "--draft-model-quantize": Flag("the draft model's weights are used as its folder has them", value=True),
    "--draft-context-len": Flag("the draft model reads all that the model reads", value=True),
    "--spec-decode-acceptance-threshold": Flag(
        "a draft is accepted exactly where it is what would have been drawn, so there is nothing to weigh", value=True
    ),
    # Jan's mlx-server
    "--batch-timeout-ms": Flag(f"no batch is waited for: {_ADMISSION}", value=True),
    "--enable-continuous-batching": Flag(f"batching is always continuous: {_ADMISSION}"),
    "--embedding": Flag("every model answers /v1/embeddings, and goes on answering chats"),
    # MLX ParaLLM
    "--scheduler": Flag(f"batching is always continuous: {_ADMISSION}", value=True, harmless=("continuous",)),
    "--batch-timeout": Flag(f"no batch is waited for: {_ADMISSION}", value=True),
    "--max-concurrent-streams": Flag(
        "a stream costs the batch what any other reply does; --max-num-seqs bounds what runs at once", value=True
    ),
    "--diverse-mode": Flag(
        "no request is answered with another's tokens, and each draws with a seed of its own",
        value=True,
        harmless=("true", "True", "1"),
    ),
    # vLLM
    "--enable-auto-tool-choice": Flag("tool_choice auto needs no switch", quiet=True),
    "--enable-prompt-tokens-details": Flag("the usage always has prompt_tokens_details", quiet=True),
    "--enable-chunked-prefill": Flag(_CHUNKS, quiet=True),
    "--no-enable-chunked-prefill": Flag(_CHUNKS, refuse=True),
    "--enable-tokenizer-info-endpoint": Flag("GET /tokenizer_info is always there", quiet=True),
    "--enable-lora": Flag("adapters need no switch; --max-loras 0 turns them off"),
    "--disable-log-requests": Flag(_NO_REQUEST_LOG),
    "--no-enable-log-requests": Flag(_NO_REQUEST_LOG),
    "--enable-request-id-headers": Flag("every reply has an X-Request-Id"),
    "--enforce-eager": Flag("there is no other mode to leave"),
    # mlx-lm
    "--trust-remote-code": Flag(_NO_CODE, refuse=True),
}
"""Flags of other servers that have no setting here."""

DTYPES = {"half": "float16", "float": "float32"}
"""Other names of types."""

MODES = {"inference": "inference_only", "training": "training_only", "both": "inference_and_training"}
"""Other names of modes."""

MODEL_FLAGS = ("-m", "--model", "--model-path")
"""Flags that name the model."""


def translate(words: list[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the words as `tandem serve` spells them, and a warning for every flag that has no effect here.

    `takes_value` says for each of the command's own options whether a value follows. Raise Refused for a flag that
    is an error.
    """
    line = _Line(words, takes_value)
    return list(line.own_words()), line.warnings


class _Line:
    """One command line, read from left to right."""

    def __init__(self, words: list[str], takes_value: Mapping[str, bool]):
        self._rest = deque(words)
        self._takes_value = takes_value
        self._model_known = any(word.split("=")[0] in MODEL_FLAGS for word in words)
        self.warnings: list[str] = []

    def own_words(self) -> Iterator[str]:
        """Yield the words in this command's spelling."""
        while self._rest:
            word = self._rest.popleft()
            if word == "--":
                yield from (word, *self._rest)
                return
            if not word.startswith("-"):
                self._model_known = True
                yield word
                continue
            flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            if flag in FLAGS:
                self._other(flag, value if equals else None)
            elif flag in SPELLINGS:
                if equals:
                    self._rest.appendleft(value)
                yield from SPELLINGS[flag](self)
            else:
                yield word
                if not equals and self._takes_value.get(flag) and self._rest:
                    yield self._value(flag)

    def _value(self, flag: str, what: str = "a value must follow") -> str:
        """Return the word after `flag`. Raise Refused with the reason `what` if there is none or it is an option.

        A value that begins like an option has to be written FLAG=VALUE.
        """
        if not self._rest:
            raise Refused(flag, what)
        word = self._rest.popleft()
        if word.startswith("--") or word in self._takes_value:
            raise Refused(flag, f"{what}, not the option {word}")
        return word

    def _other(self, flag: str, value: str | None) -> None:
        row = FLAGS[flag]
        if row.value and value is None:
            value = self._value(flag)
        if row.quiet and value is not None and value.lower() in ("false", "0"):
            raise Refused(flag, f"{flag}={value} cannot be kept: {row.text}")
        if row.quiet or value in row.harmless:
            return
        if row.refuse:
            raise Refused(flag, f"{flag} {value or ''}".strip() + f" cannot be kept: {row.text}")
        self.warnings.append(f"{flag} has no effect here: {row.text}")

    # -- Other spellings ------------------------------------------------------------------------------------------

    def adapter(self) -> Iterator[str]:
        """Yield --adapter NAME PATH as NAME=PATH, which is accepted as well."""
        name = self._value("--adapter", "a name and a path must follow")
        if "=" not in name:
            name += "=" + self._value("--adapter", f"a path must follow the name {name}")
        yield from ("--adapter", name)

    def lora_modules(self) -> Iterator[str]:
        """Yield vLLM's --lora-modules as adapters: words NAME=PATH or JSON objects, up to the next option."""
        self._rest.appendleft(self._value("--lora-modules"))
        found = False
        while self._rest and (self._rest[0].startswith("{") or ("=" in self._rest[0] and self._rest[0][0] != "-")):
            word = self._rest.popleft()
            yield from ("--adapter", _module(word) if word.startswith("{") else word)
            found = True
        if not found:
            raise Refused("--lora-modules", "needs NAME=PATH or a JSON object with name and path")

    def adapter_path(self) -> Iterator[str]:
        """Yield mlx-lm-server's --adapter-path as an adapter that answers by default."""
        yield from ("--adapter", f"default={self._value('--adapter-path')}", "--default-adapter", "default")

    def served_model_name(self) -> Iterator[str]:
        """Yield vLLM's --served-model-name, which takes several words. Without a model before them the second word
        is MODEL.
        """
        yield from ("--served-model-name", self._value("--served-model-name"))
        while self._model_known and self._rest and not self._rest[0].startswith("-"):
            yield from ("--served-model-name", self._rest.popleft())

    def model_id(self) -> Iterator[str]:
        """Yield the flag with which Jan names the model that its requests ask for."""
        yield from ("--served-model-name", self._value("--model-id"))

    def sequence_cache_size(self) -> Iterator[str]:
        """Yield mlx-lm-server's --sequence-cache-size as the prefix cache's switch: 0 is off, any other number has
        no effect.
        """
        value = self._value("--sequence-cache-size")
        if value == "0":
            yield "--no-enable-prefix-caching"
        else:
            self.warnings.append(f"--sequence-cache-size has no effect here: {_IN_THE_POOL}")

    def dtype(self) -> Iterator[str]:
        """Yield --dtype with this server's name of the type."""
        value = self._value("--dtype")
        yield from ("--dtype", DTYPES.get(value, value))

    def mode(self) -> Iterator[str]:
        """Yield --mode with this server's name of the mode."""
        value = self._value("--mode")
        yield from ("--mode", MODES.get(value, value))

    def spec_decode(self) -> Iterator[str]:
        """Yield --spec-decode. Raise Refused for a method that was tried and does not pay."""
        value = self._value("--spec-decode")
        if value == "base":
            reason = "the base takes about as long for a draft as an adapter for a token, so drafts of it cannot pay"
            raise Refused("--spec-decode", f"--spec-decode base is not supported: {reason}")
        yield from ("--spec-decode", value)

    def draft_model(self) -> Iterator[str]:
        """Yield mlx-lm's flag for a draft model, which is used when it is named."""
        yield from ("--spec-decode", "draft", "--draft-model-path", self._value("--draft-model"))

    def no_adaptive_k(self) -> Iterator[str]:
        """Yield mlx-lm-server's other name of --no-spec-decode-dynamic."""
        yield "--no-spec-decode-dynamic"

    def speculative_config(self) -> Iterator[str]:
        """Yield vLLM's JSON object for n-grams or a draft model as the options that it stands for."""
        flag = "--speculative-config"
        try:
            given = json.loads(self._value(flag))
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise Refused(flag, "needs a JSON object")
        method = METHODS.get(given.pop("method", "draft_model"), "")
        known = [name for name in given if name in SPECULATIVE]
        if not method or len(known) < len(given) or (method == "draft") != ("model" in given):
            names = ", ".join(SPECULATIVE)
            raise Refused(
                flag, f"cannot be kept: the method is ngram or mtp, or draft_model with a model; known are {names}"
            )
        yield from ("--spec-decode", method)
        for name, value in given.items():
            yield from (SPECULATIVE[name], str(value))


METHODS = {"ngram": "ngram", "draft_model": "draft", "draft": "draft", "mtp": "mtp"}
"""Methods of vLLM's speculative config, and their names here."""

SPECULATIVE = {
    "model": "--draft-model-path",
    "num_speculative_tokens": "--num-speculative-tokens",
    "prompt_lookup_min": "--ngram-min",
    "prompt_lookup_max": "--ngram-max",
    "disable_by_batch_size": "--spec-decode-disable-batch-size",
}
"""Members of vLLM's speculative config, and their options here."""


SPELLINGS: dict[str, Callable[[_Line], Iterator[str]]] = {
    "--adapter": _Line.adapter,
    "--lora-modules": _Line.lora_modules,
    "--adapter-path": _Line.adapter_path,
    "--served-model-name": _Line.served_model_name,
    "--model-id": _Line.model_id,
    "--sequence-cache-size": _Line.sequence_cache_size,
    "--dtype": _Line.dtype,
    "--mode": _Line.mode,
    "--draft-model": _Line.draft_model,
    "--no-adaptive-k": _Line.no_adaptive_k,
    "--spec-decode": _Line.spec_decode,
    "--speculative-config": _Line.speculative_config,
}
"""Flags of other servers that are spelled differently here."""


def _module(word: str) -> str:
    try:
        module = json.loads(word)
        name, path = module["name"], module["path"]
    except (ValueError, KeyError, TypeError):
        name = path = None
    if not (isinstance(name, str) and isinstance(path, str)):
        raise Refused("--lora-modules", f"'{word}' is not a JSON object with name and path")
    return f"{name}={path}"
