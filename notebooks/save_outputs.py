"""``python notebooks/save_outputs.py [01_decode ...]``: run the notebooks, by default all, and save what they put out.

Some outputs are timings, so let the machine do nothing else meanwhile. Needs what the extra ``test`` installs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SECONDS_PER_CELL = 1800  # enough where other programs want the processor too


def executed(path: Path, folder: str | Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in another folder so that nothing can depend on a clone. Raises where a cell
    does.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,  # when a cell ran is in no output
        coalesce_streams=True,
    ).execute()
    return notebook


def main() -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        metadata = nbformat.read(path, as_version=4).metadata  # without what this machine's kernel adds to it
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, folder)
        notebook.metadata = metadata
        for cell in notebook.cells:
            if cell.cell_type == "code":  # stderr is this machine's talk, of a missing ipywidgets or of a folder
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
