"""Bodies of split requests: which of a client can be split, and those of both legs."""

from __future__ import annotations

from typing import Final

import msgspec

from hetlb.proxy.http.endpoints import Kind

#: Kinds whose requests can be split.
_SPLIT_KINDS: Final = (Kind.COMPLETION, Kind.CHAT, Kind.RESPONSES, Kind.MESSAGES)
#: Fields of a body that a prefill leg does not have: they make no difference to the KV cache of its prompt,
#: or could end it in a way in which its blocks are not kept.
_NOT_PREFILLED: Final = (
    "stream", "stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "max_completion_tokens",
)  # fmt: skip
#: Fields that a body may not hold: a decode instance that did not prefill the prompt cannot answer it.
_WHOLE_ONLY: Final = (
    b'"prompt_logprobs"', b'"echo"', b'"use_beam_search"', b'"prompt_embeds"', b'"return_token_ids"',
    b'"prompt_token_ids"',
)  # fmt: skip
#: More tokens than any engine takes: a request that asks for them is refused before it runs.
_TOO_MANY_TOKENS: Final = 1 << 30
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def may_split(kind: Kind, path: str, body: bytes) -> bool:
    """True if a request with one prompt and one sequence can be split."""
    return kind in _SPLIT_KINDS and path.startswith("/v1/") and not any(key in body for key in _WHOLE_ONLY)


def prefill_body(kind: Kind, body: bytes, params: bytes | None) -> bytes:
    """The body of a prefill leg: that of the client, but for one token of output and no stream."""
    fields = _raw_fields.decode(body)
    for name in _NOT_PREFILLED:
        fields.pop(name, None)
    fields["max_output_tokens" if kind is Kind.RESPONSES else "max_tokens"] = msgspec.Raw(b"1")
    if kind is Kind.RESPONSES:
        fields["store"] = msgspec.Raw(b"false")
    elif kind is not Kind.MESSAGES:
        fields["ignore_eos"] = msgspec.Raw(b"true")
    if params is not None:
        fields["kv_transfer_params"] = msgspec.Raw(params)
    return msgspec.json.encode(fields)


def release_body(model: str, params: bytes) -> bytes:
    """A request that a decode instance refuses before it runs: vLLM then has the KV blocks released."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": [1],
            "max_tokens": _TOO_MANY_TOKENS,
            "kv_transfer_params": msgspec.Raw(params),
        }
    )
