"""`kvsim capacity`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from kvsim.cli import console
from kvsim.cli.options import Json
from kvsim.types import ScenarioError

if TYPE_CHECKING:
    from kvsim.catalog import GpuSpec
    from kvsim.memory.geometry import ModelGeometry

EXIT_DOES_NOT_FIT = 1


def command(
    model: Annotated[str, Option("--model", help="A preset, or the path of a Hugging Face config.json.")],
    gpu: Annotated[str | None, Option(help="A preset, such as a100-80gb, or the GPU's memory, such as 24GiB.")] = None,
    speculative_model: Annotated[
        str | None, Option(help="A draft model beside it: a preset, or the path of a config.json.")
    ] = None,
    gpu_memory_utilization: Annotated[float, Option(help="Share of the GPU the engine may use.")] = 0.9,
    block_size: Annotated[int, Option(help="Tokens per block.")] = 16,
    max_model_len: Annotated[int | None, Option(help="Prompt and output together; default: the model's.")] = None,
    max_num_seqs: Annotated[int | None, Option(help="Sequences that run at once; default: vLLM's.")] = None,
    max_num_batched_tokens: Annotated[int | None, Option(help="Tokens per step; default: vLLM's.")] = None,
    dtype: Annotated[str, Option(help="Of the weights; auto: the model's.")] = "auto",
    kv_cache_dtype: Annotated[
        str, Option(help="Of the KV cache, such as fp8 or q8_0; auto: that of the weights.")
    ] = "auto",
    tensor_parallel_size: Annotated[int, Option(help="GPUs that share every layer.")] = 1,
    pipeline_parallel_size: Annotated[int, Option(help="Stages that share out the layers.")] = 1,
    kv_cache_memory_bytes: Annotated[
        str | None, Option(help="KV cache per GPU, such as 16GiB: no GPU needed then.")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, Option(help="Blocks, whatever the memory says.")] = None,
    swap_space: Annotated[str, Option(help="Host memory per GPU for swapped blocks, such as 4GiB.")] = "0",
    weight_bytes: Annotated[str | None, Option(help="Weights on each GPU, such as 15GiB; default: counted.")] = None,
    activation_bytes: Annotated[
        str | None, Option(help="Peak activations on each GPU, such as 1.2GiB; default: estimated.")
    ] = None,
    non_torch_bytes: Annotated[
        str | None, Option(help="Memory outside PyTorch on each GPU, such as 0.1GiB; default: estimated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How many KV blocks and tokens a model leaves on a GPU, term by term.

    Exit code 1 if the model does not fit; the report says which number to change.
    """
    from kvsim.capacity import capacity
    from kvsim.memory.geometry import GeometryError

    geometry = _geometry(model)
    try:
        report = capacity(
            geometry,
            _gpu(gpu),
            speculative_model=None if speculative_model is None else _geometry(speculative_model),
            gpu_memory_utilization=gpu_memory_utilization,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            kv_cache_memory_bytes=_bytes("--kv-cache-memory-bytes", kv_cache_memory_bytes),
            num_gpu_blocks_override=num_gpu_blocks_override,
            swap_space=_size("--swap-space", swap_space, least=0),
            weight_bytes=_bytes("--weight-bytes", weight_bytes, least=0),
            activation_bytes=_bytes("--activation-bytes", activation_bytes, least=0),
            non_torch_bytes=_bytes("--non-torch-bytes", non_torch_bytes, least=0),
        )
    except GeometryError as error:
        raise ScenarioError(_with_an_option(f"{model}: {error}")) from None
    if as_json:
        console.say_json(report.to_dict())
    else:
        console.say(report.render())
    if not report.fits:
        raise Exit(EXIT_DOES_NOT_FIT)


def _geometry(model: str) -> ModelGeometry:
    from kvsim.catalog import load_model
    from kvsim.memory.geometry import GeometryError

    try:
        return load_model(model)
    except GeometryError as error:
        raise ScenarioError(_with_an_option(str(error))) from None


def _gpu(name: str | None) -> GpuSpec | None:
    """A GPU of the catalog, or one of which the memory alone is given."""
    from kvsim.catalog import GpuSpec, load_gpu

    if name is None:
        return None
    if name[:1].isdecimal():
        return GpuSpec(f"a GPU of {name}", _size("--gpu", name), 0.0, 0.0, 0, 0.0)
    try:
        return load_gpu(name)
    except ScenarioError as error:
        raise ScenarioError(f"{error} Its memory will do too, such as --gpu 24GiB.") from None


def _with_an_option(message: str) -> str:
    """The message with the name of the cure on the command line."""
    fault, _, cure = message.partition(": give ")
    if cure == "dtype":
        return f"{fault}: give --dtype, such as bfloat16 (where the cache's size is given, --kv-cache-dtype will do)"
    for name, example in (("weight_bytes", "15GiB"), ("activation_bytes", "1.2GiB")):
        if cure.startswith(name):
            return (
                f"{fault}: give --{name.replace('_', '-')}, such as {example}, or say how much memory the KV cache has "
                f"on each GPU, such as --kv-cache-memory-bytes 16GiB"
            )
    return message


def _bytes(option: str, text: str | None, *, least: int = 1) -> int | None:
    return None if text is None else _size(option, text, least=least)


def _size(option: str, text: str, *, least: int = 1) -> int:
    from kvsim.scenario.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ScenarioError(f"{option} {text}: {error}") from None
    if size < least:
        raise ScenarioError(f"{option} {text}: must be {'above' if least else 'at least'} 0, such as 16GiB")
    if 0 < size < 1024 and text.strip()[-1].isdecimal():
        raise ScenarioError(f"{option} {text}: is {size} bytes; say the unit too, such as {text.strip()}GiB")
    return size
