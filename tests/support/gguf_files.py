"""GGUF files written byte by byte, so that a test can corrupt any byte of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(10)
UINT64, INT64, FLOAT64 = range(10, 13)
F32, F16, Q4_0, Q8_0, Q4_K, BF16 = 0, 1, 2, 8, 12, 30


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(content: str | bytes) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return u64(len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(key: str, kind: int, elements: Sequence[bytes], count: int | None = None) -> bytes:
    length = len(elements) if count is None else count
    return pair(key, ARRAY, u32(kind) + u64(length) + b"".join(elements))


def tensor(
    name: str | bytes,
    ne: Sequence[int],
    kind: int = F32,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    dims = u32(len(ne) if n_dims is None else n_dims) + b"".join(map(u64, ne))
    return text(name) + dims + u32(kind) + u64(offset)


def build(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(pairs) if n_pairs is None else n_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if tensors else head


ARCH = pair("general.architecture", STRING, text("qwen2"))

QWEN2 = [
    ARCH,
    pair("qwen2.block_count", UINT32, u32(2)),
    pair("qwen2.embedding_length", UINT32, u32(64)),
    pair("qwen2.feed_forward_length", UINT32, u32(96)),
    pair("qwen2.context_length", UINT32, u32(128)),
    pair("qwen2.attention.head_count", UINT32, u32(4)),
    pair("qwen2.attention.head_count_kv", UINT32, u32(2)),
    pair("qwen2.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-6)),
    pair("qwen2.rope.freq_base", FLOAT32, struct.pack("<f", 1e6)),
]


def vocabulary(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]) -> list[bytes]:
    return [
        pair("tokenizer.ggml.model", STRING, text("gpt2")),
        pair("tokenizer.ggml.pre", STRING, text("qwen2")),
        array("tokenizer.ggml.tokens", STRING, [text(token) for token in tokens]),
        array("tokenizer.ggml.token_type", INT32, [u32(kind) for kind in kinds]),
        array("tokenizer.ggml.merges", STRING, [text(merge) for merge in merges]),
    ]


TOKENS = ["a", "b", "ab", "<|end|>", "[PAD4]"]


def model() -> bytes:
    """Return a whole small file: configuration, tokenizer, floats and quantised blocks."""
    pairs = [
        *QWEN2,
        *vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"]),
        pair("tokenizer.ggml.eos_token_id", UINT32, u32(3)),
        pair("tokenizer.ggml.add_bos_token", BOOL, b"\0"),
        array("tokenizer.ggml.scores", FLOAT32, [struct.pack("<f", 0.5)] * 5),
    ]
    tensors = [
        tensor("token_embd.weight", [64, 5], F16, 0),
        tensor("blk.0.attn_q.weight", [64, 2], Q8_0, 640),
        tensor("output_norm.weight", [3], F32, 800),
    ]
    data = bytes(range(256)) * 2 + bytes(128) + bytes(136) + bytes(24)
    data += struct.pack("<3f", 1.0, 2.0, 3.0) + bytes(20)
    return build(pairs, tensors, data)
