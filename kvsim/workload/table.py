"""An open-loop workload as columns: a request becomes an object when it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsim.request import GREEDY, NO_NAMESPACE, Namespace, Request, Sampling
from kvsim.tokens import TokenStream
from kvsim.types import Ns
from kvsim.workload.content import Texts
from kvsim.workload.streams import mix, mix_range

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


_CHUNK = 1024
"""Rows that become Python integers together."""


@dataclass(frozen=True)
class Traits:
    """What requests have beside their times and lengths, by request number; None: nobody has it.

    `num_samples` is that of each request, `sample_lens` the lengths of request i's samples at
    `sample_lens[sample_offsets[i]:sample_offsets[i + 1]]`. `patience_ns` counts from the arrival (-1: endless).
    """

    sampling: Sampling = GREEDY
    num_samples: Ints | None = None
    sample_lens: Ints | None = None
    sample_offsets: Ints | None = None
    priorities: Ints | None = None
    patience_ns: Ints | None = None
    loras: Ints | None = None
    max_output: Ints | None = None
    seed: int = 0

    def request(
        self,
        index: int,
        request_id: str,
        arrival_ns: Ns,
        prompt: TokenStream,
        output_len: int,
        output: TokenStream | None = None,
        *,
        seed: int | None = None,
    ) -> Request:
        """Request number `index`, complete; `seed` is that of `seeds`, where it is known already."""
        patience_ns = -1 if self.patience_ns is None else int(self.patience_ns[index])
        sample_lens: tuple[int, ...] = ()
        if self.sample_lens is not None and self.sample_offsets is not None:
            begin, end = self.sample_offsets[index : index + 2]
            sample_lens = tuple(self.sample_lens[begin:end].tolist())
        sampling = self.sampling
        if self.num_samples is not None and (num_samples := int(self.num_samples[index])) != sampling.n:
            sampling = Sampling(n=num_samples)
        longest = max(sample_lens, default=output_len)
        return Request(
            request_id=request_id,
            arrival_ns=arrival_ns,
            prompt=prompt,
            output_len=output_len,
            max_output_len=longest if self.max_output is None else max(longest, int(self.max_output[index])),
            sampling=sampling,
            sample_lens=sample_lens,
            priority=0 if self.priorities is None else int(self.priorities[index]),
            namespace=NO_NAMESPACE if self.loras is None else Namespace(lora=f"lora-{self.loras[index]}"),
            output=output,
            abort_ns=arrival_ns + patience_ns if patience_ns >= 0 else None,
            seed=mix(self.seed, index) >> 1 if seed is None else seed,
        )

    def seeds(self, start: int, stop: int) -> list[int]:
        """The seeds of requests `start .. stop - 1`."""
        return [seed >> 1 for seed in mix_range(self.seed, start, stop)]


@dataclass(frozen=True)
class ColumnTable:
    """Requests in order of arrival; request ids are their numbers."""

    arrivals: Ints
    outputs: Ints
    texts: Texts
    traits: Traits

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[Request]:
        """Each request is made when it is asked for."""
        make, prompt = self.traits.request, self.texts.prompt
        for start in range(0, len(self), _CHUNK):
            stop = min(start + _CHUNK, len(self))
            times, outputs = self.arrivals[start:stop].tolist(), self.outputs[start:stop].tolist()
            seeds = self.traits.seeds(start, stop)
            for index, arrival_ns, output_len, seed in zip(range(start, stop), times, outputs, seeds, strict=True):
                yield make(index, str(index), arrival_ns, prompt(index), output_len, seed=seed)
