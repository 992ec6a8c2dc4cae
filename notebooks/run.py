"""Execute the notebooks on a clean kernel and write them back without what changes from run to run.

python notebooks/run.py             all of them, in place
python notebooks/run.py 03          those whose name begins so
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300


def execute(path: Path) -> Any:
    """The executed notebook; raises CellExecutionError with the cell and its traceback."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},
        record_timing=False,
    )
    client.execute()
    return strip(notebook)


def strip(notebook: Any) -> Any:
    """Take out times, the machine's kernel and language versions: what is left changes only if the result does."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("text/plain", None) if "image/png" in output.get("data", {}) else None
            if "metadata" in output:
                output.metadata = {}
    return notebook


def main(prefixes: list[str]) -> None:
    """Run the notebooks whose names begin with one of `prefixes` (all, if there are none)."""
    import nbformat

    for path in sorted(HERE.glob("*.ipynb")):
        if prefixes and not path.name.startswith(tuple(prefixes)):
            continue
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
