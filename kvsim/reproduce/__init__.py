"""The PagedAttention paper's figures (Kwon et al., SOSP 2023), re-run: published values beside simulated ones.

Each figure is a module that names its scenarios and turns their results into rows; `table` joins the published values
afterwards, `page` writes what differs and by how much.
"""

from __future__ import annotations

from kvsim.reproduce.run import FIGURES, GROUPS, Reproduction, reproduce

__all__ = ["FIGURES", "GROUPS", "Reproduction", "reproduce"]
