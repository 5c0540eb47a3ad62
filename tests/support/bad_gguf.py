"""GGUF files with one fault each."""

from __future__ import annotations

import struct

from tests.support.gguf_files import (
    ARCH,
    ARRAY,
    F32,
    FLOAT32,
    INT32,
    Q4_K,
    Q8_0,
    STRING,
    TOKENS,
    UINT8,
    UINT32,
    array,
    build,
    pair,
    tensor,
    text,
    u32,
    u64,
    vocabulary,
)

ONE = [tensor("t", [4])]

# Error code, further words of the message, and the file.
BAD = {
    "empty": ("GG01", "empty", b""),
    "part of the magic": ("GG01", "b'GGU'", b"GGU"),
    "html": ("GG01", "HTML page", b"<!doctype html><html>" + bytes(40)),
    "git-lfs": ("GG01", "1,234-byte", b"version https://git-lfs.github.com/spec/v1\nsize 1234\n"),
    "other magic": ("GG01", "b'GGUX", b"GGUX" + bytes(40)),
    "magic only": ("GG02", "4 of 24 bytes", b"GGUF"),
    "half a header": ("GG02", "@20", build()[:20]),
    "version 0": ("GG03", "version 0", build(version=0)),
    "version 1": ("GG03", "version 1", build(version=1)),
    "version 999": ("GG03", "@4", build(version=999)),
    "big-endian": ("GG03", "another byte order", b"GGUF" + struct.pack(">I", 3) + bytes(16)),
    "2^62 pairs": ("GG05", "@16", build([ARCH], n_pairs=2**62)),
    "-1 tensors": ("GG05", "@8", build([ARCH], n_tensors=2**64 - 1)),
    "one pair too many for the file": ("GG05", "at most 0 key/value", build(n_pairs=1)),
    "key of 2^62 bytes": ("GG06", "@32", build([u64(2**62) + bytes(20)])),
    "key longer than the file": ("GG06", "@32", build([u64(60) + bytes(20)])),
    "key not UTF-8": ("GG06", "0xff", build([pair(b"a\xff", UINT8, b"\1")])),
    "key twice": ("GG06", "also at byte 24", build([ARCH, ARCH])),
    "text of 1 TiB": ("GG07", "general.name", build([pair("general.name", STRING, u64(2**40))])),
    "text of 2^64-1": ("GG07", '"k"', build([pair("k", STRING, u64(2**64 - 1) + b"x")])),
    "text not UTF-8": ("GG07", "0xfe", build([pair("k", STRING, text(b"ab\xfe"))])),
    "number cut short": ("GG07", '"key"', build([pair("key", UINT32, b"\1")])),
    "array of 2^61": ("GG08", '"k"', build([array("k", UINT32, [], count=2**61)])),
    "array of 2^64-1 bytes": ("GG08", '"k"', build([array("k", UINT8, [b"x"], count=2**64 - 1)])),
    "array of 2^61 texts": ("GG08", '"k"', build([array("k", STRING, [], count=2**61)])),
    "text in an array too long": (
        "GG08",
        '"k"[1]',
        build([array("k", STRING, [text("a"), u64(2**63)])]),
    ),
    "text in an array cut short": (
        "GG08",
        '"k"[1]',
        build([array("k", STRING, [text("abcdefgh"), b"\0"], count=2)]),
    ),
    "scores of UINT8": (
        "GG08",
        "tokenizer.ggml.scores as an array of FLOAT32, found an array of UINT8",
        build([array("tokenizer.ggml.scores", UINT8, [b"\0"])]),
    ),
    "tokens as a number": (
        "GG08",
        "tokenizer.ggml.tokens as an array of STRING, found UINT8",
        build([pair("tokenizer.ggml.tokens", UINT8, b"\0")]),
    ),
    "scores for fewer tokens": (
        "GG08",
        "for 2 tokens",
        build(
            [
                array("tokenizer.ggml.tokens", STRING, [text("a"), text("b")]),
                array("tokenizer.ggml.scores", FLOAT32, [bytes(4)]),
            ]
        ),
    ),
    "array of arrays": ("GG09", '"k"', build([array("k", ARRAY, [u32(UINT8) + u64(0)])])),
    "value type 99": ("GG10", "@33", build([pair("k", 99, bytes(8))])),
    "element type 13": ("GG10", "type 13", build([array("k", 13, [bytes(8)])])),
    "tensor type 99": ("GG10", '"t"', build([], [tensor("t", [4], 99)], bytes(16))),
    "tensor type Q8_K": ("GG10", "15 (Q8_K)", build([], [tensor("t", [256], 15)], bytes(292))),
    "half a block of Q3_K": (
        "GG15",
        "found rows of 128",
        build([], [tensor("t", [128], 11)], bytes(64)),
    ),
    "alignment of 0": ("GG11", "found 0", build([pair("general.alignment", UINT32, u32(0))])),
    "alignment of 48": ("GG11", "found 48", build([pair("general.alignment", UINT32, u32(48))])),
    "alignment of 4": ("GG11", "found 4", build([pair("general.alignment", UINT32, u32(4))])),
    "alignment as INT32": ("GG11", "INT32", build([pair("general.alignment", INT32, u32(32))])),
    "no dimension": ("GG12", '"t"', build([], [tensor("t", [])], bytes(32))),
    "five dimensions": ("GG12", "found 5", build([], [tensor("t", [1] * 5)], bytes(32))),
    "2^32-1 dimensions": (
        "GG12",
        "4,294,967,295",
        build([], [tensor("t", [4], n_dims=2**32 - 1)], bytes(32)),
    ),
    "a dimension of zero": ("GG13", '"t"', build([], [tensor("t", [4, 0])], bytes(32))),
    "a name of 2^62 bytes": ("GG14", "@32", build([], [u64(2**62) + bytes(40)], bytes(32))),
    "a name not UTF-8": ("GG14", "0xff", build([], [tensor(b"\xff", [4])], bytes(32))),
    "a tensor twice": (
        "GG14",
        '"t" twice',
        build([], [*ONE, tensor("t", [4], F32, 32)], bytes(64)),
    ),
    "2^66 elements": ("GG16", '"t"', build([], [tensor("t", [2**33, 2**33])], bytes(32))),
    "2^64 elements": ("GG16", '"t"', build([], [tensor("t", [2**32, 2**32])], bytes(32))),
    "2^63 bytes": ("GG16", '"t"', build([], [tensor("t", [2**61])], bytes(32))),
    "a row of no whole blocks": (
        "GG15",
        "multiple of 256 for Q4_K, found rows of 128",
        build([], [tensor("t", [128, 2], Q4_K)], bytes(144)),
    ),
    "data cut short": ("GG16", '"t"', build([], ONE, bytes(15))),
    "no data": ("GG16", '"t"', build([], ONE)),
    "an offset past the end": ("GG16", '"t"', build([], [tensor("t", [4], F32, 2**40)], bytes(16))),
    "an offset not aligned": ("GG16", "of 32", build([], [tensor("t", [4], F32, 8)], bytes(64))),
    "data before the alignment": (
        "GG16",
        '"t"',
        build([pair("general.alignment", UINT32, u32(2**31))], ONE, bytes(64)),
    ),
    "no architecture": ("GG17", "general.architecture", build([pair("a", UINT8, b"\0")])),
    "another architecture": (
        "GG17",
        "qwen35",
        build([pair("general.architecture", STRING, text("qwen35"))]),
    ),
    "an architecture that is no text": (
        "GG17",
        "general.architecture",
        build([array("general.architecture", STRING, [])]),
    ),
    "an architecture without its numbers": ("GG17", "qwen2.block_count", build([ARCH])),
    "fewer rows than tokens": (
        "GG18",
        "5, found 4 rows",
        build(
            [ARCH, *vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"])],
            [tensor("token_embd.weight", [32, 4], Q8_0)],
            bytes(136),
        ),
    ),
}
