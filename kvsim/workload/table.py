"""An open-loop workload as columns: a request becomes an object when it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsim.request import GREEDY, NO_NAMESPACE, Namespace, Request, Sampling
from kvsim.tokens import TokenStream
from kvsim.types import Ns
from kvsim.workload.content import Texts
from kvsim.workload.streams import mix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Traits:
    """What requests have beside their times and lengths, by request number; None: nobody has it.

    `samples` are numbers of samples, one for each request; `sample_lens` the lengths of request i's samples at
    `sample_lens[sample_offsets[i]:sample_offsets[i + 1]]`. `patience` is in nanoseconds after arrival (-1: endless).
    """

    sampling: Sampling = GREEDY
    samples: Ints | None = None
    sample_lens: Ints | None = None
    sample_offsets: Ints | None = None
    priorities: Ints | None = None
    patience: Ints | None = None
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
    ) -> Request:
        """Request number `index`, complete."""
        patience = -1 if self.patience is None else int(self.patience[index])
        sample_lens = self._sample_lens(index)
        longest = max(sample_lens, default=output_len)
        return Request(
            request_id=request_id,
            arrival_ns=arrival_ns,
            prompt=prompt,
            output_len=output_len,
            max_output_len=longest if self.max_output is None else max(longest, int(self.max_output[index])),
            sampling=self.sampling if self.samples is None else _sampling(int(self.samples[index]), self.sampling),
            sample_lens=sample_lens,
            priority=0 if self.priorities is None else int(self.priorities[index]),
            namespace=NO_NAMESPACE if self.loras is None else Namespace(lora=f"lora-{self.loras[index]}"),
            output=output,
            abort_ns=arrival_ns + patience if patience >= 0 else None,
            seed=mix(self.seed, index) >> 1,
        )

    def _sample_lens(self, index: int) -> tuple[int, ...]:
        if self.sample_lens is None or self.sample_offsets is None:
            return ()
        return tuple(self.sample_lens[self.sample_offsets[index] : self.sample_offsets[index + 1]].tolist())


def _sampling(samples: int, default: Sampling) -> Sampling:
    return default if samples == default.n else Sampling(n=samples)


@dataclass(frozen=True)
class ColumnTable:
    """Requests in order of arrival; request ids are their numbers."""

    arrivals: Ints
    outputs: Ints
    texts: Texts
    traits: Traits

    def __len__(self) -> int:
        return len(self.arrivals)

    def arrival_ns(self, index: int) -> Ns:
        """When request number `index` arrives."""
        return int(self.arrivals[index])

    def request(self, index: int) -> Request:
        """Request number `index`, complete."""
        prompt = self.texts.prompt(index)
        return self.traits.request(index, str(index), int(self.arrivals[index]), prompt, int(self.outputs[index]))
