"""`kvsim capacity`"""

from __future__ import annotations

import json
from typing import Annotated

from typer import Exit, Option

from kvsim.cli import console
from kvsim.cli.options import Json
from kvsim.types import ScenarioError

EXIT_DOES_NOT_FIT = 1


def command(
    model: Annotated[str, Option("--model", help="A preset, or the path of a Hugging Face config.json.")],
    gpu: Annotated[str | None, Option("--gpu", help="A preset, such as a100-80gb.", show_default=False)] = None,
    gpu_memory_utilization: Annotated[float, Option(help="Share of the GPU the engine may use.")] = 0.9,
    block_size: Annotated[int, Option(help="Tokens per block.")] = 16,
    max_model_len: Annotated[int | None, Option(help="Prompt and output together; default: the model's.")] = None,
    max_num_seqs: Annotated[int | None, Option(help="Sequences that run at once; default: vLLM's.")] = None,
    max_num_batched_tokens: Annotated[int | None, Option(help="Tokens per step; default: vLLM's.")] = None,
    dtype: Annotated[str, Option(help="Of the weights; auto: the model's.")] = "auto",
    kv_cache_dtype: Annotated[str, Option(help="Of the KV cache; auto: that of the weights.")] = "auto",
    tensor_parallel_size: Annotated[int, Option(help="GPUs that share every layer.")] = 1,
    kv_cache_memory_bytes: Annotated[
        str | None, Option(help="KV cache per GPU, such as 16GiB: no GPU needed then.")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, Option(help="Blocks, whatever the memory says.")] = None,
    as_json: Json = False,
) -> None:
    """How many KV blocks and tokens a model leaves on a GPU, term by term.

    Exit code 1 if the model does not fit; the report says which number to change.
    """
    from kvsim.capacity import command as capacity
    from kvsim.memory.geometry import GeometryError

    try:
        report = capacity(
            model,
            gpu,
            gpu_memory_utilization=gpu_memory_utilization,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=tensor_parallel_size,
            kv_cache_memory_bytes=_bytes(kv_cache_memory_bytes),
            num_gpu_blocks_override=num_gpu_blocks_override,
        )
    except GeometryError as error:
        raise ScenarioError(_with_an_option(str(error))) from None
    console.say(json.dumps(report.to_dict(), indent=2) if as_json else report.render())
    if not report.fits:
        raise Exit(EXIT_DOES_NOT_FIT)


def _with_an_option(message: str) -> str:
    """The message with a cure that the command line has: single terms can be given in Python only."""
    fault, _, cure = message.partition(": give ")
    if cure == "dtype":
        return f"{fault}: give --dtype, such as bfloat16 (where the cache's size is given, --kv-cache-dtype will do)"
    if not cure.startswith(("weight_bytes", "activation_bytes")):
        return message
    return f"{fault}: say how much memory the KV cache has on each GPU, such as --kv-cache-memory-bytes 16GiB"


def _bytes(text: str | None) -> int | None:
    from kvsim.scenario.units import parse_bytes

    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ScenarioError(f"--kv-cache-memory-bytes {text}: {error}") from None
    if size <= 0:
        raise ScenarioError(f"--kv-cache-memory-bytes {text}: must be above 0, such as 16GiB")
    return size
