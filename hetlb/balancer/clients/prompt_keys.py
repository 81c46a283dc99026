"""Prefix keys: names of the first parts of a prompt, to foresee the engine's prefix cache.

Keys are digests of the prompt's raw JSON or token ids, or the client's own name of its conversation.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final

import msgspec

from hetlb.balancer.core.prefix_index import PrefixKey
from hetlb.balancer.core.types import PromptBlocks
from hetlb.balancer.exchange.served_fleet import ServedFleet
from hetlb.balancer.http.http1 import RequestHead
from hetlb.balancer.http.openai_body import Call

#: Tokens of the shortest prefix with a key; four bytes of text count as a token.
FIRST_TOKENS: Final = 256
BYTES_PER_TOKEN: Final = 4
#: Most keys of a prompt: longer prefixes share the last one.
_MOST_KEYS: Final = 96
#: Maximum bytes of text, and of a list of token ids, that have keys.
MAX_KEYED_BYTES: Final = 4 << 20
_FIRST_BYTES: Final = FIRST_TOKENS * BYTES_PER_TOKEN
_SESSION: Final = re.compile(rb"[\x21-\x7e]{1,256}")
#: The end of one element of a list of messages, content parts or tools and the start of the next. It cannot
#: occur in a string: a quotation mark there is escaped.
_BOUNDARY: Final = re.compile(rb'\}\s*,\s*\{\s*"(?:role|content|type)"')
#: Between two strings of a list.
_NEXT_STRING: Final = re.compile(rb'"\s*,\s*"')
_one_list = msgspec.json.Decoder(list[int])
_lists = msgspec.json.Decoder(list[list[int]])


def keys_of(
    head: RequestHead,
    call: Call,
    model: str,
    owner: str | None,
    session_header: bytes,
    fleet: ServedFleet,
) -> tuple[tuple[PrefixKey, ...], PromptBlocks | None]:
    """Return the keys of a request's prompts, and digests of its blocks where engines tell theirs."""
    ids = token_ids(call) if call.ids else None
    keys = id_keys(ids, model, call.cache_salt, owner) if ids else text_keys(call, model, owner)
    blocks: PromptBlocks | None = None
    if ids and call.prompts == 1 and (block_tokens := fleet.block_tokens):
        from hetlb.balancer.core.block_index import block_digests

        salt = () if call.cache_salt is None else (call.cache_salt,)
        # The last token of a prompt is always computed.
        blocks = block_tokens, block_digests(ids[0][:-1], block_tokens, salt)
    session = session_key(head.fields.get(session_header), owner, model)
    if session is not None and call.prompts == 1:
        keys = (session, *keys)
    return keys, blocks


def session_key(session: bytes | None, owner: str | None, model: str) -> PrefixKey | None:
    """Return the key of a conversation: its header's value, apart for each owner and model.

    None if there is no header or it is no plain word of at most 256 characters.
    """
    if session is None or _SESSION.fullmatch(session) is None:
        return None
    return f"session:{model}/{owner or ''}/{session.decode('ascii')}", None


def token_ids(call: Call) -> list[array[int]] | None:
    """Return the token ids of each prompt; None if they are no ids, or too many for keys."""
    data = call.ids
    if not 0 < len(data) <= MAX_KEYED_BYTES:
        return None
    try:
        lists = _lists.decode(data) if call.ids_nested else [_one_list.decode(data)]
        return [array("q", ids) for ids in lists]
    except (msgspec.DecodeError, OverflowError):  # for the engine to refuse
        return None


def id_keys(
    ids: list[array[int]], model: str, salt: str | None, owner: str | None = None
) -> tuple[PrefixKey, ...]:
    """Return the keys of the token ids with which all prompts begin, and their exact count."""
    length = len(ids[0])
    if len(ids) > 1:
        first, last = min(ids), max(ids)
        length = _common(first, last)
    if length < FIRST_TOKENS:
        return ()
    data, width = memoryview(ids[0]).cast("B"), ids[0].itemsize
    digest = _seeded("ids", model, salt, owner)
    found: list[PrefixKey] = []
    done = 0
    for cut in cuts((length,), length, FIRST_TOKENS):
        digest.update(data[done * width : cut * width])
        found.append((f"ids:{digest.hexdigest()}", cut))
        done = cut
    return tuple(found)


def text_keys(call: Call, model: str, owner: str | None = None) -> tuple[PrefixKey, ...]:
    """Return keys of the text that all prompts begin with: tools, then messages or the prompt, as raw JSON.

    A key's tokens are the prompt's estimated ones in proportion to its bytes.
    """
    total = len(call.tools) + len(call.text)
    if total < _FIRST_BYTES or call.prompt_tokens_total is None:
        return ()
    text = call.tools + call.text if call.tools else call.text
    if call.prompts > 1:
        text = _beginning_of_all(text)
    text = text[:MAX_KEYED_BYTES].rstrip(b' \t\r\n]"')
    length = len(text)
    if length < _FIRST_BYTES:
        return ()
    digest = _seeded("text", model, call.cache_salt, owner)
    tokens = call.prompt_tokens_total
    found: list[PrefixKey] = []
    done = 0
    for cut in cuts(_ends(text), length, _FIRST_BYTES):
        digest.update(text[done:cut])
        found.append((f"text:{digest.hexdigest()}", tokens * cut // total))
        done = cut
    return tuple(found)


def _seeded(kind: str, model: str, salt: str | None, owner: str | None) -> blake2b:
    """Return a digest that differs by kind, model and `cache_salt`, as vLLM's caches do.

    The owner of a key is part of it: the choice of an instance must not tell a tenant of another's prompt.
    """
    return blake2b(f"{kind}\0{model}\0{salt or ''}\0{owner or ''}\0".encode(), digest_size=12)


def _ends(text: bytes) -> Iterator[int]:
    """Yield ends of the text's messages, content parts and tools."""
    for match in _BOUNDARY.finditer(text):
        yield match.start() + 1
    yield len(text)


def _beginning_of_all(text: bytes) -> bytes:
    """Return the text with which all strings of a JSON list begin, behind one quotation mark."""
    strings = _NEXT_STRING.split(text.strip(b" \t\r\n[]"))
    strings[0] = strings[0][1:]
    strings[-1] = strings[-1].removesuffix(b'"')
    first, last = min(strings), max(strings)
    common = _common(first, last)
    return b'"' + first[:common]


def _common(first: bytes | array[int], last: bytes | array[int]) -> int:
    """Return the length of the common prefix of two sequences, by bisection: comparing slices is fast."""
    low, high = 0, min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == last[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def cuts(ends: Iterable[int], length: int, first: int) -> Iterator[int]:
    """Yield the positions at which a prompt of `length` units is cut. Its beginning up to each has a key.

    A position depends on nothing that comes after it. So two prompts that begin alike have the same cuts up
    to the point where they differ. Cuts lie, from `first` on, at the `ends` of parts (messages, turns), where
    prompts usually begin to differ. They are never closer than 1/64 of what came before. Inside a long part,
    the distance of cuts is at most 1/8 of what came before. So at worst the last eighth of a shared beginning
    is not found. The cost is some forty keys for 64 KiB.
    """
    last = count = 0
    for end in ends:
        while count < _MOST_KEYS:
            step = first if last < 8 * first else last // 8
            inner = last + step
            if inner < end and inner <= length:
                pass
            elif end <= length and end - last >= (first if not last else max(1, last // 64)):
                inner = end
            else:
                break
            yield inner
            last = inner
            count += 1
            if inner == end:
                break
