"""Model folders that say given texts token by token, so that a whole server can be tried on any text.

The model is a Llama of one layer with real weights. Its chat template looks for keys in the conversation and ends the
prompt with a token that stands for one text. From there on each token says which token follows.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_tandem.config import CacheConfig, Config, EngineConfig, ModelConfig, ServerConfig

END = "<|stop|>"
TURN = "<|turn|>"
IMAGE = "<image>"
CODE = 64
"""Numbers in the code by which one token names another."""


@dataclass(frozen=True)
class Script:
    """What a model says, and how."""

    says: Mapping[str, str | Sequence[str]]
    """What is said, by a key that a user's or a system's message contains: the last such message counts, and of several
    keys in it the longest. Of several texts the first is said to that message, the second behind the first result of a
    tool, and so on; the last one also behind later results."""
    otherwise: str = "Nobody told me what to say to that."
    """What is said where no message has a key."""
    heard: Mapping[str, str] = field(default_factory=dict)
    """What is said instead behind a result of a tool that contains a key of these."""
    signs: str = ""
    """What the template prints if there are tools. The server chooses its parsers by the markers in it."""
    opening: str = ""
    """What the prompt ends with, such as `<think>`."""
    tokens: Sequence[str] = ()
    """Texts that are tokens of their own wherever they occur."""
    special: Sequence[str] = ()
    """The same, for special tokens, which are shown only to parsers."""
    ends: Sequence[str] = ()
    """Tokens of these that end an answer. A text that ends with none of them is ended by a token of the model's own."""
    strict: bool = False
    """Refuse a system message that is not the first, and users or assistants that do not alternate."""
    shown: int | None = None
    """Print at most so many characters of each message and no tools, so that an agent's instructions cost no time."""
    sees: bool = False
    """Read images, of which the model sees nothing: one in a message is the text `<image>`, which may be in a key."""
    context: int = 32_768
    seed: int = 0
    longest: int = 6
    """The most bytes of most pieces into which `seed` cuts a text. A piece may end within a character."""


def make(folder: Path, script: Script) -> Path:
    """Write the model folder. The same script, the same folder."""
    said = [text for turns in script.says.values() for text in listed(turns)]
    texts = list(dict.fromkeys([script.otherwise, *said, *script.heard.values()]))
    cut = _Cutter(script).cut
    chains = [[go(i, script), *cut(text)] for i, text in enumerate(texts)]
    for chain in chains:
        if chain[-1] not in script.ends:
            chain.append(END)
    images = [IMAGE] if script.sees else []
    added = [END, TURN, *images, *(chain[0] for chain in chains), *script.tokens, *script.special]
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece for chain in chains for piece in chain if piece not in added}
    vocab = {piece: i for i, piece in enumerate([*byte_level, *sorted(pieces - set(byte_level))])}
    ids = vocab | {token: len(vocab) + i for i, token in enumerate(added)}
    uses = Counter(piece for chain in chains for piece in chain)
    silent = {token for token, count in uses.items() if count > 1}.union(byte_level, script.tokens, script.special)
    plans = _plans([[ids[token] for token in chain] for chain in chains], {ids[token] for token in silent})

    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(folder, vocab, [AddedToken(t, special=t not in script.tokens, normalized=False) for t in added])
    settings = {
        "eos_token": END,
        "chat_template": template(script, {text: chain[0] for text, chain in zip(texts, chains, strict=True)}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config, weights = _model(len(ids) + -len(ids) % 64, plans, ids[END])
    config["max_position_embeddings"] = script.context
    if script.sees:
        config, weights = _with_eyes(config, weights, ids[IMAGE])
        processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    config["eos_token_id"] = [ids[token] for token in (END, *script.ends)]
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def config(folder: Path, **server: Any) -> Config:
    """The settings of a server for a folder of `make`, to be passed to `tests.serving.serving`."""
    settings = json.loads((folder / "config.json").read_text())
    context = settings.get("text_config", settings)["max_position_embeddings"]
    return Config(
        engine=EngineConfig(
            model=ModelConfig(path=str(folder)), cache=CacheConfig(num_blocks=context // 8), heartbeat_seconds=0.1
        ),
        server=ServerConfig(port=0, **server),
    )


def listed(turns: str | Sequence[str]) -> Sequence[str]:
    return [turns] if isinstance(turns, str) else turns


def go(text: int, script: Script) -> str:
    """The token that makes the model say a text, by its number."""
    return f"<go:{text}>{script.opening}"


# -- the chat template

_TEMPLATE = """\
{%- set said = SAID %}
{%- set heard = HEARD %}
{%- set now = namespace(turns=[OTHERWISE], results=0, heard=none, last="") %}
{%- if tools %}{% raw %}SIGNS{% endraw %}{{ TOOLS }}{% endif %}
{%- for message in messages %}
    {%- set content = namespace(text=message.content if message.content is string else "") %}
    {%- for part in message.content if message.content and message.content is not string %}
        {%- set content.text = content.text + (part.text if part.type == "text" else "<image>") %}
    {%- endfor %}
    {%- set text = content.text %}
    {%- if message.role == "tool" %}
        {%- set now.results = now.results + 1 %}{% set now.heard = none %}
        {%- for key, told in heard if key in text %}{% set now.heard = told %}{% endfor %}
    {%- elif message.role != "assistant" %}
        {%- for key, turns in said if key in text %}
            {%- set now.turns = turns %}{% set now.results = 0 %}{% set now.heard = none %}
        {%- endfor %}
    {%- endif %}
    {%- if STRICT %}
        {%- if message.role in ("system", "developer") %}
            {%- if not loop.first %}{{ raise_exception("The system message has to be the first.") }}{% endif %}
        {%- elif message.role == now.last and message.role != "tool" or message.role == "assistant" and not now.last %}
            {{- raise_exception("Users and assistants have to alternate.") }}
        {%- else %}{% set now.last = message.role %}{% endif %}
    {%- endif %}
    {{- "<|turn|>" + message.role + "\\n" + text[:SHOWN] + "\\n" }}
    {%- for call in message.tool_calls or () %}
        {{- call.function.name + " " + (call.function.arguments | tojson)[:SHOWN] + "\\n" }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set told = now.turns[now.results] if now.results < now.turns | length else now.turns[-1] %}
    {{- "<|turn|>assistant\\n" + (now.heard or told) }}
{%- endif %}
"""


def template(script: Script, gos: Mapping[str, str]) -> str:
    """The chat template. `gos` has the token of each text."""
    said = [(key, [gos[text] for text in listed(turns)]) for key, turns in script.says.items()]
    values = {
        "SAID": _literal(sorted(said, key=lambda one: len(one[0]))),
        "HEARD": _literal([(key, gos[text]) for key, text in script.heard.items()]),
        "OTHERWISE": _literal(gos[script.otherwise]),
        "SIGNS": script.signs,
        "TOOLS": "tools | tojson" if script.shown is None else '"\\n"',
        "STRICT": _literal(script.strict),
        "SHOWN": "" if script.shown is None else str(script.shown),
    }
    return re.sub("|".join(sorted(values, key=len, reverse=True)), lambda name: values[name[0]], _TEMPLATE)


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- the tokens


class _Cutter:
    """Cuts texts into tokens, most of which occur only once, since only those say what follows them."""

    def __init__(self, script: Script):
        self._random = random.Random(script.seed)
        self._longest = script.longest
        self._letters = _byte_letters()
        self._used: set[str] = set()
        tokens = sorted([*script.tokens, *script.special], key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def cut(self, text: str) -> list[str]:
        """The tokens of a text, as the tokenizer's file spells them."""
        found: list[str] = []
        end = 0
        for token in self._whole.finditer(text):
            found += [*self._pieces(text[end : token.start()]), token[0]]
            end = token.end()
        return found + self._pieces(text[end:])

    def _pieces(self, text: str) -> list[str]:
        letters = "".join(self._letters[byte] for byte in text.encode())
        pieces: list[str] = []
        start = 0
        while start < len(letters):
            end = start + self._random.randint(1, self._longest)
            while (end - start < 2 or letters[start:end] in self._used) and end < len(letters):
                end += 1
            pieces.append(letters[start:end])
            start = end
            self._used.add(pieces[-1])
        return pieces


def _byte_letters() -> dict[int, str]:
    """The letter for each byte in a byte-level vocabulary: itself if it can be printed, else one from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _save_tokenizer(folder: Path, vocab: dict[str, int], added: list[AddedToken]) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in added:
        tokenizer.add_tokens([token])
    tokenizer.save(str(folder / "tokenizer.json"))


# -- the weights

Plans = dict[int, list[int]]
Weights = dict[str, mx.array]


def _plans(chains: Sequence[Sequence[int]], silent: set[int]) -> Plans:
    """What each token that is not silent says: the tokens behind it, up to the next one that is not silent either."""
    plans: Plans = {}
    for chain in chains:
        for token, following in itertools.pairwise(chain):
            if token not in silent:
                plan = plans[token] = []
            plan.append(following)
    return plans


def _model(vocab: int, plans: Plans, end: int) -> tuple[dict[str, Any], Weights]:
    """The settings and weights of a model in which tokens carry out their plans.

    The embedding of a token has one slot for each step of its plan, with the code of the token to be said then. The
    output layer says the token whose code is in the first slot. Head d of the attention looks at the token d before
    the current one, by the rotation alone, and adds that token's slot d to the first. Two more numbers of the embedding
    are always 1, and such that all embeddings have the same length, which makes the norms change nothing.
    """
    heads = max(1, max(map(len, plans.values())) - 1)
    slots = CODE * (1 + heads)
    hidden = slots + CODE
    one, rest = slots, slots + 1
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((vocab, CODE)).astype(np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    embed = np.zeros((vocab, hidden), np.float32)
    embed[:, one] = 1
    embed[:, rest] = [np.sqrt(1 + heads - len(plans.get(token, ()))) for token in range(vocab)]
    for token, plan in plans.items():
        embed[token, : CODE * len(plan)] = codes[plan].ravel()
    output = np.zeros((vocab, hidden), np.float32)
    output[:, :CODE] = 16 * codes
    output[end, one] = 4  # where no token has a plan

    base = 4.0
    turned = np.arange(1, 1 + heads)[:, None] * base ** (-np.arange(CODE // 2) / (CODE // 2))
    query = np.zeros((heads * CODE, hidden), np.float32)
    query[:, one] = 2 * np.hstack([np.cos(turned), -np.sin(turned)]).ravel()
    key = np.zeros((heads * CODE, hidden), np.float32)
    key[:, one] = np.tile(np.repeat([1, 0], CODE // 2), heads)
    value = np.zeros((heads * CODE, hidden), np.float32)
    value[np.arange(heads * CODE), np.arange(CODE, slots)] = 1
    summed = np.zeros((hidden, heads * CODE), np.float32)
    summed[:CODE] = np.tile(np.eye(CODE), heads) / np.sqrt(CODE)  # the norm made it so much longer

    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": output,
        f"{layer}input_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}self_attn.q_proj.weight": query,
        f"{layer}self_attn.k_proj.weight": key,
        f"{layer}self_attn.v_proj.weight": value,
        f"{layer}self_attn.o_proj.weight": summed,
        f"{layer}post_attention_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}mlp.gate_proj.weight": np.zeros((CODE, hidden), np.float32),
        f"{layer}mlp.up_proj.weight": np.zeros((CODE, hidden), np.float32),
        f"{layer}mlp.down_proj.weight": np.zeros((hidden, CODE), np.float32),
    }
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": CODE,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": CODE,
        "rms_norm_eps": 1e-6,
        "rope_theta": base,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
    }
    return settings, {name: mx.array(array) for name, array in weights.items()}


def _with_eyes(text: dict[str, Any], weights: Weights, image: int) -> tuple[dict[str, Any], Weights]:
    """A model that reads images with this one as its language model. All that it makes of an image is zeros."""
    from tests import tiny_vision  # imports mlx-vlm

    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 32}
    settings = {"model_type": "llava", "image_token_index": image, "text_config": text, "vision_config": vision}
    settings["vocab_size"] = text["vocab_size"]
    shapes = tree_flatten(tiny_vision.build(settings).parameters())
    eyes = {name: mx.zeros(array.shape) for name, array in shapes if not name.startswith("language_model.")}
    return settings, eyes | {f"language_model.{name}": array for name, array in weights.items()}
