"""What a report says beside its figures: what is squeezed, estimated or not counted."""

from __future__ import annotations

from kvsim.capacity.terms import Flags, Pages
from kvsim.catalog import GIB
from kvsim.memory.config_fields import optional
from kvsim.memory.geometry import DS_MLA, ModelGeometry
from kvsim.memory.layers import attending_windows, unexplained_state


def notes_of(
    geometry: ModelGeometry, flags: Flags, pages: Pages, num_blocks: int, num_that_fit: int
) -> tuple[str, ...]:
    """One sentence each; `num_that_fit` blocks are what the memory leaves room for."""
    notes = []
    if num_blocks > num_that_fit:
        squeezed = (num_blocks - num_that_fit) * pages.block_bytes
        notes.append(
            f"num_gpu_blocks_override asks for {num_blocks - num_that_fit:,} blocks ({squeezed / GIB:.2f} GiB) more "
            f"than the memory arithmetic leaves: they squeeze activations and whatever lies outside the budget"
        )
    if geometry.max_model_len is not None and flags.max_model_len > geometry.max_model_len:
        notes.append(f"max_model_len {flags.max_model_len} is beyond the model's own {geometry.max_model_len}")
    if geometry.is_hybrid:
        kinds = ", ".join(
            f"{group.num_layers} {group.kind.removesuffix('_attention')}"
            + (f" (last {group.window:,} tokens)" if group.window else "")
            for group in geometry.groups
        )
        notes.append(
            f"layers: {kinds}; windowed ones hold no more than their window and one step of tokens. A block here is of "
            f"all {pages.num_groups} groups of layers; vLLM counts one per group, {pages.num_groups} times as many"
        )
        used_bytes = flags.block_size * geometry.bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
        if pages.block_bytes > used_bytes:
            notes.append(
                f"layer groups of equal size leave {1 - used_bytes / pages.block_bytes:.0%} of every block to padding"
            )
    if flags.draft is not None:
        draft_bytes = flags.draft.bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
        notes.append(f"{draft_bytes:,} of the bytes of one token are those of {flags.draft.name or 'the draft'}")
    if geometry.num_encoder_tokens:
        notes.append(
            f"every request also keeps the KV of {geometry.num_encoder_tokens:,} tokens of the encoder's output "
            f"(cross-attention), however short its own text is"
        )
    if geometry.stage_layers is not None:
        first, last = geometry.stage_layers[0], geometry.stage_layers[-1]
        layers = f"layers {first} to {last}" if first < last else f"layer {first}"
        notes.append(
            f"pipeline stages keep unequally much KV: this is the one of {layers} (from 0), which keeps the most; it "
            f"has the fewest blocks, and no other stage can use more"
        )
    num_layers, config = geometry.num_hidden_layers, geometry.config
    if geometry.num_kv_layers < num_layers:
        note = f"{geometry.num_kv_layers} of {num_layers} layers keep KV of their own"
        if config.get("num_kv_shared_layers") or config.get("use_cla"):
            note += "; others read that of an earlier layer"
        if sum(num for num, _ in attending_windows(config, num_layers)) < num_layers:
            note += "; the state per sequence that layers without attention hold, which does not grow, is not counted"
        notes.append(note)
    if num_more := optional(config, "num_nextn_predict_layers", least=0):
        layer_bytes = geometry.layer_bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
        notes.append(
            f"multi-token prediction (num_nextn_predict_layers {num_more}) is not counted: with it a token takes "
            f"{num_more * layer_bytes:,} bytes more, beside the weights it loads"
        )
    if key := unexplained_state(config, num_layers, geometry.num_kv_layers):
        notes.append(
            f"the model configuration has {key}, but no key that kvsim understands says which layers have attention: "
            f"all of them are counted"
        )
    if config.get("cross_attention_layers"):
        notes.append("the KV of an image, which cross-attention layers keep for every sequence, is not counted")
    if geometry.is_uneven and len(geometry.groups) > 1:
        heads = ", ".join(f"{group.num_layers} of {group.num_kv_heads}" for group in geometry.groups)
        notes.append(f"layers keep unequally many KV heads ({heads}): a block holds what each of them needs")
    if geometry.index_dim:
        index_bytes = geometry.num_kv_layers * geometry.index_bytes_per_token
        notes.append(
            f"{index_bytes:,} of the bytes of one token are keys of the indexer of sparse attention: "
            f"{geometry.index_dim} 8-bit elements and their scales per layer, whatever the dtype of the cache. vLLM "
            f"stores the latent of such a model as {DS_MLA}, unless told bfloat16"
        )
    if geometry.latent_dim:
        notes.append("the latent is kept by every rank: tensor parallelism does not make it smaller")
    return tuple(notes)
