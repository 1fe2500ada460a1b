"""Run the notebooks and save their outputs.

    python notebooks/save_outputs.py [01_decode ...]                # default: all

Some outputs are timings, so run nothing else meanwhile. Needs the extra ``test``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SECONDS_PER_CELL = 1800  # enough on a busy machine


def executed(path: Path, folder: str | Path) -> nbformat.NotebookNode:
    """Run a notebook in another directory, so that it cannot depend on the clone, and return it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,  # keeps times out of the file
        coalesce_streams=True,
    ).execute()
    return notebook


def main() -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        metadata = nbformat.read(path, as_version=4).metadata  # without additions of this machine's kernel
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, folder)
        notebook.metadata = metadata
        for cell in notebook.cells:
            if cell.cell_type == "code":  # stderr has warnings of this machine, such as a missing ipywidgets
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
