"""What a checkpoint is, what running it takes, and what this build cannot run: facts as plain data, and as a page of text.

`describe(path)` reads headers only. `check(tensors)` reads every tensor and names those that hold NaN or inf.
Units are decimal (1 GB = 1e9 bytes), as bandwidths are.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from npglm.cache import Cache
from npglm.checkpoint import DECODABLE, EXPERT_SPLITS, EXPERTS, Checkpoint, GgufFile, Tensor, read_gguf, shard_paths
from npglm.config import GlmConfig
from npglm.errors import NpglmError
from npglm.parallel import Sharding
from npglm.tokenizer import Tokenizer

F16_BYTES, F32_BYTES = 2, 4
FULL = 0.97  # share of a memory that weights and cache may take

# What one decoded token reads, in groups of weights.
GROUPS = {
    "attention projections": ("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_output"),
    "absorbed MLA": ("attn_k_b", "attn_v_b"),
    "indexer": ("indexer_attn_q_b", "indexer_attn_k", "indexer_proj"),
    "dense FFN": ("ffn_gate", "ffn_up", "ffn_down"),
    "routed experts": EXPERTS,
    "shared experts": ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    "router": ("ffn_gate_inp", "exp_probs_b"),
    "output head": ("output",),
    "norms, embedding row": (
        "attn_norm", "attn_q_a_norm", "attn_kv_a_norm", "ffn_norm", "indexer_k_norm", "indexer_k_norm_bias", "output_norm",
    ),
}  # fmt: skip


def describe(path, context: int | None = None, device: tuple[str, int] | None = None, ranks: int | None = None) -> dict:
    """Facts about the checkpoint at `path`, fit for JSON; its keys are the sections of `page`.

    context: tokens in the cache, for what depends on it (default: 4096, or the model's own length if that is less). device: name
    and bytes of memory of the GPU that it may run on. ranks: processes that may share it.
    A file whose header can be read is described even if it cannot be run: "cannot" says why, what needs the config is left out.
    """
    paths = shard_paths(Path(path))
    notes, cannot = [], []
    try:
        checkpoint = Checkpoint.open(path)
        files, config, notes = checkpoint.files, checkpoint.config, checkpoint.notes()
    except NpglmError as error:
        files = [read_gguf(p) for p in paths]  # a damaged header ends here
        checkpoint, config = None, None
        cannot.append(f"this model: {error}")
        with contextlib.suppress(NpglmError):  # it may be a tensor only
            config = GlmConfig.from_metadata(files[0].metadata, paths[0].name)
    metadata, tensors = files[0].metadata, [t for file in files for t in file.tensors.values()]
    facts: dict = {"file": _file(files)}
    if config:
        facts["config"] = asdict(config)
        facts["layers"] = _layers(config, tensors)
    facts["tensors"] = _by_type(tensors)
    facts["tokenizer"] = _tokenizer(metadata, paths[0].name)
    if checkpoint:
        context = min(4096, config.context_length) if context is None else context
        facts["per_token"] = per_token(checkpoint, context)
        facts["memory"] = {
            "mapped_bytes": sum(t.nbytes for t in tensors),
            "decoded_bytes": F32_BYTES * sum(prod(t.shape) for t in tensors),
            "cache_bytes_per_token_f32": Cache.row_bytes(config, F32_BYTES),
            "cache_bytes_per_token_f16": Cache.row_bytes(config, F16_BYTES),
            "context": context,
        }
        facts["placement"] = placement(checkpoint, context, device)
        if ranks:
            facts["ranks"] = shared(checkpoint, context, ranks)
    return facts | {"notes": notes, "cannot": cannot}


def _file(files: list[GgufFile]) -> dict:
    first = files[0]
    return {
        "name": str(first.metadata.get("general.name", "")),
        "architecture": str(first.metadata.get("general.architecture", "")),
        "files": [file.path.name for file in files],
        "bytes": sum(file.path.stat().st_size for file in files),
        "keys": len(first.metadata),
        "header_sha256": first.header_sha256,
    }


def _layers(config: GlmConfig, tensors: list[Tensor]) -> dict:
    layers, mtp = range(config.n_layers), range(config.n_layers, config.n_layers + config.n_mtp)
    return {
        "run": config.n_layers,
        "dense": [i for i in layers if not config.is_moe(i)],
        "moe": [i for i in layers if config.is_moe(i)],
        "full": [i for i in layers if config.full[i]],
        "shared": [i for i in layers if not config.full[i]],
        "mtp": list(mtp),
        "mtp_in_file": [i for i in mtp if any(t.name.startswith(f"blk.{i}.") for t in tensors)],
    }


def _by_type(tensors: list[Tensor]) -> dict:
    types = sorted({t.type for t in tensors}, key=lambda kind: -sum(t.nbytes for t in tensors if t.type == kind))
    rows = {}
    for kind in types:
        chosen = [t for t in tensors if t.type == kind]
        rows[kind.name] = {
            "tensors": len(chosen),
            "weights": sum(prod(t.shape) for t in chosen),
            "bytes": sum(t.nbytes for t in chosen),
            "decodable": kind in DECODABLE,
        }
    return rows


def _tokenizer(metadata: dict, source: str) -> dict:
    facts = {"chat_template": "tokenizer.chat_template" in metadata}
    try:
        tokenizer = Tokenizer.from_metadata(metadata, source)
    except NpglmError as error:
        return facts | {"problem": str(error)}
    specials = {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): [id, tokenizer.token(id)]
        for key, id in metadata.items()
        if key.startswith("tokenizer.ggml.")
        and key.endswith("_token_id")
        and type(id) is int
        and 0 <= id < tokenizer.vocab_size
    }
    return facts | {
        "model": metadata["tokenizer.ggml.model"],
        "pre": tokenizer.pre,
        "tokens": tokenizer.vocab_size,
        "merges": len(metadata["tokenizer.ggml.merges"]),
        "special": specials,
        "add_bos": tokenizer.add_bos,
        "end_of_generation": [[id, tokenizer.token(id)] for id in sorted(tokenizer.eog)],
    }


def per_token(checkpoint: Checkpoint, context: int) -> dict:
    """Bytes that decoding one token reads with `context` tokens cached: weights by GROUPS, f16 cache rows."""
    config, weights = checkpoint.config, checkpoint.weights
    groups = dict.fromkeys(GROUPS, 0)
    group_of = {attribute: group for group, attributes in GROUPS.items() for attribute in attributes}
    for part in (weights, *weights.layers):
        for attribute, tensor in vars(part).items():
            if isinstance(tensor, Tensor) and attribute != "token_embd":
                share = config.n_chosen / config.n_experts if attribute in EXPERTS else 1
                groups[group_of[attribute]] += int(tensor.nbytes * share)
    embd = weights.token_embd
    groups["norms, embedding row"] += embd.nbytes // embd.n_rows
    read = min(context, config.indexer_top_k)
    return {
        "weights": groups,
        "weights_total": sum(groups.values()),
        "context": context,
        "latent_kv": read * config.n_layers * (config.kv_rank + config.rope) * F16_BYTES,
        "indexer_keys": context * sum(config.full) * config.indexer_dim * F16_BYTES,
    }


def placement(checkpoint: Checkpoint, context: int, device: tuple[str, int] | None) -> dict:
    """Bytes that the GPU backend takes, with and without --offload-experts, beside what there is. The cache is f16."""
    weights, config = checkpoint.weights, checkpoint.config
    layers = [(name, t) for layer in weights.layers for name, t in vars(layer).items() if t is not None]
    experts = sum(t.nbytes for name, t in layers if name in EXPERTS)
    rest = sum(t.nbytes for name, t in layers if name not in EXPERTS)
    rest += sum(t.nbytes for name, t in vars(weights).items() if name != "layers")
    cache = context * Cache.row_bytes(config, F16_BYTES)
    name, memory = device or (None, None)
    return {
        "context": context,
        "device": name,
        "device_memory": memory,
        "host_memory": host_memory(),
        "device_bytes": rest + experts + cache,
        "offloaded_device_bytes": rest + cache,
        "offloaded_host_bytes": experts,
    }


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of the host's memory, or what the control groups that this process is in leave of it. root: where sys and proc are."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            place = root / "sys/fs/cgroup" / folder
            for path in (place / group.strip("/"), *(place / group.strip("/")).parents):
                with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
                    sizes.append(int((path / name).read_text()))
                if path == place:
                    break
    return min(sizes)


def shared(checkpoint: Checkpoint, context: int, world: int) -> dict:
    """Bytes of weights and f16 cache that the largest of `world` ranks holds, for each way to share the experts; or why it cannot be."""
    found = {}
    for experts in EXPERT_SPLITS:
        try:
            sharding = Sharding(checkpoint, world, experts)
        except NpglmError as error:
            found[experts] = str(error)
            continue
        parts = [
            sum(sharding.part(t, a, rank).nbytes for part in (checkpoint.weights, *checkpoint.weights.layers)
                for a, t in vars(part).items() if isinstance(t, Tensor))
            for rank in range(world)
        ]  # fmt: skip
        found[experts] = max(parts) + context * Cache.row_bytes(checkpoint.config, F16_BYTES)
    return {"world": world, "context": context, "bytes": found}


# --- NaN and inf ------------------------------------------------------------------------------------------------------------

# Where the blocks hold f16 scales (F16 and BF16: the values themselves). The rest of a block is integers, whose products with a
# finite f16 fit into f32: a block decodes to finite values exactly if its scales are finite. Other types are decoded.
F16_SCALES = {
    T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q5_1: (0, 2), T.Q8_0: (0,), T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2),
    T.Q5_K: (0, 2), T.Q6_K: (208,), T.TQ1_0: (52,), T.TQ2_0: (64,), T.IQ2_XXS: (0,), T.IQ2_XS: (0,), T.IQ2_S: (0,),
    T.IQ3_XXS: (0,), T.IQ3_S: (0,), T.IQ1_S: (0,), T.IQ4_NL: (0,), T.IQ4_XS: (0,), T.F16: (0,), T.BF16: (0,),
}  # fmt: skip


def check(tensors: Iterable[Tensor], advance=lambda n_bytes: None) -> Iterator[dict]:
    """Read every tensor, a block of rows at a time; yield one entry for each that holds NaN or inf.

    advance: called with the number of bytes read, block by block.
    """
    for tensor in tensors:
        nan = inf = rows = 0
        first_row = None
        for first, last in tensor.row_blocks():
            bad = (
                ~finite_rows(tensor, first, last) if tensor.type in DECODABLE else np.zeros(1, bool)
            )  # the others are no weights
            if bad.any():
                with np.errstate(invalid="ignore", over="ignore"):
                    values = tensor.rows(first, last)
                nan, inf, rows = nan + int(np.isnan(values).sum()), inf + int(np.isinf(values).sum()), rows + int(bad.sum())
                first_row = first + int(bad.argmax()) if first_row is None else first_row
            advance((last - first) * tensor.data.shape[1])
        if rows:
            where = {"tensor": tensor.name, "file": tensor.source, "type": tensor.type.name}
            yield where | {"nan": nan, "inf": inf, "rows": rows, "first_row": first_row}


def finite_rows(tensor: Tensor, first: int, last: int) -> np.ndarray:
    """bool [last - first]: which rows decode to finite values only."""
    if tensor.type not in F16_SCALES:
        with np.errstate(invalid="ignore", over="ignore"):
            return np.isfinite(tensor.rows(first, last)).all(-1)
    blocks = tensor.data[first:last].reshape(last - first, -1, GGML_QUANT_SIZES[tensor.type][1])  # [rows, blocks, bytes]
    scales = [np.ascontiguousarray(blocks[..., at : at + 2]).view(np.uint16)[..., 0] for at in F16_SCALES[tensor.type]]
    exponent = 0x7F80 if tensor.type == T.BF16 else 0x7C00  # all ones: NaN or inf
    return np.all([(scale & exponent) != exponent for scale in scales], axis=(0, 2))


# --- the page ---------------------------------------------------------------------------------------------------------------


def page(facts: dict) -> str:
    """The facts as text of aligned columns."""
    lines = [*_file_lines(facts["file"])]
    if "config" in facts:
        lines += ["", "Config", *_columns(_config_rows(facts["config"]), "<>", width=4)]
        lines += ["", *_layer_lines(facts["layers"])]
    lines += ["", "Tensors"]
    rows = [
        (kind, str(t["tensors"]), count(t["weights"]), size(t["bytes"]), "" if t["decodable"] else "cannot be decoded")
        for kind, t in facts["tensors"].items()
    ]
    totals = [sum(t[key] for t in facts["tensors"].values()) for key in ("tensors", "weights", "bytes")]
    lines += _columns(
        [("type", "tensors", "weights", "bytes", ""), *rows, ("all", str(totals[0]), count(totals[1]), size(totals[2]), "")],
        "<>>><",
    )
    lines += ["", *_tokenizer_lines(facts["tokenizer"])]
    if "per_token" in facts:
        lines += ["", *_per_token_lines(facts["per_token"], facts["config"])]
        lines += ["", *_memory_lines(facts["memory"])]
        lines += ["", *_placement_lines(facts["placement"])]
    if "ranks" in facts:
        lines += ["", *_rank_lines(facts["ranks"], facts["placement"]["device_memory"])]
    for title, key in (("Notes", "notes"), ("Runs here", "runs"), ("Cannot run here", "cannot")):
        if facts.get(key):
            lines += ["", title, *(f"  {line}" for line in facts[key])]
    return "\n".join(lines) + "\n"


def _file_lines(file: dict) -> list[str]:
    names = file["files"]
    files = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return [
        f"{file['name'] or '(no name)'}: {file['architecture'] or '(no architecture)'}",
        *_columns(
            [
                ("file", files),
                ("bytes", size(file["bytes"])),
                ("keys", str(file["keys"])),
                ("sha256 of header", file["header_sha256"]),
            ],
            "<<",
        ),
    ]


def _config_rows(c: dict) -> list[tuple[str, str]]:
    names = {
        "vocab": "vocabulary Y", "hidden": "hidden D", "n_heads": "heads H", "nope": "nope dims N", "rope": "rope dims P",
        "v_dim": "value dims V", "q_rank": "query rank Q", "kv_rank": "key/value rank R", "indexer_heads": "indexer heads I",
        "indexer_dim": "indexer dims J", "indexer_top_k": "indexer top-k", "ffn": "dense FFN F", "n_experts": "experts E",
        "n_chosen": "chosen K", "n_shared": "shared experts", "expert_ffn": "expert FFN G", "expert_scale": "expert scale",
        "expert_norm": "normed weights", "rms_eps": "RMS eps", "rope_theta": "rope theta", "context_length": "context",
    }  # fmt: skip
    return [(label, f"{c[name]:g}" if type(c[name]) is float else str(c[name])) for name, label in names.items()]


def _layer_lines(layers: dict) -> list[str]:
    rows = [(label, ranges(layers[key])) for label, key in (("dense FFN", "dense"), ("MoE", "moe"), ("own indexer", "full"))]
    rows.append(("shared top-k", f"the other {len(layers['shared'])}" if layers["shared"] else ""))
    if layers["mtp"]:
        there = "in the file" if layers["mtp_in_file"] else "not in the file"
        rows.append(("MTP", f"{ranges(layers['mtp'])} ({there}; not run)"))
    return [f"Layers: {layers['run']}", *_columns([row for row in rows if row[1]], "<<")]


def _tokenizer_lines(t: dict) -> list[str]:
    template = ("chat template", "yes" if t["chat_template"] else "no")
    if "problem" in t:
        return ["Tokenizer", *_columns([("problem", t["problem"]), template], "<<")]
    rows = [("model, pre", f"{t['model']}, {t['pre']}"), ("tokens", f"{t['tokens']} ({t['merges']} merges)")]
    rows += [(name, f"{id} {text}") for name, (id, text) in t["special"].items()]
    rows += [("adds BOS", "yes" if t["add_bos"] else "no")]
    rows += [("ends at", ", ".join(f"{id} {text}" for id, text in t["end_of_generation"]) or "nothing"), template]
    return ["Tokenizer", *_columns(rows, "<<")]


def _per_token_lines(p: dict, config: dict) -> list[str]:
    total = p["weights_total"]
    labels = {"routed experts": f"routed experts, {config['n_chosen']} of {config['n_experts']}"}
    rows = [(labels.get(group, group), size(n), f"{n / total:.1%}") for group, n in p["weights"].items() if n]
    rows.append(("weights", size(total), ""))
    rows.append((f"latent KV, f16, {p['context']} cached", size(p["latent_kv"]), ""))
    rows.append((f"indexer keys, f16, {p['context']} cached", size(p["indexer_keys"]), ""))
    rows.append(("all", size(total + p["latent_kv"] + p["indexer_keys"]), ""))
    return ["Read for each decoded token", *_columns(rows, "<>>")]


def _memory_lines(m: dict) -> list[str]:
    rows = [
        ("mapped files, in the page cache", size(m["mapped_bytes"])),
        ("decoded weights: --weight-cache, 1 GiB by default; all of them in f32", size(m["decoded_bytes"])),
        ("cache of a token, f32 (ggml numerics: f16, half of it)", size(m["cache_bytes_per_token_f32"])),
        (f"cache of {m['context']} tokens, f32", size(m["context"] * m["cache_bytes_per_token_f32"])),
    ]
    return ["Memory", *_columns(rows, "<>")]


def _fits(n: int, memory: int | None) -> str:
    return "" if memory is None else f"{'fits' if n <= FULL * memory else 'does not fit'} in {size(memory)}"


def _placement_lines(p: dict) -> list[str]:
    gpu, host = p["device_memory"], p["host_memory"]
    slow = "" if p["offloaded_host_bytes"] <= FULL * host else ": slow, as experts are read from the file again"
    rows = [
        ("all weights and the cache", "device_bytes", gpu, ""),
        ("--offload-experts: on the GPU", "offloaded_device_bytes", gpu, ""),
        ("--offload-experts: in host memory", "offloaded_host_bytes", host, slow),
    ]
    lines = _columns([(label, size(p[key]), _fits(p[key], memory) + more) for label, key, memory, more in rows], "<><")
    return [f"On {p['device'] or 'a GPU'}, {p['context']} tokens cached", *lines]


def _rank_lines(r: dict, memory: int | None) -> list[str]:
    rows = [
        (f"--experts {way}", "", n) if type(n) is str else (f"--experts {way}", size(n), _fits(n, memory))
        for way, n in r["bytes"].items()
    ]
    return [f"Each of {r['world']} ranks, {r['context']} tokens cached", *_columns(rows, "<><")]


def _columns(rows: list[tuple[str, ...]], align: str, width: int = 1) -> list[str]:
    """Rows of cells as indented lines; align: one of < > for each cell. width: rows that share a line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    cells = ["  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)) for row in rows]
    return ["  " + "    ".join(cells[i : i + width]).rstrip() for i in range(0, len(cells), width)]


def size(n: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


def count(n: float) -> str:
    """A number of weights."""
    return f"{n / 1e9:.2f} G" if n >= 1e9 else f"{n / 1e6:.2f} M"


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 6, 8] -> "0-2, 6, 8"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
